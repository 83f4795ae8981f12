"""Models that make vectors of texts and pictures, against transformers: float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from test_pooling import vectors
from test_vision import SHOWN, TEXTS, qwen2_vl, qwen3_vl
from tiny import make_core, run, submit, tiny_config
from vision_models import Model, save_model

from sgla.errors import ConfigError
from sgla.media.prepare import arrays_of
from sgla.messages import Placed, RowSampling, Submit
from sgla.worker.start_cpu import cpu_runner

MAKERS = {"qwen3-vl": qwen3_vl, "qwen2-vl": qwen2_vl}


def asked(model: Model) -> list[Submit]:
    made = [model.submit(str(count), text, SHOWN[:count], 0) for count, text in TEXTS.items()]
    return [replace(request, sampling=RowSampling(pool=[])) for request in made]


@torch.no_grad()
def expected(model: Model, request: Submit) -> Any:
    """The last token's hidden state."""
    given = model.given(request, SHOWN[: int(request.rid)])
    return model.module.model(**given).last_hidden_state[0, -1].numpy()


@pytest.mark.parametrize("name", MAKERS)
def test_the_last_token_stands_for_texts_and_pictures(name: str, tmp_path: Path) -> None:
    """Together, in chunks, alone and again."""
    model = MAKERS[name](tmp_path)
    requests = asked(model)
    config = tiny_config(step_tokens=256, task="embed")
    runner: Any = cpu_runner(config, model.source, 0, 1, "", lambda progress: None)
    assert runner.facts.media["image"]
    core = make_core(runner.facts)
    found = vectors(run(runner, requests, core))
    for request in requests:
        np.testing.assert_allclose(found[request.rid], expected(model, request), atol=1e-4)
    again = vectors(run(runner, [replace(each, rid=f"{each.rid} again") for each in requests], core))
    assert runner._pictures.computed == len(SHOWN), "the tower has seen each once"
    for request in requests:
        chunked = vectors(run(runner, [request], step_tokens=24, prefix_cache=False))
        np.testing.assert_allclose(chunked[request.rid], found[request.rid], atol=1e-4)
        np.testing.assert_allclose(again[f"{request.rid} again"], found[request.rid], atol=1e-4)
    other = replace(model.submit("other", TEXTS[1], SHOWN[1:2], 0), sampling=RowSampling(pool=[]))
    assert np.abs(vectors(run(runner, [other], core))["other"] - found["1"]).max() > 1e-2


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER = {**SIZES, "patch_size": 4, "image_size": 16}


def clip(folder: Path) -> Model:
    from transformers import CLIPConfig

    text = {**SIZES, "hidden_size": 24, "vocab_size": 311, "max_position_embeddings": 20, "eos_token_id": 310}
    config = CLIPConfig(text_config=text, vision_config=TOWER, projection_dim=16)
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16},
    }
    return save_model(folder, "CLIPModel", config, images)


def siglip(folder: Path) -> Model:
    from transformers import SiglipConfig

    text = {**SIZES, "vocab_size": 311, "max_position_embeddings": 20, "pad_token_id": 1}
    config = SiglipConfig(text_config=text, vision_config=TOWER)
    images = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16}}
    return save_model(folder, "SiglipModel", config, images)


@pytest.mark.parametrize("make", [clip, siglip])
def test_a_text_and_a_picture_have_encoders_of_their_own(make: Any, tmp_path: Path) -> None:
    """Together and alone; a picture that comes again is not looked at again."""
    model = make(tmp_path)
    runner: Any = cpu_runner(tiny_config(), model.source, 0, 1, "", lambda progress: None)
    pooling, texts = runner.facts.pooling, [[5, 6, 310], [7, 310], [8, 9, 310], [*range(3, 20), 310]]
    requests = [submit(f"text {i}", tokens, 0, pool=[]) for i, tokens in enumerate(texts)]
    for i, shown in enumerate([*SHOWN, SHOWN[0]]):
        made = [Placed(0, 1, model.prepared(shown))]
        requests.insert(i, replace(submit(f"picture {i}", [0], 0, pool=[]), pictures=made))
    limits = {"encoder": True, "prefix_cache": False}
    found = vectors(run(runner, requests, make_core(runner.facts, **limits)))
    assert runner._seen.computed == len(SHOWN)
    filled = [tokens + [1] * (20 - len(tokens)) for tokens in texts] if make is siglip else texts
    with torch.no_grad():
        for i, tokens in enumerate(filled):
            expected = model.module.get_text_features(torch.tensor([tokens])).pooler_output[0]
            np.testing.assert_allclose(found[f"text {i}"], expected, atol=1e-5)
        for i, shown in enumerate(SHOWN):
            arrays = arrays_of(shown, model.processor, model.settings, {})
            expected = model.module.get_image_features(torch.tensor(arrays["pixel_values"])).pooler_output[0]
            np.testing.assert_allclose(found[f"picture {i}"], expected, atol=1e-5)
    assert (found["picture 3"] == found["picture 0"]).all()
    assert {len(each) for each in found.values()} == {pooling.size}
    for one in requests:
        alone = vectors(run(runner, [one], make_core(runner.facts, **limits)))
        np.testing.assert_allclose(alone[one.rid], found[one.rid], atol=1e-5)


def test_a_picture_that_cannot_be_had_ends_its_request_alone(tmp_path: Path) -> None:
    model = clip(tmp_path)
    runner: Any = cpu_runner(tiny_config(), model.source, 0, 1, "", lambda progress: None)
    one = model.prepared(SHOWN[0])
    lost = replace(one, digest=b"lost", file="/nowhere")
    requests = [
        replace(submit(name, [0], 0, pool=[]), pictures=[Placed(0, 1, picture)])
        for name, picture in (("lost", lost), ("there", one))
    ]
    core = make_core(runner.facts, encoder=True, prefix_cache=False)
    assert run(runner, requests, core).finish() == {"lost": "error", "there": "stop"}


def test_settings_that_pairs_of_encoders_refuse(tmp_path: Path) -> None:
    model = clip(tmp_path)
    for changes, words in (
        ({"quantization": "int8"}, "--quantization int8"),
        ({"task": "classify"}, "--task classify"),
    ):
        with pytest.raises(ConfigError, match=words):
            cpu_runner(tiny_config(**changes), model.source, 0, 1, "", lambda progress: None)
    (tmp_path / "preprocessor_config.json").unlink()
    runner = cpu_runner(tiny_config(), model.source, 0, 1, "", lambda progress: None)
    assert runner.facts.media == {}
    assert any("no pictures are taken" in note for note in runner.facts.notes)
