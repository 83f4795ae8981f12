"""Launcher of ``batch_gemm.cu``: linear layers for the rows of a decode batch, with the gated activation behind them."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.kernels.cuda import build
from sgla.kernels.cuda.build import Kernel

MAX_ROWS = 256
MIN_GAIN, MAX_GAIN = 9, 64  # rows for which it beats ``skinny_gemm`` and cuBLAS
STORE, SILU, FLOAT32, GELU = 0, 2, 3, 4  # EPILOGUE, numbered as in skinny_gemm
SHARED = 112 << 10  # bytes of a block, so that two fit on a multiprocessor


_Map = ctypes.c_uint64 * 16  # CUtensorMap


class _Params(ctypes.Structure):
    _fields_ = (
        ("w", _Map),
        ("x", _Map),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "row_tiles")),
        ("pad", ctypes.c_int * 8),  # tensor maps are aligned to 64 bytes
    )


class Config(NamedTuple):
    """A block takes ``tile`` weight rows (64 or 128); ``split`` blocks share the sum over k."""

    tile: int
    split: int


def supported(n: int, k: int) -> bool:
    """Whether a weight ``[n, k]`` has the alignment that is needed. (Gated, n must be a multiple of 16.)"""
    return k % 64 == 0 and k >= 512 and n % 8 == 0 and n >= 128


@cache
def _kernel(config: Config, rows: int, epilogue: int) -> Kernel:
    stage = (config.tile + rows) * 128
    stages = min(8, (SHARED - 1280) // stage)
    defines = {"BM": config.tile, "BN": rows, "SPLIT": config.split, "STAGES": stages, "EPILOGUE": epilogue}
    return Kernel("batch_gemm.cu", "batch_gemm", defines, stages * (stage + 16) + 1024, config.split)


def choose(m: int, n: int) -> Config:
    """For a weight with ``n`` rows, from measurements on an H200."""
    if n >= 100_000:
        return Config(64, 1)
    if n > 2048:
        return Config(64, 2)
    return Config(64, 8 if m <= 16 else 4)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    epilogue: int = STORE,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """``epilogue(x @ weight.T + bias)``: x bf16 ``[m, k]`` contiguous with m <= 256, weight bf16 ``[n, k]``, see ``supported``.

    Epilogues: STORE bf16; SILU, GELU: the rows of ``weight`` are gate then up, out ``[m, n / 2]``; FLOAT32.
    """
    m, k = x.shape
    n = weight.shape[0]
    gated = epilogue in (SILU, GELU)
    columns = n // 2 if gated else n
    if out is None:
        out = x.new_empty(m, columns, dtype=torch.float32 if epilogue == FLOAT32 else x.dtype)
    assert x.is_contiguous(), "the tensor map knows no padding"
    config = config or choose(m, n)
    rows = next(size for size in (16, 32, 64, 128) if size >= min(m, 128))
    row_tiles = -(-m // rows)
    params = _Params(
        _weight_map(weight.data_ptr(), n, k, config.tile, gated),
        _map(x.data_ptr(), (k, m), (2 * k,), (64, rows)),
        bias.data_ptr() if bias is not None else None,
        out.data_ptr(), m, columns, k, row_tiles,
    )  # fmt: skip
    tiles = -(-n // config.tile) * row_tiles
    kernel = _kernel(config, rows, epilogue)
    kernel.launch(tiles * config.split, (config.tile // 64) * 128 + 32, params)
    return out


@lru_cache(1 << 14)
def _weight_map(data: int, n: int, k: int, tile: int, gated: bool) -> ctypes.Array[ctypes.c_uint64]:
    if not gated:
        return _map(data, (k, n), (2 * k,), (64, tile))
    half = n // 2
    return _map(data, (k, 8, 2, half // 8), (2 * k, 2 * k * half, 16 * k), (64, 8, 2, tile // 16))


def _map(
    data: int, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> ctypes.Array[ctypes.c_uint64]:
    """A CUtensorMap of bf16: ``strides`` in bytes of all dims but the first, tiles swizzled by 128 bytes."""
    rank = len(dims)
    room = ctypes.create_string_buffer(192)
    at = -(-ctypes.addressof(room) // 64) * 64  # it must be aligned
    encode = build.driver().cuTensorMapEncodeTiled
    bf16, no_interleave, swizzle_128, no_promotion, fill_zero = 9, 0, 3, 0, 0
    code = encode(
        ctypes.c_void_p(at), bf16, rank, ctypes.c_void_p(data),
        (ctypes.c_uint64 * rank)(*dims), (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*(1,) * rank),
        no_interleave, swizzle_128, no_promotion, fill_zero,
    )  # fmt: skip
    build.check(code, "cuTensorMapEncodeTiled")
    return _Map.from_buffer_copy(ctypes.string_at(at, 128))
