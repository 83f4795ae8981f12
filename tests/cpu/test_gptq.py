"""Checkpoints of GPTQ, AWQ and compressed-tensors, written here number by number, against the matrices that
they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Eager, random_prompts, save_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgla.config import Config
from sgla.dist import Shard
from sgla.errors import ConfigError, WeightError
from sgla.hub.source import ModelSource, open_source
from sgla.loading.load import load_model
from sgla.model.sizes import weight_bytes
from sgla.observe.machine import detect
from sgla.quant.methods import method_of
from sgla.quant.weight import Weight
from sgla.resolve import resolve

PROMPTS = random_prompts([9, 2, 30])
SHAPE = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "intermediate_size": 192}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # casper-hansen/AutoAWQ, awq/modules/linear/gemm.py


def pack(numbers: Tensor, dim: int, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of ``32 / bits`` neighbours along ``dim``."""
    numbers = numbers.movedim(dim, -1).long()
    each = 32 // bits
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // each, dtype=torch.long)
    for place, which in enumerate(order or range(each)):
        words |= numbers[..., which::each] << place * bits
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def quantize(w: Tensor, config: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a random matrix like ``w``, by suffix, and the matrix they mean."""
    n, k = w.shape
    bits, group = config["bits"], config["group_size"]
    group = k if group == -1 else group
    q, scale = torch.randint(0, 1 << bits, (n, k)), (torch.rand(n, -(-k // group)) * 0.02 + 0.01).half()
    scale *= 16 / (1 << bits)
    zero = torch.full(scale.shape, 1 << bits - 1)
    if not config.get("sym"):
        zero += torch.randint(-3, 4, scale.shape)
    g_idx = torch.arange(k) // group
    if config.get("desc_act"):
        g_idx = g_idx[torch.randperm(k)]
    dense = (q - zero[:, g_idx]) * scale.float()[:, g_idx]
    if config["quant_method"] == "compressed-tensors":
        parts = {
            "weight_packed": pack(q, 1, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([n, k]),
        }
        if not config["sym"]:
            parts["weight_zero_point"] = pack(zero, 0, bits)
        return parts | ({"weight_g_idx": g_idx.int()} if config.get("desc_act") else {}), dense
    if config["quant_method"] == "awq":
        parts = {"qweight": pack(q.T, 1, 4, AWQ_ORDER), "qzeros": pack(zero.T, 1, 4, AWQ_ORDER)}
        return parts | {"scales": scale.T.contiguous()}, dense
    stored = zero if "gptq_v2" in (config.get("checkpoint_format"), config.get("format")) else zero - 1
    parts = {"qweight": pack(q.T, 0, bits), "qzeros": pack(stored.T, 1, bits), "g_idx": g_idx.int()}
    return parts | {"scales": scale.T.contiguous()}, dense


def checkpoints(
    folder: Path, config: dict[str, Any], model_type: str = "llama", **changes: Any
) -> tuple[ModelSource, ModelSource]:
    """A quantized checkpoint and one with the same numbers in float32. The last layer's down_proj is left as
    it is."""
    for name in ("packed", "plain"):
        save_checkpoint(folder / name, model_type, **SHAPE | changes)
    torch.manual_seed(1)
    plain, packed = load_file(folder / "plain/model.safetensors"), {}
    for name, tensor in list(plain.items()):
        if ("_proj." in name or ".experts." in name) and "layers.2.mlp.down" not in name:
            parts, plain[name] = quantize(tensor, config)
            packed |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
        else:
            packed[name] = tensor
    if config["quant_method"] == "gptq":
        packed["model.layers.0.mlp.up_proj.bias"] = torch.zeros(192).half()  # as AutoGPTQ writes it
    save_file(packed, folder / "packed/model.safetensors", {"format": "pt"})
    save_file(plain, folder / "plain/model.safetensors", {"format": "pt"})
    path = folder / "packed/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return open_source(folder / "packed"), open_source(folder / "plain")


def gptq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False} | changes


def compressed(**changes: Any) -> dict[str, Any]:
    """With what ``quantize`` reads beside what the file says."""
    settings = {"bits": 4, "group_size": 32, "sym": True} | changes
    weights = {
        "num_bits": settings["bits"],
        "type": "int",
        "symmetric": settings["sym"],
        "strategy": "channel" if settings["group_size"] == -1 else "group",
        "group_size": settings["group_size"],
        "actorder": "group" if settings.get("desc_act") else None,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return settings | {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers.2.mlp.down_proj"],
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": (gptq(), "q4_0"),
    "gptq, groups of 32, version 2": (gptq(group_size=32, checkpoint_format="gptq_v2"), "q4_0"),
    "gptq, 8 bits, one group": (gptq(bits=8, group_size=-1), "q8_0"),
    "gptq, asymmetric": (gptq(sym=False), "int4"),
    "gptq, asymmetric, version 2 by its newer name": (gptq(sym=False, format="gptq_v2"), "int4"),
    "awq": (AWQ, "int4"),
    "compressed-tensors": (compressed(), "q4_0"),
    "compressed-tensors, 8 bits, channels": (compressed(bits=8, group_size=-1), "q8_0"),
    "compressed-tensors, asymmetric": (compressed(sym=False), "int4"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_checkpoints_mean_what_their_matrices_mean(name: str, tmp_path: Path) -> None:
    config, kind = CASES[name]
    packed, plain = checkpoints(tmp_path, config)
    given = resolve(Config(device="cpu"), detect(), packed.config).config
    method = config["quant_method"]
    assert given.quantization == ("checkpoint" if method == "compressed-tensors" else method)
    expected = load_model(plain)
    logprobs = Eager(expected).prompt_logprobs(PROMPTS)
    torch.testing.assert_close(Eager(load_model(packed)).prompt_logprobs(PROMPTS), logprobs)
    model = load_model(packed, quantization=given.quantization)
    assert [b.mlp.gate_up.weight.kind for b in model.blocks] == [kind] * 3
    assert [b.mlp.down.weight.kind for b in model.blocks] == [kind, kind, "f32"]
    for block, wanted in zip(model.blocks, expected.blocks):
        for a, b in ((block.attention.qkv, wanted.attention.qkv), (block.mlp.down, wanted.mlp.down)):
            if config.get("sym"):
                assert torch.equal(a.weight.dequant(), b.weight.dequant())
            else:  # the minimum, up to 11 steps, is rounded to float16
                step = 0.03 * 11 * 2**-11
                torch.testing.assert_close(a.weight.dequant(), b.weight.dequant(), rtol=1e-6, atol=step)
    kept = Eager(model).prompt_logprobs(PROMPTS)
    torch.testing.assert_close(kept, logprobs, rtol=0, atol=1e-3 if config.get("sym") else 0.2)
    nbytes = sum(
        layer.weight.nbytes
        for b in model.blocks[:2]
        for layer in (b.attention.qkv, b.attention.out, b.mlp.gate_up, b.mlp.down)
    )
    layers = [weight_bytes(model.spec, "float32", q, 1) - 2 * 4 * 311 * 128 for q in (None, "checkpoint")]
    assert nbytes / 2 == layers[1] / 3 < layers[0] / 10 * (2.7 if kind == "q8_0" else 1.6)


@torch.no_grad()
def test_act_order_becomes_floats(tmp_path: Path) -> None:
    for i, config in enumerate((gptq(desc_act=True), compressed(desc_act=True))):
        packed, plain = checkpoints(tmp_path / str(i), config)
        resolved = resolve(Config(device="cpu"), detect(), packed.config)
        assert resolved.config.quantization is None
        assert any("act-order" in note for note in resolved.notes)
        found, expected = (Eager(load_model(source)).prompt_logprobs(PROMPTS) for source in (packed, plain))
        torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_fused_layers_experts_and_ranks(tmp_path: Path) -> None:
    for i, (model_type, changes) in enumerate((("phi3", {}), ("mixtral", {"num_local_experts": 3}))):
        packed, plain = checkpoints(tmp_path / str(i), gptq(group_size=32), model_type, **changes)
        for shard in (Shard(), Shard(1, 2)):
            found, expected = (
                load_model(source, quantization=quantization, shard=shard)
                for source, quantization in ((packed, "gptq"), (plain, None))
            )
            assert held(found.blocks[0].mlp.gate_up).kind == "q4_0"
            for a, b in zip(found.blocks[:2], expected.blocks):
                pairs = (a.mlp.gate_up, b.mlp.gate_up), (a.mlp.down, b.mlp.down)
                for x, y in (*pairs, (a.attention.qkv, b.attention.qkv)):
                    assert torch.equal(held(x).dequant(), held(y).dequant())


def held(layer: Any) -> Weight:
    """Of a linear layer, or a mixture's own."""
    return layer if isinstance(layer, Weight) else layer.weight


def test_groups_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    for config, name in ((gptq(desc_act=True), "g_idx"), (compressed(desc_act=True), "weight_g_idx")):
        packed, _ = checkpoints(tmp_path / name, config)
        path = tmp_path / name / "packed/model.safetensors"
        tensors, g_idx = load_file(path), f"model.layers.1.mlp.up_proj.{name}"
        for wrong in (-1, 2**31 - 1):
            tensors[g_idx][5] = wrong
            save_file(tensors, path, {"format": "pt"})
            with pytest.raises(WeightError, match=f"{g_idx} has groups that do not exist"):
                load_model(packed)
        del tensors[g_idx]
        save_file(tensors, path, {"format": "pt"})
        with pytest.raises(WeightError, match=f"{g_idx} is missing"):
            load_model(packed)


def test_files_that_contradict_their_configuration_are_refused(tmp_path: Path) -> None:
    for i, (config, said, words) in enumerate(
        (
            (gptq(sym=False), gptq(), "qzeros is not half of the range"),
            (gptq(desc_act=True), gptq(), "g_idx is not in order"),
            (gptq(group_size=32), gptq(), r"has shape \[4, 16\], expected \[2, 16\]"),
            (compressed(desc_act=True), compressed(), "weight_g_idx is not in order"),
        )
    ):
        packed, _ = checkpoints(tmp_path / str(i), config)
        packed.config["quantization_config"] = said
        with pytest.raises(WeightError, match=words):
            load_model(packed)
    said = compressed()
    said["config_groups"]["group_0"]["weights"]["actorder"] = "random"
    with pytest.raises(ConfigError, match="actorder is 'random'"):
        method_of({"quantization_config": said})
    tensors = load_file(tmp_path / "0/packed/model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    save_file(tensors, tmp_path / "0/packed/model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=r"1 unexpected: model.layers.0.mlp.up_proj.bias"):
        load_model(open_source(tmp_path / "0/packed"))
