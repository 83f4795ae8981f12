"""Checkpoints of GPTQ, AWQ and compressed-tensors, written here number by number, against the matrices that
they mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Eager, random_prompts
from quantized import Stored, pair
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgla.config import Config
from sgla.dist import Shard
from sgla.errors import ConfigError, WeightError
from sgla.hub.source import ModelSource, open_source
from sgla.kernels.integers import KINDS
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
    """int32 words of neighbours along ``dim``, one behind the other from the lowest bit on."""
    numbers = numbers.movedim(dim, -1).long()
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] * bits // 32, dtype=torch.long)
    each = 32 // bits
    for i in range(numbers.shape[-1]):
        of = i // each * each + order[i % each] if order else i
        word, place = divmod(i * bits, 32)
        words[..., word] |= numbers[..., of] << place & 0xFFFFFFFF
        if place + bits > 32:
            words[..., word + 1] |= numbers[..., of] >> 32 - place
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def pack_fast(q: Tensor) -> Tensor:
    """AutoAWQ, awq/modules/linear/gemv_fast.py: pack_intweight."""
    n, k = q.shape
    q = q.view(n, k // 32, 4, 4, 2).transpose(2, 3).reshape(n, k // 32, 4, 4, 2).transpose(3, 4)
    q = q.reshape(n // 4, 4, k // 64, 64).transpose(1, 2).reshape(n // 4, k, 4)
    words = (q << torch.tensor([0, 4, 8, 12])).sum(-1)
    return torch.where(words >= 2**15, words - 2**16, words).to(torch.int16)


def pack_marlin(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """AutoGPTQ, nn_modules/qlinear/qlinear_marlin.py: pack. Of ``[n, k]`` and ``[n, groups]``."""
    n, k = q.shape
    places = []
    for lane in range(32):
        rows = [2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1]
        mine = [16 * row + lane // 4 + 8 * block for block in (0, 1) for row in rows]
        places += [place + 256 * tile for tile in range(4) for place in mine]
    perm = torch.tensor(places).view(-1, 8)[:, list(AWQ_ORDER)].flatten()
    tiles = q.T.reshape(k // 16, 16, n // 16, 16).transpose(1, 2).reshape(-1, 1024)[:, perm]
    of_scales = [i + 8 * j for i in range(8) for j in range(8)]
    if scale.shape[1] == 1:
        of_scales = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    scales = scale.T.reshape(-1, len(of_scales))[:, of_scales].reshape(-1, n).contiguous()
    return pack(tiles.reshape(k // 16, n * 16), 1, 4), scales


def numbers_like(w: Tensor, config: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random quants ``[n, k]``, zeros and scales ``[n, groups]``, and the group of each channel."""
    n, k = w.shape
    bits, group = config["bits"], config["group_size"]
    group = k if group == -1 else group
    q, scale = torch.randint(0, 1 << bits, (n, k)), (torch.rand(n, -(-k // group)) * 0.02 + 0.01).half()
    scale *= 16 / (1 << bits)
    zero = torch.full(scale.shape, 1 << bits - 1)
    if not config.get("sym"):
        zero += torch.randint(-1, 2, scale.shape) if bits < 4 else torch.randint(-3, 4, scale.shape)
    g_idx = torch.arange(k) // group
    # Layers of the same inputs have them in the same order.
    order = torch.randperm(k, generator=torch.Generator().manual_seed(k + config.get("seed", 0)))
    return q, zero, scale, g_idx[order] if config.get("desc_act") else g_idx


def quantize(w: Tensor, config: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a random matrix like ``w``, by suffix, and the matrix they mean."""
    bits, (n, k) = config["bits"], w.shape
    q, zero, scale, g_idx = numbers_like(w, config)
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
    version = config.get("checkpoint_format") or config.get("version") or ""
    if version == "marlin":
        packed, scales = pack_marlin(q, scale)
        names = ("B", "s") if config["quant_method"] == "gptq" else ("qweight", "scales")
        return dict(zip(names, (packed, scales))), dense
    if config["quant_method"] == "awq":
        return quantize_awq(version, q, zero, scale, dense)
    stored = zero if "gptq_v2" in (config.get("checkpoint_format"), config.get("format")) else zero - 1
    parts = {"qweight": pack(q.T, 0, bits), "qzeros": pack(stored.T, 1, bits), "g_idx": g_idx.int()}
    return parts | {"scales": scale.T.contiguous()}, dense


def quantize_awq(
    version: str, q: Tensor, zero: Tensor, scale: Tensor, dense: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Of AutoAWQ's formats; those for vectors pad the groups."""
    if version == "gemm":
        parts = {"qweight": pack(q.T, 1, 4, AWQ_ORDER), "qzeros": pack(zero.T, 1, 4, AWQ_ORDER)}
        return parts | {"scales": scale.T.contiguous()}, dense
    groups, each = scale.shape[1], q.shape[1] // scale.shape[1]
    pad = -groups % {64: 16, 32: 32}.get(each, 8)
    padded, zeros = (torch.nn.functional.pad(t, (0, pad)) for t in (scale, zero))
    if version == "gemv":
        return {"qweight": pack(q, 1, 4), "qzeros": pack(zeros, 1, 4), "scales": padded}, dense
    minimum = (-zeros * padded).T.contiguous()
    low = minimum[:groups].T.float().repeat_interleave(each, 1)
    name = "qzeros" if version == "gemv_fast" else "scaled_zeros"
    parts = {"qweight": pack_fast(q), name: minimum, "scales": padded.T.contiguous()}
    return parts, q * scale.float().repeat_interleave(each, 1) + low


def of_layer(config: dict[str, Any], name: str) -> dict[str, Any]:
    """With what the first rule for this layer says."""
    rules = (said for rule, said in config.get("dynamic", {}).items() if re.match(rule.lstrip("+-:"), name))
    return config | next(rules, {})


def checkpoints(
    folder: Path, config: dict[str, Any], model_type: str = "llama", **changes: Any
) -> tuple[ModelSource, ModelSource]:
    """Quantized and plain. The last layer's down_proj is left as it is."""

    def of(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        return None if "layers.2.mlp.down" in name else quantize(tensor, of_layer(config, name))

    biases = {"model.layers.0.mlp.up_proj.bias": torch.zeros(192).half()}  # as AutoGPTQ writes them
    more = biases if config["quant_method"] == "gptq" else {}
    return pair(folder, config, of, model_type, more, **SHAPE | changes)


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
    "gptq, 3 bits": (gptq(bits=3, group_size=-1), "q4_0"),
    "gptq, Marlin": (gptq(checkpoint_format="marlin", is_marlin_format=True), "q4_0"),
    "awq": (AWQ, "int4"),
    "awq, gemv_fast": (AWQ | {"version": "gemv_fast"}, "int4"),
    "compressed-tensors": (compressed(), "q4_0"),
    "compressed-tensors, 8 bits, channels": (compressed(bits=8, group_size=-1), "q8_0"),
    "compressed-tensors, asymmetric": (compressed(sym=False), "int4"),
}


LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq, 2 bits": (gptq(bits=2), "q4_0"),
    "gptq, 3 bits, asymmetric": (gptq(bits=3, sym=False, group_size=32), "int4"),
    "gptq, 8 bits, asymmetric": (gptq(bits=8, sym=False), "int8"),
    "gptq, Marlin, one group": (gptq(checkpoint_format="marlin", group_size=-1), "q4_0"),
    "awq, symmetric": (AWQ | {"zero_point": False, "sym": True}, "q4_0"),
    "awq, gemv": (AWQ | {"version": "gemv"}, "int4"),
    "awq, gemv, groups of 32": (AWQ | {"version": "gemv", "group_size": 32}, "int4"),
    "awq, llm-awq": (AWQ | {"version": "llm-awq", "group_size": 32}, "int4"),
    "awq, Marlin": (AWQ | {"version": "marlin", "zero_point": False, "sym": True}, "q4_0"),
}


@pytest.mark.parametrize("name", [*CASES, *LAYOUTS])
def test_every_layout_is_read_at_any_row(name: str) -> None:
    config, kind = (CASES | LAYOUTS)[name]
    method = method_of({"quantization_config": config})
    assert method is not None
    assert method.kept("x") == kind
    on_gpus = method.kept("x", "cuda")
    assert KINDS[on_gpus][0] == (8 if kind in ("q8_0", "int8") else 4)
    for n, k in ((128, 128), (192, 256)):
        parts, dense = quantize(torch.zeros(n, k), config)
        stored: dict[str, Any] = {f"x.{part}": Stored(value) for part, value in parts.items()}
        held = method.tensors("x", n, k)
        assert stored.keys() <= held.keys()
        assert all(held[part].shape in (None, value.shape) for part, value in stored.items())
        assert all(each.optional for part, each in held.items() if part not in stored)
        source = method.take("x", stored, n, k)
        torch.testing.assert_close(source.dense(), dense)
        torch.testing.assert_close(source.dense(range(37, 101)), dense[37:101])
        found, step = source.weight(kind, range(37, 101), range(32, k)), 0.03 * 11 * 2**-11
        torch.testing.assert_close(found.dequant(), dense[37:101, 32:], rtol=1e-6, atol=step)
        found = source.weight(on_gpus, range(37, 101))
        torch.testing.assert_close(
            found.dequant(), dense[37:101], rtol=1e-6, atol=step if "fast" in name or "llm" in name else 0
        )


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_zeros_of_rows_that_fill_no_word_are_padded(bits: int) -> None:
    """As of an output layer for a vocabulary of 50,257; what pads them means nothing."""
    method = method_of({"quantization_config": gptq(bits=bits)})
    assert method is not None
    parts, dense = quantize(torch.zeros(128, 128), gptq(bits=bits))
    words = -(-101 * bits // 32)
    cut = {"qweight": parts["qweight"][:, :101], "scales": parts["scales"][:, :101]}
    zeros = parts["qzeros"][:, :words].clone()
    zeros[:, -1] &= (1 << 101 * bits % 32) - 1
    stored: dict[str, Any] = {f"x.{part}": Stored(value) for part, value in (cut | {"qzeros": zeros}).items()}
    held = method.tensors("x", 101, 128)
    assert all(held[name].shape == tensor.shape for name, tensor in stored.items())
    torch.testing.assert_close(method.take("x", stored, 101, 128).dense(), dense[:101])


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
def test_layers_have_schemes_of_their_own(tmp_path: Path) -> None:
    """GPTQModel's ``dynamic``: the first rule that a name fits counts, and ``-:`` leaves layers out."""
    others = {
        r"-:.*layers\.2\.mlp\.down": {},
        r".*\.down_proj": {"bits": 8, "group_size": -1, "mse": 0.5},
        r"+:.*layers\.1\..*gate_proj": {"bits": 3, "group_size": 32},
        r"+:.*layers\.0\.self_attn\.k_proj": {"sym": False},
    }
    config = gptq(dynamic=others, lm_head=False)
    packed, plain = checkpoints(tmp_path, config)
    resolved = resolve(Config(device="cpu"), detect(), packed.config).config
    assert resolved.quantization == "gptq"
    model, expected = load_model(packed, quantization="gptq"), load_model(plain)
    kinds = [
        [b.attention.qkv.weight.kind, b.mlp.gate_up.weight.kind, b.mlp.down.weight.kind] for b in model.blocks
    ]
    assert kinds == [["int4", "q4_0", "q8_0"], ["q4_0", "q4_0", "q8_0"], ["q4_0", "q4_0", "f32"]]
    for block, wanted in zip(model.blocks, expected.blocks):
        assert torch.equal(block.mlp.down.weight.dequant(), wanted.mlp.down.weight.dequant())
    for wrong, words in (
        ({"x": {"bits": 5}}, "bits is 5; it must be 2 or 3 or 4 or 8"),
        ({"x": {"adapter": {}}}, "rules without 'adapter'"),
        ({"x": 4}, "must be an object"),
    ):
        with pytest.raises(ConfigError, match=words):
            method_of({"quantization_config": gptq(dynamic=wrong)})


@torch.no_grad()
@pytest.mark.parametrize("packing", ["auto_gptq", "auto_awq"])
def test_autoround_says_the_same_in_its_words(packing: str, tmp_path: Path) -> None:
    """Layers by their names or by expressions, those of 16 bits left as they are."""
    others: dict[str, dict[str, Any]] = {"model.layers.2.mlp.down_proj": {"bits": 16, "data_type": "fp"}}
    if packing == "auto_awq":
        config = AWQ
    else:
        config = gptq(dynamic={r"+:.*layers\.[01]\.mlp\.down_proj": {"bits": 8, "group_size": 32}})
        others[r".*layers\.[01]\.mlp\.down_proj"] = {"bits": 8, "group_size": 32}
    packed, plain = checkpoints(tmp_path, config)
    words = {"bits": 4, "group_size": 64, "sym": packing == "auto_gptq", "data_type": "int"}
    words |= {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}", "extra_config": others}
    path = packed.folder / "config.json"
    path.write_text(json.dumps(packed.config | {"quantization_config": words}))
    source = open_source(packed.folder)
    given = resolve(Config(device="cpu"), detect(), source.config).config
    model, expected = load_model(source, quantization=given.quantization), load_model(plain)
    kind, wide = ("int4", "int4") if packing == "auto_awq" else ("q4_0", "q8_0")
    assert [b.mlp.gate_up.weight.kind for b in model.blocks] == [kind] * 3
    assert [b.mlp.down.weight.kind for b in model.blocks] == [wide, wide, "f32"]
    found, wanted = (Eager(each).prompt_logprobs(PROMPTS) for each in (model, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.2 if packing == "auto_awq" else 1e-3)


def test_layers_of_a_file_with_towers_have_longer_names() -> None:
    other = {"model.language_model.layers.0.mlp.down_proj": {"bits": 8}}
    said = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "extra_config": other}
    method = method_of({"quantization_config": said})
    assert method is not None
    found = [method.kept(f"model.layers.{layer}.mlp.down_proj") for layer in (0, 1)]
    assert found == ["q8_0", "q4_0"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"packing_format": "auto_round:exllamav2"}, "packing_format"),
        ({"data_type": "mx_fp"}, "data_type"),
        ({"data_type": "mx_fp", "bits": 6, "packing_format": "auto_round:llm_compressor"}, "data_type"),
        ({"data_type": "mx_int", "packing_format": "auto_round:llm_compressor"}, "data_type"),
        ({"act_bits": 8}, "act_bits is 8; it must be 16"),
        ({"extra_config": {"x": 4}}, "must be an object"),
        ({"extra_config": {"(": {"bits": 8}}}, "is no regular expression"),
        ({"packing_format": "auto_round:auto_awq", "extra_config": {"x": {"bits": 8}}}, "extra_config"),
    ],
)
def test_what_autoround_says_and_is_not_supported_is_named(change: dict[str, Any], words: str) -> None:
    said = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True} | change
    with pytest.raises(ConfigError, match=words):
        method_of({"quantization_config": said})


