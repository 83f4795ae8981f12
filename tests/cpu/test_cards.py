"""Which models start on which GPUs, and what the others are told, without a GPU: see ``fake_gpu.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import run_script

from sgla.device import nvidia
from sgla.kernels import device

HERE = Path(__file__).parent
HEAD_DIMS = (64, 72, 80, 96, 100, 112, 128, 192, 256, 512)
SMALL = {"num_hidden_layers": 1, "vocab_size": 500, "hidden_size": 256, "intermediate_size": 256}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
CARDS = ("H200", "A100", "L40S", "H100", "B200", "RTX 5090", "T4", "MI300X")
FEW = ("H200", "L40S", "RTX 5090", "T4", "MI300X")
REFUSED = {"T4": "compute capability 7.5", "MI300X": "no NVIDIA GPU"}


LATENT = json.loads(
    """{"architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "num_key_value_heads": 2,
    "head_dim": null, "kv_lora_rank": 32, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "rope_scaling": null}"""
)


def start(cases: list[dict[str, Any]], model: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """What ``fake_gpu.py`` says of the cases, each of which changes the configuration ``model``."""
    if model is None:
        model = json.loads((HERE.parents[1] / "bench/models/llama-3.1-8b/config.json").read_text()) | SMALL
    few = {"step_tokens": 64, "context_length": 64, "max_running_requests": 8, "kv_cache_bytes": 4 << 20}
    full = [
        case | {"model": model | case.get("model", {}), "config": few | case.get("config", {})}
        for case in cases
    ]
    return [json.loads(line) for line in run_script("fake_gpu.py", json.dumps(full))]


@pytest.mark.parametrize("dims", [(72, 512), pytest.param(HEAD_DIMS, marks=pytest.mark.slow)])
def test_every_head_size_starts_or_is_refused_by_name(dims: tuple[int, ...]) -> None:
    cases = [
        {"card": card, "model": {"head_dim": dim}}
        for card in (CARDS if len(dims) > 2 else FEW)
        for dim in (dims if card in ("H200", "L40S") else (96,))
    ]
    cases += [
        {"card": "L40S", "model": {"head_dim": n}, "config": {"dtype": "float32"}} for n in dims if n >= 256
    ]
    cases += [{"card": "H200", "model": model} for model in ({"head_dim": 576}, LATENT)]
    for card, more in (("H200", {}), ("L40S", {}), ("H200", {"deterministic": True})):
        kinds = ("int8", "int4") if card == "H200" else ("int4",)
        cases += [{"card": card, "config": {"quantization": kind} | more} for kind in kinds]
    for case, found in zip(cases, start(cases), strict=True):
        error = found.get("error")
        if error is None:
            assert case["card"] not in REFUSED
            alone = case.get("model", {}).get("head_dim") == 576  # then steps are no graphs
            assert alone or found["late"] == [], case
            assert any("torch decode, torch prefill" in note for note in found["notes"]) == alone, case
            continue
        expected = REFUSED[case["card"]]
        assert case["card"] in REFUSED, (case, error)
        assert expected in error
        assert "--device cpu" in error
        assert not found["loaded"]


def test_caches_of_integers_start_or_are_refused_by_name() -> None:
    cases: list[dict[str, Any]] = [
        {"model": model, "config": {"kv_cache_dtype": kind}}
        for model in ({"head_dim": 64}, {"head_dim": 72}, LATENT)
        for kind in ("int8", "int4")
    ]
    refused = [None, None, None, "a multiple of 16 a head", "latent attention", "latent attention"]
    for case, found, why in zip(cases, start([{"card": "H200"} | case for case in cases]), refused):
        error = found.get("error")
        assert (error is None) if why is None else (why in str(error) and not found["loaded"]), (case, found)


def test_other_makers_numbers_are_not_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300X says 9.4."""
    facts = {
        "major": 9,
        "minor": 4,
        "multi_processor_count": 304,
        "name": "MI300X",
        "total_memory": 192 << 30,
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**facts))
    assert device.describe(0).arch == (9, 4)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    found = device.describe(0)
    assert (found.kind, found.arch, found.memory) == ("rocm", (0, 0), 192 << 30)
    assert not any((found.fp8, found.tma, found.wgmma, found.pdl, found.bf16))


def test_tiles_fit_the_memory_of_a_block() -> None:
    """Whatever the head size, the type and the card; and those of Hopper are the largest there are."""
    from sgla.kernels.triton import attention

    hopper = nvidia("H200", (9, 0)).shared
    for shared in (99 << 10, 163 << 10, hopper):
        for size in (2, 4):
            for dim in HEAD_DIMS:
                cut, padded = attention.extend_cut(dim, size, shared), attention.padded(dim)
                needs = size * (padded * (cut.m + 2 * cut.n) + cut.m * cut.n) + 4 * cut.m
                assert needs <= shared
                assert min(cut.m, cut.n) >= 16
                if shared == hopper and dim <= 256:
                    assert cut == (128, 64 if dim <= 128 else 32, 2)
    assert attention.extend_cut(128, 2, 99 << 10) == (128, 64, 2)
    assert attention.extend_cut(256, 2, 99 << 10) == (64, 32, 2)


