"""Checkpoints of bitsandbytes, HQQ and torchao, written here number by number, against the matrices that they
mean; and by these and other libraries where they are installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Eager, random_prompts, save_checkpoint
from quantized import Stored, check, pair
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgla.config import Config
from sgla.dist import Shard
from sgla.errors import ConfigError, WeightError
from sgla.hub.source import open_source
from sgla.loading.load import load_model
from sgla.observe.machine import detect
from sgla.quant import coded
from sgla.quant.method import Method
from sgla.quant.methods import method_of
from sgla.resolve import resolve

PROMPTS = random_prompts([9, 2, 17])
SHAPE = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "intermediate_size": 192}
NF4: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def hqq(**settings: Any) -> dict[str, Any]:
    weights = {"nbits": 4, "group_size": 64, "axis": 1} | settings
    return {
        "quant_method": "hqq",
        "quant_config": {"weight_quant_params": weights},
        "skip_modules": ["lm_head"],
    }


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": data}}}


def intx(bits: int, mapping: str) -> dict[str, Any]:
    """As the library writes them: values with their types."""
    return torchao(
        "IntxWeightOnlyConfig",
        weight_dtype={"_type": "torch.dtype", "_data": f"int{bits}"},
        granularity={"_type": "PerGroup", "_version": 1, "_data": {"group_size": 32}},
        mapping_type={"_type": "MappingType", "_data": mapping},
    )


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "nf4": (NF4, "nf4"),  # on GPUs
    "nf4, nested": (NF4 | {"bnb_4bit_use_double_quant": True}, "nf4"),
    "bitsandbytes int8": (INT8, "q8_0"),
    "hqq": (hqq(), "int4"),
    "hqq, 2 bits": (hqq(nbits=2, group_size=32), "int4"),
    "hqq, 3 bits": (hqq(nbits=3), "int4"),
    "hqq, 8 bits": (hqq(nbits=8), "int8"),
    "hqq, axis 0": (hqq(axis=0), ""),
    "torchao int8": (torchao("Int8WeightOnlyConfig"), "q8_0"),
    "torchao int4": (torchao("Int4WeightOnlyConfig", group_size=32), "int4"),
    "torchao int4 in tiles": (
        torchao(
            "Int4WeightOnlyConfig",
            group_size=32,
            int4_packing_format={"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"},
        ),
        "int4",
    ),
    "torchao intx": (torchao("IntxWeightOnlyConfig"), "int8"),
    "torchao intx, 4 bits": (intx(4, "SYMMETRIC"), "q4_0"),
    "torchao intx, 3 bits, asymmetric": (intx(3, "ASYMMETRIC"), "int4"),
    "torchao float8": (torchao("Float8WeightOnlyConfig"), "fp8"),
}

ON_GPUS = {
    "nf4": "nf4",
    "nf4, nested": "nf4",
    "bitsandbytes int8": "int8g128",
    "hqq": "int4m64",
    "hqq, 2 bits": "int4m32",
    "hqq, 3 bits": "int4m64",
    "hqq, 8 bits": "int8m64",
    "torchao int8": "int8g128",
    "torchao int4": "int4m32",
    "torchao int4 in tiles": "int4m32",
    "torchao intx": "int8g32",
    "torchao intx, 4 bits": "int4g32",
    "torchao intx, 3 bits, asymmetric": "int4g32",
    "torchao float8": "fp8",
}


def method(name: str) -> Method:
    found = method_of({"quantization_config": CASES[name][0]})
    assert found is not None
    assert found.kept("x") == CASES[name][1]
    assert found.kept("x", "cuda") == ON_GPUS.get(name, "")
    return found


def quantize(w: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a random matrix like ``w``, by suffix, and the matrix they mean."""
    config = CASES[name][0]
    if name == "bitsandbytes int8":
        q, largest = torch.randint(-127, 128, w.shape, dtype=torch.int8), (torch.rand(len(w)) + 1) / 8
        parts = {"weight": q, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}
        return parts, q * (largest / 127)[:, None]
    if config["quant_method"] == "bitsandbytes":
        return nf4(w, "nested" in name)
    if config["quant_method"] == "hqq":
        return planes(w, **config["quant_config"]["weight_quant_params"])
    return of_torchao(w, name)


