"""Products of tiles of bfloat16: the CUDA kernel, emulated, with what stands around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated_cuda import HERE, kernels, tensor_map
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.cuda import batch_gemm
from sgla.kernels.cuda.batch_gemm import SILU, STORE, Config, Unscaled
from sgla.kernels.ops import AddedNorm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU"),
]
K = 512


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(batch_gemm, "Kernel", kernels(tmp_path, 16 << 10))
    monkeypatch.setattr(batch_gemm, "tensor_map", tensor_map)
    monkeypatch.setattr(batch_gemm, "processors", lambda: 132)
    monkeypatch.setattr(batch_gemm, "SHARED", (96 << 10, 48 << 10))
    caches = batch_gemm._kernel, batch_gemm._weight_map
    for kept in caches:
        kept.cache_clear()
    yield
    for kept in caches:
        kept.cache_clear()


def factors(rows: int, n: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, K).bfloat16(), (torch.randn(n, K) * 0.1).bfloat16()


def near(found: Tensor, expected: Tensor) -> None:
    assert (found.float() - expected).norm() < 6e-3 * expected.norm()


@pytest.mark.parametrize(
    ("rows", "n", "config"),
    [
        (30, 256, Config(128, 1, 1)),
        (30, 192, Config(64, 2, 1)),
        (9, 192, Config(192, 1, 1)),
        (20, 64, Config(64, 8)),
    ],
)
def test_blocks_share_a_sum(rows: int, n: int, config: Config) -> None:
    x, w = factors(rows, n)
    near(batch_gemm.linear(x, w, config, epilogue=STORE), x.float() @ w.float().T)


@pytest.mark.parametrize(("config", "half"), [(Config(192, 1, 1), 192), (Config(64, 2), 96)])
def test_gate_and_up_of_what_a_norm_left_unscaled(config: Config, half: int) -> None:
    x, w = factors(40, 2 * half)
    squares = torch.rand(3, 64) * K / 3
    scale = torch.rsqrt(squares.sum(0)[:40, None] / K + 1e-6)
    found = batch_gemm.linear(Unscaled(x, squares, 1e-6), w, config, epilogue=SILU)
    near(found, ops.act_mul(x.float() @ w.float().T * scale, "silu"))


def test_a_layer_that_joins_the_residual() -> None:
    x, w = factors(40, 128)
    residual, norm = torch.randn(40, 128).bfloat16(), torch.rand(128) + 0.5
    expected = residual.float() + x.float() @ w.float().T
    found = batch_gemm.linear_add(x, w, Config(64, 2, 1), AddedNorm(residual, norm, 1e-6))
    near(residual, expected)
    near(found.x, expected * norm)
    near(found.squares.sum(0)[:40], expected.square().sum(1))


@pytest.mark.parametrize(
    ("rows", "config", "gated"),
    [
        (20, Config(128, 2, 1), False),
        (70, Config(128, 2, 1, rows=128), False),
        (100, Config(128, 1, 1, rows=128), True),
        (130, Config(192, 1, 1, rows=128), True),
        (200, Config(128, 1, 1, rows=256), False),
    ],
)
def test_scales_of_groups(rows: int, config: Config, gated: bool) -> None:
    torch.manual_seed(rows)
    n, k = 384, 8 * 128
    x, w = (torch.randn(size, k).to(torch.float8_e4m3fn) for size in (rows, n))
    of_x, of_w = torch.rand(rows) + 0.5, torch.rand(n, k // 128) + 0.5
    y = (x.float() * of_x[:, None]) @ (w.float() * of_w.repeat_interleave(128, 1)).T
    scales, epilogue = batch_gemm.Scales(of_x, of_w), SILU if gated else STORE
    found = batch_gemm.linear(x, w, config, epilogue=epilogue, scales=scales)
    near(found, ops.act_mul(y, "silu") if gated else y)