@torch.no_grad()
@pytest.mark.parametrize("make", [gptq, compressed])
def test_act_order_gathers_the_inputs(make: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Of layers that have all of their inputs; the others are floating-point numbers."""
    packed, plain = checkpoints(tmp_path, make(desc_act=True))
    resolved = resolve(Config(device="cpu"), detect(), packed.config)
    assert resolved.config.quantization in ("gptq", "checkpoint")
    assert any("layers gather their inputs" in note for note in resolved.notes)
    expected = Eager(load_model(plain)).prompt_logprobs(PROMPTS)
    torch.testing.assert_close(Eager(load_model(packed)).prompt_logprobs(PROMPTS), expected)
    model = load_model(packed, quantization="checkpoint")
    kinds = [
        (layer.weight.kind, layer.gather is not None)
        for block in model.blocks[1:]
        for layer in (block.attention.qkv, block.attention.out, block.mlp.gate_up, block.mlp.down)
    ]
    assert kinds == [("q4_0", True)] * 7 + [("f32", False)]
    torch.testing.assert_close(Eager(model).prompt_logprobs(PROMPTS), expected, rtol=1e-4, atol=1e-4)
    native, plainly = (
        Eager(load_model(source, quantization=how), budget=40, native=True).generate(PROMPTS, 8)
        for source, how in ((packed, "checkpoint"), (plain, None))
    )
    same = [a.tokens == b.tokens for a, b in zip(native, plainly, strict=True)]
    assert sum(same) > len(same) / 2  # native kernels round activations
    half = load_model(packed, quantization="checkpoint", shard=Shard(1, 2))
    assert half.blocks[0].attention.out.weight.kind == half.blocks[0].mlp.down.weight.kind == "f32"
    assert half.blocks[0].mlp.gate_up.weight.kind == "q4_0"
    own = load_model(plain, shard=Shard(1, 2)).blocks[0]
    assert torch.equal(half.blocks[0].mlp.down.weight.dequant(), own.mlp.down.weight.dequant())
    x = torch.randn(3, half.blocks[0].mlp.gate_up.weight.k)
    torch.testing.assert_close(half.blocks[0].mlp.gate_up(x), own.mlp.gate_up(x), rtol=1e-4, atol=1e-4)


def test_layers_that_are_one_have_one_order(tmp_path: Path) -> None:
    config = gptq(desc_act=True)

    def of(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return quantize(tensor, config | {"seed": int("layers.1.self_attn.k_proj" in name)})

    packed, plain = pair(tmp_path, config, of, **SHAPE)
    with pytest.raises(WeightError, match="inputs in different orders .* --quantization none"):
        load_model(packed, quantization="checkpoint")
    expected = Eager(load_model(plain)).prompt_logprobs(PROMPTS)
    torch.testing.assert_close(Eager(load_model(packed)).prompt_logprobs(PROMPTS), expected)


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
            (AWQ, AWQ | {"zero_point": False}, "qzeros is not half of the range"),
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
