# mypy: allow-untyped-defs
"""Rows that guess: their guesses before a step, and how many of them were right behind it. The rule is that of
``worker/drafts.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HISTORY = 1024  # tokens that a program looks at together
PLACES = 21  # bits of a place in a history (``messages.LONGEST``)


@triton.jit(
    do_not_specialize=["rows", "padding"],
    do_not_specialize_on_alignment=["columns", "slots", "starts", "where", "ends"],
)
def _guess(
    columns, rows, tokens, stride, computed, limits, trusts, slots, starts, where, ends, padding,
    LONGEST: tl.constexpr, SHORTEST: tl.constexpr, PLACES: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot, most = tl.load(columns + row), tl.load(columns + rows + row)
    first = tl.load(columns + 2 * rows + row)
    if most >= 0:
        history = tokens + slot.to(tl.int64) * stride
        known = tl.load(computed + slot) + 1
        left = tl.load(limits + slot) - known - 1  # -1: it has all its tokens, and the host does not know yet
        wanted = tl.minimum(tl.minimum(most, left), tl.load(trusts + slot))
        best = 0
        for begin in range(0, tl.where(wanted > 0, known, 0), BLOCK):
            end = begin + tl.arange(0, BLOCK)
            same, alike = end < known, tl.zeros([BLOCK], tl.int32)
            for back in tl.static_range(1, LONGEST + 1):
                there = tl.load(history + end - back, mask=same & (end >= back), other=-1)
                same = same & (there == tl.load(history + known - back, mask=known >= back, other=-2))
                alike += same.to(tl.int32)
            best = tl.maximum(best, tl.max(tl.where(alike >= SHORTEST, (alike << PLACES) + end, 0), 0))
        end = best & ((1 << PLACES) - 1)
        guessed = tl.where(best > 0, wanted, 0)
        i = tl.arange(0, MOST)
        token = tl.load(history + end + i % (known - end), mask=i < guessed, other=0)
        tl.store(history + known + i, token, mask=i < guessed)
        real, own = (i <= guessed) & (left >= 0), i <= most
        tl.store(slots + first + i, tl.where(real, slot, padding), mask=own)
        tl.store(starts + first + i, tl.where(real, known - 1 + i, 0), mask=own)
        tl.store(where + first + i, tl.where(real, slot, padding), mask=own)
        tl.store(ends + first + i, tl.where(real, known + i, 0), mask=own)


@triton.jit(
    do_not_specialize=["rows"], do_not_specialize_on_alignment=["columns", "ids", "out", "ends", "counts"]
)
def _accept(columns, rows, ids, out, ends, computed, trusts, counts, MOST: tl.constexpr):
    row = tl.program_id(0)
    slot, most = tl.load(columns + row), tl.load(columns + rows + row)
    first = tl.load(columns + 2 * rows + row)
    position = tl.load(ends + first)
    i = tl.arange(0, MOST)
    there = tl.load(ends + first + 1 + i, mask=i < most, other=0)
    guessed = tl.sum((there > 0).to(tl.int32), 0)
    draft = tl.load(ids + first + 1 + i, mask=i < guessed, other=0)
    wrong = (i < guessed) & (tl.load(out + first + i, mask=i < guessed, other=0) != draft)
    right = tl.min(tl.where(wrong, i, guessed), 0)
    tl.store(counts + row, tl.where(position > 0, right + 1, 0))
    tl.store(counts + rows + row, guessed)
    tl.store(computed + slot, position + right, mask=position > 0)
    trust = tl.load(trusts + slot)
    trust = tl.where(right < guessed, tl.maximum(right, 1), trust + (guessed > 0).to(tl.int32))
    tl.store(trusts + slot, trust)


def guess(
    columns: Tensor,
    tokens: Tensor,
    computed: Tensor,
    limits: Tensor,
    trusts: Tensor,
    slots: Tensor,
    starts: Tensor,
    where: Tensor,
    ends: Tensor,
    padding: int,
    lengths: tuple[int, int],
    most: int,
) -> None:
    """Fill in the rows of one token that each of R rows may verify.

    ``columns`` int32[3, R]: slot, guesses at most (-1: the row is as it is), and which row of one token is its
    first. By slot: ``tokens`` int32[slots, *], into which the guesses go behind what is known; ``computed``,
    the tokens with KV; ``limits``, the tokens it may have; ``trusts``, the guesses it may have. Of each row of
    one token: ``slots`` and ``starts``, those of its input; ``where`` and ``ends``, of what it samples. Those
    that are not needed are the first of the slot ``padding``, and sample nothing (end 0). ``lengths``: the most
    and the fewest tokens that have come before."""
    longest, shortest = lengths
    rows = columns.shape[1]
    _guess[(rows,)](
        columns, rows, tokens, tokens.stride(0), computed, limits, trusts, slots, starts, where, ends, padding,
        LONGEST=longest, SHORTEST=shortest, PLACES=PLACES, MOST=most, BLOCK=HISTORY, num_warps=4,
    )  # fmt: skip


def accept(
    columns: Tensor,
    ids: Tensor,
    out: Tensor,
    ends: Tensor,
    computed: Tensor,
    trusts: Tensor,
    counts: Tensor,
    most: int,
) -> None:
    """Behind the draw: ``counts`` int32[2, R] tells how many tokens each row of ``columns`` brings, and how many
    it had guessed; ``computed`` and ``trusts`` go on. Of each row of one token: ``ids``, its input, and ``out``,
    what it has drawn; ``ends`` as in ``guess``."""
    rows = columns.shape[1]
    _accept[(rows,)](columns, rows, ids, out, ends, computed, trusts, counts, MOST=most, num_warps=1)
