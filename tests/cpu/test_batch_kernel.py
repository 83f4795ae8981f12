"""Products of many rows by weights of e4m3 with scales of groups: the CUDA kernel, emulated, against the
dense product of what it is given."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cuda import HERE, compile_kernel, tensor_map

from sgla.kernels import ops
from sgla.kernels.cuda import batch_gemm
from sgla.kernels.cuda.batch_gemm import SILU, STORE, Config, Scales


class Emulated:
    """In place of ``build.Kernel``."""

    folder: Path

    def __init__(self, file: str, name: str, defines: dict[str, int], shared: int, cluster: int) -> None:
        self.of, self.cluster = (file, name, defines), cluster

    def launch(self, grid: int, threads: int, params: Any) -> None:
        room = ctypes.create_string_buffer(ctypes.sizeof(params) + 64)
        at = -(-ctypes.addressof(room) // 64) * 64
        ctypes.memmove(at, ctypes.addressof(params), ctypes.sizeof(params))
        library = compile_kernel(*self.of, threads, self.cluster, self.folder, 4 << 10)
        library.run(ctypes.c_void_p(at), 1, grid)


@pytest.mark.slow
@pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU")
@pytest.mark.parametrize(
    ("m", "n", "epilogue", "cut"),
    [
        (150, 200, STORE, Config(128, 1, 1, rows=128)),
        (300, 400, STORE, Config(128, 1, 1, rows=256)),
        (140, 400, SILU, Config(128, 1, 1, rows=256)),
        (40, 400, STORE, Config(192, 1, 1, rows=64)),
        (150, 400, STORE, Config(192, 2, 1, rows=96)),
        (150, 800, SILU, Config(192, 1, 1, rows=96)),
        (40, 400, STORE, Config(64, 2, 1, rows=64)),
        (90, 400, SILU, Config(128, 1, 1, rows=128)),
        (40, 400, STORE, Config(256, 1, 1, rows=64)),
        (40, 384, STORE, Config(128, 1, 1, rows=64)),
        (40, 256, SILU, Config(64, 1, 1, rows=64)),
    ],
)
def test_the_kernel_equals_the_oracle(
    m: int, n: int, epilogue: int, cut: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tiles reach beyond x and the weight; whole blocks have scales of their own."""
    Emulated.folder = tmp_path
    monkeypatch.setattr(batch_gemm, "Kernel", Emulated)
    monkeypatch.setattr(batch_gemm, "tensor_map", tensor_map)
    monkeypatch.setattr(batch_gemm, "processors", lambda: 3)
    torch.manual_seed(0)
    k = 1024
    x, w = (torch.randn(rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
    of_x, of_w = torch.rand(m) + 0.5, torch.rand(n if n % 128 else n // 128, k // 128) + 0.5
    for kept in (batch_gemm._kernel, batch_gemm._weight_map):
        kept.cache_clear()
    out = torch.full((m, n // 2 if epilogue == SILU else n), torch.nan, dtype=torch.bfloat16)
    batch_gemm.linear(x, w, cut, epilogue=epilogue, out=out, scales=Scales(of_x, of_w))
    for kept in (batch_gemm._kernel, batch_gemm._weight_map):
        kept.cache_clear()
    y = (x.float() * of_x[:, None]) @ (
        w.float() * of_w.repeat_interleave(n // len(of_w), 0).repeat_interleave(128, 1)
    ).T
    y = ops.act_mul(y, "silu") if epilogue == SILU else y
    assert (out.float() - y).norm() < 4e-3 * y.norm()