CARDS = {"A100": (8, 0), "L40S": (8, 9), "H200": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0)}
COMPILE = """
import json, os, sys
os.environ.pop('TRITON_INTERPRET', 0)
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sgla.device import nvidia
from sgla.kernels.triton import attention, compressed, hyper, latent, picking

TYPES = dict.fromkeys(('q', 'out'), '*bf16') | dict.fromkeys(
    ('part', 'part_ml', 'sinks', 'slopes', 'told', 'k_scales', 'v_scales'), '*fp32'
)
TYPES |= dict.fromkeys(('page_table', 'tiles', 'slots', 'kv_len', 'ends'), '*i32')
TYPES |= dict.fromkeys(('until', 'origin'), '*i64')
TYPES |= dict.fromkeys(('scale', 'k_scale', 'v_scale', 'softcap'), 'fp32')

def shared(kernel, arch, stages, pages='*bf16', **sizes):
    if 'PDL' in kernel.arg_names:
        sizes['PDL'] = nvidia('', tuple(arch)).pdl
    assert set(sizes) == {parameter.name for parameter in kernel.params if parameter.is_constexpr}, kernel
    types = {'k': pages, 'v': pages} | TYPES | dict.fromkeys(sizes, 'constexpr')
    source = ASTSource(kernel, {name: types.get(name, 'i32') for name in kernel.arg_names}, sizes)
    target, options = GPUTarget('cuda', 10 * arch[0] + arch[1], 32), {'num_warps': 4, 'num_stages': stages}
    return triton.compile(source, target=target, options=options).metadata.shared

found, heads = [], {'GROUP': 2, 'SOFTCAP': False, 'SINKS': True, 'CHUNKED': True, 'RISING': True}
for arch in json.loads(sys.argv[1]):
    cut = attention.decode_cut(64, 16, 2, nvidia('', tuple(arch)).shared)
    sizes = {'HD': 64, 'HB': 64, 'VD': 64, 'VB': 64, 'GROUP_BLOCK': 16, 'BLOCK': cut.n, 'ENDS': True}
    found.append(shared(attention._decode, arch, cut.stages, **sizes, **heads, INT8=False, DIMS=0))
for pages in ('*fp8e4nv', '*i8'):
    found.append(shared(attention._decode, (8, 9), 2, pages, **sizes, **heads, INT8=pages == '*i8', DIMS=0))
TYPES |= {'v': '*u8', 'v_scales': '*i32'}
found.append(shared(attention._decode, (8, 9), 2, '*i8', **sizes, **heads, INT8=True, DIMS=32))
TYPES['v_scales'] = '*fp32'
del TYPES['v']
places = {'UNTIL': True, 'ORIGIN': True}
cut = attention.extend_cut(192, 2, nvidia('', (8, 9)).shared)
sizes = {'HD': 192, 'HB': attention.padded(192), 'VD': 128, 'VB': 128, 'BLOCK_M': cut.m, 'BLOCK_N': cut.n}
found.append(shared(attention._extend, (8, 9), cut.stages, **sizes, **heads, INT8=False, DIMS=0, **places))
room = nvidia('', (8, 9)).shared
decode, extend = latent.decode_cut(576, 512, 20, 2, room), latent.extend_cut(576, 512, 2, room)
for kernel, cut in ((latent._decode, decode), (latent._extend, extend)):
    sizes = {'C': 512, 'CB': 512, 'R': 64, 'RB': 64, 'M': cut.m, 'N': cut.n, 'RANKS': 2, 'RANK': 1}
    sizes |= {'SINKS': True} if kernel is latent._decode else {}
    found.append(shared(kernel, (8, 9), latent._ahead(cut), **sizes))
TYPES |= {'out': '*i64', 'weights': '*fp32', 'lengths': '*i32'}
found.append(shared(picking._ranks, (8, 9), 2, D=128, DB=128, H=64, N=picking.BLOCK))
TYPES |= dict.fromkeys(('given', 'entries', 'out'), '*bf16') | {'eps': 'fp32'}
TYPES |= dict.fromkeys(('own_table', 'table', 'picked', 'positions', 'counts'), '*i32')
TYPES |= dict.fromkeys(('bias', 'norm', 'cos_sin', 'x', 'base'), '*fp32')
places, cut = {'DIM': 512, 'RATE': 128, 'TOGETHER': 16}, latent.decode_cut(512, 512, 32, 2, room)
found.append(shared(compressed._attend, (8, 9), 2, **places, DB=512, PICKED=True, M=cut.m, N=cut.n))
found.append(shared(compressed._make, (8, 9), 2, **places, FIRST=0, HALF=32, HB=32, RB=512, SERIES=2))
TYPES |= dict.fromkeys(('scale', 'out'), '*fp32')
shared(hyper._weights, (8, 9), 2, N=4, WIDTH=24, BT=hyper.TOGETHER)
print(json.dumps(found))
"""


def test_attention_compiles_for_each_kind_of_cards() -> None:
    """Of decode rows, and for a small card those of pages of 8 and 4 bits, of prompts with heads padded
    to 256 and of DeepSeek's latents, scores by which tokens are picked, and entries of several tokens."""
    pytest.importorskip("triton")
    cards = list(CARDS)
    command = [sys.executable, "-c", COMPILE, json.dumps([CARDS[name] for name in cards])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, shared in zip([*cards, *["L40S"] * 9], json.loads(done.stdout), strict=True):
        assert 0 < shared <= nvidia(name, CARDS[name]).shared
