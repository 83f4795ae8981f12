"""Launcher of ``byte_gemm.cu``: linear layers for some rows with weights of 4 bits in groups of 128, fused
with what stands before and after them, by products of bytes."""

from __future__ import annotations

import ctypes
import itertools
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.kernels.cuda.build import Kernel, processors
from sgla.kernels.cuda.integer_gemm import Shape, padded
from sgla.kernels.cuda.skinny_gemm import ADD, FLOAT32, GELU, SILU, STORE
from sgla.kernels.integers import BLOCK, Integers
from sgla.kernels.rehearsal import under_way

FEWEST, MAX_ROWS = 9, 16  # of x
FEWEST_WARPS, MOST_WARPS = 6, 16  # of a block
WIDE = 1 << 13  # channels of a wide x
STAGES = 8  # at most
SHARED = 228 << 10  # bytes of a multiprocessor, of which each block takes 1 KiB more than it asks for
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("x", "w", "constants", "norm", "bias", "out")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "x_stride", "out_stride", "blocks")),
        ("eps", ctypes.c_float),
    )


class Config(NamedTuple):
    """How the work is cut. A warp has ``blocks`` of 128 channels, of which it loads ``unit`` at a time, of
    16 weight rows, and ``tiles`` of those in a tile; ``slices`` blocks of a cluster have all of k between
    them, and ``beside`` warps of a block the same channels. ``lag``: tiles until one is finished; ``early``
    loads at most before the kernel before has ended."""

    blocks: int = 4
    unit: int = 4
    slices: int = 8
    beside: int = 8
    lag: int = 1
    early: int = STAGES
    tiles: int = 1

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
    groups = -(-shape.rows // 8)
    deep = -(-shape.blocks // (config.slices * config.blocks))  # warps that share the k of a slice
    warps = deep * config.beside
    if max(config.slices, config.beside) % min(config.slices, config.beside):
        return None
    if warps > MOST_WARPS or shape.columns(config) > shape.n:
        return None
    if (config.slices - 1) * deep * config.blocks >= shape.blocks:
        return None
    if config.beside % 4 or config.blocks % config.unit or (shape.bits, shape.group) != (4, BLOCK):
        return None
    sums = config.weight_rows * groups * 8 * 4 * deep  # bytes that a block gets of a tile
    x = deep * config.blocks * groups * 16 * BLOCK
    stage = warps * 16 * config.unit * (16 * shape.bits + 4)
    kept = (2 * config.lag + 2) * sums + x + 1024
    fixed = 2304 + deep * groups * 32 * (config.slices + 2 * config.blocks)
    stages = min(STAGES, (SHARED - fixed - kept) // stage)
    if stages < 2:
        return None
    own, loaded = shape.blocks, config.unit  # words of constants
    defines = {
        "WHOLE": int(shape.whole),
        "NT": groups,
        "MT": config.tiles,
        "KB": config.blocks,
        "KU": config.unit,
        "WK": deep,
        "WN": config.beside,
        "SLICES": config.slices,
        "WIDTH": next(4 * w for w in (4, 2, 1) if own % w == loaded % w == 0),
        "STAGES": stages,
        "LAG": config.lag,
        "EARLY": min(config.early, stages - 1),
        "NORM": int(shape.norm),
        "EPILOGUE": shape.epilogue,
    }
    tiles = -(-shape.n // shape.columns(config))
    parts = min(tiles, max(1, processors() // config.slices))
    return Plan(defines, -(-(stages * stage + kept) // 1024) * 1024, warps * 32, parts)


@lru_cache(1 << 14)
def default_config(shape: Shape) -> Config | None:
    """The cut that was fastest or nearly so with the layers of Qwen3-8B on an H200, or, where that does not
    fit, the first that does; None: none does."""
    best = Config(12) if shape.k > WIDE else Config()
    cuts = itertools.product((4, 8, 6, 12, 3, 2, 1), (4, 3, 2, 1), (8, 4, 2), (8, 4))
    others = (Config(*cut) for cut in cuts)
    fitting = ((config, plan(shape, config)) for config in (best, *others))
    return next((config for config, made in fitting if made and made.threads >= 32 * FEWEST_WARPS), None)


@lru_cache(1 << 14)
def refuses(rows: int, n: int, k: int, bits: int, group: int) -> str | None:
    """Why it cannot or should not multiply ``rows`` by a weight ``[n, k]``, or None."""
    if not FEWEST <= rows <= MAX_ROWS:
        return f"it is faster with {FEWEST} to {MAX_ROWS} rows"
    if (bits, group) != (4, BLOCK):
        return f"it multiplies 4 bits in groups of {BLOCK}"
    many = padded(rows)
    shapes = Shape(many, n // 2, k, bits, group, True, SILU), Shape(many, n, k, bits, group, True, ADD)
    return "no cut fits" if None in map(default_config, shapes) else None


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
    """``epilogue(norm(x) @ weight.T + bias)``: x bf16 ``[m, k]`` with m <= ``MAX_ROWS``; see
    ``skinny_gemm.linear`` for the rest."""
    m, k = x.shape
    n = weight.n // 2 if epilogue in (SILU, GELU) else weight.n
    if out is None:
        out = torch.empty(m, n, dtype=torch.float32 if epilogue == FLOAT32 else x.dtype, device=x.device)
    shape = Shape(padded(m), n, k, weight.bits, weight.group, norm is not None, epilogue, weight.whole)
    config = config or default_config(shape)
    assert config is not None, f"no cut fits {shape}"
    kernel, made = _kernel(shape, config)
    tensors = x, *weight.tensors, norm, bias, out
    params = _Params(
        *(None if t is None else t.data_ptr() for t in tensors),
        m, n, k, x.stride(0), out.stride(0), shape.blocks, eps,
    )  # fmt: skip
    parts = made.parts if under_way() else min(made.parts, _clusters(kernel, made.threads))
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
    return Kernel("byte_gemm.cu", "byte_gemm", dict(defines), shared, slices)
