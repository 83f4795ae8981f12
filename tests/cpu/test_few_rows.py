"""The CUDA kernel of products of few rows, emulated, against torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated_cuda import HERE, kernels

from sgla.kernels import ops
from sgla.kernels.cuda import skinny_gemm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU"),
]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(skinny_gemm, "Kernel", kernels(tmp_path, 16 << 10))
    monkeypatch.setattr(skinny_gemm, "processors", lambda: 2)
    skinny_gemm._kernel.cache_clear()
    yield
    skinny_gemm._kernel.cache_clear()


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("k", [192, 1536, 6144])
@pytest.mark.parametrize("normed", [False, True])
def test_products_are_as_torch_has_them(rows: int, k: int, normed: bool) -> None:
    """Where x is in shared memory, and where it comes a chunk ahead; of more channels than are asked for
    ahead, and of fewer than warps have chunks."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, k).bfloat16(), (torch.randn(40, k) * k**-0.5).bfloat16()
    norm = torch.rand(k) + 0.5 if normed else None
    made = skinny_gemm.linear(x, weight, norm=norm, eps=1e-6)
    expected = (x if norm is None else ops.rms_norm(x, norm, 1e-6)).float() @ weight.float().T
    torch.testing.assert_close(made.float(), expected, atol=2e-2, rtol=2e-2)


def test_a_product_is_added_to_what_is_there() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 1024).bfloat16(), torch.randn(32, 1024).div(32).bfloat16()
    out = torch.randn(1, 32).bfloat16()
    expected = out.float() + x.float() @ weight.float().T
    skinny_gemm.linear(x, weight, epilogue=skinny_gemm.ADD, out=out)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
