"""Towers with kernels for GPUs, in Triton's interpreter, give what transformers' modules give."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from test_vision import MAKERS, SHOWN
from torch import Tensor
from torch.nn.attention import varlen

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from sgla.config import Config
from sgla.hub.source import open_source
from sgla.kernels.batch import Media
from sgla.kernels.cuda import prompt_attention
from sgla.loading import tower_attention
from sgla.loading.tower import load_tower
from sgla.loading.tower_grid import Grids
from sgla.messages import NewRow, Placed, RowSampling
from sgla.model.vision.served import vision_of
from sgla.worker import seeing, tower_kernels
from sgla.worker.features import arrays_of
from sgla.worker.pictures import Pictures


def one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    ends_k: Tensor,
    longest: int,
    longest_k: int,
    scale: float | None = None,
) -> Tensor:
    """In place of torch's kernel, which CPUs have not."""
    assert torch.equal(ends, ends_k)
    assert longest == longest_k == int(ends.diff().max())
    parts = [[x[a:b].transpose(0, 1) for x in (q, k, v)] for a, b in zip(ends.tolist(), ends[1:].tolist())]
    return torch.cat([F.scaled_dot_product_attention(*part, scale=scale).transpose(0, 1) for part in parts])


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("qwen2.5-vl", 8),
        *(pytest.param(n, 3, marks=pytest.mark.slow) for n in ("qwen2-vl", "qwen3-vl")),
    ],
)
@torch.inference_mode()
def test_kernels_of_towers(name: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First one kernel for the attention of all windows, then those for other parts, too, then what follows
    from shapes computed once on the host."""
    monkeypatch.setattr(varlen, "varlen_attn", one_by_one)
    model = MAKERS[name](tmp_path)
    tower = load_tower(model.source, model.speller.vision, torch.float32, torch.device("cpu"))
    biases = [values for name, values in tower.module.visual.named_parameters() if name.endswith("bias")]
    for values in biases:  # a random model has zeros
        values.normal_()
    given = [arrays_of(model.prepared(shown)) for shown in SHOWN]
    apart = [tower(arrays) for arrays in given]
    for step in (0, 1, 2):
        if step == 0:
            tower_attention.use_packed(tower.module)
        elif step == 1:
            assert tower_kernels.hasten(tower.module) == parts
        else:
            assert Grids.fit(tower.module)
            tower.grids = Grids(tower.module, tower.device)
        for arrays, expected in [*zip(given, apart), (given[0], apart[0])]:
            found = tower(arrays)
            torch.testing.assert_close(found.values, expected.values, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found.deep, expected.deep, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[5184], [128, 1, 0, 300], [129, 127]])
def test_tiles_of_texts(lengths: list[int]) -> None:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    tiles = prompt_attention.tiles_of(ends.int(), sum(lengths)).tolist()
    expected = [
        [length, begin + at, at, min(prompt_attention.ROWS, length - at)]
        for begin, length in zip(ends.tolist(), lengths)
        for at in range(0, length, prompt_attention.ROWS)
    ]
    assert tiles[: len(expected)] == expected
    assert all(count == 0 for *_, count in tiles[len(expected) :])


def test_kernels_that_give_something_else_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MAKERS["qwen2.5-vl"](tmp_path)
    vision = model.speller.vision
    example = seeing.example_of(model.source, vision, 40)
    load = lambda: load_tower(model.source, vision, torch.float32, torch.device("cpu"))  # noqa: E731
    plain = load()
    monkeypatch.setattr(varlen, "varlen_attn", one_by_one)
    tower, note = seeing.quick(load(), load, vision, example)
    assert note == ""
    assert hasattr(tower.module.visual.blocks[0].mlp, "both")
    for fault, why in ((lambda q, *more: 2 * q, "differ by"), (lambda *given: 1 / 0, "ZeroDivisionError")):
        monkeypatch.setattr(varlen, "varlen_attn", fault)
        tower, note = seeing.quick(load(), load, vision, example)
        assert "slower" in note
        assert why in note
        with torch.inference_mode():
            assert torch.equal(tower(example).values, plain(example).values)


@pytest.mark.parametrize("name", ["qwen3-vl", pytest.param("qwen2.5-vl", marks=pytest.mark.slow)])
@torch.inference_mode()
def test_several_pictures_at_a_time(name: str, tmp_path: Path) -> None:
    """As many as the bytes are for; one that is lost is no other's trouble."""
    model = MAKERS[name](tmp_path)
    vision, config = model.speller.vision, model.source.config
    assert vision.merged is not None
    tower = load_tower(model.source, vision, torch.float32, torch.device("cpu"))
    prepared = [model.prepared(shown) for shown in SHOWN]
    token = vision.token_of(config)
    axes = seeing.axes_of(*vision.sections(config))
    request = model.submit("a", "<image> One, <image><image> three.", SHOWN)
    counts = [int((np.array(request.tokens[p.first : p.end]) == token).sum()) for p in request.pictures]
    alone = [tower(arrays_of(one)) for one in prepared]
    assert [len(one.values) for one in alone] == counts

    def shown(most: int, *pictures: Placed) -> tuple[Pictures, Media]:
        made = Pictures(tower, vision.tokens_of(config), 48, False, 2, axes, abreast=most)
        tokens = np.array(request.tokens, np.int32).tobytes()
        new = NewRow(slot=0, tokens=tokens, prompt_len=len(request.tokens), pages=[], sampling=RowSampling())
        made.admit(replace(new, pictures=list(pictures or request.pictures)))
        zero, length = np.zeros(1, np.int32), np.full(1, len(request.tokens), np.int32)
        media = made.media(zero, zero, length)
        assert media is not None
        return made, media

    expected = torch.cat([one.values for one in alone])
    for most in (0, 1, 1 << 16, 1 << 30):
        made, media = shown(most)
        torch.testing.assert_close(media.values, expected, atol=1e-5, rtol=1e-4)
        assert made.computed == 3
    first, second, third = request.pictures
    lost = replace(second, picture=replace(second.picture, digest=b"gone", file="/nowhere"))
    _, media = shown(1 << 30, first, lost, third)
    ends = np.cumsum(counts)
    assert media.values[ends[0] : ends[1]].isnan().all()
    assert torch.equal(media.values[: ends[0]], alone[0].values)
    assert torch.equal(media.values[ends[1] :], alone[2].values)


def test_towers_stand_beside_quantized_layers(tmp_path: Path) -> None:
    """Whatever the layers' format, without its library; where the tower is quantized texts are served."""
    model = MAKERS["qwen2.5-vl"](tmp_path)
    vision = model.speller.vision
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    plain = load_tower(model.source, vision, torch.float32, torch.device("cpu")).module.visual.state_dict()
    config = json.loads(path.read_text())
    for said in (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["visual"]},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ):
        path.write_text(json.dumps(config | {"quantization_config": said}))
        source = open_source(tmp_path)
        found = load_tower(source, vision, torch.float32, torch.device("cpu")).module.visual.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
        assert vision_of(Config(device="cpu"), source) == (vision, "")
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("blocks.0.attn.proj.weight"))
    save_file(tensors | {name: tensors[name].to(torch.int8)}, weights, {"format": "pt"})
    taken, why = vision_of(Config(device="cpu"), open_source(tmp_path))
    assert taken is None
    assert "no pictures are taken: the weights of their towers are quantized" in why
