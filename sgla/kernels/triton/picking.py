# mypy: allow-untyped-defs
"""Scores of an indexer (DSA, arXiv 2512.02556) in Triton, as numbers that can be ordered at once with the
places they belong to. Lengths and page tables are read on the device, as in ``attention.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.attention import padded
from sgla.kernels.triton.common import cdiv, next_power_of_2

LAST = (1 << 31) - 1
BLOCK = 64  # places that a program looks at


@triton.jit
def _ranks(
    q, weights, k, page_table, slots, lengths, out, s_page, s_token, table_stride, page_size, heads, width,
    D: tl.constexpr, DB: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program: N places in the history of a token."""
    token, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    length = tl.load(lengths + token)
    rank = tl.full([N], -0x8000000000000000, dtype=tl.int64)  # of what is not there
    if tl.program_id(1) * N < length:
        h, d, live = tl.arange(0, H), tl.arange(0, DB), n < length
        pages = page_table + tl.load(slots + token).to(tl.int64) * table_stride
        page = tl.load(pages + n // page_size, mask=live, other=0).to(tl.int64)
        place = page * s_page + (n % page_size) * s_token
        at = (token * heads + h)[:, None] * D + d[None, :]
        queries = tl.load(q + at, mask=(h < heads)[:, None] & (d < D)[None, :], other=0.0)
        there = live[None, :] & (d < D)[:, None]
        keys = tl.load(k + place[None, :] + d[:, None], mask=there, other=0.0).to(queries.dtype)
        weight = tl.load(weights + token * heads + h, mask=h < heads, other=0.0)
        products = tl.maximum(tl.dot(queries, keys, input_precision="ieee"), 0.0)
        score = tl.sum(products * weight[:, None], 0) + 0.0  # -0 is no other number
        bits = score.to(tl.int32, bitcast=True)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers they are in the order of the scores
        rank = tl.where(live, (order.to(tl.int64) << 32) | (0x7FFFFFFF - n).to(tl.int64), rank)
    tl.store(out + token * width + n, rank, mask=n < width)


def ranks(
    q: Tensor, weights: Tensor, k: Tensor, page_table: Tensor, slots: Tensor, lengths: Tensor, width: int
) -> Tensor:
    """int64 ``[T, width]`` of the places in each token's history, the higher the better: by score, then the
    earliest. q ``[T, H, i]``, weights float32 ``[T, H]``, k ``[pages, page_size, 1, i]``; the token's row is
    in ``slots`` int32[T], and it sees ``lengths`` int32[T] places."""
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, width, dtype=torch.int64, device=q.device)
    _ranks[(tokens, cdiv(width, BLOCK))](
        q.contiguous(), weights.contiguous(), k, page_table, slots, lengths, out, k.stride(0), k.stride(1),
        page_table.stride(0), k.shape[1], heads, width,
        D=dim, DB=padded(dim), H=max(16, next_power_of_2(heads)), N=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def places(ranks: Tensor) -> Tensor:
    """int32, which place has each of ``ranks``; -1: none."""
    place = LAST - (ranks & LAST)
    return torch.where(ranks == torch.iinfo(torch.int64).min, -1, place).to(torch.int32)
