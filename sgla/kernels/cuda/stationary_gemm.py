"""Launcher of ``stationary_gemm.cu``: linear layers for some rows with weights of 4 or 8 bits, integers or
other codes, fused with what stands before and after them, in which x stays in registers."""

from __future__ import annotations

import ctypes
import itertools
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgla.kernels.cuda.build import Kernel, processors
from sgla.kernels.cuda.integer_gemm import (
    INTEGERS,
    TABLE,
    TABLE_BYTES,
    Shape,
    padded,
    shape_of,
    tensors_of,
)
from sgla.kernels.cuda.skinny_gemm import ADD, FLOAT32, GELU, SILU, STORE
from sgla.kernels.integers import BLOCK
from sgla.kernels.rehearsal import under_way

__all__ = ["ADD", "FLOAT32", "GELU", "SILU", "STORE", "Shape"]
FEWEST, MAX_ROWS = 5, 16  # of x
NARROW, WIDE = 1 << 11, 1 << 13  # channels of a narrow x, and of a wide one
FEWEST_WARPS, MOST_WARPS = 8, 16  # of a block, if it may be
MOST_SLICES = 8
STAGES = 6  # at most
SHARED = 228 << 10  # bytes of a multiprocessor, of which each block takes 1 KiB more than it asks for
REGISTERS = 64 << 10  # of a multiprocessor
KEPT = 4  # tiles whose sums a cluster exchanges at a time
PASSING = 8 * (2 * BLOCK + 16)  # bytes through which a warp's part of x goes
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("x", "w", "constants", "norm", "bias", "out", "factors")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "x_stride", "out_stride", "blocks")),
        ("eps", ctypes.c_float),
    )


class Config(NamedTuple):
    """How the work is cut. A warp keeps ``blocks`` of 128 channels of x, and multiplies ``tiles`` of 16
    weight rows at a time; ``slices`` blocks of a cluster have all of k between them, and ``beside`` warps of
    a block (1, 2 or 4) the same channels. ``per_sm`` blocks are on a multiprocessor that has room for
    ``resident``: those of the next kernel fetch weights there, if ``late`` when this one has asked for its
    last; ``early`` loads at most before this one has ended. ``behind``: a tile is added up when the next one
    is multiplied."""

    tiles: int = 1
    blocks: int = 2
    slices: int = 1
    beside: int = 1
    per_sm: int = 1
    resident: int = 1
    late: bool = False
    early: int = STAGES
    behind: bool = False

    @property
    def weight_rows(self) -> int:
        """Of a tile."""
        return self.beside * self.tiles * 16


class Plan(NamedTuple):
    """What is compiled and launched for a shape. ``parts``: of the tiles, a cluster each."""

    defines: dict[str, int]
    shared: int
    threads: int
    parts: int


