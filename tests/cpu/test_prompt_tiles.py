"""Linear layers of prompts: the CUDA kernel, emulated, alone and with what it sends to another rank."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated_cuda import HERE, kernels, tensor_map
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.cuda import prompt_gemm
from sgla.kernels.cuda.all_reduce import EMPTY
from sgla.kernels.cuda.batch_gemm import SILU, STORE, Sending

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU"),
]
K, ROWS = 512, 290


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(prompt_gemm, "Kernel", kernels(tmp_path))
    monkeypatch.setattr(prompt_gemm, "tensor_map", tensor_map)
    monkeypatch.setattr(prompt_gemm, "_map", tensor_map)
    monkeypatch.setattr(prompt_gemm, "processors", lambda: 4)  # so blocks have several tiles
    for kept in (prompt_gemm._kernel, prompt_gemm._weight_map):
        kept.cache_clear()
    yield
    for kept in (prompt_gemm._kernel, prompt_gemm._weight_map):
        kept.cache_clear()


def factors(n: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(n)
    return torch.randn(ROWS, K).bfloat16(), (torch.randn(n, K) * 0.1).bfloat16()


@pytest.mark.parametrize(("n", "epilogue"), [(416, STORE), (640, SILU)])
def test_the_kernel_equals_the_product(n: int, epilogue: int) -> None:
    x, w = factors(n)
    y = x.float() @ w.float().T
    expected = ops.act_mul(y, "silu") if epilogue == SILU else y
    found = prompt_gemm.linear(x, w, epilogue=epilogue).float()
    assert (found - expected).norm() < 6e-3 * expected.norm()


@pytest.mark.parametrize("calls", [4, 7])
def test_another_rank_gets_the_result(calls: int) -> None:
    """In the inbox of this call, in the place of the rank that sends."""
    (x, w), rank = factors(416), 1
    inboxes = [torch.full((2, 2, ROWS, 416 // 2), EMPTY, dtype=torch.int32) for _ in range(2)]
    addresses = (ctypes.c_void_p * 8)(*(inbox.data_ptr() for inbox in inboxes))
    state = torch.tensor([calls, 0], dtype=torch.int32)
    sending = Sending(2, rank, addresses, state.data_ptr(), inboxes[0][0].numel())
    found = prompt_gemm.linear(x, w, send=sending)
    assert torch.equal(found, prompt_gemm.linear(x, w))
    assert torch.equal(inboxes[0][calls % 2, rank].view(torch.bfloat16), found)
    inboxes[0][calls % 2, rank] = EMPTY
    assert all((inbox == EMPTY).all() for inbox in inboxes)
