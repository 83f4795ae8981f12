"""Weights read straight to the GPU are those that the CPU reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sgla.dist import Shard
from sgla.hub.source import open_source
from sgla.layers.build import Build
from sgla.loading.checkpoint import FileTensor
from sgla.loading.load import load_model, model_of
from sgla.loading.stacks import of_experts
from sgla.model.read import read_decoder
from sgla.quant.quants import Int4Tiles
from sgla.quant.weight import Weight

MODELS = Path(__file__).parents[2] / "bench/models"
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 384,
    "vocab_size": 1001,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def tensors_of(thing: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Every tensor that an object's attributes lead to; the numbers of packed weights."""
    if isinstance(thing, Weight):
        return {path: thing.data if thing.data.is_floating_point() else thing.dequant()}
    if isinstance(thing, torch.Tensor):
        return {path: thing}
    if isinstance(thing, list):
        parts = {str(i): item for i, item in enumerate(thing)}
    elif type(thing).__module__.startswith(("sgla.model", "sgla.layers")) and hasattr(thing, "__dict__"):
        parts = {name: item for name, item in vars(thing).items() if name not in ("spec", "shard")}
    else:
        return {}
    return {k: v for name, item in parts.items() for k, v in tensors_of(item, f"{path}.{name}").items()}


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2), Shard(2, 4)])
@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-30b-a3b"])
def test_the_gpu_has_what_the_cpu_reads(
    tmp_path: Path, model: str, shard: Shard, stored: torch.dtype
) -> None:
    config = json.loads((MODELS / model / "config.json").read_text()) | SMALL
    if "num_experts" in config:
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    spec = read_decoder(config)
    build = Build(kind="bf16", vocab_kind="bf16", plain="bf16")
    model_of(spec, build, 64)
    names = sorted(build.table)
    for i in range(2):
        tensors = {name: torch.randn(build.table[name].shape).to(stored) for name in names[i::2]}
        save_file(tensors, tmp_path / f"{i}.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_source(tmp_path)
    on_cpu = tensors_of(load_model(source, "bfloat16", shard=shard, context_len=64))
    with torch.device("cuda"):
        on_gpu = tensors_of(load_model(source, "bfloat16", shard=shard, context_len=64))
    assert len(on_cpu) > 15
    assert on_cpu.keys() == on_gpu.keys()
    for name, tensor in on_gpu.items():
        assert tensor.is_cuda, name
        close = torch.allclose if name.endswith("cos_sin") else torch.equal
        assert close(tensor.cpu(), on_cpu[name]), name


INTEGERS: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": False,
    "strategy": "group",
    "group_size": 32,
}
ROUNDED: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
PACKED: dict[str, dict[str, Any]] = {
    "AutoRound as GPTQ": ROUNDED | {"packing_format": "auto_round:auto_gptq"},
    "AutoRound as AWQ": ROUNDED | {"packing_format": "auto_round:auto_awq"},
    "gptq": {"bits": 4, "group_size": 32, "sym": False, "desc_act": False},
    "awq": {"bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
    "compressed-tensors": {
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INTEGERS}},
        "ignore": ["re:.*k_proj"],
    },
}


@pytest.mark.parametrize("method", PACKED)
def test_packed_checkpoints_are_the_same_numbers(tmp_path: Path, method: str) -> None:
    """The GPU keeps them packed, a CPU that is asked for bfloat16 does not."""
    said = {"quantization_config": {"quant_method": method} | PACKED[method]}
    config = json.loads((MODELS / "qwen3-8b/config.json").read_text()) | SMALL | said
    spec, build = read_decoder(config), Build(kind="bf16", vocab_kind="bf16", plain="bf16")
    model_of(spec, build, 64)
    assert spec.method is not None
    tensors: dict[str, torch.Tensor] = {}
    for name, slot in build.table.items():
        module = name.removesuffix(".weight")
        if "_proj" not in name or not spec.method.covers(module):
            tensors[name] = torch.randn(slot.shape)
            continue
        for part, held in spec.method.tensors(module, *slot.shape).items():
            if held.shape is not None and not held.optional:
                numbers = torch.randint(-(2**31), 2**31, held.shape, dtype=torch.int32)
                tensors[part] = numbers if held.types == ("I32",) else torch.rand(held.shape).half()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_source(tmp_path)
    on_cpu = tensors_of(load_model(source, "bfloat16", context_len=64))
    with torch.device("cuda"):
        on_gpu = tensors_of(load_model(source, "bfloat16", context_len=64))
    assert on_cpu.keys() == on_gpu.keys()
    for name, tensor in on_gpu.items():
        assert tensor.is_cuda, name
        numbers, held = tensor.cpu().float(), on_cpu[name].float()
        assert name.endswith("cos_sin") or torch.allclose(numbers, held, rtol=1 / 128, atol=1e-3), name


def test_tiles_of_torchao_lie_as_torch_packs_them() -> None:
    q = torch.randint(0, 16, (96, 1024), device="cuda", dtype=torch.int32)
    pairs = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8)
    packed = FileTensor(torch.ops.aten._convert_weight_to_int4pack(pairs, 8), (12, 8, 32, 4), "I32", None)
    constants = FileTensor(torch.ones(32, 96, 2, device="cuda"), (32, 96, 2), "F32", None)
    on_cpu = replace(packed, view=packed.view.cpu()), None, replace(constants, view=constants.view.cpu())
    found = Int4Tiles(*on_cpu, (96, 1024), 4, 32).quants(range(11, 83))
    assert torch.equal(found.q.int(), q[11:83].cpu())


@pytest.mark.parametrize("turned", [False, True])
def test_stacks_of_experts_in_e4m3_are_the_same_numbers(turned: bool, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    config = json.loads((MODELS / "qwen3-30b-a3b/config.json").read_text()) | SMALL | experts | said
    build = Build(kind="bf16", vocab_kind="bf16", plain="bf16")
    model_of(read_decoder(config), build, 64)
    tensors = {name: torch.randn(slot.shape) for name, slot in build.table.items() if ".experts." not in name}
    for name in of_experts(build):
        count, n, k = build.stacks[name][0]
        shape, blocks = ((k, n), (k // 128, n // 128)) if turned else ((n, k), (n // 128, k // 128))
        tensors[name] = torch.randn(count, *shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.rand(count, *blocks) + 0.1
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_source(tmp_path)
    on_cpu = tensors_of(load_model(source, "bfloat16", "checkpoint", context_len=64))
    with torch.device("cuda"):
        on_gpu = tensors_of(load_model(source, "bfloat16", "checkpoint", context_len=64))
    assert on_cpu.keys() == on_gpu.keys()
    for name, tensor in on_gpu.items():
        assert tensor.is_cuda, name
        assert name.endswith("cos_sin") or torch.equal(tensor.cpu().float(), on_cpu[name].float()), name
