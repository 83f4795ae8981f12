"""Products that send what they make to the inboxes of ranks: the CUDA kernels, emulated."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cuda import HERE, kernels, tensor_map
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.cuda import all_reduce, batch_gemm, skinny_gemm
from sgla.kernels.cuda.all_reduce import EMPTY, AllReduce, inbox_bytes
from sgla.kernels.cuda.batch_gemm import Sending
from sgla.kernels.ops import AddedNorm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU"),
]
K, RANK, CALLS = 512, 1, 7
FEW, TILES = skinny_gemm.Config, batch_gemm.Config


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for module, room in ((skinny_gemm, 14 << 10), (batch_gemm, 16 << 10), (all_reduce, 4 << 10)):
        monkeypatch.setattr(module, "Kernel", kernels(tmp_path, room))
        monkeypatch.setattr(module, "processors", lambda: 4)
    monkeypatch.setattr(batch_gemm, "tensor_map", tensor_map)
    monkeypatch.setattr(batch_gemm, "SHARED", (96 << 10, 48 << 10))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **more: zeros(*size, **more))
    caches = skinny_gemm._kernel, batch_gemm._kernel, batch_gemm._weight_map, all_reduce._kernel
    for kept in caches:
        kept.cache_clear()
    yield
    for kept in caches:
        kept.cache_clear()


@pytest.mark.parametrize(
    ("module", "config", "rows", "n"),
    [
        (skinny_gemm, FEW(1, False, 3, 1), 1, 136),  # the last tile reaches beyond the weight
        (skinny_gemm, FEW(1, True, 3, 1), 3, 136),
        (skinny_gemm, FEW(2, False, 3, 2), 9, 168),
        (batch_gemm, TILES(64, 2, 1), 9, 200),
        (batch_gemm, TILES(128, 1, 1), 40, 136),
    ],
)
def test_all_ranks_get_the_result(module: Any, config: Any, rows: int, n: int) -> None:
    """In the inbox of this call, in the place of the rank that sends; nothing else is written."""
    torch.manual_seed(rows)
    x, w = torch.randn(rows, K).bfloat16(), (torch.randn(n, K) * 0.1).bfloat16()
    w[3:6] = 0.0  # what an empty place looks like, but for the sign
    inboxes = [torch.full((2, 2, rows, n // 2), EMPTY, dtype=torch.int32) for _ in range(2)]
    addresses = (ctypes.c_void_p * 8)(*(inbox.data_ptr() for inbox in inboxes))
    state = torch.tensor([CALLS, 0], dtype=torch.int32)
    sending = Sending(2, RANK, addresses, state.data_ptr(), inboxes[0][0].numel())
    product = partial(module.linear, x, w, config=config)
    out = torch.full((rows, n), torch.nan).bfloat16()
    product(send=sending, out=out)
    assert out.isnan().all()
    expected: Tensor = product()
    for inbox in inboxes:
        assert torch.equal(inbox[CALLS % 2, RANK].view(torch.bfloat16), expected)
        inbox[CALLS % 2, RANK] = EMPTY
        assert (inbox == EMPTY).all()


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(
    ("module", "config", "rows"), [(skinny_gemm, FEW(1, False, 3, 1), 3), (batch_gemm, TILES(64, 1), 9)]
)
def test_a_sum_takes_what_was_sent(module: Any, config: Any, rows: int, layer: bool) -> None:
    """As the sum that sends by itself, call after call. The rank is its own peer, whose inbox begins so far
    behind its own that what goes there is where the other's part is looked for."""
    torch.manual_seed(rows)
    memory = torch.empty(inbox_bytes(2, 8 * rows * K), dtype=torch.uint8)
    AllReduce.clear(memory)
    rank = AllReduce([memory.data_ptr(), memory.data_ptr() + 2 * rows * K], 0, 8 * rows * K)
    weight = torch.rand(K) + 0.5
    bias = torch.randn(K) if layer else None
    for _ in range(3):
        x, w = torch.randn(rows, K).bfloat16(), (torch.randn(K, K) * 0.1).bfloat16()
        w[3:6] = 0.0
        residual = torch.randn(rows, K).add(2.0).bfloat16()
        residuals = residual.clone(), residual.clone()
        first, second = (AddedNorm(h, weight, 1e-6, bias) for h in residuals)
        alone = rank.sum(module.linear(x, w, config=config), first)
        y = module.linear(x, w, config=config, send=rank.sending(rows, K))
        assert torch.equal(rank.sum(y, second, sent="all"), alone)
        assert torch.equal(*residuals)
        total = residual.float() + 2 * (x.float() @ w.float().T)
        assert (residuals[0].float() - total).norm() < 6e-3 * total.norm()
        h = residuals[0].float()
        normed = ops.rms_norm(h, weight, 1e-6) if bias is None else ops.layer_norm(h, weight, bias, 1e-6)
        assert (alone.float() - normed).norm() < 6e-3 * normed.norm()
    assert (memory[all_reduce.KEYS_BYTES :].view(torch.int32) == EMPTY).all()
