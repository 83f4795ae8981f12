"""Weights of 4 and 8 bits in groups on the GPU, and few rows of other codes, against the torch oracle in
float32."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_gpu_fp8 import relative
from test_gpu_runner import TINY, agreement, assert_rows_alone_equal_all, generate, make, prompt

from sgla.kernels import ops
from sgla.kernels.cuda import integer_gemm, stationary_gemm
from sgla.kernels.gpu import integers as rules
from sgla.kernels.integers import KINDS
from sgla.kernels.rehearsal import rehearsing
from sgla.kernels.triton import integers
from sgla.quant.weight import pack
from sgla.worker.region import GROWN

pytest.importorskip("triton")
BF16 = torch.bfloat16


def weight(n: int, k: int, kind: str) -> Any:
    return pack(torch.randn(n, k, device="cuda") * torch.logspace(-2, 0, k, device="cuda"), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_is_packed_as_on_a_cpu(kind: str) -> None:
    """But where two spans have nearly the same error."""
    dense = torch.randn(500, 1000).bfloat16()
    (words, constants), expected = pack(dense.cuda(), kind).tensors, pack(dense, kind)
    same = constants.cpu() == expected.tensors[1]
    assert same.float().mean() > 0.999
    assert torch.equal(words.cpu()[same.all(1)], expected.tensors[0][same.all(1)])


def few_rows(w: Any, m: int, linear: Any = integer_gemm.linear) -> Iterator[tuple[float, float]]:
    """How far products of each kind are from the oracle, and what is allowed."""
    n, k = w.n, w.k
    norm, bias = torch.rand(k, device="cuda") + 0.5, torch.randn(n, device="cuda")
    x, h = (torch.randn(m, size, dtype=BF16, device="cuda") for size in (k, n))
    plain, normed = x.float() @ w.dequant().T, ops.rms_norm(x.float(), norm, 1e-6) @ w.dequant().T
    given: dict[str, Any] = {"norm": norm, "eps": 1e-6}
    for _ in range(2):  # what counts arrivals is as before
        yield relative(linear(x, w, bias=bias), plain + bias), 5e-3
    yield relative(linear(x, w, **given), normed), 5e-3
    total = h.clone()
    linear(x, w, epilogue=integer_gemm.ADD, out=total)
    yield relative(total, h.float() + plain), 5e-3
    out = linear(x, w, epilogue=integer_gemm.SILU, **given)
    yield relative(out, ops.act_mul(normed, "silu")), 1e-2
    yield relative(linear(x, w, epilogue=integer_gemm.FLOAT32, **given), normed), 5e-3


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_equal_the_oracle(kind: str) -> None:
    weights = [weight(n, k, kind) for n, k in ((6144, 4096), (4096, 12288), (200, 1000), (4096, 4096))]
    cases = [(w, m) for w in weights for m in (1, 2, 3, 8, 13, 16)]
    with rehearsing():
        for w, m in cases:
            list(few_rows(w, m))
    for w, m in cases:
        for at, (found, allowed) in enumerate(few_rows(w, m)):
            assert found < allowed, (w.n, w.k, m, at)


@pytest.mark.parametrize("kind", integer_gemm.OTHERS)
def test_few_rows_of_other_codes_equal_the_oracle(kind: str) -> None:
    weights = [weight(n, k, kind) for n, k in ((6144, 4096), (4096, 12288), (200, 1088))]
    cases = [(w, m) for w in weights for m in (1, 3, 8, 16)]
    with rehearsing():
        for w, m in cases:
            list(few_rows(w, m))
    for w, m in cases:
        for at, (found, allowed) in enumerate(few_rows(w, m)):
            assert found < allowed, (w.n, w.k, m, at)


@pytest.mark.parametrize("kind", integer_gemm.OTHERS)
def test_few_rows_take_every_code(kind: str) -> None:
    """Of numbers of x near the ends of what models make, each by itself."""
    w, at = weight(200, 1024, kind), torch.arange(16, device="cuda") * 61 + 1
    x = torch.zeros(16, 1024, dtype=BF16, device="cuda")
    x[torch.arange(16), at] = 2.0 ** torch.linspace(-30, 30, 16, device="cuda").round().to(BF16)
    expected = w.dequant()[:, at].T * x.amax(1, keepdim=True).float()
    found = integer_gemm.linear(x, w, epilogue=integer_gemm.FLOAT32)
    rounded = 2**-8 if kind in ("nf4", "fp4") else 0.0  # numbers of tables are
    torch.testing.assert_close(found, expected, rtol=rounded, atol=0.0)


STATIONARY = ["int4g128", "int4g64", "int4m64", "int8g128", "int8m32", "nf4", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("kind", STATIONARY)
def test_stationary_rows_equal_the_oracle(kind: str) -> None:
    weights = [weight(n, k, kind) for n, k in ((6144, 4096), (4096, 12288), (200, 1088))]
    cases = [(w, m) for w in weights for m in (1, 8, 13, 16)]
    with rehearsing():
        for w, m in cases:
            list(few_rows(w, m, stationary_gemm.linear))
    for w, m in cases:
        for at, (found, allowed) in enumerate(few_rows(w, m, stationary_gemm.linear)):
            assert found < allowed, (w.n, w.k, m, at)


CUTS = (
    (1, 2, 1),
    (2, 1, 2, 1, 1, 2, True, 1),
    (1, 2, 3, 2, 1, 1, False, 1, True),
    (1, 1, 4, 1, 2, 2),
    (2, 1, 8, 2, 1, 1, False, 2),
    (1, 4, 1, 1, 2, 2, False, 2, True),
)


def test_every_cut_of_stationary_rows_equals_the_oracle() -> None:
    w = weight(1000, 1960, "int4g128")
    cases = [(m, stationary_gemm.Config(*cut)) for m in (1, 11) for cut in CUTS]

    def fits(m: int, cut: stationary_gemm.Config) -> bool:
        rows = integer_gemm.padded(m)
        shape = stationary_gemm.Shape(rows, w.n, w.k, w.bits, w.group, True, integer_gemm.SILU)
        return stationary_gemm.plan(shape, cut) is not None

    cases = [case for case in cases if fits(*case)]
    assert len([cut for m, cut in cases if m == 1]) == len(CUTS)

    def found(m: int, cut: stationary_gemm.Config) -> Iterator[tuple[float, float]]:
        return few_rows(w, m, functools.partial(stationary_gemm.linear, config=cut))

    with rehearsing():
        for case in cases:
            list(found(*case))
    for case in cases:
        for at, (error, allowed) in enumerate(found(*case)):
            assert error < allowed, (case, at)


def any_rows(w: Any, m: int) -> Iterator[float]:
    x, bias = torch.randn(m, w.k, dtype=BF16, device="cuda"), torch.randn(w.n, device="cuda")
    y = x.float() @ w.dequant().T + bias
    yield relative(integers.linear(x, w, bias), y)
    yield relative(rules.product(x, w, bias), y)
    yield float((integers.unpack(w, torch.float32) != w.dequant()).any())


@pytest.mark.parametrize("kind", KINDS)
def test_any_rows_equal_the_oracle(kind: str) -> None:
    weights = [weight(n, k, kind) for n, k in ((4096, 4096), (328, 1000))]
    cases = [(w, m) for w in weights for m in (1, 5, 17, 40, 64, 100, 256, 700, 1025)]
    with rehearsing():
        for w, m in cases:
            list(any_rows(w, m))
    for w, m in cases:
        for at, found in enumerate(any_rows(w, m)):
            assert found < 6e-3, (w.n, w.k, m, at)


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
    assert runner.facts.ledger["weights"] < 1.1 * weights + GROWN
    prompts = {slot: prompt(slot, 20 + 13 * slot) for slot in range(20)}
    together = generate(runner, prompts, 12, True)
    assert agreement(together, generate(runner, prompts, 12, False)) >= 0.5
    assert len({tuple(tokens) for tokens in together.values()}) == 20
    assert_rows_alone_equal_all(runner, 0.1)
    torch.cuda.empty_cache()
