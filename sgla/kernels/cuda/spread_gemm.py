"""Launcher of ``spread_gemm.cu``: linear layers for some rows with weights of 4 or 8 bits, fused with what
stands before and after them, whose k the blocks of a cluster share and keep in registers."""

from __future__ import annotations

import ctypes
import itertools
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.kernels.cuda.build import Kernel, processors
from sgla.kernels.cuda.integer_gemm import Shape, padded
from sgla.kernels.cuda.skinny_gemm import FLOAT32, GELU, SILU, STORE
from sgla.kernels.integers import BLOCK, Integers
from sgla.kernels.rehearsal import under_way

MAX_ROWS = 16  # of x
FEWEST_WARPS, MOST_WARPS = 6, 16  # of a block
WIDE = 1 << 13  # channels of a wide x
STAGES = 8  # at most
SHARED = 228 << 10  # bytes of a multiprocessor, of which each block takes 1 KiB more than it asks for
REGISTERS = 64 << 10  # of a multiprocessor
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("x", "w", "constants", "norm", "bias", "out")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "x_stride", "out_stride", "blocks")),
        ("eps", ctypes.c_float),
    )


class Config(NamedTuple):
    """How the work is cut. A warp keeps ``blocks`` of 128 channels of x, and multiplies ``tiles`` of 16
    weight rows at a time; ``slices`` blocks of a cluster have all of k between them, and ``beside`` warps of
    a block the same channels. ``lag``: tiles until one is finished; ``early`` loads at most before the kernel
    before has ended; ``half``: products of float16."""

    tiles: int = 1
    blocks: int = 4
    slices: int = 8
    beside: int = 8
    lag: int = 1
    early: int = STAGES
    half: bool = True

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
    groups, per = -(-shape.rows // 8), BLOCK // shape.group
    deep = -(-shape.blocks // (config.slices * config.blocks))  # warps that share the k of a slice
    warps = deep * config.beside
    if max(config.slices, config.beside) % min(config.slices, config.beside):
        return None
    if warps > MOST_WARPS or shape.columns(config) > shape.n:
        return None
    if (config.slices - 1) * deep * config.blocks >= shape.blocks:
        return None
    held = groups * config.blocks * (16 + 2 * per) + groups * (12 if groups == 1 else 8)
    if held + 40 > min(255, REGISTERS // (warps * 32)):
        return None
    sums = config.weight_rows * groups * 8 * 4 * deep  # bytes that a block gets of a tile
    x = deep * groups * 8 * (config.blocks * BLOCK * 2 + 16)
    stage = warps * 16 * config.blocks * (16 * shape.bits + 4 * per)
    kept = (2 * config.lag + 2) * sums + max(0, x - stage)
    fixed = 2304 + deep * groups * 32 * (1 + config.slices + config.blocks * per)
    stages = min(STAGES, (SHARED - fixed - kept) // stage)
    if stages < 2:
        return None
    own, loaded = shape.blocks * per, config.blocks * per  # words of constants
    defines = {
        "BITS": shape.bits,
        "GROUP": shape.group,
        "WHOLE": int(shape.whole),
        "NT": groups,
        "MT": config.tiles,
        "KB": config.blocks,
        "WK": deep,
        "WN": config.beside,
        "SLICES": config.slices,
        "WIDTH": next(4 * w for w in (4, 2, 1) if own % w == loaded % w == 0),
        "STAGES": stages,
        "LAG": config.lag,
        "EARLY": min(config.early, stages - 1),
        "HALF": int(config.half and shape.bits == 4),
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
    best = Config(2, 3, 8, 2) if shape.k > WIDE else Config()
    cuts = itertools.product((1,), (4, 3, 2, 1), (8, 4, 2), (8, 4, 2), (2, 1))
    others = (Config(*cut) for cut in cuts)
    fitting = ((config, plan(shape, config)) for config in (best, *others))
    return next((config for config, made in fitting if made and made.threads >= 32 * FEWEST_WARPS), None)


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
    return Kernel("spread_gemm.cu", "spread_gemm", dict(defines), shared, slices)