def nf4(w: Tensor, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """bitsandbytes, functional.py: QuantState.as_dict."""
    (n, k), table = w.shape, torch.tensor(coded.NF4.table)
    codes, largest = torch.randint(0, 16, (n * k,)), torch.rand(n * k // 64) * 0.3 + 0.1
    said: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [n, k]}
    parts = {"absmax": largest, "quant_map": table}
    if nested:
        inner, outer, offset = torch.linspace(-1, 1, 256), torch.rand(-(-len(largest) // 256)) * 0.1, 0.25
        places = torch.randint(0, 256, largest.shape, dtype=torch.uint8)
        largest = inner[places.long()] * outer.repeat_interleave(256)[: len(places)] + offset
        parts |= {"absmax": places, "nested_absmax": outer, "nested_quant_map": inner}
        said |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
    parts["quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    packed = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    dense = (table[codes] * largest.repeat_interleave(64)).view(n, k)
    return {"weight": packed} | {f"weight.{part}": value for part, value in parts.items()}, dense


def planes(w: Tensor, nbits: int, group_size: int, axis: int) -> tuple[dict[str, Tensor], Tensor]:
    """HQQ, core/bitpack.py."""
    groups = w.numel() // group_size
    q = torch.randint(0, 1 << nbits, (groups, group_size) if axis else (group_size, groups))
    shape = (groups, 1) if axis else (1, groups)
    scale, zero = (torch.rand(shape) * 0.02 + 0.01) * 16 / (1 << nbits), torch.rand(shape) * (1 << nbits)
    scale, zero = scale.half(), zero.half()
    each, top = (10, 27) if nbits == 3 else (8 // nbits, 8 - nbits)
    rows = torch.nn.functional.pad(q, (0, 0, 0, -len(q) % each)).chunk(each)
    packed = sum(part << top - nbits * i for i, part in enumerate(rows))
    numbers = {"nbits": nbits, "group_size": group_size, "axis": axis, "quant_scale": 0}
    parts = {"W_q": torch.as_tensor(packed).to(torch.int32 if nbits == 3 else torch.uint8)}
    parts |= {"scale": scale, "zero": zero, "shape": torch.tensor(w.shape)}
    parts |= {key: torch.tensor(value, dtype=torch.int32) for key, value in numbers.items()}
    return parts, ((q - zero.float()) * scale.float()).view(w.shape)


def of_torchao(w: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
    n, k = w.shape
    if name.endswith("float8"):
        numbers, scale = torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(n, 1) * 0.1
        return {"_weight_qdata": numbers, "_weight_scale": scale}, numbers.float() * scale
    if name.endswith("int4"):
        q, scale, middle = (
            torch.randint(-8, 8, (n, k)),
            torch.rand(k // 32, n) / 32,
            torch.randn(k // 32, n) / 16,
        )
        scale, middle = scale.half() + 0.01, middle.half()
        packed = (q[:, 0::2] & 15 | (q[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
        wide = [t.float().T.repeat_interleave(32, 1) for t in (scale, middle)]
        parts = {"_weight_qdata": packed, "_weight_scale": scale, "_weight_zero_point": middle}
        return parts, q * wide[0] + wide[1]
    if name.endswith("tiles"):
        return tiles(n, k)
    groups = 1 if name.endswith("int8") else k // 32
    half = 8 if "4 bits" in name else 4 if "3 bits" in name else 128
    q = torch.randint(-half, half, (n, k), dtype=torch.int8)
    scale, zero = torch.rand(n, groups).half() / 500 + 1e-3, torch.zeros(n, groups, dtype=torch.int8)
    if groups > 1 and "4 bits" not in name:
        zero.random_(-min(half, 9), min(half, 9))
    wide = [t.float().repeat_interleave(k // groups, 1) for t in (scale, zero)]
    parts = {"_weight_qdata": q, "_weight_scale": scale, "_weight_zero_point": zero}
    return parts, (q - wide[1]) * wide[0]


def tiles(n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
    """PyTorch, native/cuda/int4mm.cu: _convert_weight_to_int4pack, of a matrix that is padded first."""
    rows, columns = -(-n // 8) * 8, -(-k // 1024) * 1024
    q = torch.nn.functional.pad(torch.randint(0, 16, (n, k)), (0, columns - k, 0, rows - n))
    packed = torch.zeros(rows // 8, columns // 128, 32, 4, dtype=torch.int64)
    for lane in range(32):
        for word in range(4):
            for place, step in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
                at = 32 * word + 2 * (lane % 4) + step
                packed[:, :, lane, word] |= q[lane // 4 :: 8, at::128] << 4 * place
    constants = torch.stack(
        [torch.rand(columns // 32, rows) / 32 + 0.01, torch.randn(columns // 32, rows) / 16]
    )
    both = constants.permute(1, 2, 0).bfloat16().contiguous()
    scale, middle = both[: k // 32, :n].float().repeat_interleave(32, 0).unbind(-1)
    words = (packed - (packed >> 31 << 32)).to(torch.int32)
    return {"_weight_qdata": words, "_weight_scale_and_zero": both}, (q[:n, :k] - 8) * scale.T + middle.T


@pytest.mark.parametrize("name", CASES)
def test_every_layout_means_its_matrix(name: str) -> None:
    """int4 and int8 have minima in float16, q8_0 scales."""
    torch.manual_seed(0)
    check(method(name), *quantize(torch.zeros(96, 128), name), atol=2e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["nf4, nested", "bitsandbytes int8", "hqq", "torchao int4", "torchao int4 in tiles"]
)
def test_checkpoints_mean_what_their_matrices_mean(name: str, tmp_path: Path) -> None:
    packed, plain = pair(tmp_path, CASES[name][0], lambda _, w: quantize(w, name), **SHAPE)
    resolved = resolve(Config(device="cpu"), detect(), packed.config)
    assert resolved.config.quantization == "checkpoint"
    expected, wide = (Eager(load_model(source)).prompt_logprobs(PROMPTS) for source in (plain, packed))
    torch.testing.assert_close(wide, expected)
    model = load_model(packed, quantization=resolved.config.quantization)
    assert {b.mlp.down.weight.kind for b in model.blocks} == {CASES[name][1]}
    torch.testing.assert_close(Eager(model).prompt_logprobs(PROMPTS), expected, rtol=0, atol=0.2)
    rows, native = (Eager(model, native=each).generate(PROMPTS, 4) for each in (False, True))
    assert [row.tokens for row in native] == [row.tokens for row in rows]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_places_in_bytes_of_floats_are_the_same(kind: str, tmp_path: Path) -> None:
    """As trainers that shard floats alone want them (``bnb_4bit_quant_storage``)."""

    def stored(_: str, w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts, dense = quantize(w, "nf4")
        bytes_ = parts["weight"].flatten().view(getattr(torch, kind))
        return parts | {"weight": bytes_[:, None]}, dense

    config = NF4 | {"bnb_4bit_quant_storage": kind}
    packed, plain = pair(tmp_path, config, stored, **SHAPE | {"intermediate_size": 256})
    model = load_model(packed, quantization="checkpoint")
    assert {b.mlp.down.weight.kind for b in model.blocks} == {"nf4"}
    found, expected = (Eager(load_model(source)).prompt_logprobs(PROMPTS) for source in (packed, plain))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(Eager(model).prompt_logprobs(PROMPTS), expected, rtol=0, atol=0.2)
    second = load_model(packed, quantization="checkpoint", shard=Shard(1, 2))
    whole, half = (each.blocks[0].mlp.gate_up.weight.dequant() for each in (model, second))
    assert torch.equal(half, torch.cat([part[128:] for part in whole.split(256)]))


@torch.no_grad()
def test_rows_that_cut_blocks_are_refused_before_weights_load(tmp_path: Path) -> None:
    shape = SHAPE | {"hidden_size": 160, "head_dim": 40}
    packed, plain = pair(tmp_path, NF4, lambda _, w: quantize(w, "nf4"), **shape)
    with pytest.raises(ConfigError, match="blocks of 64 channels, and a layer has 160: --quantization none"):
        load_model(packed, quantization="checkpoint")
    expected, found = (Eager(load_model(source)).prompt_logprobs(PROMPTS) for source in (plain, packed))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["nf4", "bitsandbytes int8", "hqq", "torchao int8"])
def test_files_that_do_not_say_how_they_are_quantized_are_named(name: str, tmp_path: Path) -> None:
    packed, _ = pair(tmp_path, CASES[name][0], lambda _, w: quantize(w, name), **SHAPE)
    del packed.config["quantization_config"]
    with pytest.raises(WeightError, match=r"_proj\.\S+ is a quantized layer's, which quant"):
        load_model(packed)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    layer = "model.layers.1.mlp.up_proj"
    state = torch.tensor(list(b'{"shape": [128, 192], "blocksize": 64}'), dtype=torch.uint8)
    changes: dict[str, list[tuple[dict[str, Tensor | None], str]]] = {
        "nf4": [
            ({f"{layer}.weight": torch.tensor(1, dtype=torch.uint8)}, r"weight has shape \[\], expected"),
            ({f"{layer}.weight": torch.ones(1, 12288, dtype=torch.uint8)}, r"expected \[12288, 1\]"),
            ({f"{layer}.weight.absmax": None}, f"{layer}.weight.absmax is missing"),
            ({f"{layer}.weight.absmax": torch.ones(3)}, f"{layer}.weight.absmax has 3 values, expected 384"),
            ({f"{layer}.weight.absmax": torch.ones(2, 192)}, "the order of a CPU's kernel"),
            ({f"{layer}.weight.absmax": torch.ones(384, dtype=torch.uint8)}, "beside nested_absmax"),
            ({f"{layer}.weight.quant_map": torch.ones(16, dtype=torch.int32)}, "holds I32, expected"),
            ({f"{layer}.weight.quant_state.bitsandbytes__nf4": None}, "quant_state is missing"),
            ({f"{layer}.weight.quant_state.bitsandbytes__nf4": state}, r"quant_state has shape \[128, 192\]"),
        ],
        "nf4, nested": [
            (
                {f"{layer}.weight.nested_quant_map": None},
                "absmax holds U8; it is U8 beside nested_absmax",
            ),
        ],
        "hqq": [
            ({f"{layer}.W_q": torch.zeros(2, 64, dtype=torch.uint8)}, r"W_q has shape \[2, 64\], expected"),
            ({f"{layer}.nbits": torch.tensor(5)}, "has 5 bits"),
            ({f"{layer}.quant_scale": torch.tensor(1)}, "quant_scale is true"),
        ],
        "torchao int8": [
            ({f"{layer}._weight_zero_point": torch.ones(192, 1, dtype=torch.int8)}, "zero_point is not 0"),
            ({f"{layer}._weight_scale": torch.ones(4)}, r"does not fit \[192, 128\]"),
        ],
    }
    for name, cases in changes.items():
        packed, _ = pair(tmp_path / name, CASES[name][0], lambda _, w, name=name: quantize(w, name), **SHAPE)
        path = tmp_path / name / "packed/model.safetensors"
        whole = load_file(path)
        for change, words in cases:
            made = {key: value for key, value in (whole | change).items() if value is not None}
            save_file(made, path, {"format": "pt"})
            with pytest.raises(WeightError, match=words):
                load_model(packed)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (NF4 | {"load_in_8bit": True}, "load_in_4bit"),
        (NF4 | {"bnb_4bit_quant_storage": "float64"}, "bnb_4bit_quant_storage"),
        (NF4 | {"bnb_4bit_quant_storage": ["uint8"]}, "bnb_4bit_quant_storage"),
        (hqq(nbits=5), "nbits"),
        (torchao("UIntXWeightOnlyConfig"), "quant_type"),
        (torchao("FqnToConfig", fqn_to_config={"_default": None}), "settings of some layers"),
        (torchao("Int4WeightOnlyConfig", int4_packing_format="preshuffled"), "preshuffled"),
        (torchao("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d", group_size=16), "64, 128"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        method_of({"quantization_config": config})


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_writes_what_is_read(nested: bool) -> None:
    library = pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import dequantize_4bit

    w = torch.randn(96, 128)
    made = library.nn.Params4bit(w, requires_grad=False, quant_type="nf4", compress_statistics=nested)
    made = made._quantize("cpu")
    parts = {f"weight.{key}": value for key, value in made.quant_state.as_dict(packed=True).items()}
    check(method("nf4"), parts | {"weight": made.data}, dequantize_4bit(made.data, made.quant_state).float())


@pytest.mark.parametrize(
    ("kind", "name"), [("Int8", "int8"), ("Float8", "float8"), ("Intx", "intx"), ("Intx", "intx, 4 bits")]
)
def test_torchao_writes_what_is_read(kind: str, name: str) -> None:
    library = pytest.importorskip("torchao.quantization")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    layer = torch.nn.Sequential(torch.nn.Linear(128, 96, bias=False))
    said = (
        {"weight_dtype": torch.int4, "granularity": library.PerGroup(32)}
        if kind == "Intx"
        else {"version": 2}
    )
    library.quantize_(layer, getattr(library, f"{kind}WeightOnlyConfig")(**said))
    tensors, _ = flatten_tensor_state_dict(layer.state_dict())
    parts = {key.removeprefix("0."): value for key, value in tensors.items()}
    check(method(f"torchao {name}"), parts, layer[0].weight.dequantize().float(), atol=2e-3)


def test_torchao_has_settings_for_some_layers(tmp_path: Path) -> None:
    """By names of layers or parameters, by expressions for whole names, or for all others."""
    kinds = {
        "model.layers.0.self_attn.q_proj.weight": "torchao int4",
        r"re:.*mlp\.(gate|up)_proj\.weight": "torchao float8",
        "re:.*down": None,
        "re:.*k_proj": None,
        "_default": "torchao int8",
    }
    settings = {name: kind and CASES[kind][0]["quant_type"]["default"] for name, kind in kinds.items()}

    def of(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if "k_proj" in name:
            return None
        own = "torchao int4" if name.endswith("0.self_attn.q_proj.weight") else "torchao int8"
        return quantize(tensor, "torchao float8" if "gate" in name or "up_proj" in name else own)

    config = torchao("FqnToConfig", fqn_to_config=settings, module_fqn_to_config=settings)
    packed, plain = pair(tmp_path, config, of, **SHAPE)
    model = load_model(packed, quantization="checkpoint")
    layers = [(b.attention.qkv, b.attention.out, b.mlp.gate_up, b.mlp.down) for b in model.blocks]
    assert [layer.weight.kind for layer in layers[0]] == ["f32", "q8_0", "fp8", "q8_0"]
    found, expected = (Eager(load_model(source)).prompt_logprobs(PROMPTS) for source in (packed, plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("hqq")])
def test_hqq_writes_what_is_read(name: str) -> None:
    pytest.importorskip("hqq")
    from hqq.core.quantize import Quantizer
    from hqq.core.utils import encode_safetensor_type

    settings = CASES[name][0]["quant_config"]["weight_quant_params"]
    q, meta = Quantizer.quantize(torch.randn(96, 128), device="cpu", compute_dtype=torch.float32, **settings)
    dense = Quantizer.dequantize(q, meta)
    parts = {key: encode_safetensor_type(value) for key, value in meta.items() if value is not None}
    found = method(name)
    known = {held.removeprefix("x.") for held in found.tensors("x", 96, 128)}
    assert parts.keys() <= known
    check(found, parts | {"W_q": q}, dense, atol=4e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ("FP8_DEFAULT_CFG", "fp8"),
        ("FP8_PER_CHANNEL_PER_TOKEN_CFG", "fp8"),
        ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "fp8g128"),
    ],
)
def test_modelopt_writes_what_is_read(config: str, kind: str, tmp_path: Path) -> None:
    """Also where config.json is as it was, and a file beside it says what the weights are."""
    library = pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    save_checkpoint(tmp_path / "plain", "llama", **SHAPE | {"intermediate_size": 256})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    library.quantize(model, getattr(library, config), lambda each: each(torch.tensor(PROMPTS[2:])))
    export_hf_checkpoint(model, export_dir=str(tmp_path / "written"))
    plain = load_model(open_source(tmp_path / "plain"))
    path = tmp_path / "written/config.json"
    for beside in (False, True):
        if beside:
            said = json.loads(path.read_text())
            del said["quantization_config"]
            path.write_text(json.dumps(said))
        found = load_model(open_source(tmp_path / "written"), quantization="checkpoint")
        for block, wanted in zip(found.blocks, plain.blocks):
            assert block.mlp.down.weight.kind == kind
            expected = wanted.mlp.down.weight.dequant()
            error = (block.mlp.down.weight.dequant() - expected).norm() / expected.norm()
            assert error < 0.04


def rounded(w: Tensor, group: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and zeros ``[n, groups]`` of a matrix, and what it is then."""
    tiles, most = w.view(len(w), -1, group), (1 << bits) - 1
    low, high = tiles.amin(-1), tiles.amax(-1)
    reach = torch.maximum(high, -low)
    scale = (2 * reach if symmetric else high - low).div(most).half().float()
    zero = torch.full_like(scale, 1 << bits - 1) if symmetric else (-low / scale).round().clamp(0, most)
    q = (tiles / scale[..., None] + zero[..., None]).round().clamp(0, most)
    return scale, zero, ((q - zero[..., None]) * scale[..., None]).view(w.shape)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(2, 32), (3, 64), (4, 128), (4, 32), (8, 256)])
def test_gptqmodel_writes_what_is_read(bits: int, group: int, act_order: bool, symmetric: bool) -> None:
    library = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    said = {"bits": bits, "group_size": -1 if group == 256 else group, "sym": symmetric}
    torch.manual_seed(0)
    n, k = 96, 256
    w, order = torch.randn(n, k), torch.randperm(k) if act_order else torch.arange(k)
    places = torch.empty(k, dtype=torch.int32)
    places[order] = torch.arange(k, dtype=torch.int32) // group
    scale, zero, dense = rounded(w[:, order], group, bits, symmetric)
    layer = torch.nn.Linear(k, n, bias=False)
    layer.weight.data = torch.empty(n, k)
    layer.weight.data[:, order] = dense
    made = library.TorchLinear(
        **said, desc_act=act_order, in_features=k, out_features=n, bias=False, register_buffers=True
    )
    made.pack(layer, scale, zero, places)
    found = method_of(
        {
            "quantization_config": {
                "quant_method": "gptq",
                "checkpoint_format": "gptq_v2",
                "desc_act": act_order,
                **said,
            }
        }
    )
    assert found is not None
    stored: dict[str, Any] = {f"x.{name}": Stored(tensor) for name, tensor in made.state_dict().items()}
    torch.testing.assert_close(found.take("x", stored, n, k).dense(), layer.weight.data, rtol=0, atol=2e-3)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", ["gemm", "gemv", "gemv_fast"])
def test_autoawq_writes_what_is_read(kind: str, group: int) -> None:
    pytest.importorskip("awq")
    from importlib import import_module

    module = import_module(f"awq.modules.linear.{kind}")
    torch.manual_seed(0)
    scale, zero, dense = rounded(torch.randn(128, 256), group, 4, False)
    layer = torch.nn.Linear(256, 128, bias=False)
    layer.weight.data = dense.half()
    turned = [t.t().contiguous() if kind == "gemm" else t for t in (scale.half(), zero)]
    name = {"gemm": "GEMM", "gemv": "GEMV", "gemv_fast": "GEMVFast"}[kind]
    made = getattr(module, f"WQLinear_{name}").from_linear(layer, 4, group, False, *turned)
    said = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": kind}
    found = method_of({"quantization_config": said})
    assert found is not None
    stored: dict[str, Any] = {f"x.{name}": Stored(tensor) for name, tensor in made.state_dict().items()}
    torch.testing.assert_close(found.take("x", stored, 128, 256).dense(), dense, rtol=0, atol=2e-3)


SCHEMES = {
    "W4A16": "q4_0",
    "W4A16_ASYM": "int4",
    "W8A16": "q8_0",
    "W8A8": "q8_0",
    "FP8": "fp8",
    "FP8_DYNAMIC": "fp8",
    "FP8_BLOCK": "fp8g128",
    "NVFP4A16": "nvfp4",
    "MXFP4A16": "e2m1",
    "MXFP8A16": "mxfp8",
}


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
def test_llm_compressor_writes_what_is_read(scheme: str, tmp_path: Path) -> None:
    library = pytest.importorskip("llmcompressor")
    from datasets import Dataset
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    save_checkpoint(tmp_path / "plain", "qwen3_moe", **SHAPE | sizes, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    library.oneshot(
        model=model,
        processor=words,
        recipe=[QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])],
        dataset=Dataset.from_dict({"input_ids": PROMPTS, "attention_mask": [[1] * len(p) for p in PROMPTS]}),
        num_calibration_samples=3,
        pipeline="basic",
    )
    model.save_pretrained(tmp_path / "written", save_compressed=True)
    plain = load_model(open_source(tmp_path / "plain"))
    found = load_model(open_source(tmp_path / "written"), quantization="checkpoint")
    most = 0.13 if "4" in scheme.partition("A")[0] else 0.04
    for block, wanted in zip(found.blocks, plain.blocks):
        pairs = [(b.attention.qkv.weight, b.mlp.gate_up, b.mlp.down) for b in (block, wanted)]
        for weight, expected in zip(*pairs):
            assert weight.kind == SCHEMES[scheme]
            error = (weight.dequant() - expected.dequant()).norm() / expected.dequant().norm()
            assert error < most


@torch.no_grad()
def test_autoround_writes_what_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("auto_round")
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    save_checkpoint(tmp_path / "plain", "llama", **SHAPE | {"intermediate_size": 256})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    others = {"model.layers.0.mlp.down_proj": {"bits": 8}, "model.layers.1.mlp.down_proj": {"bits": 16}}
    made = library.AutoRound(
        model, words, bits=4, group_size=64, iters=0, disable_opt_rtn=True, layer_config=others
    )
    made.quantize()
    made.save_quantized(str(tmp_path / "written"), format="auto_round")
    plain = load_model(open_source(tmp_path / "plain"))
    found = load_model(open_source(tmp_path / "written"), quantization="gptq")
    assert [block.mlp.down.weight.kind for block in found.blocks] == ["q8_0", "f32", "q4_0"]
    for block, wanted in zip(found.blocks, plain.blocks):
        expected = wanted.mlp.gate_up.weight.dequant()
        assert (block.mlp.gate_up.weight.dequant() - expected).norm() < 0.13 * expected.norm()
