"""fp8 weights on the GPU against the torch oracle in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gpu_runner import TINY, agreement, assert_rows_alone_equal_all, generate, make, prompt

from sgla.kernels import ops
from sgla.kernels.cuda import skinny_gemm
from sgla.kernels.triton import fp8
from sgla.quant.weight import pack

pytest.importorskip("triton")
BF16 = torch.bfloat16


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (256, 512), (4096, 12288)])
@pytest.mark.parametrize("m", [1, 2, 3, 8, 13, 16])
def test_few_rows_are_not_rounded(m: int, n: int, k: int) -> None:
    """The weights' e4m3 numbers are exact in bfloat16, those below its normal range included."""
    w = pack(torch.randn(n, k, device="cuda") * torch.logspace(-3, 0, k, device="cuda"), "fp8")
    x, norm = torch.randn(m, k, dtype=BF16, device="cuda"), torch.rand(k, device="cuda") + 0.5
    for options, given in (
        ({}, x.float()),
        ({"norm": norm, "eps": 1e-6}, ops.rms_norm(x.float(), norm, 1e-6)),
    ):
        y = given @ w.dequant().T
        assert relative(skinny_gemm.linear(x, w.data, scale=w.scale, **options), y) < 5e-3
        h = torch.randn(m, n, dtype=BF16, device="cuda")
        total = h.clone()
        skinny_gemm.linear(x, w.data, scale=w.scale, epilogue=skinny_gemm.ADD, out=total, **options)
        assert relative(total, h.float() + y) < 5e-3
        out = skinny_gemm.linear(x, w.data, scale=w.scale, epilogue=skinny_gemm.SILU, **options)
        assert relative(out, ops.act_mul(y, "silu")) < 1e-2


@pytest.mark.parametrize("m", [1, 17, 64, 128, 300, 2048])
def test_many_rows_are_rounded_token_by_token(m: int) -> None:
    n, k = 6144, 4096
    w = pack(torch.randn(n, k, device="cuda"), "fp8")
    assert w.scale is not None
    x = torch.randn(m, k, dtype=BF16, device="cuda") * torch.logspace(-2, 2, m, device="cuda")[:, None].to(
        BF16
    )
    bias = torch.randn(n, device="cuda")
    q, scale = rounded = fp8.quantize(x)
    y = fp8.linear(rounded, w.data, w.scale, bias)
    expected = (q.float() * scale[:, None]) @ w.dequant().T + bias
    assert relative(y, expected) < 5e-3
    for row in (0, m - 1):  # a small token beside a large one keeps its precision
        assert relative(y[row], x[row].float() @ w.dequant().T + bias) < 0.05


def test_a_model_in_fp8_decodes_alike_alone_and_in_a_batch() -> None:
    runner: Any = make(quantization="fp8")
    weights = 2 * (4096 * 1024 + 1024 * 2048 + 6144 * 1024 + 1024 * 3072) + 2 * TINY["vocab_size"] * 1024
    assert runner.facts.ledger["weights"] < 1.3 * weights
    prompts = {slot: prompt(slot, 20 + 13 * slot) for slot in range(20)}
    together = generate(runner, prompts, 12, True)
    assert (
        agreement(together, generate(runner, prompts, 12, False)) >= 0.3
    )  # see fp8.linear: few rows are exact
    assert len({tuple(tokens) for tokens in together.values()}) == 20
    assert_rows_alone_equal_all(runner, 0.1)
    torch.cuda.empty_cache()
