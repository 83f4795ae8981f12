# mypy: allow-untyped-defs
"""Multi-head latent attention in Triton, in the absorbed form (DeepSeek-V2, arXiv 2405.04434, 2.1): all heads
of a token read one key of the pages, whose first values, its content, are the value, too. So a block of keys
is loaded once for many heads and both products; what is behind the content, the rotated values, counts for
the scores alone.

Lengths and page tables are read on the device, as in ``attention.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.ops import Part
from sgla.kernels.triton.attention import LOG2E, NEG, Cut, _fitting, padded
from sgla.kernels.triton.common import _begin, _pdl, _saturate, cdiv, next_power_of_2

MOST_HEADS = 64  # of a decode row that one program serves
EARLY = 4  # tokens up to which kernels let the next one in at once, which asks for its weights meanwhile


@triton.jit
def _keys(k, place, there, C: tl.constexpr, CB: tl.constexpr, R: tl.constexpr, RB: tl.constexpr):
    """Content and rotated values of the tokens at ``place``: ``[N, CB]`` and ``[N, RB]``."""
    c, r = tl.arange(0, CB), tl.arange(0, RB)
    content = tl.load(k + place[:, None] + c[None, :], mask=there[:, None] & (c < C)[None, :], other=0.0)
    rotated = tl.load(k + place[:, None] + C + r[None, :], mask=there[:, None] & (r < R)[None, :], other=0.0)
    return content, rotated


@triton.jit
def _own(length, RANKS: tl.constexpr, RANK: tl.constexpr):
    """How many of the first ``length`` tokens a rank has: see ``ops.Part``."""
    if RANKS > 1:
        length = (length + RANKS - 1 - RANK) // RANKS
    return length


@triton.jit
def _look(content_q, rotated_q, content, rotated, seen, scale, top, total, acc):
    """One block of keys more: the state of an online softmax (``top`` and ``total`` [M], ``acc`` [M, CB])."""
    content, rotated = content.to(content_q.dtype), rotated.to(content_q.dtype)
    s = tl.dot(content_q, tl.trans(content), input_precision="ieee")
    s = tl.dot(rotated_q, tl.trans(rotated), s, input_precision="ieee") * scale
    s = tl.where(seen, s, NEG)
    new_top = tl.maximum(top, tl.max(s, 1))
    p = tl.where(seen, tl.exp2(s - new_top[:, None]), 0.0)
    fade = tl.exp2(top - new_top)
    acc = acc * fade[:, None] + tl.dot(p.to(content.dtype), content, input_precision="ieee")
    return new_top, total * fade + tl.sum(p, 1), acc


@triton.jit
def _tell(told, at, top, total, there):
    """The logarithms of the sums of weights, as ``ops.Part`` has them."""
    whole = top + tl.log2(tl.maximum(total, 1e-30))
    most = whole.to(told.dtype.element_ty)
    tl.store(told + at * 2, most, mask=there)
    tl.store(told + at * 2 + 1, whole - most.to(tl.float32), mask=there)


# Eager steps pass columns of one upload, which lie anywhere.
@triton.jit(do_not_specialize_on_alignment=["slots", "kv_len"])
def _decode(
    q, k, page_table, slots, kv_len, sinks, out, part, part_ml, told,
    s_page, s_token, table_stride, page_size, heads, splits, scale, k_scale,
    C: tl.constexpr, CB: tl.constexpr, R: tl.constexpr, RB: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SINKS: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: M heads of a row, and a share of its history. Before it waits it reads what the step began
    with."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * M + tl.arange(0, M)
    length = _own(tl.load(kv_len + row), RANKS, RANK)
    pages = page_table + tl.load(slots + row).to(tl.int64) * table_stride
    _begin(PDL)
    share = tl.cdiv(tl.cdiv(length, splits), N) * N
    begin = split * share
    end = tl.minimum(begin + share, length)
    at = row * heads + head
    content_q, rotated_q = _keys(q, at * (C + R), head < heads, C, CB, R, RB)
    top = tl.full([M], NEG, dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    if SINKS and split == 0:  # a score without a value
        top = tl.load(sinks + head, mask=head < heads, other=0.0) * 1.4426950408889634
        total = tl.full([M], 1.0, dtype=tl.float32)
    acc = tl.zeros([M, CB], dtype=tl.float32)
    for start in range(begin, end, N):
        n = start + tl.arange(0, N)
        live = n < end
        page = tl.load(pages + n // page_size, mask=live, other=0).to(tl.int64)
        content, rotated = _keys(k, page * s_page + (n % page_size) * s_token, live, C, CB, R, RB)
        seen = live[None, :] & (head >= 0)[:, None]
        top, total, acc = _look(content_q, rotated_q, content, rotated, seen, scale, top, total, acc)
    c = tl.arange(0, CB)
    used = (head < heads)[:, None] & (c < C)[None, :]
    if splits == 1:
        result = acc / tl.maximum(total, 1e-30)[:, None] * k_scale
        tl.store(out + at[:, None] * C + c[None, :], result, mask=used)
        if RANKS > 1:
            _tell(told, at, top, total, head < heads)
    else:
        slice_ = at * splits + split
        tl.store(part + slice_[:, None] * C + c[None, :], acc, mask=used)
        tl.store(part_ml + slice_ * 2, top, mask=head < heads)
        tl.store(part_ml + slice_ * 2 + 1, total, mask=head < heads)


@triton.jit
def _merge(
    part, part_ml, out, told, splits, k_scale, C: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
    TELLS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BC values of the content that a head of a row has seen, of all shares of its history.
    EARLY, here and below: the next kernel starts at once, whose first loads need nothing of this one."""
    if EARLY and PDL:
        tl.extra.cuda.gdc_launch_dependents()
    _begin(PDL)
    head = tl.program_id(0).to(tl.int64)
    c, split = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, SPLITS)
    there, at = split < splits, head * splits + split
    top = tl.load(part_ml + at * 2, mask=there, other=NEG)
    most = tl.max(top)
    weight = tl.exp2(top - most)
    total = tl.sum(weight * tl.load(part_ml + at * 2 + 1, mask=there, other=0.0))
    inside = there[:, None] & (c < C)[None, :]
    x = tl.load(part + at[:, None] * C + c[None, :], mask=inside, other=0.0)
    y = tl.sum(x * weight[:, None], 0) / tl.maximum(total, 1e-30) * k_scale
    tl.store(out + head * C + c, y, mask=c < C)
    if TELLS:
        _tell(told, head, most, total, tl.program_id(1) == 0)


