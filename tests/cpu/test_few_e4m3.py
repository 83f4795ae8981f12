"""Products of few rows by e4m3 weights: the CUDA kernel, emulated, against the dense product."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from emulated_cuda import HERE, compile_kernel

from sgla.kernels import ops
from sgla.kernels.cuda import batch_gemm, skinny_gemm
from sgla.kernels.cuda.skinny_gemm import ADD, E4M3_CUT, E4M3_WIDE, SILU, STORE, Config
from sgla.quant.weight import pack


@pytest.mark.slow
@pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU")
@pytest.mark.parametrize(
    ("kind", "rows", "epilogue", "cut", "k"),
    [
        ("fp8g128", 1, STORE, E4M3_CUT, 5120),
        ("fp8g128", 2, SILU, E4M3_WIDE, 8192),
        ("fp8g128", 1, STORE, E4M3_WIDE, 6144),
        ("fp8g128", 5, ADD, Config(1, False, 3, 1), 5120),
        ("fp8g128", 5, ADD, Config(1, False, 3, 1), 4096),
        ("blocks", 1, SILU, E4M3_CUT, 4096),
        ("blocks", 2, STORE, E4M3_WIDE, 5120),
        ("mxfp8", 1, SILU, E4M3_CUT, 5120),
        ("mxfp8", 3, STORE, E4M3_CUT, 2176),
        ("mxfp8", 9, ADD, Config(2, False, 3, 2), 4096),
        ("mxfp8", 7, STORE, Config(1, False, 5, 2), 5120),
        ("fp8", 1, SILU, E4M3_CUT, 5120),
        ("fp8", 3, ADD, E4M3_WIDE, 5120),
    ],
)
def test_the_kernel_equals_the_oracle(
    kind: str, rows: int, epilogue: int, cut: Config, k: int, tmp_path: Path
) -> None:
    """The last tile reaches beyond the weight; there are more pieces of x than the norm is read early for."""
    torch.manual_seed(0)
    n, storage = (256, "fp8g128") if kind == "blocks" else (136, kind)
    w, x = pack(torch.randn(n, k) * torch.logspace(-2, 0, k), storage), torch.randn(rows, k).bfloat16()
    scale = w.scales()
    assert len(scale) == (n // 128 if kind == "blocks" else n)
    norm, columns = (None if epilogue == ADD else torch.rand(k) + 0.5), n // 2 if epilogue == SILU else n
    out = torch.randn(rows, columns).bfloat16()
    y = (x.float() if norm is None else ops.rms_norm(x.float(), norm, 1e-6)) @ w.dequant().T
    factor = 0.22 if epilogue == ADD else 1.0
    y = ops.act_mul(y, "silu") if epilogue == SILU else factor * y + out.float() if epilogue == ADD else y
    run = skinny_gemm.run_of(k) if w.scale.dim() == 2 else 0
    staged = skinny_gemm._staged(rows, k, cut, True, True, run)
    defines = {"NT": -(-rows // 8), "MT": cut.tiles, "STAGES": cut.stages, "STAGED": staged.rows, "E4M3": 1}
    defines |= {"NORM": int(norm is not None), "EPILOGUE": epilogue, "GROUPED": run}
    defines["MX"] = int(kind == "mxfp8")
    given = skinny_gemm._Params(
        x.data_ptr(), w.data.data_ptr(), scale.data_ptr(), None if norm is None else norm.data_ptr(), None,
        None, out.data_ptr(), rows, columns, k, x.stride(0), 0, out.stride(0), 1e-6, factor,
        batch_gemm.shared(w.data, scale),
    )  # fmt: skip
    library = compile_kernel("skinny_gemm.cu", "skinny_gemm", defines, 256, 1, tmp_path, 14 << 10)
    library.run(ctypes.byref(given), 1, 2)
    assert (out.float() - y).norm() < 5e-3 * y.norm()
