"""Launcher of ``integer_gemm.cu``: linear layers for few rows with weights of 4 or 8 bits, integers or other
codes, fused with what stands before and after them."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sgla.kernels.cuda.build import Kernel, processors
from sgla.kernels.cuda.skinny_gemm import ADD, FLOAT32, GELU, SILU, STORE
from sgla.kernels.integers import BLOCK, KINDS

__all__ = ["ADD", "FLOAT32", "GELU", "SILU", "STORE"]  # EPILOGUE
MAX_ROWS = 16  # of x
WARPS = 8  # of a block
ALIGNED = 8  # channels that x is read by
STAGES = 5  # at most
SHARED = 228 << 10  # bytes of a multiprocessor, of which each block takes 1 KiB more than it asks for
TABLE_BYTES = 32 << 10  # of a table in shared memory
INTEGERS, TABLE, E2M1 = range(3)  # CODES
OTHERS = {"nf4": (64, TABLE), "fp4": (64, TABLE), "mxfp4": (32, E2M1), "nvfp4": (16, E2M1)}  # group, codes
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("x", "w", "constants", "norm", "bias", "out", "factors")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "x_stride", "out_stride", "blocks", "x_row")),
        ("eps", ctypes.c_float),
    )


class Config(NamedTuple):
    """How the work is cut. ``tiles`` of 16 weight rows are a warp's, 1 or 2, whose k ``warps`` of a block
    share, and ``slices`` blocks; a warp loads ``unit`` blocks of channels at a time, 2 or 4. ``per_sm``
    blocks of a kernel are on a multiprocessor, which has room for ``resident``: those of the next kernel
    fetch weights there, ``early`` loads at most before this one has ended. ``after``: a stage is asked for
    again when it has been multiplied, so that all are on their way."""

    tiles: int
    warps: int
    slices: int = 1
    unit: int = 2
    per_sm: int = 2
    resident: int = 2
    early: int = STAGES
    after: bool = False

    @property
    def weight_rows(self) -> int:
        """Of a tile."""
        return WARPS // self.warps * self.tiles * 16


class Tiled(Protocol):
    """A cut into tiles."""

    @property
    def weight_rows(self) -> int:
        """Of a tile."""


class Shape(NamedTuple):
    """A product as kernels see it: ``n`` output columns; ``rows``: of x, ``padded``."""

    rows: int
    n: int
    k: int
    bits: int
    group: int
    norm: bool
    epilogue: int
    whole: bool = True
    codes: int = INTEGERS

    @property
    def held(self) -> int:
        """Words of constants of a row's block."""
        return BLOCK // self.group // (4 if self.codes == E2M1 else 1)

    @property
    def gated(self) -> bool:
        return self.epilogue in (SILU, GELU)

    @property
    def blocks(self) -> int:
        return -(-self.k // BLOCK)

    def columns(self, config: Tiled) -> int:
        """Of the result, of a tile."""
        return config.weight_rows // (2 if self.gated else 1)


class Plan(NamedTuple):
    """What is compiled and launched for a shape."""

    defines: dict[str, int]
    shared: int
    x_row: int
    grid: int


def refuses(n: int, k: int) -> str | None:
    """Why a weight with ``n`` output columns cannot be multiplied, or None."""
    if k % ALIGNED:
        return f"its input width is no multiple of {ALIGNED}"
    if k > 1 << 15:
        return f"its input width is more than {1 << 15}"
    return "its output width is less than 32" if n < 32 else None


def padded(m: int) -> int:
    """Rows of x that ``m`` share their kernels with: the next power of two."""
    return 1 << (m - 1).bit_length()


def plan(shape: Shape, config: Config) -> Plan | None:
    """None: it does not fit."""
    groups, held, units = -(-shape.rows // 8), shape.held, -(-shape.blocks // config.unit)
    if config.slices > units or shape.columns(config) > shape.n:
        return None
    here = -(-units // config.slices) * config.unit  # blocks of k
    x_row = here * BLOCK * 2 + 16  # bytes; the last ones are there so that rows lie in different banks
    alone = config.warps == config.slices == 1
    sums = 0 if alone else 8 * config.warps * shape.rows * (config.weight_rows + 4)
    of_zeros = BLOCK // shape.group * groups * 32 if shape.codes == INTEGERS else 0
    x = shape.rows * x_row + sums + here * (of_zeros + shape.rows * 2)
    x += TABLE_BYTES if shape.codes == TABLE else 0
    stage = WARPS * config.tiles * 16 * config.unit * (16 * shape.bits + 4 * held)
    stages = min(STAGES, (SHARED // config.resident - 2048 - x) // stage)
    if stages < 2:
        return None
    once, keeps = _of_x(shape, config, here // 2)
    own, loaded = shape.blocks * held, config.unit * held  # words of constants
    tiles = -(-shape.n // shape.columns(config))
    defines = {
        "BITS": shape.bits,
        "GROUP": shape.group,
        "CODES": shape.codes,
        "WHOLE": int(shape.whole),
        "NT": groups,
        "MT": config.tiles,
        "WK": config.warps,
        "SLICES": config.slices,
        "UNIT": config.unit,
        "WIDTH": next(4 * w for w in (4, 2, 1) if own % w == loaded % w == 0),
        "STAGES": stages,
        "AFTER": int(config.after),
        "EARLY": min(config.early, stages - (not config.after)),
        "RESIDENT": config.resident,
        "AT_ONCE": once,
        "KEEPS_NORM": keeps,
        "NORM": int(shape.norm),
        "EPILOGUE": shape.epilogue,
    }
    parts = min(tiles, max(1, processors() * config.per_sm // config.slices))
    return Plan(defines, -(-(stages * stage + x) // 1024) * 1024, x_row, parts * config.slices)


def _of_x(shape: Shape, config: Config, chunks: int) -> tuple[int, int]:
    """Pieces of x that a lane has on their way, and how many of a row are its warp's, whose factors it has
    before x is there (0: it reads them with x). ``chunks``: of a row."""
    if not config.after:
        return 4 if shape.rows <= 8 or shape.norm else 8, 0
    most = -(-shape.rows * chunks // WARPS)
    if not shape.norm:
        return min(6, most), 0
    own = -(-chunks // WARPS)
    whole = chunks % WARPS == 0 or WARPS % chunks == 0
    if not whole or own > 4 or shape.blocks % (config.unit * config.slices):
        return min(4, most), 0
    return -(-min(4, most) // own) * own, own


WIDE = 1 << 13  # channels of a wide x
MOST = tuple(Config(1, warps, slices, 2, 1, 1) for warps, slices in ((8, 1), (8, 2), (4, 4), (2, 8)))


@lru_cache(1 << 14)
def default_config(shape: Shape) -> Config | None:
    """The first that fits, of those that were fastest with the layers of Qwen3-8B on an H200
    (``bench/gpu_integers.py``); None: so many rows do not, and half of them would. One and two rows of a
    weight whose tiles would leave a quarter of the multiprocessors out take the cut of wide ones, whose tiles
    are smaller."""
    wide = shape.k > WIDE
    small = wide or 4 * shape.n <= 3 * processors() * shape.columns(Config(1, 4, 1, 4))
    best: tuple[Config, ...]
    if shape.rows <= 2:
        best = (Config(1, 8, 1, 4), Config(1, 4)) if small else (Config(1, 4, 1, 4), Config(1, 8))
    elif shape.rows <= 8:
        best = (Config(1, 4, 2), Config(1, 8, 2)) if wide else (Config(1, 2, 2, 4), Config(1, 4, 1, 4))
    else:
        many = shape.n * (1 + shape.gated) > 4 * shape.k
        best = (Config(1, 1, 8), Config(1, 2, 8)) if wide else (Config(1, 1, 4), Config(1, 2, 4))
        best = (Config(2, 2, 2, 2, 1, 1), *best) if many and not wide else best
    if shape.rows == 1:
        best = tuple(config._replace(after=True, early=1) for config in best)
    large = tuple(config._replace(per_sm=1, resident=1) for config in best)
    return next((config for config in (*best, *large, *MOST) if plan(shape, config) is not None), None)


def takes(weight: Any) -> bool:
    """Whether it knows the storage of a weight."""
    return weight.kind in KINDS or weight.kind in OTHERS


def packing(kind: str) -> tuple[int, int, int]:
    """Bits, channels of a group, and codes of a storage."""
    return (*KINDS[kind], INTEGERS) if kind in KINDS else (4, *OTHERS[kind])


def shape_of(weight: Any, rows: int, n: int, norm: bool, epilogue: int) -> Shape:
    bits, group, codes = packing(weight.kind)
    whole = weight.whole if codes == INTEGERS else True
    return Shape(rows, n, weight.k, bits, group, norm, epilogue, whole, codes)


def tensors_of(weight: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Words, constants and factors."""
    words, constants, *more = weight.tensors
    if weight.kind in KINDS:
        return words, constants, None
    if OTHERS[weight.kind][1] == TABLE:
        return words, constants, weight.values(words.device)
    return words, constants, more[0] if more else None


def linear(
    x: Tensor,
    weight: Any,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    epilogue: int = STORE,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """``epilogue(norm(x) @ weight.T + bias)``: x bf16 ``[m, k]`` with m <= ``MAX_ROWS``, the weight in
    integers or one of ``OTHERS``; see ``refuses``, and ``skinny_gemm.linear`` for the rest."""
    m, k = x.shape
    n = weight.n // 2 if epilogue in (SILU, GELU) else weight.n
    if out is None:
        out = torch.empty(m, n, dtype=torch.float32 if epilogue == FLOAT32 else x.dtype, device=x.device)
    shape = shape_of(weight, padded(m), n, norm is not None, epilogue)
    config = config or default_config(shape)
    if config is None:
        half = shape.rows // 2
        for part in (slice(half), slice(half, m)):
            linear(x[part], weight, norm=norm, eps=eps, bias=bias, epilogue=epilogue, out=out[part])
        return out
    kernel, made = _kernel(shape, config)
    words, constants, factors = tensors_of(weight)
    tensors = x, words, constants, norm, bias, out, factors
    params = _Params(
        *(None if t is None else t.data_ptr() for t in tensors),
        m, n, k, x.stride(0), out.stride(0), shape.blocks, made.x_row, eps,
    )  # fmt: skip
    kernel.launch(made.grid, 32 * WARPS, params)
    return out


@cache
def _kernel(shape: Shape, config: Config) -> tuple[Kernel, Plan]:
    made = plan(shape, config)
    assert made is not None, f"{config} does not fit {shape}"
    return _compiled(tuple(made.defines.items()), made.shared, config.slices), made


@cache
def _compiled(defines: tuple[tuple[str, int], ...], shared: int, slices: int) -> Kernel:
    return Kernel("integer_gemm.cu", "integer_gemm", dict(defines), shared, slices)
