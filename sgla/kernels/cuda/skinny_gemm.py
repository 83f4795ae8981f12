"""Launcher of ``skinny_gemm.cu``: linear layers for few rows, fused with what stands before and after them."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from sgla.kernels.cuda.build import Kernel

MAX_ROWS = 16
STORE, ADD, SILU, FLOAT32, GELU = range(5)  # EPILOGUE
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("x", "w", "norm", "bias", "out")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "x_stride", "out_stride")),
        ("eps", ctypes.c_float),
    )


@cache
def _kernel(
    groups: int, tiles: int, half: bool, unroll: int, norm: bool, epilogue: int, warps: int, resident: int
) -> Kernel:
    defines = {"NT": groups, "MT": tiles, "HALF": int(half), "UNROLL": unroll, "NORM": int(norm)}
    defines |= {"EPILOGUE": epilogue, "WARPS": warps, "MIN_BLOCKS": resident}
    return Kernel("skinny_gemm.cu", "skinny_gemm", defines)


def shape(m: int, n: int, k: int, gated: bool) -> tuple[int, bool, int, int, int]:
    """``(tiles, half, unroll, warps, resident blocks)`` for ``n`` output columns: enough blocks to fill the chip."""
    if m > 8:
        return (2, False, 2, 8, 2) if n >= 16 * 512 else (1, False, 4, 8, 2)
    if n <= 2048 and not gated:
        return 1, True, 4, 8, 2
    return 1, False, 4, 8, 2


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    epilogue: int = STORE,
    out: Tensor | None = None,
    config: tuple[int, bool, int, int, int] | None = None,
) -> Tensor:
    """``epilogue(norm(x) @ weight.T + bias)``: x bf16 ``[m, k]`` with m <= 16, weight bf16 ``[n, k]``, k a multiple of 64.

    ``norm`` float32[k]: RMSNorm of x first. Epilogues: STORE bf16; ADD into ``out`` in place; SILU, GELU: the rows of
    ``weight`` are gate then up, out ``[m, n / 2]``; FLOAT32.
    """
    m, k = x.shape
    gated = epilogue in (SILU, GELU)
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = torch.empty(m, n, dtype=torch.float32 if epilogue == FLOAT32 else x.dtype, device=x.device)
    tiles, half, unroll, warps, resident = config or shape(m, n, k, gated)
    kernel = _kernel(-(-m // 8), tiles, half, unroll, norm is not None, epilogue, warps, resident)
    params = _Params(
        x.data_ptr(), weight.data_ptr(), norm.data_ptr() if norm is not None else None,
        bias.data_ptr() if bias is not None else None, out.data_ptr(), m, n, k, x.stride(0), out.stride(0), eps,
    )  # fmt: skip
    columns = tiles * (8 if half or gated else 16)
    kernel.launch(-(-n // columns), warps * 32, params)
    return out
