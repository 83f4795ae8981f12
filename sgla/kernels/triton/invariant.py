# mypy: allow-untyped-defs
"""Linear layers and attention whose results for a token do not depend,
bit for bit, on what else is in the batch.

Sums run in one order: a linear layer adds its products along k from first to last in every tile, and
attention cuts a history into chunks at fixed places, attends within a chunk block by block, and joins the
chunks in order, whether the token comes alone, in a prompt or after a cached prefix. Masked places add exact
zeros (He et al., Defeating nondeterminism in LLM inference, 2025).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.device import this_device
from sgla.kernels.triton.attention import NEG, _dims, _score, _sink, padded, scales
from sgla.kernels.triton.common import cdiv

ROWS = 64  # queries of a tile: tokens times the query heads of a KV head
BLOCK = 64  # tokens of a block


@triton.jit(do_not_specialize=["m"])
def _linear(
    x, w, bias, out, m, n, k, s_x, s_w, s_out,
    HAS_BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tiles in groups of GROUP rows of tiles, so that those that run together share what they read."""
    tiles_m, tiles_n = tl.cdiv(m, M), tl.cdiv(n, N)
    index = tl.program_id(0)
    first = index // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    tile_m, tile_n = first + index % (GROUP * tiles_n) % height, index % (GROUP * tiles_n) // height
    rows, columns = tile_m * M + tl.arange(0, M), tile_n * N + tl.arange(0, N)
    depth = tl.arange(0, K)
    x += rows.to(tl.int64)[:, None] * s_x + depth[None, :]
    w += (columns % n).to(tl.int64)[None, :] * s_w + depth[:, None]
    acc = tl.zeros([M, N], dtype=tl.float32)
    for at in range(0, k, K):
        live = depth < k - at
        a = tl.load(x, mask=(rows < m)[:, None] & live[None, :], other=0.0)
        b = tl.load(w, mask=live[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        x += K
        w += K
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * s_out + columns[None, :], acc, mask=inside)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x ``[m, k]``, weight ``[n, k]``;
    ``out`` ``[m, n]`` of any float type, x's by default."""
    (m, k), n = x.shape, weight.shape[0]
    if out is None:
        out = x.new_empty(m, n)
    size_m, size_n, depth = _tile(m, n, this_device().multiprocessors)
    _linear[(cdiv(m, size_m) * cdiv(n, size_n),)](
        x, weight, bias if bias is not None else x, out, m, n, k, x.stride(0), weight.stride(0),
        out.stride(0), HAS_BIAS=bias is not None, M=size_m, N=size_n, K=depth, GROUP=8,
        num_warps=4 if size_m * size_n <= 64 * 64 else 8, num_stages=4 if depth == 128 else 3,
    )  # fmt: skip
    return out


TILES = (
    (128, 128, 64),
    (128, 64, 64),
    (64, 64, 64),
    (64, 32, 128),
)  # rows, columns, k; all give the same bits


def _tile(m: int, n: int, processors: int) -> tuple[int, int, int]:
    """The largest tile that leaves no more than a few processors without one."""
    fitting = TILES if m > 64 else TILES[2:]
    for tile in fitting:
        if cdiv(m, tile[0]) * cdiv(n, tile[1]) * 10 >= processors * 9:
            return tile
    return fitting[-1]


@triton.jit
def _join(top, total, acc, other_top, other_total, other_acc):
    """Results of two runs of tokens;
    the products are fused with the sums by hand, so that no compiler decides it."""
    new_top = tl.maximum(top, other_top)
    a, b = tl.exp2(top - new_top), tl.exp2(other_top - new_top)
    return new_top, tl.fma(other_total, b, total * a), tl.fma(other_acc, b[:, None], acc * a[:, None])


@triton.jit(do_not_specialize_on_alignment=["slots", "q_start", "kv_len", "tiles"])
def _attend(
    q, k, v, page_table, slots, q_start, kv_len, tiles, out, part, part_ml, sinks,
    s_q, s_page, s_token, s_head, table_stride, page_size, kv_heads, scale, v_scale, softcap, window, chunk,
    chunks, SPLIT: tl.constexpr, HD: tl.constexpr, HB: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One tile of the queries of one row; SPLIT: one chunk of its history, else all."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tiles + tile * 2)
    offset = tl.load(tiles + tile * 2 + 1)
    begin = tl.load(q_start + row)
    q_len = tl.load(q_start + row + 1) - begin
    length = tl.load(kv_len + row)
    pages = page_table + tl.load(slots + row).to(tl.int64) * table_stride
    lane = tl.arange(0, ROWS)
    d, inside = _dims(HD, HB)
    i = offset + lane // GROUP
    live = (i < q_len) & (lane < ROWS // GROUP * GROUP)
    q_head = head * GROUP + lane % GROUP
    query = tl.load(
        q + (begin + i).to(tl.int64)[:, None] * s_q + q_head[:, None] * HD + d[None, :],
        mask=live[:, None] & inside[None, :],
        other=0.0,
    )
    position = length - q_len + i
    end = tl.minimum(length, length - q_len + offset + ROWS // GROUP)
    read = 0  # what is behind may be another request's, and no number
    if window > 0:
        read = tl.maximum(length - q_len + offset - window + 1, 0)
    oldest = read // BLOCK * BLOCK
    top = tl.full([ROWS], NEG, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, HB], dtype=tl.float32)
    first = tl.program_id(2) if SPLIT else oldest // chunk
    last = tl.minimum(first + 1, tl.cdiv(end, chunk)) if SPLIT else tl.cdiv(end, chunk)
    for c in range(first, last):
        own_top = tl.full([ROWS], NEG, dtype=tl.float32)
        own_total = tl.zeros([ROWS], dtype=tl.float32)
        own = tl.zeros([ROWS, HB], dtype=tl.float32)
        for start in range(tl.maximum(c * chunk, oldest), tl.minimum(end, (c + 1) * chunk), BLOCK):
            n = start + tl.arange(0, BLOCK)
            page = tl.load(pages + n // page_size, mask=n < end, other=0).to(tl.int64)
            place = page * s_page + (n % page_size) * s_token + head * s_head
            there = (n[None, :] >= read) & (n[None, :] < end) & inside[:, None]
            keys = tl.load(k + place[None, :] + d[:, None], mask=there, other=0.0).to(query.dtype)
            s = _score(tl.dot(query, keys, input_precision="ieee"), scale, softcap, SOFTCAP)
            seen = n[None, :] <= position[:, None]
            if window > 0:
                seen = seen & (n[None, :] > position[:, None] - window)
            s = tl.where(seen, s, NEG)
            new_top = tl.maximum(own_top, tl.max(s, 1))
            p = tl.where(seen, tl.exp2(s - new_top[:, None]), 0.0)
            fade = tl.exp2(own_top - new_top)
            own_total = tl.fma(own_total, fade, tl.sum(p, 1))
            there = (n[:, None] >= read) & (n[:, None] < end) & inside[None, :]
            values = tl.load(v + place[:, None] + d[None, :], mask=there, other=0.0).to(query.dtype)
            own = tl.dot(p.to(query.dtype), values, own * fade[:, None], input_precision="ieee")
            own_top = new_top
        top, total, acc = _join(top, total, acc, own_top, own_total, own)
    if SPLIT:
        place = ((begin + i).to(tl.int64) * kv_heads * GROUP + q_head) * chunks + first
        used = live & (first + 0 * i < last)  # by row: newer interpreters take no scalar into a mask
        tl.store(part + place[:, None] * HD + d[None, :], acc, mask=used[:, None] & inside[None, :])
        tl.store(part_ml + place * 2, top, mask=used)
        tl.store(part_ml + place * 2 + 1, total, mask=used)
    else:
        if SINKS:
            total += _sink(tl.load(sinks + q_head), top)
        result = acc / tl.maximum(total, 1e-30)[:, None] * v_scale
        at = ((begin + i).to(tl.int64) * kv_heads * GROUP + q_head) * HD
        tl.store(out + at[:, None] + d[None, :], result, mask=live[:, None] & inside[None, :])


@triton.jit
def _merge(
    part, part_ml, kv_len, out, sinks, heads, v_scale, window, chunk, chunks,
    HD: tl.constexpr, HB: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Join the chunks of one query head of a decode row."""
    index = tl.program_id(0).to(tl.int64)
    length = tl.load(kv_len + index // heads)
    oldest = 0
    if window > 0:
        oldest = tl.maximum(length - window, 0)
    d, inside = _dims(HD, HB)
    top = tl.full([1], NEG, dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    acc = tl.zeros([1, HB], dtype=tl.float32)
    one = tl.arange(0, 1)
    for c in range(oldest // chunk, tl.cdiv(length, chunk)):
        place = index * chunks + c + one
        x = tl.load(part + place[:, None] * HD + d[None, :], mask=inside[None, :], other=0.0)
        top, total, acc = _join(
            top, total, acc, tl.load(part_ml + place * 2), tl.load(part_ml + place * 2 + 1), x
        )
    if SINKS:
        total += _sink(tl.load(sinks + index % heads), top)
    result = acc / tl.maximum(total, 1e-30)[:, None] * v_scale
    tl.store(out + index * HD + d[None, :], result, mask=inside[None, :])


def tile_tokens(group: int) -> int:
    """Query tokens of a tile."""
    return ROWS // group


def tiles_of(q_lens: list[int], group: int, device: torch.device | str) -> Tensor:
    """int32[tiles, 2]: (row, offset of the tile in the row's query),
    longest rows first for an even finish."""
    order = sorted(range(len(q_lens)), key=lambda r: -q_lens[r])
    pairs = [(r, o) for r in order for o in range(0, q_lens[r], tile_tokens(group))]
    return torch.tensor(pairs, dtype=torch.int32, device=device).view(-1, 2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    slots: Tensor,
    q_start: Tensor,
    kv_len: Tensor,
    tiles: Tensor,
    scale: float,
    window: int,
    softcap: float,
    chunk: int,
    parts: tuple[Tensor, Tensor] | None = None,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of rows with any number of query tokens: q ``[T, Hq * hd]``; ``tiles`` from
    ``tiles_of``; ``chunk`` a multiple of BLOCK, always the same; ``v_scale`` as in ``attention.decode``.

    With ``parts``, float32 ``[T, Hq, chunks, hd]`` and ``[T, Hq, chunks, 2]``, all rows have one query token,
    and programs of their own attend to the chunks of a row.
    """
    page_size, kv_heads, dim = k.shape[1:]
    tokens, width = q.shape
    group = width // dim // kv_heads
    out = q.new_empty(tokens, width)
    factor, cap = scales(scale, softcap)
    chunks = parts[0].shape[2] if parts is not None else 1
    part, part_ml = parts if parts is not None else (out, out)
    _attend[(tiles.shape[0], kv_heads, chunks)](
        q, k, v, page_table, slots, q_start, kv_len, tiles, out, part, part_ml, q if sinks is None else sinks,
        q.stride(0), k.stride(0), k.stride(1), k.stride(2), page_table.stride(0), page_size, kv_heads,
        factor, v_scale, cap, window, chunk, chunks,
        SPLIT=parts is not None, HD=dim, HB=padded(dim), GROUP=group, ROWS=ROWS,
        BLOCK=BLOCK if dim <= 128 else BLOCK // 2,
        SOFTCAP=softcap > 0, SINKS=sinks is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    if parts is not None:
        heads = kv_heads * group
        _merge[(tokens * heads,)](
            part,
            part_ml,
            kv_len,
            out,
            q if sinks is None else sinks,
            heads,
            v_scale,
            window,
            chunk,
            chunks,
            HD=dim,
            HB=padded(dim),
            SINKS=sinks is not None,
            num_warps=1,
        )
    return out


@triton.jit
def _log_sum_exp(x, out, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + i, mask=i < n, other=float("-inf"))
        new_top = tl.maximum(top, value)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.exp(value - base)
        top = new_top
    most = tl.max(top, 0)
    tl.store(out + row, most + tl.log(tl.sum(total * tl.exp(top - most), 0)))


def log_sum_exp(x: Tensor) -> Tensor:
    """float32[S, V] -> float32[S, 1], each row by itself and in one pass."""
    out = x.new_empty(x.shape[0], 1)
    if x.shape[0]:
        _log_sum_exp[(x.shape[0],)](x, out, x.stride(0), x.shape[1], BLOCK=2048, num_warps=8)
    return out