@triton.jit
def _extend(
    q, k, page_table, tiles, out, told, s_page, s_token, table_stride, page_size, heads, scale, k_scale,
    C: tl.constexpr, CB: tl.constexpr, R: tl.constexpr, RB: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    RANKS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """One program: one head of the tokens of a tile."""
    tile, head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    pages = page_table + tl.load(tile).to(tl.int64) * table_stride
    begin, first, count = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    i = tl.arange(0, M)
    at = (begin + i).to(tl.int64) * heads + head
    content_q, rotated_q = _keys(q, at * (C + R), i < count, C, CB, R, RB)
    end = _own(first + count, RANKS, RANK)
    top = tl.full([M], NEG, dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    acc = tl.zeros([M, CB], dtype=tl.float32)
    for start in range(0, end, N):
        n = start + tl.arange(0, N)
        page = tl.load(pages + n // page_size, mask=n < end, other=0).to(tl.int64)
        content, rotated = _keys(k, page * s_page + (n % page_size) * s_token, n < end, C, CB, R, RB)
        seen = (n * RANKS + RANK)[None, :] <= (first + i)[:, None]
        top, total, acc = _look(content_q, rotated_q, content, rotated, seen, scale, top, total, acc)
    c = tl.arange(0, CB)
    result = acc / tl.maximum(total, 1e-30)[:, None] * k_scale
    tl.store(out + at[:, None] * C + c[None, :], result, mask=(i < count)[:, None] & (c < C)[None, :])
    if RANKS > 1:
        _tell(told, at, top, total, i < count)


@triton.jit
def _share(
    seen, told, out, tokens, heads, C: tl.constexpr, CB: tl.constexpr, RANKS: tl.constexpr,
    RANK: tl.constexpr, RB: tl.constexpr, M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: M heads of all for a token, by the part of the weights that this rank has."""
    _begin(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * M + tl.arange(0, M)
    rank, c = tl.arange(0, RB)[:, None], tl.arange(0, CB)[None, :]
    own, there = heads // RANKS, head < heads
    at = ((rank * tokens + token) * heads + head[None, :]) * 2
    inside = (rank < RANKS) & there[None, :]
    sums = tl.load(told + at, mask=inside, other=NEG).to(tl.float32)
    sums += tl.load(told + at + 1, mask=inside, other=0.0).to(tl.float32)
    weights = tl.exp2(sums - tl.max(sums, 0)[None, :])
    share = tl.sum(tl.where(rank == RANK, weights, 0.0), 0) / tl.sum(weights, 0)
    x = tl.load(seen + (token * heads + head)[:, None] * C + c, mask=there[:, None] & (c < C), other=0.0)
    place = ((head // own * tokens + token) * own + head % own)[:, None] * C + c
    tl.store(out + place, x.to(tl.float32) * share[:, None], mask=there[:, None] & (c < C))


@triton.jit
def _angles(positions, cos_sin, token, live, HALF: tl.constexpr, HALF_B: tl.constexpr):
    """Cosines and sines ``[M, HALF_B]`` of tokens."""
    i = tl.arange(0, HALF_B)[None, :]
    there = live[:, None] & (i < HALF)
    position = tl.load(positions + token, mask=live, other=0).to(tl.int64)
    angle = cos_sin + (position * 2 * HALF)[:, None] + i
    return tl.load(angle, mask=there, other=0.0), tl.load(angle + HALF, mask=there, other=0.0)


@triton.jit
def _rotated(x, cos, sin, live, HALF: tl.constexpr, HALF_B: tl.constexpr):
    """Two halves at the pointers ``x`` ``[M, 1]``, rotated."""
    i = tl.arange(0, HALF_B)[None, :]
    there = live[:, None] & (i < HALF)
    a = tl.load(x + i, mask=there, other=0.0).to(tl.float32)
    b = tl.load(x + HALF + i, mask=there, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _store_latents(
    latent, norm, positions, cos_sin, k, out_loc, token, live, eps, k_inverse, s_latent, s_page, s_token,
    page_size, C: tl.constexpr, CB: tl.constexpr, HALF: tl.constexpr, HALF_B: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The latents of some tokens, normed and rotated. Where they go and by how much they turn was known when
    the step began."""
    c, i = tl.arange(0, CB)[None, :], tl.arange(0, HALF_B)[None, :]
    there, turned = live[:, None] & (c < C), live[:, None] & (i < HALF)
    start = latent + (token * s_latent)[:, None]
    weight = tl.load(norm + c, mask=c < C, other=0.0)
    cos, sin = _angles(positions, cos_sin, token, live, HALF, HALF_B)
    loc = tl.load(out_loc + token, mask=live, other=0).to(tl.int64)
    place = k + ((loc // page_size) * s_page + (loc % page_size) * s_token)[:, None]
    _begin(PDL)
    content = tl.load(start + c, mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(content * content, 1) / C + eps)[:, None]
    content = (content * scale * weight).to(latent.dtype.element_ty)
    a, b = _rotated(start + C, cos, sin, live, HALF, HALF_B)
    if FP8:
        tl.store(place + c, _saturate(content.to(tl.float32) * k_inverse), mask=there)
        a, b = _saturate(a * k_inverse), _saturate(b * k_inverse)
    else:
        tl.store(place + c, content, mask=there)
    tl.store(place + C + i, a, mask=turned)
    tl.store(place + C + HALF + i, b, mask=turned)


@triton.jit(do_not_specialize_on_alignment=["positions", "out_loc"])
def _queries(
    q, latent, k_up, norm, positions, cos_sin, k, out_loc, out, tokens, heads, eps, k_inverse, s_q, s_latent,
    s_page, s_token, page_size,
    NOPE: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, HALF: tl.constexpr,
    HALF_B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, FP8: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: of BM tokens BN values of one head's content, or behind these the rotated ones; of the
    head that is one too many, BL of their latents."""
    if EARLY and PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block, head, tile = tl.program_id(0) * BM, tl.program_id(1), tl.program_id(2)
    token = (block + tl.arange(0, BM)).to(tl.int64)
    live = token < tokens
    source = q + (token * s_q + head * (NOPE + 2 * HALF))[:, None]
    target = out + ((token * heads + head) * (C + 2 * HALF))[:, None]
    if head == heads:
        within = tile * BL + tl.arange(0, BL)
        own = (block + within).to(tl.int64)
        _store_latents(
            latent, norm, positions, cos_sin, k, out_loc, own, (within < BM) & (own < tokens), eps, k_inverse,
            s_latent, s_page, s_token, page_size, C, CB, HALF, HALF_B, FP8, PDL,
        )  # fmt: skip
    elif tile * BN >= C:
        i = tl.arange(0, HALF_B)[None, :]
        cos, sin = _angles(positions, cos_sin, token, live, HALF, HALF_B)
        _begin(PDL)
        a, b = _rotated(source + NOPE, cos, sin, live, HALF, HALF_B)
        tl.store(target + C + i, a, mask=live[:, None] & (i < HALF))
        tl.store(target + C + HALF + i, b, mask=live[:, None] & (i < HALF))
    else:
        n, c = tl.arange(0, NB), tile * BN + tl.arange(0, BN)[None, :]
        up = k_up + ((head * NOPE + n) * C)[:, None] + c
        w = tl.load(up, mask=(n < NOPE)[:, None] & (c < C), other=0.0)
        _begin(PDL)
        x = tl.load(source + n[None, :], mask=live[:, None] & (n < NOPE)[None, :], other=0.0)
        y = tl.dot(x, w.to(x.dtype), input_precision="ieee")
        tl.store(target + c, y, mask=live[:, None] & (c < C))


@triton.jit
def _values(
    seen, v_up, out, tokens, heads, value, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BN values of one head for BM tokens."""
    if EARLY and PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1)
    token = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    n, c = tl.program_id(2) * BN + tl.arange(0, BN), tl.arange(0, BK)[None, :]
    live, inside = (token < tokens)[:, None], (n < value)[:, None]
    source = seen + ((token * heads + head) * C)[:, None] + c
    up = v_up + ((head * value + n) * C)[:, None] + c
    w = tl.load(up, mask=inside & (c < C), other=0.0)
    _begin(PDL)
    x = tl.load(source, mask=live & (c < C), other=0.0)
    acc = tl.dot(x, tl.trans(w.to(x.dtype)), input_precision="ieee")
    for at in range(BK, C, BK):
        w = tl.load(up + at, mask=inside & (at + c < C), other=0.0)
        x = tl.load(source + at, mask=live & (at + c < C), other=0.0)
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision="ieee")
    to = out + ((token * heads + head) * value)[:, None] + n[None, :]
    tl.store(to, acc, mask=live & (n < value)[None, :])


def _tokens_together(tokens: int, itemsize: int) -> int:
    """How many of them a program of ``queries`` and ``values`` takes."""
    return 16 if itemsize == 4 else min(64, max(16, next_power_of_2(tokens)))


def queries(
    q: Tensor,
    latent: Tensor,
    k_up: Tensor,
    norm: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    k: Tensor,
    out_loc: Tensor,
    k_scale: float = 1.0,
) -> Tensor:
    """See ``ops.latent_queries``; rows of q and of the latent may lie apart."""
    (heads, nope, content), rot, tokens = k_up.shape, cos_sin.shape[1], len(q)
    out = q.new_empty(tokens, heads * (content + rot))
    m = _tokens_together(tokens, q.itemsize)
    tiles = cdiv(content, 64) + 1
    _queries[(cdiv(tokens, m), heads + 1, tiles)](
        q, latent, k_up, norm, positions, cos_sin, k, out_loc, out, tokens, heads, eps, 1 / k_scale,
        q.stride(0), latent.stride(0), k.stride(0), k.stride(1), k.shape[1], NOPE=nope,
        NB=max(16, next_power_of_2(nope)), C=content, CB=next_power_of_2(content),
        HALF=rot // 2, HALF_B=next_power_of_2(rot // 2), BM=m, BN=64,
        BL=next_power_of_2(cdiv(m, tiles)), FP8=k.dtype == torch.float8_e4m3fn, EARLY=tokens <= EARLY,
        num_warps=4, **_pdl(),
    )  # fmt: skip
    return out


def values(seen: Tensor, v_up: Tensor) -> Tensor:
    """See ``ops.latent_values``."""
    (heads, value, content), tokens = v_up.shape, len(seen)
    out = seen.new_empty(tokens, heads * value)
    m = _tokens_together(tokens, seen.itemsize)
    n, k = (32, 1024 // seen.itemsize) if m == 16 else (64, 64)
    _values[(cdiv(tokens, m), heads, cdiv(value, n))](
        seen.contiguous(), v_up, out, tokens, heads, value, C=content, BM=m, BN=n,
        BK=max(16, min(k, next_power_of_2(content))), EARLY=tokens <= EARLY, num_warps=4, **_pdl(),
    )  # fmt: skip
    return out


def decode(
    q: Tensor,
    k: Tensor,
    content: int,
    page_table: Tensor,
    slots: Tensor,
    kv_len: Tensor,
    scale: float,
    splits: int = 1,
    k_scale: float = 1.0,
    shared: int = 1 << 30,
    sinks: Tensor | None = None,
    own: Part | None = None,
) -> Tensor:
    """One query token a row: q ``[R or more, Hq * hd]`` -> ``[as many, Hq * content]``, of which R rows are
    written; k ``[pages, page_size, 1, hd]``. Of quantized pages ``k_scale`` times the stored k is meant.

    Each history is cut into ``splits`` shares (Flash-decoding). ``shared``: bytes of shared memory that a
    block may have. A row with ``kv_len`` 0 gives zeros. ``sinks``: as in ``ops.attention``. ``own``: what k
    has of the tokens, if not all.
    """
    rows, dim, page_size = slots.shape[0], k.shape[3], k.shape[1]
    q = q.contiguous()
    heads = q.shape[1] // dim
    out = q.new_empty(q.shape[0], heads * content)
    several = rows * heads * splits if splits > 1 else 0
    part = q.new_empty(several, content, dtype=torch.float32) if several else out
    part_ml = q.new_empty(several, 2, dtype=torch.float32) if several else out
    cut = decode_cut(dim, content, heads, q.itemsize, shared)
    _decode[(rows, cdiv(heads, cut.m), splits)](
        q, k, page_table, slots, kv_len, q if sinks is None else sinks, out, part, part_ml, _told(own, q),
        k.stride(0), k.stride(1), page_table.stride(0), page_size, heads, splits, scale * k_scale * LOG2E,
        k_scale, C=content, CB=padded(content), R=dim - content, RB=padded(dim - content), M=cut.m, N=cut.n,
        SINKS=sinks is not None, **_ranks(own), num_warps=8 if cut.m > 16 else 4, num_stages=_ahead(cut),
        **_pdl(),
    )  # fmt: skip
    if splits > 1:
        merge(part, part_ml, out, rows, k_scale, own)
    return out


def merge(
    part: Tensor,
    part_ml: Tensor,
    out: Tensor,
    rows: int,
    k_scale: float = 1.0,
    own: Part | None = None,
) -> None:
    """What the heads of ``rows`` have seen of all shares of their histories -> ``out``. Of each share
    ``part`` float32 ``[rows * Hq * splits, content]`` is a sum under weights, and ``part_ml`` the largest
    score, times log2(e), by which they were divided, and the sum of the weights. ``own``: as that of
    ``decode``."""
    content = part.shape[1]
    count = rows * (out.shape[1] // content)
    splits = len(part) // count
    shares = next_power_of_2(splits)
    block = min(padded(content), max(128, 2048 // shares))
    _merge[(count, cdiv(content, block))](
        part, part_ml, out, _told(own, out), splits, k_scale, C=content, BC=block, SPLITS=shares,
        TELLS=own is not None, EARLY=rows <= EARLY, num_warps=4, **_pdl(),
    )  # fmt: skip


def extend(
    q: Tensor,
    k: Tensor,
    content: int,
    page_table: Tensor,
    tiles: Tensor,
    scale: float,
    out: Tensor,
    cut: Cut,
    k_scale: float = 1.0,
    own: Part | None = None,
) -> None:
    """Causal attention of rows with any number of query tokens: q ``[T, Hq * hd]`` -> ``out``
    ``[T, Hq * content]``; ``tiles`` as in ``attention.extend``. ``own``: as that of ``decode``."""
    dim, page_size = k.shape[3], k.shape[1]
    q = q.contiguous()
    heads = q.shape[1] // dim
    _extend[(tiles.shape[0], heads)](
        q, k, page_table, tiles, out, _told(own, out), k.stride(0), k.stride(1), page_table.stride(0),
        page_size, heads, scale * k_scale * LOG2E, k_scale, C=content, CB=padded(content), R=dim - content,
        RB=padded(dim - content), M=cut.m, N=cut.n, **_ranks(own), num_warps=8 if cut.m == 64 else 4,
        num_stages=_ahead(cut),
    )  # fmt: skip


def share(seen: Tensor, told: Tensor, ranks: int, rank: int) -> Tensor:
    """What ``rank`` adds to the attention of each of ``ranks``: ``[ranks * T, Hq / ranks * content]``, where
    each has as many heads, of what all heads have seen of its tokens (``seen`` ``[T, Hq * content]``) and of
    the sums of all ranks (``told`` ``[ranks * T, Hq * 2]``: see ``ops.Part``)."""
    tokens, heads = len(seen), told.shape[1] // 2
    content = seen.shape[1] // heads
    out = seen.new_empty(ranks * tokens, seen.shape[1] // ranks)
    _share[(tokens, cdiv(heads, 8))](
        seen, told, out, tokens, heads, C=content, CB=padded(content), RANKS=ranks, RANK=rank,
        RB=next_power_of_2(ranks), M=8, num_warps=4, **_pdl(),
    )  # fmt: skip
    return out


def _told(own: Part | None, other: Tensor) -> Tensor:
    return other if own is None else own.told


def _ranks(own: Part | None) -> dict[str, int]:
    return {"RANKS": 1, "RANK": 0} if own is None else {"RANKS": own.ranks, "RANK": own.rank}


def _ahead(cut: Cut) -> int:
    """Numbers of pages are read a block before the latents there: a stage more, that takes no memory to speak
    of."""
    return cut.stages + 1 if cut.stages > 1 else 1


def decode_cut(dim: int, content: int, heads: int, size: int, shared: int) -> Cut:
    """As ``extend_cut``, where the query tokens are heads of one row."""
    m = min(MOST_HEADS, max(16, next_power_of_2(heads)))
    return _largest(
        [(m, 32, 2), (m, 16, 2), (16, 32, 2), (16, 16, 2), (16, 16, 1)], dim, content, size, shared
    )


def extend_cut(dim: int, content: int, size: int, shared: int) -> Cut:
    """The largest tiles of a prompt that fit: see ``attention.extend_cut``."""
    cuts = [(64, 32, 2), (32, 32, 2), (32, 16, 2), (16, 16, 2), (16, 16, 1)]
    return _largest(cuts, dim, content, size, shared)


def _largest(cuts: list[tuple[int, int, int]], dim: int, content: int, size: int, shared: int) -> Cut:
    """Queries, blocks of keys for each stage, and weights lie in shared memory."""
    width = padded(content) + padded(dim - content)
    return _fitting(
        [Cut(*cut) for cut in cuts], lambda c: size * (width * (c.m + c.n * c.stages) + c.m * c.n), shared
    )
