# mypy: allow-untyped-defs
"""How layers read and write several residual streams, in Triton: see ``kernels/hyper.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.common import cdiv

TOGETHER = 8  # tokens of a program


@triton.jit
def _weights(
    x, scale, base, out, tokens, iterations, eps, N: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr
):
    """One program: BT tokens."""
    t, i, j = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, N), tl.arange(0, N)
    live = t < tokens
    line = t.to(tl.int64)[:, None] * WIDTH + i[None, :]
    reads = tl.load(x + line, mask=live[:, None], other=0.0) * tl.load(scale) + tl.load(base + i)[None, :]
    tl.store(out + line, tl.sigmoid(reads) + eps, mask=live[:, None])
    writes = tl.load(x + N + line, mask=live[:, None], other=0.0) * tl.load(scale + 1)
    writes += tl.load(base + N + i)[None, :]
    tl.store(out + N + line, 2 * tl.sigmoid(writes), mask=live[:, None])
    at = 2 * N + i[:, None] * N + j[None, :]
    square = t.to(tl.int64)[:, None, None] * WIDTH + at[None]
    there = live[:, None, None] & (at >= 0)[None]
    mixed = tl.load(x + square, mask=there, other=0.0) * tl.load(scale + 2) + tl.load(base + at)[None]
    mixed = tl.exp(mixed - tl.max(mixed, 2)[:, :, None])
    mixed = mixed / tl.sum(mixed, 2)[:, :, None] + eps
    mixed = mixed / (tl.sum(mixed, 1)[:, None, :] + eps)
    for _ in range(1, iterations):
        mixed = mixed / (tl.sum(mixed, 2)[:, :, None] + eps)
        mixed = mixed / (tl.sum(mixed, 1)[:, None, :] + eps)
    tl.store(out + square, mixed, mask=there)


def weights(x: Tensor, scale: Tensor, base: Tensor, streams: int, iterations: int, eps: float) -> Tensor:
    """See ``kernels.hyper.stream_weights``; ``streams`` is a power of two."""
    out, tokens = torch.empty_like(x), len(x)
    _weights[(cdiv(tokens, TOGETHER),)](
        x.contiguous(), scale, base, out, tokens, iterations, eps, N=streams, WIDTH=x.shape[1], BT=TOGETHER,
        num_warps=1,
    )  # fmt: skip
    return out
