"""Weights of 4 and 8 bits in groups on the GPU against the torch oracle in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gpu_fp8 import relative
from test_gpu_runner import TINY, agreement, assert_rows_alone_equal_all, generate, make, prompt

from sgla.kernels import ops
from sgla.kernels.cuda import integer_gemm
from sgla.kernels.gpu import integers as rules
from sgla.kernels.integers import KINDS
from sgla.kernels.triton import integers
from sgla.quant.weight import pack

pytest.importorskip("triton")
BF16 = torch.bfloat16


def weight(n: int, k: int, kind: str) -> Any:
    return pack(torch.randn(n, k, device="cuda") * torch.logspace(-2, 0, k, device="cuda"), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12288), (200, 1000), (4096, 4096)])
def test_few_rows_equal_the_oracle(kind: str, n: int, k: int) -> None:
    w, norm, bias = weight(n, k, kind), torch.rand(k, device="cuda") + 0.5, torch.randn(n, device="cuda")
    for m in (1, 2, 3, 8, 13, 16):
        x = torch.randn(m, k, dtype=BF16, device="cuda")
        for options, given in (
            ({}, x.float()),
            ({"norm": norm, "eps": 1e-6}, ops.rms_norm(x.float(), norm, 1e-6)),
        ):
            y = given @ w.dequant().T
            for _ in range(2):  # what counts arrivals is as before
                assert relative(integer_gemm.linear(x, w, bias=bias, **options), y + bias) < 5e-3
            h = torch.randn(m, n, dtype=BF16, device="cuda")
            total = h.clone()
            integer_gemm.linear(x, w, epilogue=integer_gemm.ADD, out=total, **options)
            assert relative(total, h.float() + y) < 5e-3
            out = integer_gemm.linear(x, w, epilogue=integer_gemm.SILU, **options)
            assert relative(out, ops.act_mul(y, "silu")) < 1e-2
            assert relative(integer_gemm.linear(x, w, epilogue=integer_gemm.FLOAT32, **options), y) < 5e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 5, 17, 40, 64, 100, 256, 700, 1025])
def test_any_rows_equal_the_oracle(kind: str, m: int) -> None:
    for n, k in ((4096, 4096), (328, 1000)):
        w, bias = weight(n, k, kind), torch.randn(n, device="cuda")
        x = torch.randn(m, k, dtype=BF16, device="cuda")
        y = x.float() @ w.dequant().T + bias
        assert relative(integers.linear(x, w, bias), y) < 6e-3
        assert relative(rules.product(x, w, bias), y) < 6e-3
        assert torch.equal(integers.unpack(w, torch.float32), w.dequant())


def test_rows_do_not_see_each_other_where_that_is_asked_for() -> None:
    w, x = weight(512, 1024, "int4g64"), torch.randn(300, 1024, dtype=BF16, device="cuda")
    whole = rules.product(x, w, None, deterministic=True)
    for at, size in ((0, 1), (7, 17), (130, 129)):
        assert torch.equal(
            rules.product(x[at : at + size], w, None, deterministic=True), whole[at : at + size]
        )


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_a_model_decodes_alike_alone_and_in_a_batch(quantization: str) -> None:
    runner: Any = make(quantization=quantization)
    layers = 2 * (4096 * 1024 + 1024 * 2048 + 6144 * 1024 + 1024 * 3072)
    weights = layers * {"int4": 0.5625, "int8": 1.03125}[quantization] + 2 * TINY["vocab_size"] * 1024
    assert runner.facts.ledger["weights"] < 1.3 * weights
    prompts = {slot: prompt(slot, 20 + 13 * slot) for slot in range(20)}
    together = generate(runner, prompts, 12, True)
    assert agreement(together, generate(runner, prompts, 12, False)) >= 0.5
    assert len({tuple(tokens) for tokens in together.values()}) == 20
    assert_rows_alone_equal_all(runner, 0.1)
    torch.cuda.empty_cache()
