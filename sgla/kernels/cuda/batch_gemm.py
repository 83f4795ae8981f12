"""Launcher of ``batch_gemm.cu``:
linear layers of decode batches, and with the gated activation behind them of prompts too."""

from __future__ import annotations

import ctypes
import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgla.kernels.cuda.build import SHARED, Kernel, processors
from sgla.kernels.cuda.tensor_map import TensorMap, tensor_map
from sgla.kernels.ops import AddedNorm

MIN_ROWS = 8  # of bfloat16; with fewer, ``skinny_gemm`` is faster
MIN_GROUPED = 9  # of e4m3 with a scale for each group of channels
ROWS = 32, 64, 96, *range(128, 257, 16)  # of x in a tile
MAX_ROWS = ROWS[-1]
STORE, ADD, SILU, FLOAT32, GELU = range(5)  # EPILOGUE, numbered as in skinny_gemm
DRAW = 6  # 5 is that of ``prompt_gemm``
SMALL = 4 << 20  # elements of a weight that gains from tiles of few rows
LARGE = 16 << 20  # that gains from these kernels with more than 192 rows
VOCABULARY = 100_000  # rows of a weight that is an output layer


class _Params(ctypes.Structure):
    _fields_ = (
        ("w", TensorMap),
        ("x", TensorMap),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "bias", "out", "residual", "norm", "squares", "row_squares", "sums", "counts",
                "slots", "positions", "seeds", "temperatures", "keys", "plain",
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in ("m", "n", "k", "tiles", "row_tiles", "x_rows", "parts", "row_stride", "first")
        ),
        ("eps", ctypes.c_float),
        ("row_scale", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("shared", ctypes.c_int),
        ("pad", ctypes.c_int * 5),  # tensor maps are aligned to 64 bytes
    )  # fmt: skip


class Sending(NamedTuple):
    """Where the results of ``ranks`` go, for the sum that follows (``AllReduce.sum`` with ``sent``): the
    inboxes, the number of sums so far, and words of one of the two inboxes; this one is ``rank``."""

    ranks: int
    rank: int
    inboxes: Any
    state: int
    half: int


class _SendParams(ctypes.Structure):
    _fields_ = (
        *_Params._fields_[:-2],
        ("inbox", ctypes.c_void_p * 8),
        ("state", ctypes.c_void_p),
        ("half", ctypes.c_longlong),
        ("rank", ctypes.c_int),
        ("shared", ctypes.c_int),
    )


