"""Launcher of ``integer_gemm.cu``: linear layers for few rows with weights of 4 or 8 bits, fused with what
stands before and after them."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.kernels.cuda.build import SHARED, Kernel, processors
from sgla.kernels.cuda.skinny_gemm import ADD, FLOAT32, GELU, MAX_ROWS, SILU, STORE
from sgla.kernels.integers import BLOCK, Integers

__all__ = ["ADD", "FLOAT32", "GELU", "MAX_ROWS", "SILU", "STORE"]  # EPILOGUE, and the most rows of x
WARPS = 8  # of a block
ALIGNED = 8  # channels that x is read by
X_ROOM = 36 << 10  # bytes of x in shared memory, so that enough of the weights are on their way beside it
X_STEP = 4 << 10  # in which that is counted, so that there are few kernels
STAGES = 6  # at most
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("x", "w", "constants", "norm", "bias", "out", "sums", "counts")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "x_stride", "out_stride")),
        *((name, ctypes.c_int) for name in ("blocks", "slices", "x_row")),
        ("eps", ctypes.c_float),
    )


class Config(NamedTuple):
    """``tiles`` of 16 weight rows share a load of x; ``slices`` of k are added up at the end; ``per_sm``
    blocks on a multiprocessor."""

    tiles: int
    slices: int = 1
    per_sm: int = 2


class Shape(NamedTuple):
    """What a kernel is compiled for. ``epilogue``: of ``skinny_gemm``; ``split``: there are several slices;
    ``groups``: of 8 rows of x."""

    bits: int
    group: int
    groups: int
    tiles: int
    norm: bool
    split: bool
    epilogue: int

    @property
    def gated(self) -> bool:
        return self.epilogue in (SILU, GELU)

    @property
    def columns(self) -> int:
        """Of the result, of a tile."""
        return self.tiles * (8 if self.gated else 16)

    @property
    def floats(self) -> int:
        """That a block leaves of a tile."""
        return self.groups * 8 * (self.tiles * 16 + 1)

    @property
    def sums(self) -> int:
        """Bytes of the sums of a block of x."""
        return BLOCK // self.group * self.groups * 8 * 4

    @property
    def stage(self) -> int:
        """Bytes that the warps load at a time."""
        return WARPS * self.tiles * 16 * (BLOCK * self.bits // 8 + BLOCK // self.group * 4)

    def stages(self, x: int) -> int:
        """How many are on their way, beside ``x`` bytes of x, if two blocks fit on a multiprocessor."""
        sums = (2 if self.groups == 1 else 1) * WARPS * self.floats * 4 + WARPS * self.groups * 32
        return max(2, min(STAGES, (SHARED[1] - 1024 - sums - x) // self.stage))

    def defines(self, stages: int) -> dict[str, int]:
        names = {"BITS": self.bits, "GROUP": self.group, "NT": self.groups, "MT": self.tiles}
        return names | {
            "NORM": int(self.norm),
            "SPLIT": int(self.split),
            "EPILOGUE": self.epilogue,
            "STAGES": stages,
        }


def refuses(n: int, k: int) -> str | None:
    """Why a weight with ``n`` output columns cannot be multiplied, or None."""
    if k % ALIGNED:
        return f"its input width is no multiple of {ALIGNED}"
    return "its output width is less than 32" if n < 32 else None


def choose(m: int, n: int, k: int, gated: bool, bits: int = 4) -> Config:
    """An estimate for ``n`` output columns: slices of x must fit, and blocks should be as many as there is
    room for, with as many tiles each."""
    tiles, blocks, most = 1 if m <= 2 or bits == 8 else 2, -(-k // BLOCK), 2 * processors()
    slices = min(blocks, -(-m * _x_row(blocks, 1) // X_ROOM))
    units = -(-n // (tiles * (8 if gated else 16)))
    if slices > 1:
        return Config(tiles, min(range(slices, min(blocks, 2 * slices) + 1), key=lambda s: _rounds(units, s)))
    while 2 * units * slices <= most and blocks >= 2 * slices * WARPS:
        slices *= 2
    return Config(tiles, slices)


def _rounds(units: int, slices: int) -> float:
    """How long the block that does most is at work, in tiles of whole rows."""
    parts = min(units, max(1, 2 * processors() // slices))
    return -(-units // parts) / slices


def linear(
    x: Tensor,
    weight: Integers,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    epilogue: int = STORE,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """``epilogue(norm(x) @ weight.T + bias)``: x bf16 ``[m, k]`` with m <= 16; see ``refuses``, and
    ``skinny_gemm.linear`` for the rest."""
    m, k = x.shape
    gated = epilogue in (SILU, GELU)
    n = weight.n // 2 if gated else weight.n
    if out is None:
        out = torch.empty(m, n, dtype=torch.float32 if epilogue == FLOAT32 else x.dtype, device=x.device)
    config = config or choose(m, n, k, gated, weight.bits)
    shape = Shape(
        weight.bits, weight.group, -(-m // 8), config.tiles, norm is not None, config.slices > 1, epilogue
    )
    blocks, tiles = -(-k // BLOCK), -(-n // shape.columns)
    x_row = _x_row(blocks, config.slices)
    sums, counts = _left(tiles * config.slices * shape.floats, tiles) if shape.split else (None, None)
    tensors = x, weight.tensors[0], weight.tensors[1], norm, bias, out, sums, counts
    params = _Params(
        *(None if t is None else t.data_ptr() for t in tensors),
        m, n, k, x.stride(0), out.stride(0), blocks, config.slices, x_row, eps,
    )  # fmt: skip
    parts = min(tiles, max(1, processors() * config.per_sm // config.slices))
    x_bytes = m * x_row + -(-blocks // config.slices) * shape.sums
    _kernel(shape, -(-x_bytes // X_STEP) * X_STEP).launch(parts * config.slices, 32 * WARPS, params)
    return out


def _x_row(blocks: int, slices: int) -> int:
    """Bytes of a row of x in shared memory; 16 more than there are, so that rows lie in different banks."""
    return -(-blocks // slices) * BLOCK * 2 + 16


@cache
def _kernel(shape: Shape, x: int) -> Kernel:
    stages = shape.stages(x)
    return Kernel("integer_gemm.cu", "integer_gemm", shape.defines(stages), stages * shape.stage + x)


@cache
def _left(floats: int, tiles: int) -> tuple[Tensor, Tensor]:
    """Where blocks leave sums, and how many have. Kept: it belongs to no graph's memory."""
    return torch.empty(floats, device="cuda"), torch.zeros(tiles, dtype=torch.int32, device="cuda")
