"""Checkpoints of compressed-tensors and ModelOpt beyond packed integers, written here number by number,
against the matrices that they mean; and by compressed-tensors itself where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Eager, random_prompts
from quantized import Stored, check, pair
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgla.config import Config
from sgla.errors import ConfigError, WeightError
from sgla.loading.load import load_model
from sgla.observe.machine import detect
from sgla.quant.methods import method_of
from sgla.quant.weight import pack
from sgla.resolve import resolve

PROMPTS = random_prompts([9, 2, 17])
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
SHAPE = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "intermediate_size": 192}


def group(kind: str, **weights: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "format": kind, "weights": weights, "input_activations": None}


INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
GROUPS: dict[str, tuple[dict[str, Any], str]] = {
    "int8 channels": (group("int-quantized", **INT8), "q8_0"),
    "int8 tensor": (group("int-quantized", **INT8 | {"strategy": "tensor"}), "q8_0"),
    "int8 groups": (group("naive-quantized", **INT8 | {"strategy": "group", "group_size": 32}), "q8_0"),
    "int8 asymmetric": (group("int-quantized", **INT8 | {"symmetric": False}), "int8"),
    "int4 in bytes": (
        group("int-quantized", **INT8 | {"num_bits": 4, "strategy": "group", "group_size": 64}),
        "q4_0",
    ),
    "fp8 channels": (group("float-quantized", **FP8), "fp8"),
    "fp8 naive": (group("naive-quantized", **FP8), "fp8"),
    "nvfp4": (group("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), "nvfp4"),
    "mxfp4": (group("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), "e2m1"),
    "mxfp8": (group("mxfp8-quantized", num_bits=8, type="float", group_size=32), "mxfp8"),
}


def said(**groups: dict[str, Any]) -> dict[str, Any]:
    kinds = {each["format"] for each in groups.values()}
    kind = kinds.pop() if len(kinds) == 1 else "mixed-precision"
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": []}


def nibbles(codes: Tensor) -> Tensor:
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


def quantize(w: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a random matrix like ``w`` in a group of ``GROUPS``, by suffix, and what they mean."""
    (n, k), weights = w.shape, GROUPS[name][0]["weights"]
    strategy = weights.get("strategy", "group")
    size = weights.get("group_size", k)
    shape = (1,) if strategy == "tensor" else (n, k // size)
    if weights["type"] == "int":
        half = 1 << weights["num_bits"] - 1
        q = torch.randint(-half, half, (n, k), dtype=torch.int8)
        scale = torch.rand(shape).half() * 2e-3 + 1e-3
        zero = torch.zeros(shape, dtype=torch.int8)
        if not weights["symmetric"]:
            zero.random_(-20, 20)
        wide = [t.float().view(-1, shape[-1]).repeat_interleave(size, 1) for t in (scale, zero)]
        parts = {"weight": q, "weight_scale": scale}
        if not weights["symmetric"]:
            parts["weight_zero_point"] = zero
        return parts, (q - wide[1]) * wide[0]
    if weights["num_bits"] == 8:
        q = torch.randn(n, k).to(torch.float8_e4m3fn)
        if size == k:
            scale = torch.rand(n, 1) * 0.1 + 0.05
            return {"weight": q, "weight_scale": scale}, q.float() * scale
        powers = torch.randint(122, 126, (n, k // size), dtype=torch.uint8)
        scale = (2.0 ** (powers.float() - 127)).repeat_interleave(size, 1)
        return {"weight": q, "weight_scale": powers}, q.float() * scale
    codes = torch.randint(0, 16, (n, k))
    if size == 32:
        powers = torch.randint(121, 125, (n, k // size), dtype=torch.uint8)
        scale, parts = 2.0 ** (powers.float() - 127), {"weight_scale": powers}
    else:
        small, factor = (torch.rand(n, k // size) * 200 + 50).to(torch.float8_e4m3fn), torch.tensor([3000.0])
        scale, parts = small.float() / factor, {"weight_scale": small, "weight_global_scale": factor}
    return parts | {"weight_packed": nibbles(codes)}, E2M1[codes] * scale.repeat_interleave(size, 1)


@pytest.mark.parametrize("name", GROUPS)
def test_every_layout_means_its_matrix(name: str) -> None:
    method = method_of({"quantization_config": said(g=GROUPS[name][0])})
    assert method is not None
    assert method.kept("x") == GROUPS[name][1]
    check(method, *quantize(torch.zeros(96, 128), name), atol=1e-3 if name == "int8 asymmetric" else 1e-6)


def test_groups_that_are_null_are_left_out() -> None:
    """Whatever stands behind them keeps its own settings."""
    int8, fp8 = GROUPS["int8 groups"][0], GROUPS["fp8 channels"][0] | {"targets": ["re:.*mlp"]}
    config = said(a=int8, b=fp8)
    for groups in ({"none": None, "a": int8, "b": fp8}, {"a": int8, "none": None, "b": fp8}):
        method = method_of({"quantization_config": config | {"config_groups": groups}})
        assert method is not None
        assert [method.kept(name) for name in ("attn.q", "x.mlp.up")] == ["q8_0", "fp8"]


def test_numbers_of_more_bits_than_the_file_says_are_refused() -> None:
    method = method_of({"quantization_config": said(g=GROUPS["int4 in bytes"][0])})
    assert method is not None
    parts, _ = quantize(torch.zeros(96, 128), "int4 in bytes")
    for wrong in (8, -9, 127):
        parts["weight"][3, 5] = wrong
        stored: Any = {f"x.{part}": Stored(value) for part, value in parts.items()}
        with pytest.raises(ValueError, match="more than 4 bits"):
            method.take("x", stored, 96, 128).dense()


def test_nvfp4_stays_as_it_is() -> None:
    """Bit for bit, in parts and cut between its groups; what is made of floats is the nearest."""
    method = method_of({"quantization_config": said(g=GROUPS["nvfp4"][0])})
    assert method is not None
    parts, dense = quantize(torch.zeros(96, 208), "nvfp4")
    stored: Any = {f"x.{name}": Stored(t) for name, t in parts.items()}
    source = method.take("x", stored, 96, 208)
    found = source.weight("nvfp4", range(16, 80))
    torch.testing.assert_close(found.dequant(), dense[16:80], rtol=1e-6, atol=0.0)
    assert found.nbytes < 0.57 * 64 * 256 + 4 * 64 + 1
    torch.testing.assert_close(found.columns(48, 160).dequant(), dense[16:80, 48:160], rtol=1e-6, atol=0.0)
    again = pack(found.dequant(), "nvfp4").dequant()
    assert (again - found.dequant()).norm() < 0.12 * found.dequant().norm()
    with pytest.raises(ConfigError, match="groups of 16"):
        found.columns(8, 160)


@pytest.mark.parametrize("factor", [[], [0.0], [-2.0], [float("nan")], [float("inf")], [1.0, 2.0]])
def test_a_factor_of_scales_that_is_none_is_refused(factor: list[float]) -> None:
    method = method_of({"quantization_config": said(g=GROUPS["nvfp4"][0])})
    assert method is not None
    parts = quantize(torch.zeros(96, 128), "nvfp4")[0] | {"weight_global_scale": torch.tensor(factor)}
    stored: Any = {f"x.{part}": Stored(value) for part, value in parts.items()}
    with pytest.raises(WeightError, match="x.weight_global_scale is .* must be one number above 0"):
        method.take("x", stored, 96, 128)


@pytest.mark.parametrize("algorithm", ["mxfp4", "W4A8_MXFP4_FP8"])
def test_modelopt_has_mxfp4_under_its_own_name(algorithm: str) -> None:
    method = method_of({"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm}})
    assert method is not None
    parts, dense = quantize(torch.zeros(96, 128), "mxfp4")
    check(method, {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}, dense)


def test_modelopt_multiplies_by_its_scale() -> None:
    method = method_of({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}})
    assert method is not None
    parts, dense = quantize(torch.zeros(96, 128), "nvfp4")
    renamed = {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}
    check(method, renamed | {"weight_scale_2": 1 / parts["weight_global_scale"]}, dense)


@pytest.mark.parametrize(
    ("algorithm", "kind", "shape"),
    [
        ("FP8", "fp8", ()),
        ("FP8_PER_CHANNEL_PER_TOKEN", "fp8", (384,)),
        ("fp8_pb_wo", "fp8g128", (3, 1, 2, 1)),  # as the library writes it
        ("MXFP8", "mxfp8", (384, 8)),
    ],
)
def test_modelopt_has_e4m3_in_every_size_of_block(algorithm: str, kind: str, shape: tuple[int, ...]) -> None:
    method = method_of({"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm}})
    assert method is not None
    assert method.kept("x") == kind
    assert any("scales of activations" in note for note in method.notes) == (algorithm == "FP8")
    torch.manual_seed(0)
    numbers = torch.randn(384, 256).to(torch.float8_e4m3fn)
    powers = torch.randint(120, 127, shape, dtype=torch.uint8)
    scale = torch.exp2(powers.float() - 127)
    blocks = scale.reshape(shape[0] if shape else 1, shape[-1 if kind == "mxfp8" else 2] if shape[1:] else 1)
    wide = blocks.repeat_interleave(384 // len(blocks), 0).repeat_interleave(256 // blocks.shape[1], 1)
    parts = {"weight": numbers, "weight_scale": powers if kind == "mxfp8" else scale}
    check(method, parts, numbers.float() * wide)


@pytest.mark.parametrize("exponents", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp8_is_a_method_of_its_own(exponents: torch.dtype) -> None:
    """As MiniMax publishes it, and transformers reads it."""
    config = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0", "fmt": "e4m3"}
    method = method_of({"quantization_config": config})
    assert method is not None
    numbers = torch.randn(96, 128).to(torch.float8_e4m3fn)
    powers = torch.randint(120, 127, (96, 4), dtype=torch.uint8)
    scale = torch.exp2(powers.float() - 127).repeat_interleave(32, 1)
    parts = {"weight": numbers, "weight_scale_inv": powers.view(exponents)}
    check(method, parts, numbers.float() * scale)
    with pytest.raises(ConfigError, match=r"weight_block_size is \[128, 128\]; it must be \[1, 32\]"):
        method_of({"quantization_config": config | {"weight_block_size": [128, 128]}})


@pytest.mark.parametrize(
    ("name", "kind", "bits", "group"),
    [("nvfp4", "nv_fp", 4, 16), ("mxfp4", "mx_fp", 4, 32), ("mxfp8", "mx_fp", 8, 32)],
)
def test_autoround_has_small_floats_alike(name: str, kind: str, bits: int, group: int) -> None:
    """In its own words, some layers in others, some as they were."""
    own = {"bits": bits, "data_type": kind, "group_size": group, "act_bits": bits, "act_data_type": kind}
    others = {"a.b": {"bits": 16}, r".*\.wide": {"bits": 8, "data_type": "mx_fp", "group_size": 32}}
    said = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "sym": True} | own
    method = method_of({"quantization_config": said | {"extra_config": others}})
    assert method is not None
    assert method.notes == ("the checkpoint's activations are not rounded",)
    assert [method.covers(module) for module in ("x", "a.b", "lm_head")] == [True, False, False]
    assert method.kept("x.wide") == "mxfp8"
    check(method, *quantize(torch.zeros(96, 128), name))


def test_autoround_has_fp8_with_scales_of_activations() -> None:
    said = {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static", "data_type": "fp"}
    said |= {"bits": 8, "act_bits": 8, "group_size": -1, "fmt": "e4m3", "activation_scheme": "static"}
    method = method_of({"quantization_config": said | {"extra_config": {"lm_head": {"bits": 16}}}})
    assert method is not None
    assert method.unused("x.input_scale", Stored(torch.ones(1)))
    assert [method.covers(module) for module in ("x", "lm_head")] == [True, False]
    check(method, *quantize(torch.zeros(96, 128), "fp8 channels"))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_activations_that_are_not_rounded_are_noted(name: str) -> None:
    inputs = {"num_bits": 4, "type": "float", "dynamic": True}
    for more, notes in (({}, 0), ({"input_activations": inputs}, 1)):
        method = method_of({"quantization_config": said(g=GROUPS[name][0] | more)})
        assert method is not None
        assert method.notes == ("the checkpoint's activations are not rounded",) * notes


def test_modelopt_says_of_each_layer_what_it_is() -> None:
    """By its name or that of its experts, with towers or without; groups beside that say the same, and a file
    that names the tool alone."""
    layers = {
        "model.language_model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"},
        "model.language_model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    method = method_of(
        {
            "quantization_config": {
                "config_groups": {"group_0": {"weights": numbers, "targets": [*layers][1:]}},
                "producer": {"name": "modelopt", "version": "0.37.0"},
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": layers,
            }
        }
    )
    assert method is not None
    kept = {
        "model.layers.0.self_attn.o_proj": "fp8",
        "model.layers.0.mlp.experts.3.up_proj": "nvfp4",
    }
    assert {module: method.kept(module) for module in kept} == kept
    assert not method.covers("model.layers.0.mlp.gate")
    assert not method.covers("lm_head")


MIXED = said(
    a=GROUPS["int8 channels"][0] | {"targets": ["re:.*layers\\.[01]\\.mlp\\.down_proj"]},
    b=GROUPS["mxfp4"][0] | {"targets": ["model.layers.0.mlp.gate_proj", "re:.*layers\\.0\\.mlp\\.up_proj"]},
    c=GROUPS["fp8 channels"][0] | {"targets": ["re:.*k_proj$"]},
    d=GROUPS["nvfp4"][0]
    | {"targets": ["re:.*o_proj$"], "input_activations": {"num_bits": 4, "type": "float"}},
    e=GROUPS["int8 groups"][0],
) | {"ignore": ["re:.*layers.2.mlp.down_proj"], "kv_cache_scheme": {"num_bits": 8, "type": "float"}}


@torch.no_grad()
@pytest.mark.parametrize("alone", [False, True])
def test_embeddings_have_a_scheme_of_their_own(alone: bool, tmp_path: Path) -> None:
    table = GROUPS["int8 channels"][0] | {"targets": ["Embedding"]}
    config = said(table=table) if alone else said(linears=GROUPS["int8 groups"][0], table=table)
    packed, plain = pair(
        tmp_path, config, lambda _, w: None if alone else quantize(w, "int8 groups"), **SHAPE
    )
    name = "model.embed_tokens.weight"
    parts, dense = quantize(torch.zeros(311, 128), "int8 channels")
    for source, made in (
        (packed, {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}),
        (plain, {name: dense}),
    ):
        save_file(load_file(source.files[0]) | made, source.files[0], {"format": "pt"})
    found, expected = (Eager(load_model(source)).prompt_logprobs(PROMPTS) for source in (packed, plain))
    torch.testing.assert_close(found, expected)


def scheme_of(name: str) -> str | None:
    if "mlp.down" in name:
        return None if "layers.2" in name else "int8 channels"
    if "layers.0.mlp" in name:
        return "mxfp4"
    return "fp8 channels" if "k_proj" in name else "nvfp4" if "o_proj" in name else "int8 groups"


@torch.no_grad()
def test_schemes_are_mixed_in_a_file(tmp_path: Path) -> None:
    def of(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        kind = scheme_of(name)
        return None if kind is None else quantize(tensor, kind)

    cache = {
        f"model.layers.{i}.self_attn.{kv}_scale": torch.tensor([i + 1.0 + (kv == "v") / 2])
        for i in range(3)
        for kv in "kv"
    }
    packed, plain = pair(tmp_path, MIXED, of, more=cache, **SHAPE)
    resolved = resolve(Config(device="cpu"), detect(), packed.config)
    assert resolved.config.quantization == "checkpoint"
    assert "the checkpoint's activations are not rounded" in resolved.notes
    model, expected = load_model(packed, quantization="checkpoint"), load_model(plain)
    assert model.cache_scales == [(1.0, 1.5), (2.0, 2.5), (3.0, 3.5)]
    assert expected.cache_scales is None
    layers = [(b.attention.qkv, b.attention.out, b.mlp.gate_up, b.mlp.down) for b in model.blocks]
    kinds = [[layer.weight.kind for layer in each] for each in layers]
    assert kinds == [
        ["f32", "nvfp4", "e2m1", "q8_0"],
        ["f32", "nvfp4", "q8_0", "q8_0"],
        ["f32", "nvfp4", "q8_0", "f32"],
    ]
    rows, native = (Eager(model, native=each).generate(PROMPTS, 4) for each in (False, True))
    assert [row.tokens for row in native] == [row.tokens for row in rows]
    logprobs = Eager(expected).prompt_logprobs(PROMPTS)
    for given in ("checkpoint", None):
        found = Eager(load_model(packed, quantization=given)).prompt_logprobs(PROMPTS)
        torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-3)
    path = tmp_path / "packed/model.safetensors"
    whole, name = load_file(path), "model.layers.0.self_attn.o_proj.weight"
    for wrong in (None, torch.tensor([0.0]), torch.tensor([float("nan")])):
        part = whole | {"model.layers.1.self_attn.v_scale": wrong}
        save_file({key: value for key, value in part.items() if value is not None}, path, {"format": "pt"})
        assert load_model(packed).cache_scales is None
    for change, words in (
        ({f"{name}_global_scale": None}, f"{name}_global_scale is missing beside"),
        ({f"{name}_scale": torch.ones(128, 8).half()}, f"{name}_scale holds F16, expected F8_E4M3"),
        ({f"{name}_packed": torch.zeros(128, 32, dtype=torch.uint8)}, r"has shape \[128, 32\], expected"),
        (
            {"model.layers.0.mlp.down_proj.weight_scale": torch.ones(128, 3)},
            r"has shape \[128, 3\], expected",
        ),
    ):
        made = {key: value for key, value in (whole | change).items() if value is not None}
        save_file(made, path, {"format": "pt"})
        with pytest.raises(WeightError, match=words):
            load_model(packed)


PACKED = {"type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
WRITTEN: dict[str, dict[str, Any]] = {name: GROUPS[name][0] for name in GROUPS if "tensor" not in name}
WRITTEN |= {f"int{bits}": group("pack-quantized", num_bits=bits, **PACKED) for bits in (3, 4, 8)}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_library_writes_what_is_read(name: str) -> None:
    """Its own reader computes numbers of NVFP4 in bfloat16, and scales in float32 become float16 here."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    kind, weights = WRITTEN[name]["format"], dict(WRITTEN[name]["weights"])
    if name == "nvfp4":
        weights["strategy"] = "tensor_group"
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=kind)
    torch.manual_seed(0)
    w = torch.randn(96, 128)
    tiles = w.view(96, -1, weights.get("group_size", 128))
    factor = generate_gparam(w.amin(), w.amax()).view(1) if name == "nvfp4" else None
    scale, zero = calculate_qparams(tiles.amin(-1), tiles.amax(-1), args, global_scale=factor)
    state = {"weight": w, "weight_scale": scale, "weight_zero_point": zero}
    state |= {} if factor is None else {"weight_global_scale": factor}
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(state, scheme)
    dense = compressor.decompress(stored, scheme)["weight"].float()
    method = method_of({"quantization_config": said(g=WRITTEN[name])})
    assert method is not None
    check(
        method, stored, dense, rtol=2**-8 if name == "nvfp4" else 1e-6, atol=4e-3 if "int" in name else 1e-6
    )
