"""Layers that keep a state, on a GPU: kernels against the bodies of their ops, and texts that go on from
states, in graphs and out of them."""

from __future__ import annotations

import random
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_runner import make
from test_gpu_windows import run

from sgla.attention.base import DeviceBatch
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cuda import skinny_gemm
from sgla.kernels.dispatch import using
from sgla.kernels.gpu import GpuOps
from sgla.kernels.gpu.states import device_states
from sgla.kernels.triton import conv
from sgla.messages import Submit
from sgla.worker.device_state import upload_columns

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from recurrence import batch_of
from tiny import make_core, submit

LENGTHS, READS, WRITES = [1, 1, 1, 70, 9, 300, 2], [3, 0, 5, 0, 4, 6, 12], [3, 1, 7, 2, 4, 6, 12]
MARKS = [(1, 1, 11), (3, 48, 9), (3, 16, 8), (4, 9, 10), (6, 1, 13)]
DECODES, UNITS, TOKENS = 3, 14, sum(LENGTHS)


def batches(linked: bool) -> tuple[ForwardBatch, DeviceBatch]:
    """The same tokens for the bodies of ops and for kernels. ``linked``: the rows of one token go on from
    each other, so they are one row for the bodies, which begins with the unit that the last one reads."""
    lengths, reads, writes, marks, own, runs = LENGTHS, READS, WRITES, MARKS, MARKS, None
    if linked:
        first, runs = READS[DECODES - 1], np.array([DECODES, 0, 0], np.int32)
        lengths, writes = [DECODES, *LENGTHS[DECODES:]], WRITES[DECODES - 1 :]
        own = [mark for mark in MARKS if mark[0] >= DECODES]
        marks = [(0, n + 1, unit) for n, unit in enumerate(WRITES[: DECODES - 1])]
        marks += [(row - DECODES + 1, length, unit) for row, length, unit in own]
        reads = [first, *READS[DECODES:]]
    plain = batch_of(lengths, reads, writes, marks, "cuda")
    reads = [first, 0, 0, *READS[DECODES:]] if linked else READS
    made = batch_of(LENGTHS, reads, WRITES, [], "cuda")
    columns = (np.array(x, np.int32) for x in (reads, WRITES, own))
    states = device_states(*columns, made.q_start.cpu().numpy(), DECODES, upload_columns, runs)
    fields = {name: getattr(made, name) for name in made.__slots__} | {"states": states}
    return plain, DeviceBatch(**fields, decode_rows=DECODES)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dk", "dv"), [(8, 128, 128), (4, 64, 32), (2, 48, 80), (2, 256, 256)])
@pytest.mark.parametrize("channels", [False, True])
def test_a_layer_equals_its_ops(
    dtype: torch.dtype, heads: int, dk: int, dv: int, channels: bool, linked: bool
) -> None:
    torch.manual_seed(0)
    keys, width = heads // 2 * dk, heads * dv
    x = torch.randn(TOKENS, 2 * keys + width, device="cuda", dtype=dtype)
    x[100:140] = x[100]
    weight = torch.randn(x.shape[1], 4, device="cuda", dtype=dtype) / 2
    a, b = torch.randn(2, TOKENS, heads, device="cuda", dtype=dtype)
    a_log, bias = torch.randn(2, heads, device="cuda")
    norm = torch.rand(dv, device="cuda")
    begin = ops.StateLayer(
        torch.randn(UNITS, x.shape[1], 3, device="cuda", dtype=dtype),
        torch.randn(UNITS, heads, dk, dv, device="cuda"),
    )

    def layer(state: ops.StateLayer, rows: ForwardBatch) -> torch.Tensor:
        y = ops.causal_conv(x, weight, None, state, rows)
        q, k, v = y.split([keys, keys, width], 1)
        decay, beta = ops.decay_rates(a, b, a_log, bias)
        if channels:
            decay = decay[..., None] * torch.linspace(0.1, 1, dk, device="cuda")
        q, k, v = q.unflatten(1, (-1, dk)), k.unflatten(1, (-1, dk)), v.unflatten(1, (-1, dv))
        return ops.gated_rms_norm(ops.gated_delta(q, k, v, decay, beta, state, rows), v, norm, 1e-6)

    (plain, rows), other = batches(linked), deepcopy(begin)
    expected = layer(begin, plain)
    with using(GpuOps(None)):  # type: ignore[arg-type]
        found = layer(other, rows)
    near = 2e-4 if dtype == torch.float32 else 2e-2
    for mine, theirs in ((found, expected), (other.memory[1:], begin.memory[1:])):
        assert float((mine - theirs).float().abs().max()) < near * float(theirs.float().abs().max())
    assert torch.equal(other.conv[1:], begin.conv[1:])


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize(("channels", "others", "k"), [(8192, 4160, 2048), (1000, 72, 4096)])
def test_a_convolution_in_the_product(rows: int, channels: int, others: int, k: int) -> None:
    """As the product, and the convolution behind it."""
    torch.manual_seed(0)
    x, norm = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16), torch.rand(k, device="cuda") + 0.5
    w = torch.randn(channels + others, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    taps = torch.randn(channels, 4, device="cuda") / 2
    state = torch.randn(rows + 3, 3, channels, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    mine = state.clone()
    reads, writes = (torch.arange(1, rows + 1, device="cuda", dtype=torch.int32) for _ in range(2))
    marks = torch.zeros(rows, 3, device="cuda", dtype=torch.int32)
    reads[0], marks[-1, 2] = 0, rows + 1
    for _ in range(3):
        plain = skinny_gemm.linear(x, w, norm=norm, eps=1e-6)
        y = torch.empty_like(plain[:, :channels])
        conv.decode(plain[:, :channels], taps, None, state, reads, writes, marks, y)
        behind = skinny_gemm.Convolution(taps, mine, reads, writes, marks)
        epilogue = skinny_gemm.CONVOLVED
        found = skinny_gemm.linear(x, w, norm=norm, eps=1e-6, epilogue=epilogue, convolution=behind)
        assert torch.equal(found[:, channels:], plain[:, channels:])
        assert torch.equal(mine[1:], state[1:])
        torch.testing.assert_close(found[:, :channels], y, rtol=1e-2, atol=1e-3)
        reads[0] = 1


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "groups", "p", "n"), [(16, 1, 64, 128), (8, 8, 80, 16), (4, 2, 64, 256), (2, 1, 40, 400)]
)
def test_a_mamba_equals_its_ops(
    dtype: torch.dtype, heads: int, groups: int, p: int, n: int, linked: bool
) -> None:
    torch.manual_seed(0)
    widths = [heads * p, groups * n, groups * n]
    x = torch.randn(TOKENS, sum(widths), device="cuda", dtype=dtype)
    weight = torch.randn(sum(widths), 4, device="cuda", dtype=dtype) / 2
    bias = torch.randn(sum(widths), device="cuda", dtype=dtype)
    z, dt = torch.randn(TOKENS, heads * p + heads, device="cuda", dtype=dtype).split([heads * p, heads], 1)
    a, d, norm = (torch.rand(size, device="cuda") for size in (heads, heads, heads * p))
    steps = ops.TimeSteps(torch.linspace(-6, 1, heads, device="cuda"), 0.001, 2.0)
    begin = ops.StateLayer(
        torch.randn(UNITS, x.shape[1], 3, device="cuda", dtype=dtype),
        torch.randn(UNITS, heads, p, n, device="cuda"),
    )

    def layer(state: ops.StateLayer, rows: ForwardBatch) -> torch.Tensor:
        y, b, c = ops.causal_conv(x, weight, bias, state, rows).split(widths, 1)
        y, b, c = y.unflatten(1, (-1, p)), b.unflatten(1, (-1, n)), c.unflatten(1, (-1, n))
        seen = ops.selective_scan(y, dt, a * -4, b, c, d, state, rows, steps)
        return ops.gated_group_norm(seen.flatten(1), z, norm, 1e-5, groups)

    (plain, rows), other = batches(linked), deepcopy(begin)
    expected = layer(begin, plain)
    with using(GpuOps(None)):  # type: ignore[arg-type]
        found = layer(other, rows)
    near = 2e-4 if dtype == torch.float32 else 2e-2
    for mine, theirs in ((found, expected), (other.memory[1:], begin.memory[1:])):
        assert float((mine - theirs).float().abs().max()) < near * float(theirs.float().abs().max())
    assert torch.equal(other.conv[1:], begin.conv[1:])


