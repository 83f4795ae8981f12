"""Launcher of ``skinny_gemm.cu``:
linear layers for few rows, fused with what stands before and after them."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgla.kernels.cuda.batch_gemm import Sending, shared
from sgla.kernels.cuda.build import SHARED, Kernel, processors

MAX_ROWS = 16
STORE, ADD, SILU, FLOAT32, GELU, CONVOLVED = range(6)  # EPILOGUE
TAPS = 4  # of convolutions
WARPS = 8
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("x", "w", "scale", "norm", "by", "bias", "out")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "x_stride", "by_stride", "out_stride")),
        *((name, ctypes.c_float) for name in ("eps", "factor")),
        ("shared", ctypes.c_int),
    )


class _SendParams(ctypes.Structure):
    _fields_ = (
        *_Params._fields_,
        ("inbox", P * 8),
        ("state", P),
        ("half", ctypes.c_longlong),
        ("rank", ctypes.c_int),
    )


class _Convolved(ctypes.Structure):
    """Of an epilogue with a convolution."""

    _fields_ = (
        *_Params._fields_,
        *((name, P) for name in ("taps", "state", "reads", "writes", "marks")),
        *((name, ctypes.c_int) for name in ("channels", "s_channel", "s_place")),
        ("s_unit", ctypes.c_longlong),
    )


class Convolution(NamedTuple):
    """Of the first channels that rows of one token make: ``taps`` float32 ``[C, TAPS]``; ``state`` bf16
    ``[units, C, TAPS - 1]``, of which each row has the unit of ``reads`` (0: none) before, and behind it that
    of ``writes``, and that in the last column of ``marks`` int32[R, 3], if it is not 0."""

    taps: Tensor
    state: Tensor
    reads: Tensor
    writes: Tensor
    marks: Tensor


class Config(NamedTuple):
    """``tiles`` of 16 weight rows (``half``: 8) share a load of x; ``per_sm`` blocks on a multiprocessor."""

    tiles: int
    half: bool
    stages: int
    per_sm: int

    def ring(self, run: int = 0) -> int:
        """Bytes of weights in shared memory, with the scales of ``run`` groups each."""
        return 8 * (2048 + 64 * run) * self.tiles * self.stages

    def sums(self, rows: int) -> int:
        """Bytes of those of so many rows, and of what else the kernel keeps in shared memory."""
        return 4 * 2 * WARPS * rows * (16 * self.tiles + 1) + 512


class Staged(NamedTuple):
    """How many rows of x there is room for in shared memory, and the room."""

    rows: int
    bytes: int


STAGED_ROWS = 2  # at most, or reading x once costs more than it saves
STAGED_BYTES = 16 << 10  # of x in shared memory, so that two blocks still fit on a multiprocessor
E4M3_STAGED = 2, 4  # rows of x that are kept in shared memory where the weights are e4m3
E4M3_STAGED_BYTES = 32 << 10  # of x at most: more takes longer than it saves
E4M3_CUT = Config(1, False, 4, 2)  # beside which there is room for so much
E4M3_WIDE = Config(2, False, 4, 1)  # and for large weights


class Gate(NamedTuple):
    """What x is first: ``x * sigmoid(by)``, by bf16 ``[m, k]``; with ``norm`` float32[head] the RMSNorm of
    each head of x times that, or times ``silu(by)`` if ``silu``."""

    by: Tensor
    norm: Tensor | None = None
    eps: float = 0.0
    silu: bool = False

    @property
    def defines(self) -> tuple[int, int]:
        """GATE and HEAD."""
        return (1, 128) if self.norm is None else (2 if self.silu else 3, len(self.norm))


def gate_refuses(m: int, k: int, norm: Tensor | None) -> str | None:
    """Why ``m`` rows of the width ``k`` cannot be gated on the way, or None."""
    if m > STAGED_ROWS or m * k * 2 > STAGED_BYTES:
        return f"x is gated once, for at most {STAGED_ROWS} rows and {STAGED_BYTES} bytes"
    if norm is None or (norm.dtype == torch.float32 and norm.shape in ((64,), (128,), (256,))):
        return None
    return "it takes norms of heads of 64, 128 or 256 in float32"


def run_of(k: int) -> int:
    """Groups of 128 channels whose scales a warp takes together."""
    return next(run for run in (4, 2, 1) if run == 1 or k % (WARPS * run * 128) == 0)


def _staged(m: int, k: int, config: Config, e4m3: bool, made: bool, run: int = 0) -> Staged:
    """What is kept of x. ``made``: it is not used as it is; ``run``: see ``Config.ring``. One row is kept
    where it fits, too, for warps that read it in front of each chunk of weights would wait for the L2 cache
    as often."""
    if not e4m3:
        if made:
            kept = m <= STAGED_ROWS and m * k * 2 <= STAGED_BYTES
            return Staged(1, STAGED_BYTES) if kept else Staged(0, 0)
        alone = m == 1 and config.ring() + 2 * k + config.sums(8) <= SHARED[config.per_sm - 1]
        return Staged(1, 2 * k) if alone else Staged(0, 0)
    rows = next((rows for rows in E4M3_STAGED if m <= rows and m * k * 2 <= E4M3_STAGED_BYTES), 0)
    room = m * (2 * k + 16)
    fits = rows and config.ring(run) + room + config.sums(rows) <= SHARED[config.per_sm - 1]
    return Staged(rows, room) if fits else Staged(0, 0)


@cache
def _kernel(
    groups: int,
    config: Config,
    norm: bool,
    epilogue: int,
    staged: Staged,
    e4m3: bool,
    gate: tuple[int, int] | None = None,
    run: int = 0,
    powers: bool = False,
    ranks: int = 0,
) -> Kernel:
    defines = {"NT": groups, "MT": config.tiles, "HALF": int(config.half), "STAGES": config.stages}
    defines |= {"NORM": int(norm), "EPILOGUE": epilogue, "STAGED": staged.rows}
    defines |= {"E4M3": 1} if e4m3 else {}
    defines |= {"GROUPED": run} if run else {}
    defines |= {"MX": 1} if powers else {}
    defines |= {"GATE": gate[0], "HEAD": gate[1]} if gate else {}
    defines |= {"SEND": ranks} if ranks else {}
    return Kernel("skinny_gemm.cu", "skinny_gemm", defines, config.ring(run) + staged.bytes)


def default_config(m: int, n: int, k: int, gated: bool, e4m3: bool = False, run: int = 0) -> Config:
    """An estimate for ``n`` output columns, from measurements on an H200 (132 multiprocessors). ``run``: see
    ``Config.ring``."""
    if not e4m3:
        return _choose(m, n, k, gated)
    config = _choose(m, n, k // 2, gated)
    for cut in (config, E4M3_CUT):
        if _staged(m, k, cut, e4m3, True, run).rows:
            return cut if gated or k <= 2048 or not 2048 < n < 100_000 else E4M3_WIDE
    return config


def _choose(m: int, n: int, k: int, gated: bool) -> Config:
    """``k`` is in two bytes of a weight."""
    if m > 8:
        return Config(2, False, 3, 2)
    if n >= 100_000:
        return Config(2, False, 4, 1)
    if gated or n > 2048:
        if m > STAGED_ROWS and (gated or k <= 4096 < n):
            return Config(2, False, 3, 2)
        if k <= 1024:
            return Config(1, False, 5, 1)
        # Blocks do whole tiles: halve them where that evens out the work.
        tiles = n // (8 if gated else 16)
        uneven = -(-tiles // (2 * processors())) * 2 * processors() > 1.2 * tiles
        return Config(1, uneven and not gated and k % 128 == 0, 5, 2)
    return Config(1, k % 128 == 0, 5, 2)


def aligned(x: Tensor) -> bool:
    """Whether kernels can load 16 bytes of a row of bf16 ``[m, k]`` at a time."""
    return bool(x.stride(1) == 1 and x.stride(0) % 8 == x.data_ptr() % 16 == 0)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: Gate | None = None,
    bias: Tensor | None = None,
    epilogue: int = STORE,
    out: Tensor | None = None,
    config: Config | None = None,
    convolution: Convolution | None = None,
    factor: float = 1.0,
    send: Sending | None = None,
) -> Tensor:
    """``epilogue((norm(x) @ weight.T + bias) * factor)``:
    x bf16 ``[m, k]`` with m <= 16, weight bf16 ``[n, k]``, k a multiple of 64.

    With ``scale`` float32[n] the weight is e4m3, its rows times these, and k a multiple of 128; or float32
    ``[n, k / 128]``, of as many channels, or of blocks ``[n / 128, k / 128]``; or uint8 ``[n, k / 32]``:
    exponents of MXFP8. ``norm``
    float32[k]: RMSNorm of x first; or ``gate``, see ``gate_refuses``, with rows of x and of what gates at
    multiples of 16 bytes. Epilogues: STORE bf16; ADD into ``out`` in place (others have no ``factor``); SILU,
    GELU: the rows of ``weight`` are gate then up, out ``[m, n / 2]``; FLOAT32; CONVOLVED, with the
    ``convolution``, and silu.
    With ``send``, STORE and n a multiple of 8 all ranks get the result, and nobody finds it in ``out``.
    """
    m, k = x.shape
    gated = epilogue in (SILU, GELU)
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = torch.empty(m, n, dtype=torch.float32 if epilogue == FLOAT32 else x.dtype, device=x.device)
    run = run_of(k) if scale is not None and scale.dim() == 2 else 0
    config = config or default_config(m, n, k, gated, scale is not None, run)
    if run:  # a chunk is a group
        config = config._replace(half=False)
    staged = _staged(m, k, config, scale is not None, norm is not None or gate is not None, run)
    normed, by = norm is not None, None
    if gate is not None:
        assert norm is None
        assert gate_refuses(m, k, gate.norm) is None
        assert staged.rows
        by, norm, eps = gate.by, gate.norm, gate.eps
    gating, powers = None if gate is None else gate.defines, scale is not None and scale.dtype == torch.uint8
    ranks = 0 if send is None else send.ranks
    kernel = _kernel(
        -(-m // 8), config, normed, epilogue, staged, scale is not None, gating, run, powers, ranks
    )
    params = (
        x.data_ptr(), weight.data_ptr(), scale.data_ptr() if scale is not None else None,
        norm.data_ptr() if norm is not None else None, by.data_ptr() if by is not None else None,
        bias.data_ptr() if bias is not None else None, out.data_ptr(), m, n, k, x.stride(0),
        by.stride(0) if by is not None else 0, out.stride(0), eps, factor,
        0 if scale is None else shared(weight, scale),
    )  # fmt: skip
    made: Any = _Params(*params)
    if send is not None:
        assert epilogue == STORE
        assert n % 8 == 0
        made = _SendParams(*params, send.inboxes, send.state, send.half, send.rank)
    if convolution is not None:
        taps, state, *units = convolution
        assert epilogue == CONVOLVED
        made = _Convolved(
            *params, taps.data_ptr(), state.data_ptr(), *(x.data_ptr() for x in units), len(taps),
            state.stride(1), state.stride(2), state.stride(0),
        )  # fmt: skip
    columns = config.tiles * (8 if config.half or gated else 16)
    kernel.launch(min(-(-n // columns), processors() * config.per_sm), 256, made)
    return out
