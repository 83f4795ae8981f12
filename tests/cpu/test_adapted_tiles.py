"""Layers of decode rows that add themselves what adapters do: the CUDA kernel, emulated, with what another
one has made of x."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated_cuda import HERE, kernels, tensor_map
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.cuda import batch_gemm
from sgla.kernels.cuda.batch_gemm import SILU, STORE, Added, Config, Unscaled, adapters_refuse
from sgla.kernels.lora import Stack, tiles_of
from sgla.kernels.ops import AddedNorm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU"),
]
K, PLACES, SPLITS = 512, 64, 2
ONE = Config(64, 1, 1)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(batch_gemm, "Kernel", kernels(tmp_path, 16 << 10))
    monkeypatch.setattr(batch_gemm, "tensor_map", tensor_map)
    monkeypatch.setattr(batch_gemm, "processors", lambda: 132)
    monkeypatch.setattr(batch_gemm, "SHARED", (96 << 10, 48 << 10))
    caches = batch_gemm._kernel, batch_gemm._weight_map, batch_gemm._b_map
    for kept in caches:
        kept.cache_clear()
    yield
    for kept in caches:
        kept.cache_clear()


def made(
    rows: int, sizes: list[int], ranks: int, alike: bool, k: int = K
) -> tuple[Tensor, Tensor, Added, Tensor]:
    """x, a weight, and what adapters add, which is the last one. ``alike``: rows share a few adapters."""
    x, w = torch.randn(rows, k).bfloat16(), (torch.randn(sum(sizes), k) * 0.1).bfloat16()
    stack = Stack(PLACES, k, sizes, first=16)
    stack.lie((torch.randn(PLACES, ranks, stack.last + 32) * 0.2).bfloat16())
    places = torch.randint(0, 4, (rows,)) if alike else torch.randperm(PLACES)[:rows] + torch.arange(rows) % 2
    places = places.int()
    inner = torch.randn(SPLITS, rows, len(sizes), ranks)
    u, more, begin = inner.sum(0).bfloat16().float(), torch.zeros(rows, stack.n), 0
    for part, end in enumerate(stack.ends):
        b = stack.b[(places - 1).clamp(min=0).long(), begin:end].float()
        more[:, begin:end] = torch.einsum("tnr,tr->tn", b, u[:, part])
        begin = end
    inner[:, places == 0] = torch.nan
    runs = torch.zeros(rows, 3, dtype=torch.int32)
    found = torch.from_numpy(tiles_of(places.cpu().numpy(), 8)[1])
    runs[: len(found)] = found.to(runs.device)
    counts = ((runs[:, 1] > 0).sum() * SPLITS * len(sizes)).int()[None]
    added = Added(stack.b, stack.ends, places, runs, inner, counts)
    return x, w, added, more * (places > 0)[:, None]


def near(found: Tensor, expected: Tensor) -> None:
    assert (found.float() - expected).norm() < 6e-3 * expected.norm()


@pytest.mark.parametrize(
    ("rows", "sizes", "ranks", "config", "alike"),
    [
        (30, [64, 64, 128], 16, Config(128, 1, 1), False),
        (30, [128, 64], 8, Config(64, 2, 1), True),
        (40, [64], 32, ONE, False),
        (9, [192], 4, Config(192, 1, 1), True),
        (20, [64], 16, Config(64, 8), False),
    ],
)
def test_a_layer_adds_what_adapters_do(
    rows: int, sizes: list[int], ranks: int, config: Config, alike: bool
) -> None:
    torch.manual_seed(rows)
    x, w, added, more = made(rows, sizes, ranks, alike)
    found = batch_gemm.linear(x, w, config, epilogue=STORE, added=added)
    near(found, x.float() @ w.float().T + more)


@pytest.mark.parametrize(
    ("config", "half"), [(Config(64, 1, 1), 96), (Config(192, 1, 1), 192), (Config(64, 2), 96)]
)
def test_gate_and_up_of_what_a_norm_left_unscaled(config: Config, half: int) -> None:
    """What adapters add is not scaled yet, as x is not."""
    torch.manual_seed(1)
    x, w, added, more = made(40, [half, half], 16, False)
    squares = torch.rand(3, 64) * K / 3
    scale = torch.rsqrt(squares.sum(0)[:40, None] / K + 1e-6)
    y = (x.float() @ w.float().T + more) * scale
    found = batch_gemm.linear(Unscaled(x, squares, 1e-6), w, config, epilogue=SILU, added=added)
    near(found, ops.act_mul(y, "silu"))


def test_a_layer_that_joins_the_residual() -> None:
    torch.manual_seed(2)
    x, w, added, more = made(40, [128], 16, True)
    residual, norm = torch.randn(40, 128).bfloat16(), torch.rand(128) + 0.5
    expected = residual.float() + x.float() @ w.float().T + more
    found = batch_gemm.linear_add(x, w, Config(64, 2, 1), AddedNorm(residual, norm, 1e-6), None, added)
    near(residual, expected)
    near(found.x, expected * norm)
    near(found.squares.sum(0)[:40], expected.square().sum(1))


def test_what_is_refused() -> None:
    """Blocks that would not all run at once, and parts and ranks that pieces of b do not meet."""
    ok = (64, 4096, Config(64, 2, 1), False, [4096], 16)
    assert adapters_refuse(*ok) is None
    assert adapters_refuse(64, 24576, Config(192, 1, 1), True, [12288, 24576], 64) is None
    for at, value in (
        (0, 65),
        (1, 16896),
        (1, 4100),
        (2, Config(96, 1, 1)),
        (4, [100, 4096]),
        (5, 6),
        (5, 24),
    ):
        assert adapters_refuse(*ok[:at], value, *ok[at + 1 :]) is not None
    assert adapters_refuse(64, 4096, ONE, True, [1024, 4096], 16) is not None