MODEL = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 5000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "max_position_embeddings": 2048,
}


KIMI = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": 5000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 256,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "linear_head_dim": 64,
    "linear_num_heads": 4,
    "model_max_length": 2048,
}
CONVOLUTIONS = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "vocab_size": 5000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
WINDOWS = CONVOLUTIONS | {
    "architectures": ["Lfm3ForCausalLM"],
    "model_type": "lfm3",
    "layer_types": ["conv", "sliding_attention", "full_attention"],
    "sliding_window": 200,
}
BESIDE = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "vocab_size": 5000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 128,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "max_position_embeddings": 2048,
}
ONE_EACH = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME*-M",
    "vocab_size": 5000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 8,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 512,
    "max_position_embeddings": 2048,
}
CHANNELS = {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "vocab_size": 5000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "max_position_embeddings": 2048,
}
SCANS = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "vocab_size": 5000,
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_heads": 16,
    "head_dim": 64,
    "n_groups": 1,
}


@pytest.fixture(
    scope="module",
    params=[
        *((m, dtype) for m in (MODEL, KIMI, CONVOLUTIONS, ONE_EACH) for dtype in ("float32", "bfloat16")),
        *((model, "float32") for model in (BESIDE, CHANNELS, SCANS, WINDOWS)),
    ],
    ids=lambda case: f"{case[0]['model_type']} {case[1]}",
)
def runner(request: pytest.FixtureRequest) -> Any:
    model, dtype = request.param
    return make(model, dtype=dtype)


def requests() -> list[Submit]:
    """Behind a prefix that others share, which some leave early, and short."""
    rng = random.Random(5)
    prompt = lambda n: [rng.randrange(5000) for _ in range(n)]  # noqa: E731
    shared = prompt(450)
    return [
        submit("long", prompt(520), 40),
        submit("first", shared + prompt(5), 30),
        submit("second", shared + prompt(50), 20),
        submit("branch", shared[:330] + prompt(9), 20),
        submit("short", prompt(3), 60),
    ]


@pytest.mark.parametrize("limits", [{"depth": 1}, {"depth": 3}, {"step_tokens": 50}, {"step_tokens": 500}])
def test_text_goes_on_from_states(runner: Any, limits: dict[str, Any]) -> None:
    """However prompts are cut, and from checkpoints, in float32: in bfloat16 a random model makes other
    tokens of sums in another order."""
    expected = run(runner, requests(), make_core(runner.facts, prefix_cache=False))
    core = make_core(runner.facts, **limits)
    for _ in range(2):
        found = run(runner, requests(), core)
        assert {rid: len(tokens) for rid, tokens in found.items()} == {r.rid: r.max_new for r in requests()}
        assert runner.facts.dtype != "float32" or found == expected
    assert core.stats().pages_cached > 30
    assert not any("cannot be captured" in note for note in runner.facts.notes), runner.facts.notes