def plan(shape: Shape, config: Config) -> Plan | None:
    """None: it does not fit."""
    groups, held = -(-shape.rows // 8), shape.held
    deep = -(-shape.blocks // (config.slices * config.blocks))  # warps that share the k of a slice
    warps = deep * config.beside
    if config.beside not in (1, 2, 4):
        return None
    if warps > MOST_WARPS or shape.columns(config) > shape.n:
        return None
    if config.slices > 1 and (config.slices - 1) * deep * config.blocks >= shape.blocks:
        return None
    each = -(-shape.columns(config) // config.slices)  # columns that a block finishes
    if each * (config.slices - 1) >= shape.columns(config):
        return None  # one would have none, and wait for nothing, which never comes
    of_zeros = 2 * BLOCK // shape.group if shape.codes == INTEGERS else 0
    registers = groups * config.blocks * (16 + of_zeros) + groups * (12 if groups == 1 else 8)
    registers += 40 + 40 * (of_zeros > 2) + 16 * (shape.bits == 8)
    if registers > min(255, REGISTERS // (warps * 32 * config.resident)):
        return None
    sums = 2 * deep * groups * 8 * (config.weight_rows + 4) * 4
    passing = max(sums, (warps if config.beside == 1 else deep * groups * config.blocks) * PASSING)
    share = each * (2 if shape.gated else 1)
    shared = passing + (KEPT * config.slices * groups * 8 * share * 4 if config.slices > 1 else 0)
    shared += TABLE_BYTES if shape.codes == TABLE else 0
    stage = warps * config.tiles * 16 * config.blocks * (16 * shape.bits + 4 * held)
    fixed = 2304 + (deep + config.slices) * groups * 32  # bytes: of the kernel's arrays, and so that KiB fit
    stages = min(STAGES, (SHARED // config.resident - fixed - shared) // stage)
    if stages < 2:
        return None
    own, loaded = shape.blocks * held, config.blocks * held  # words of constants
    defines = {
        "BITS": shape.bits,
        "GROUP": shape.group,
        "CODES": shape.codes,
        "WHOLE": int(shape.whole),
        "NT": groups,
        "MT": config.tiles,
        "KB": config.blocks,
        "WK": deep,
        "WN": config.beside,
        "SLICES": config.slices,
        "WIDTH": next(4 * w for w in (4, 2, 1) if own % w == loaded % w == 0),
        "STAGES": stages,
        "RED_BYTES": passing,
        "BEHIND": int(config.behind),
        "EARLY": min(config.early, stages - 1),
        "RESIDENT": config.resident,
        "LATE": int(config.late),
        "NORM": int(shape.norm),
        "EPILOGUE": shape.epilogue,
    }
    tiles = -(-shape.n // shape.columns(config))
    parts = min(tiles, max(1, processors() * config.per_sm // config.slices))
    return Plan(defines, -(-(stages * stage + shared) // 1024) * 1024, warps * 32, parts)


@lru_cache(1 << 14)
def default_config(shape: Shape) -> Config | None:
    """The cut that was fastest or nearly so with the layers of Qwen3-8B on an H200 (``bench/gpu/w4.sh``), or,
    where that does not fit, the fewest slices, so that warps have all of k between them; None: no cut
    fits."""
    many, few = shape.n * (1 + shape.gated) > 4 * shape.k, shape.rows <= 8
    if many:
        best = Config(2, 2) if few else Config(2, 4, behind=True)
    elif shape.k > WIDE:
        best = Config(1, 4, 2) if few else Config(2, 2, 4)
    elif shape.n > shape.k:
        best = Config(1, 2, 2) if few else Config(2, 4, behind=True)
    else:
        best = Config(1, 4) if few else Config(2, 2, 2, 2) if shape.n == shape.k else Config(1, 2)
    wanted = itertools.product(range(1, MOST_SLICES + 1), (2, 1), (2, 1) if many else (1,))
    others = (Config(tiles, blocks, slices) for slices, blocks, tiles in wanted)
    plans = ((config, plan(shape, config)) for config in (best, *others))
    fitting = [(config, made) for config, made in plans if made is not None]
    enough = (config for config, made in fitting if made.threads >= 32 * FEWEST_WARPS)
    return next(enough, fitting[0][0] if fitting else None)


@lru_cache(1 << 14)
def refuses(rows: int, n: int, k: int, bits: int, group: int, codes: int = INTEGERS) -> str | None:
    """Why it cannot or should not multiply ``rows`` by a weight ``[n, k]``, or None."""
    if not FEWEST <= rows <= MAX_ROWS:
        return f"it is faster with {FEWEST} to {MAX_ROWS} rows"
    if k < NARROW:
        return f"warps that have {NARROW} channels between them are too few"
    many = padded(rows)
    shapes = [
        Shape(many, columns, k, bits, group, True, epilogue, codes=codes)
        for columns, epilogue in ((n // 2, SILU), (n, ADD))
    ]
    return "x does not fit into registers" if None in map(default_config, shapes) else None


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
    """``epilogue(norm(x) @ weight.T + bias)``: x bf16 ``[m, k]`` with m <= ``MAX_ROWS``; see ``refuses``, and
    ``skinny_gemm.linear`` for the rest."""
    m, k = x.shape
    n = weight.n // 2 if epilogue in (SILU, GELU) else weight.n
    if out is None:
        out = torch.empty(m, n, dtype=torch.float32 if epilogue == FLOAT32 else x.dtype, device=x.device)
    shape = shape_of(weight, padded(m), n, norm is not None, epilogue)
    config = config or default_config(shape)
    assert config is not None, f"no cut fits {shape}"
    kernel, made = _kernel(shape, config)
    words, constants, factors = tensors_of(weight)
    tensors = x, words, constants, norm, bias, out, factors
    params = _Params(
        *(None if t is None else t.data_ptr() for t in tensors),
        m, n, k, x.stride(0), out.stride(0), shape.blocks, eps,
    )  # fmt: skip
    parts = made.parts
    if config.slices > 1 and not under_way():
        parts = min(parts, _clusters(kernel, made.threads))
    kernel.launch(parts * config.slices, made.threads, params)
    return out


@cache
def _clusters(kernel: Kernel, threads: int) -> int:
    return kernel.clusters(threads)


@cache
def _kernel(shape: Shape, config: Config) -> tuple[Kernel, Plan]:
    made = plan(shape, config)
    assert made is not None, f"{config} does not fit {shape}"
    return _compiled(tuple(made.defines.items()), made.shared, config.slices), made


@cache
def _compiled(defines: tuple[tuple[str, int], ...], shared: int, slices: int) -> Kernel:
    return Kernel("stationary_gemm.cu", "stationary_gemm", dict(defines), shared, slices)