class Config(NamedTuple):
    """A block takes ``tile`` weight rows (multiples of 64 up to 256; with STORE, SILU, GELU and FLOAT32 also
    32 less) in so many ``passes``; ``split`` blocks share the sum over k, as a cluster or, ``apart``, through
    global memory; ``per_sm`` (1 or 2) blocks are on a multiprocessor. A tile takes at most ``rows`` of x.
    ``panels``: of 64 of k in a stage, more than one for STORE and FLOAT32 alone; k is a multiple of all."""

    tile: int
    split: int
    per_sm: int = 2
    apart: bool = False
    rows: int = MAX_ROWS
    passes: int = 1
    panels: int = 1

    @property
    def groups(self) -> int:
        """Of warps that multiply, each with 64 weight rows in a pass."""
        return -(-self.tile // (64 * self.passes))

    @property
    def box(self) -> int:
        """Weight rows of a copy."""
        return self.tile if self.tile < 64 else 64 * self.groups


class Unscaled(NamedTuple):
    """An RMSNorm but for its scale: x bf16 ``[m, d]`` is still to be divided by the rms of the rows whose
    sums of squares over each part of the width stand in ``squares`` float32 ``[parts, m rounded up to
    32]``."""

    x: Tensor
    squares: Tensor
    eps: float


class Scales(NamedTuple):
    """Of e4m3 numbers, float32: ``x`` ``[m]``, ``weight`` ``[n]``, or grouped, ``[n, k / 128]`` or, of
    blocks, ``[n / 128, k / 128]``."""

    x: Tensor
    weight: Tensor


def shared(weight: Tensor, scale: Tensor) -> int:
    """The logarithm of the number of the weight's rows that share one of the scales."""
    return (len(weight) // len(scale)).bit_length() - 1


class DrawInputs(NamedTuple):
    """What the output layer needs to draw tokens, as ``kernels/triton/sampling.py`` would, where ``plain``
    int32[1] is not 0; elsewhere it leaves logits. ``slots``, ``positions`` int32[S]; ``seeds`` int64 and
    ``temperatures`` float32 by slot. The best goes to ``keys`` int64[S], which must be ``WORST`` before; the
    weight has the tokens from ``first`` on."""

    slots: Tensor
    positions: Tensor
    seeds: Tensor
    temperatures: Tensor
    keys: Tensor
    plain: Tensor
    first: int


def refuses(n: int, k: int, e4m3: bool = False) -> str | None:
    """Why a weight ``[n, k]`` cannot be multiplied, or None. (Gated, n must be a multiple of 16.)"""
    step = 128 if e4m3 else 64
    if k % step or k < 8 * step:
        return f"it needs an input width from {8 * step} on that is a multiple of {step}"
    if n % 8 or n < 128:
        return "it needs an output width from 128 on that is a multiple of 8"
    return None


def default_config(m: int, n: int, k: int, gated: bool = False, e4m3: bool = False) -> Config | None:
    """An estimate for ``m`` rows and a weight ``[n, k]``, from measurements on an H200; None: cuBLAS is
    faster."""
    if not e4m3:
        return _choose(processors(), m, n, k, gated)
    if m > MAX_ROWS:
        return None
    split = 1 if n > 4096 else 2 if n > 2048 else 4
    return _choose(processors(), m, n, k // 2, gated) or Config(64, split, 1)


GROUPED_ROWS = 128  # of x in a tile, where rows are not many: sums of two groups stand beside those of all


def grouped_config(m: int, n: int, k: int, gated: bool = False) -> Config:
    """The same for e4m3 weights with scales of groups."""
    if m > 64:
        return _grouped(processors(), m, n, k)
    found = default_config(m, n, k, gated, e4m3=True)
    assert found is not None
    return found


@lru_cache(1 << 14)
def _grouped(count: int, m: int, n: int, k: int) -> Config:
    """Of cuts for whose sums there are registers."""

    def time(config: Config) -> float:
        """Of all rounds. Blocks that share a sum are there at once."""
        blocks = -(-n // config.tile) * -(-m // config.rows) * config.split
        if config.split > 1 and (blocks > count or k < 2048):
            return math.inf
        return -(-blocks // count) * config.tile * (config.rows + 64) / config.split

    for split in (1, 2) if m <= GROUPED_ROWS else ():
        if count // 2 < split * -(-n // 64) <= count and k >= 1024 * split:
            return Config(64, split, 1, rows=GROUPED_ROWS)
    rows = 96 if GROUPED_ROWS < m <= 192 else GROUPED_ROWS
    cuts = [Config(192, 1, 1, rows=rows), *(Config(128, split, 1, rows=rows) for split in (1, 2))]
    if rows < GROUPED_ROWS:
        cuts.append(Config(192, 2, 1, rows=rows))
    if m > MAX_ROWS:
        cuts += [Config(128, split, 1) for split in (1, 2)]
    return min(cuts, key=time)


@lru_cache(1 << 14)
def _choose(count: int, m: int, n: int, k: int, gated: bool) -> Config | None:
    def busy(tile: int, blocks: int = 1) -> float:
        """The share of the multiprocessors that work, on average,
        if each takes one of the ``blocks`` of a tile at a time."""
        blocks *= _tiles(n, tile)
        return blocks / (-(-blocks // count) * count)

    if m > MAX_ROWS:
        if not gated:
            return None
        row_tiles = -(-m // MAX_ROWS)
        rows = -(-m // (32 * row_tiles)) * 32
        tile = max((192, 224), key=lambda tile: busy(tile, row_tiles))
        if busy(tile, row_tiles) * m / (row_tiles * rows) <= 0.9:
            return None
        return Config(tile, 1, 1, rows=rows, passes=1 + (tile == 224))
    if n >= VOCABULARY:
        return Config(128, 1, 1) if m <= 64 or (m <= 192 and k <= 1024) else None
    if m > 64 and not gated and n * k <= SMALL:
        return _cut_rows(count, m, n, k)
    tiles = ((192, 256, 128) if m <= 128 else (192, 128)) + ((224, 160, 96) if gated else ())
    wide = max(tiles, key=busy)
    if busy(wide) > 0.8:  # 224 x 128 sums are what the registers hold
        return Config(wide, 1, 1, passes=2 if wide == 224 and m > 128 else 1)
    split = 4 if n > 16 * count else 8
    apart = Config(128, split, 1, True) if n <= 128 * count // split and busy(128, split) > 0.8 else None
    if m <= 64:
        if apart and split == 4 and k >= 4096:
            return apart
        return Config(64, 2 if n > 2048 else 4 if n > 1024 else 8)
    # Tiles of 64, each by two blocks, fill the GPU; of whole batches the library is as fast (an H200).
    in_two = 2048 < n <= 4096 and busy(64, 2) > 0.9 and m <= 240
    ours = in_two or m <= (224 if n * k >= LARGE else 192)
    if ours and apart and ((k >= 8192 and not in_two) if m > 192 else (k >= 4096 and split == 8)):
        return apart
    if m <= 128 and 4096 < n <= 64 * count and k >= 4096:
        return Config(128, 2, 1)
    if n <= 64 * count and (ours or (gated and k <= 3072)):
        return Config(64, 1 if n > 4096 or k <= 1024 else 2 if n > 2048 else 4, 1)
    return None


def draw_config(m: int) -> Config | None:
    """For the output layer where it draws.
    With more than 192 rows the products wait for the draw: nothing is gained."""
    return Config(192, 1, 1) if m <= 192 else None


def _cut_rows(count: int, m: int, n: int, k: int) -> Config:
    """For a weight that is read within the time that a kernel takes to start:
    tiles of 64 rows of x, for more blocks."""
    blocks = -(-n // 64) * -(-m // 64)
    if blocks > count:
        return Config(128, 1, 1, rows=64)
    split = 4 if 2 * blocks <= count and k >= 1024 else 1
    alone = split * blocks <= count
    return Config(64, split, 1 if alone else 2, split > 1 and (alone or m > 192), 64)


def ask(config: Config, m: int, epilogue: int) -> Kernel:
    """Begin to compile what multiplies ``m`` rows of bfloat16 alone."""
    return _kernel(config, rows_of(config, m), epilogue, False, False, 0, False, False)


# Without defaults, since a call that leaves some out would be another one for the cache.
@cache
def _kernel(
    config: Config,
    rows: int,
    epilogue: int,
    scaled: bool,
    e4m3: bool,
    ranks: int,
    grouped: bool,
    rounded: bool,
) -> Kernel:
    room = _room(config, rows, epilogue, scaled, e4m3, ranks > 0)
    stages = room.stages
    # A stage is free when the next one has been multiplied.
    assert stages > 1, f"there is no room for two stages of {config} with {rows} rows"
    defines = {"BM": config.tile, "BN": rows, "SPLIT": config.split, "GLOBAL": int(config.apart)}
    defines |= {"PER_SM": config.per_sm, "PASSES": config.passes, "STAGES": stages}
    defines |= {"EPILOGUE": epilogue, "SCALED": int(scaled)} | ({"E4M3": 1} if e4m3 else {})
    defines |= ({"SEND": ranks} if ranks else {}) | ({"GROUPED": 1} if grouped else {})
    defines |= ({"PANELS": config.panels} if config.panels > 1 else {}) | ({"ROUNDED": 1} if rounded else {})
    shared = stages * (room.stage + 16) + room.inbox + room.rows + 1032
    cluster = 1 if config.apart else config.split
    return Kernel("batch_gemm.cu", "batch_gemm", defines, shared, cluster)


class _Room(NamedTuple):
    """In shared memory: how many stages of how many bytes, the bytes of sums from others of the cluster, and
    of rows that wait to be sent."""

    stages: int
    stage: int
    inbox: int
    rows: int


def _room(config: Config, rows: int, epilogue: int, scaled: bool, e4m3: bool, sends: bool = False) -> _Room:
    stage, cluster = (config.box + rows) * 128 * config.panels, 1 if config.apart else config.split
    # Scales, parts of squares, or what a row's draw needs.
    kept = (
        4
        * rows
        * (scaled + e4m3 + (epilogue == ADD) * config.tile // (16 * config.split) + 8 * (epilogue == DRAW))
    )
    inbox = 4 * config.tile * rows * (cluster - 1) // cluster
    sent = sends * (2 * config.box * rows // config.split + 16)
    most = (SHARED[config.per_sm - 1] - 1280 - kept - inbox - sent) // stage
    return _Room(min(8 if config.tile >= 64 else 12, most), stage, inbox, sent)


def fits(config: Config, m: int, epilogue: int) -> bool:
    """Whether a block has room for ``m`` rows of bfloat16."""
    return _room(config, rows_of(config, m), epilogue, True, False).stages > 1


def sends(config: Config, m: int) -> bool:
    """Whether each of the results of ``m`` rows is written once, and those of a block have room to wait."""
    return config.tile % 64 == 0 and _room(config, rows_of(config, m), STORE, True, False, True).stages > 1


@cache
def _exchange(tiles: int, config: Config, rows: int) -> tuple[Tensor, Tensor]:
    """Where blocks that are ``apart`` leave sums, and how often they came.
    Kept: it belongs to no graph's memory."""
    sums = torch.empty(tiles * config.split * config.tile * rows, device="cuda")
    return sums, torch.zeros(tiles, dtype=torch.int32, device="cuda")


def rows_of(config: Config, m: int) -> int:
    """Of x in a tile, where there are ``m``."""
    return next(size for size in ROWS if size >= min(m, config.rows) and size % (8 * config.split) == 0)


def linear(
    x: Tensor | Unscaled,
    weight: Tensor,
    config: Config,
    *,
    bias: Tensor | None = None,
    epilogue: int = STORE,
    out: Tensor | None = None,
    draw: DrawInputs | None = None,
    scales: Scales | None = None,
    send: Sending | None = None,
    rounded: bool = False,
) -> Tensor:
    """``epilogue(x @ weight.T + bias)``:
    x bf16 ``[m, k]`` contiguous, weight bf16 ``[n, k]``, see ``refuses``. With ``scales`` both are e4m3.

    Epilogues: STORE bf16; SILU, GELU:
    the rows of ``weight`` are gate then up, out ``[m, n / 2]``; FLOAT32; DRAW, see ``DrawInputs``. With
    ``send``, STORE and a config that ``sends`` all ranks get the result, and nobody finds it in ``out``.
    ``rounded``: gate and up are bf16 before the activation. Without ``split`` a result is the same bits with
    every ``config``.
    """
    if out is None:
        rows, n = x[0] if isinstance(x, Unscaled) else x, weight.shape[0]
        dtype = torch.float32 if epilogue in (FLOAT32, DRAW) else torch.bfloat16
        out = rows.new_empty(rows.shape[0], n // 2 if epilogue in (SILU, GELU) else n, dtype=dtype)
    _launch(x, weight, config, bias, epilogue, out, draw=draw, scales=scales, send=send, rounded=rounded)
    return out


def linear_add(
    x: Tensor | Unscaled, weight: Tensor, config: Config, norm: AddedNorm, bias: Tensor | None = None
) -> Unscaled:
    """Adds ``x @ weight.T + bias`` to ``norm.residual`` in place;
    the norm of the sum, which another ``linear`` completes."""
    assert norm.residual is not None
    m, n = norm.residual.shape
    squares = torch.empty(-(-n // config.tile), row_stride(m), device=norm.residual.device)
    result = Unscaled(torch.empty_like(norm.residual), squares, norm.eps)
    _launch(x, weight, config, bias, ADD, result.x, norm, squares)
    return result


def _launch(
    x: Tensor | Unscaled,
    weight: Tensor,
    config: Config,
    bias: Tensor | None,
    epilogue: int,
    out: Tensor,
    norm: AddedNorm | None = None,
    squares: Tensor | None = None,
    draw: DrawInputs | None = None,
    scales: Scales | None = None,
    send: Sending | None = None,
    rounded: bool = False,
) -> None:
    x, row_squares, eps = x if isinstance(x, Unscaled) else (x, None, 0.0)
    m, k = x.shape
    n = weight.shape[0]
    config = held(config, m, n)
    gated, scaled, e4m3 = epilogue in (SILU, GELU), row_squares is not None, scales is not None
    assert not e4m3 or epilogue in (STORE, SILU, GELU, FLOAT32)
    assert x.is_contiguous(), "the tensor map knows no padding"
    rows = rows_of(config, m)
    tiles, row_tiles = _tiles(n, config.tile), -(-m // rows)
    x_rows = min(rows, -(-m // 8) * 8)
    grouped = scales is not None and scales.weight.dim() == 2
    kept = scaled or (e4m3 and not grouped)  # factors of rows of x
    blocks = _blocks(config, tiles, row_tiles, kept)
    sums = counts = None
    if config.apart:
        sums, counts = _exchange(tiles * row_tiles, config, rows)
    residual, factors = (norm.residual, norm.weight) if norm is not None else (None, None)
    tensors = bias, out, residual, factors, squares, row_squares, sums, counts
    drawing = (None,) * 6 if draw is None else draw[:6]
    given = (
        *_maps(x, weight, config, x_rows, gated),
        *(None if t is None else t.data_ptr() for t in (*tensors, *drawing)),
        m, n // 2 if gated else n, k, tiles, row_tiles, x_rows,
        0 if row_squares is None else row_squares.shape[0], row_stride(m),
        0 if draw is None else draw.first, eps,
        *((None, None) if scales is None else (t.data_ptr() for t in scales)),
    )  # fmt: skip
    rows_shared = 0 if scales is None else shared(weight, scales.weight)
    params: Any = _Params(*given, rows_shared)
    if send is not None:
        assert epilogue == STORE
        assert sends(config, m)
        params = _SendParams(*given, send.inboxes, send.state, send.half, send.rank, rows_shared)
    ranks = send.ranks if send is not None else 0
    kernel = _kernel(config, rows, epilogue, scaled, e4m3, ranks, grouped, rounded)
    lends = rows > (192 if config.groups == 3 else MAX_ROWS)
    if grouped:
        lends = rows > (64 if config.groups in (2, 3) else GROUPED_ROWS)
    helpers = 128 if lends else 32 + 32 * kept
    kernel.launch(blocks, 128 * config.groups + helpers, params)


def held(config: Config, m: int, n: int) -> Config:
    """Blocks that are ``apart`` wait for each other: the same tiles with one block each where these
    multiprocessors have no room for all, as those of a part of the GPU that ``config`` was measured on."""
    blocks = _tiles(n, config.tile) * -(-m // rows_of(config, m)) * config.split
    there = not config.apart or blocks <= processors() * config.per_sm
    return config if there else config._replace(split=1, apart=False)


def _blocks(config: Config, tiles: int, row_tiles: int, scaled: bool) -> int:
    """Those of a launch.
    ``scaled``: a block keeps the scales of one tile's rows, so all its tiles are of these."""
    blocks, most = tiles * row_tiles * config.split, processors() * config.per_sm
    if config.split == 1:
        blocks = min(blocks, most // row_tiles * row_tiles if scaled else most)
    return blocks


def _tiles(n: int, tile: int) -> int:
    """Of ``n`` weight rows: an even number if neighbours share some."""
    pair = 1 + (tile > 64 and tile % 64 != 0)
    return -(-n // (pair * tile)) * pair


def _maps(
    x: Tensor, weight: Tensor, config: Config, x_rows: int, gated: bool
) -> tuple[ctypes.Array[ctypes.c_uint64], ctypes.Array[ctypes.c_uint64]]:
    """Of the weight and of x."""
    (m, k), n, size = x.shape, weight.shape[0], x.itemsize
    if config.panels > 1:
        boxes = (weight.data_ptr(), n, config.box), (x.data_ptr(), m, x_rows)
        w_map, x_map = (_panel_map(at, rows, k, box, config.panels) for at, rows, box in boxes)
        return w_map, x_map
    w_map = _weight_map(weight.data_ptr(), n, k, config.box, gated, size)
    return w_map, tensor_map(x.data_ptr(), (k, m), (k * size,), (128 // size, x_rows), size == 1)


def row_stride(m: int) -> int:
    """Of the squares of ``Unscaled``."""
    return -(-m // 32) * 32


@lru_cache(1 << 14)
def _weight_map(
    data: int, n: int, k: int, tile: int, gated: bool, size: int
) -> ctypes.Array[ctypes.c_uint64]:
    """``size``: bytes of a number."""
    row, wide, bytes_ = size * k, 128 // size, size == 1
    if not gated:
        return tensor_map(data, (k, n), (row,), (wide, tile), bytes_)
    half = n // 2
    return tensor_map(
        data, (k, 8, 2, half // 8), (row, row * half, 8 * row), (wide, 8, 2, tile // 16), bytes_
    )


@lru_cache(1 << 14)
def _panel_map(data: int, rows: int, k: int, box: int, panels: int) -> ctypes.Array[ctypes.c_uint64]:
    """Of bf16, in panels of 64 of k."""
    return tensor_map(data, (64, rows, k // 64), (2 * k, 128), (64, box, panels))
