# mypy: allow-untyped-defs
"""Rows that guess: what they guess before a step, and how much of it was right after the draw.
The rule is that of ``worker/ngrams.py``, but for how many guesses a row makes. Where a model guesses, the
rows of its own steps, too."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.common import _begin, _pdl, cdiv, next_power_of_2
from sgla.kernels.triton.tokens import TokenTable, _token

HISTORY = 1024  # tokens that a program looks at together
PARTS, WORDS = 16, 2048  # programs that copy a unit, and what one of them moves together
MORE = 2  # guesses of a row than were right in the step before, if not all were
PLACES = 21  # bits of a place in a history (``messages.LONGEST``)


@triton.jit
def _spread(
    slot, known, guessed, most, left, deep, first, slots, starts, where, ends, padding, MOST: tl.constexpr
):
    """The decode rows of a row: of the guesses behind the first ``deep`` each stands beside one of these."""
    i = tl.arange(0, MOST)
    real, own = (i <= guessed) & (left >= 0), i <= most
    end = known + i - tl.where(i > deep, deep, 0)
    tl.store(slots + first + i, tl.where(real, slot, padding), mask=own)
    tl.store(starts + first + i, tl.where(real, known - 1 + i, 0), mask=own)
    tl.store(where + first + i, tl.where(real, slot, padding), mask=own)
    tl.store(ends + first + i, tl.where(real, end, 0), mask=own)


@triton.jit
def _of_others(
    tokens, pages, stride, held, page_size, base, own, known, wanted, others,
    RUN: tl.constexpr, BITS: tl.constexpr, PRIME: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Where in ``others`` the last ``RUN`` tokens came before, behind the numbers of runs, and how many of
    the ``wanted`` tokens are there; see ``worker/others.py: Outputs``."""
    number = tl.zeros([1], tl.uint32)
    for back in tl.static_range(RUN, 0, -1):
        token = tl.load(
            _token(tokens, pages, stride, held, page_size, base, own, known - back),
            mask=known >= RUN,
            other=0,
        )
        number = (number ^ token.to(tl.uint32)) * PRIME
    place = tl.load(others + (number >> (32 - BITS)).to(tl.int32))
    texts = others + (1 << BITS) + place
    before, i = tl.arange(0, RUN) - RUN, tl.arange(0, MOST)
    there = tl.load(texts + before, mask=(place >= RUN) & (before < 0), other=-1)
    last = _token(tokens, pages, stride, held, page_size, base, own, known + before)
    last = tl.load(last, mask=known + before >= 0, other=-2)
    wanted = tl.where(tl.min((there == last).to(tl.int32), 0) > 0, wanted, 0)
    ends = tl.load(texts + i, mask=i < wanted, other=-1) < 0
    return texts, tl.min(tl.where(ends, i, MOST), 0)


@triton.jit(
    do_not_specialize=["rows", "padding"],
    do_not_specialize_on_alignment=["columns", "slots", "starts", "where", "ends"],
)
def _guess(
    columns, rows, tokens, pages, stride, held, page_size, base, computed, limits, trusts, slots, starts,
    where, ends, padding, others, apart, forced, RUN: tl.constexpr, BITS: tl.constexpr, PRIME: tl.constexpr,
    LONGEST: tl.constexpr, SHORTEST: tl.constexpr, PLACES: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot, most = tl.load(columns + row), tl.load(columns + rows + row)
    first = tl.load(columns + 2 * rows + row)
    if most >= 0:
        own = slot.to(tl.int64)
        known = tl.load(computed + slot) + 1
        left = tl.load(limits + slot) - known - 1  # -1: it has all its tokens, and the host does not know yet
        wanted = tl.minimum(tl.minimum(most, left), tl.load(trusts + slot))
        best = 0
        for begin in range(0, tl.where(wanted > 0, known, 0), BLOCK):
            end = begin + tl.arange(0, BLOCK)
            same, alike = end < known, tl.zeros([BLOCK], tl.int32)
            for back in tl.static_range(1, LONGEST + 1):
                place = _token(tokens, pages, stride, held, page_size, base, own, end - back)
                there = tl.load(place, mask=(end >= back) & (end < known), other=-1)
                place = _token(tokens, pages, stride, held, page_size, base, own, known - back)
                same = same & (there == tl.load(place, mask=known >= back, other=-2))
                alike += same.to(tl.int32)
            best = tl.maximum(best, tl.max(tl.where(alike >= SHORTEST, (alike << PLACES) + end, 0), 0))
        end, i = best & ((1 << PLACES) - 1), tl.arange(0, MOST)
        guessed = tl.where(best > 0, wanted, 0)
        wanted = tl.where((best >> PLACES < LONGEST) & (tl.load(apart + slot) == 0), wanted, 0)
        found, count = _of_others(
            tokens, pages, stride, held, page_size, base, own, known, wanted, others, RUN, BITS, PRIME, MOST
        )
        place = _token(tokens, pages, stride, held, page_size, base, own, end + i % (known - end))
        token = tl.load(place, mask=i < guessed, other=0)
        token = tl.where(count > 0, tl.load(found + i, mask=i < count, other=0), token)
        guessed = tl.where(count > 0, count, guessed)
        # What its grammar forces, if the text has gone on as was thought.
        run = forced + own * (MOST + 2)
        ahead, size = known - tl.load(run), tl.load(run + 1)
        behind = tl.load(run + 2 + i, mask=i < size, other=0)
        came = (i < ahead) & (i < size)
        place = _token(tokens, pages, stride, held, page_size, base, own, known - ahead + i)
        other = came & (behind != tl.load(place, mask=came, other=0))
        there = (ahead >= 0) & (ahead < size) & (tl.max(other.to(tl.int32), 0) == 0)
        count = tl.where(there, tl.minimum(size - ahead, tl.minimum(most, left)), 0)
        token = tl.where(count > 0, tl.load(run + 2 + ahead + i, mask=i < count, other=0), token)
        guessed = tl.where(count > 0, count, guessed)
        tl.store(
            _token(tokens, pages, stride, held, page_size, base, own, known + i), token, mask=i < guessed
        )
        _spread(slot, known, guessed, most, left, MOST, first, slots, starts, where, ends, padding, MOST)


@triton.jit(
    do_not_specialize=["rows", "padding", "deep"],
    do_not_specialize_on_alignment=["columns", "slots", "starts", "where", "ends"],
)
def _place(
    columns, rows, computed, limits, slots, starts, where, ends, padding, deep, MOST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot, most = tl.load(columns + row), tl.load(columns + rows + row)
    first = tl.load(columns + 2 * rows + row)
    if most >= 0:
        known = tl.load(computed + slot) + 1
        left = tl.load(limits + slot) - known - 1
        guessed = tl.minimum(most, left)
        _spread(slot, known, guessed, most, left, deep, first, slots, starts, where, ends, padding, MOST)


@triton.jit(
    do_not_specialize=["rows"], do_not_specialize_on_alignment=["columns", "ends", "reads", "writes", "runs"]
)
def _link(columns, rows, ends, reads, writes, runs, MOST: tl.constexpr):
    row = tl.program_id(0)
    most, first = tl.load(columns + rows + row), tl.load(columns + 2 * rows + row)
    own, spare = tl.load(columns + 3 * rows + row), tl.load(columns + 4 * rows + row)
    if most >= 0:
        i = tl.arange(0, MOST)
        mine = i <= most
        count = tl.sum((tl.load(ends + first + i, mask=mine, other=0) > 0).to(tl.int32), 0)
        tl.store(reads + first + i, tl.where((i == 0) & (count > 0), own, 0), mask=mine)
        write = tl.where(i == count - 1, own, tl.where(i < count, spare + i, 0))
        tl.store(writes + first + i, write, mask=mine)
        tl.store(
            runs + first + i, tl.where(i == 0, tl.maximum(count, 1), (i >= count).to(tl.int32)), mask=mine
        )


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["columns", "sources"])
def _go_back(columns, rows, sources, memory, places, BLOCK: tl.constexpr):
    """One program: a part of the units of a tensor."""
    row, tensor = tl.program_id(0), tl.program_id(1)
    source = tl.load(sources + row).to(tl.int64)
    if source > 0:
        target = tl.load(columns + 3 * rows + row).to(tl.int64)
        units, words = memory + tl.load(places + 2 * tensor), tl.load(places + 2 * tensor + 1)
        for begin in range(tl.program_id(2) * BLOCK, words.to(tl.int32), tl.num_programs(2) * BLOCK):
            i = begin + tl.arange(0, BLOCK)
            kept = tl.load(units + source * words + i, mask=i < words)
            tl.store(units + target * words + i, kept, mask=i < words)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots", "starts", "ends", "told"])
def _tell(
    slots, starts, ends, count, tokens, pages, stride, held, page_size, base, told, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    slot, start = tl.load(slots + i, mask=live, other=0), tl.load(starts + i, mask=live, other=0)
    end = tl.load(ends + i, mask=live, other=0)
    place = _token(tokens, pages, stride, held, page_size, base, slot.to(tl.int64), start)
    tl.store(told + i, tl.load(place, mask=end > 0, other=0), mask=live)
    tl.store(told + count + i, end, mask=live)


@triton.jit(do_not_specialize=["ahead", "padding"])
def _go_on(
    rows, most, leaves, computed, limits, floors, ahead, slots, starts, ends, beside, live, padding,
    SHIFT: tl.constexpr, WIDTH: tl.constexpr, LEAVES: tl.constexpr, LIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(rows + row)
    known = tl.load(computed + slot) + 1
    deep, left = tl.load(most + row), tl.load(limits + slot) - known - 1
    wanted = tl.minimum(deep, left)
    if LEAVES:
        leaf = (ahead < tl.load(leaves + row)) & (deep + ahead < left)
        tl.store(beside + row, tl.where(leaf, known + deep + ahead, 0))
    i = tl.arange(0, BLOCK)
    start = known - SHIFT - WIDTH + ahead + i
    real, own = (wanted > ahead) & (start >= tl.load(floors + slot)), i < WIDTH
    tl.store(slots + row * WIDTH + i, tl.where(real, slot, padding), mask=own)
    tl.store(starts + row * WIDTH + i, tl.where(real, start, 0), mask=own)
    if LIVE:
        tl.store(live + row * WIDTH + i, real.to(tl.int32), mask=own)
    tl.store(ends + row, tl.where(wanted > ahead, known + ahead, 0))


@triton.jit(do_not_specialize=["padding"])
def _block(
    rows, most, computed, limits, slots, starts, until, where, ends, padding, COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(rows + row)
    known = tl.load(computed + slot) + 1
    wanted = tl.minimum(tl.load(most + row), tl.load(limits + slot) - known - 1)
    i = tl.arange(0, BLOCK)
    real, own, first = (i <= wanted) & (wanted > 0), i <= COUNT, row * (COUNT + 1)
    tl.store(slots + first + i, tl.where(real, slot, padding), mask=own)
    tl.store(starts + first + i, tl.where(real, known - 1 + i, 0), mask=own)
    tl.store(until + first + i, tl.where(real, known + wanted, 1), mask=own)
    guess, first = own & (i > 0), row * COUNT - 1
    tl.store(where + first + i, tl.where(real, slot, padding), mask=guess)
    tl.store(ends + first + i, tl.where(real, known - 1 + i, 0), mask=guess)


@triton.jit(do_not_specialize=["count", "padding"])
def _look_back(
    rows, back, count, computed, floors, slots, starts, live, padding, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = i < count
    slot, far = tl.load(rows + i, mask=own, other=0), tl.load(back + i, mask=own, other=0)
    start = tl.load(computed + slot, mask=own, other=0) - SHIFT - far
    real = (far > 0) & (start >= tl.load(floors + slot, mask=own, other=0))
    tl.store(slots + i, tl.where(real, slot, padding), mask=own)
    tl.store(starts + i, tl.where(real, start, 0), mask=own)
    tl.store(live + i, real.to(tl.int32), mask=own)


@triton.jit(
    do_not_specialize=["rows", "deep"],
    do_not_specialize_on_alignment=["columns", "ids", "out", "ends", "counts", "moves"],
)
def _take_leaf(
    columns, rows, ids, out, ends, tokens, pages, stride, held, page_size, base, computed, counts, moves,
    deep, MOST: tl.constexpr,
):  # fmt: skip
    """``_accept`` of a row behind whose first ``deep`` guesses stand others, one beside each of the first."""
    row = tl.program_id(0)
    slot, first = tl.load(columns + row), tl.load(columns + 2 * rows + row)
    position, most = tl.load(ends + first), tl.load(columns + rows + row)
    i = tl.arange(0, MOST)
    there = tl.load(ends + first + 1 + i, mask=i < most, other=0)
    guessed = tl.sum((there > 0).to(tl.int32), 0)
    chain = tl.minimum(guessed, deep)
    draft = tl.load(ids + first + 1 + i, mask=i < chain, other=0)
    drawn = tl.load(out + first + i, mask=i <= chain, other=0)
    right = tl.min(tl.where((i < chain) & (drawn != draft), i, chain), 0)
    leaf = tl.where(right < chain, 1 + deep + right, MOST)
    beside = tl.load(ids + first + leaf, mask=leaf <= guessed, other=-3)
    taken = tl.where(beside == tl.load(out + first + right), leaf, 0)
    more = (taken > 0).to(tl.int32)
    tl.store(counts + row, tl.where(position > 0, right + 1 + more, 0))
    tl.store(counts + rows + row, chain)
    tl.store(counts + 2 * rows + row, taken)
    tl.store(computed + slot, position + right + more, mask=position > 0)
    tl.store(moves + row, tl.where(taken > 0, position + deep + right, 0))
    tl.store(moves + rows + row, position + right)
    own = slot.to(tl.int64)
    place = _token(tokens, pages, stride, held, page_size, base, own, position + i)
    tl.store(place, tl.maximum(drawn, 0), mask=i <= tl.where(position > 0, right, -1))
    place = _token(tokens, pages, stride, held, page_size, base, own, position + right + 1)
    last = tl.load(out + first + taken, mask=taken > 0, other=0)
    tl.store(place, tl.maximum(last, 0), mask=taken > 0)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["columns", "moves"])
def _move_kv(columns, rows, moves, page_table, table_stride, page_size, memory, places, BLOCK: tl.constexpr):
    """One program: what a tensor has of a token."""
    row, tensor = tl.program_id(0), tl.program_id(1)
    source, target = tl.load(moves + row), tl.load(moves + rows + row)
    if source > 0:
        pages = page_table + tl.load(columns + row).to(tl.int64) * table_stride
        own = places + 6 * tensor
        begin, page_stride, token_stride = memory + tl.load(own), tl.load(own + 1), tl.load(own + 2)
        head_stride, heads, words = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
        there = begin + tl.load(pages + source // page_size) * page_stride + source % page_size * token_stride
        here = begin + tl.load(pages + target // page_size) * page_stride + target % page_size * token_stride
        for at in range(0, (words * heads).to(tl.int32), BLOCK):
            i = at + tl.arange(0, BLOCK)
            inside = i < words * heads
            word = i // words * head_stride + i % words
            tl.store(here + word, tl.load(there + word, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["columns", "moves"])
def _move_ring(columns, rows, moves, ring, width, REACH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    source, target = tl.load(moves + row), tl.load(moves + rows + row)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = ring + tl.load(columns + row).to(tl.int64) * REACH * width + i
    inside = i < tl.where(source > 0, width, 0)
    kept = tl.load(own + source % REACH * width, mask=inside)
    tl.store(own + target % REACH * width, kept, mask=inside)


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["columns", "ids", "out", "ends", "counts", "sources"],
)
def _accept(
    columns, rows, ids, out, ends, computed, trusts, counts, sources, STATES: tl.constexpr,
    MOST: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """A row whose step has room for guesses pays for those that it does not make, too, but for their
    attention: so it makes twice as many when all are right, and ``MORE`` than were right else."""
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
    if STATES:
        wrong_one = (position > 0) & (right < guessed)
        tl.store(sources + row, tl.where(wrong_one, tl.load(columns + 4 * rows + row) + right, 0))
    trust = tl.load(trusts + slot)
    longer = tl.minimum(2 * trust, MOST)
    tl.store(trusts + slot, tl.where(right < guessed, right + MORE, tl.where(guessed > 0, longer, trust)))


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _ring(
    values, stride, ring, slots, positions, width,
    REACH: tl.constexpr, INTO: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(slots + row).to(tl.int64) * REACH + tl.maximum(tl.load(positions + row), 0) % REACH
    here, there = values + row * stride + i, ring + place * width + i
    if INTO:
        tl.store(there, tl.load(here, mask=i < width), mask=i < width)
    else:
        tl.store(here, tl.load(there, mask=i < width), mask=i < width)


class Others(NamedTuple):
    """What rows know beside their own texts. ``answers`` int32[*]: ``places`` and then ``tokens`` of
    ``worker/others.py: Outputs``, whose runs have so many tokens, and numbers by this ``numbering`` (tokens,
    bits, factor); ``apart`` int32 of each slot: it sees none of these. ``forced`` int32[slots, most + 2]: a
    position of the slot, and how many tokens a grammar forces from there on, then these."""

    answers: Tensor
    apart: Tensor
    forced: Tensor
    numbering: tuple[int, int, int]


def guess(
    columns: Tensor,
    tokens: TokenTable,
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
    others: Others,
) -> None:
    """Fill in the decode rows that R rows with guesses are made of.

    ``columns`` int32[3, R]: slot, guesses at most (-1: the row does not guess), and the number of its first
    decode row. The guesses go into ``tokens``, behind what is known. Int32 of each slot: ``computed``, how
    many have KV; ``limits``, how many there may be; ``trusts``, how many may be guessed.
    Int32 of each decode row: slot and position of its input (``slots``, ``starts``) and of what it samples
    (``where``, ``ends``). One without a guess reads the first token of the slot ``padding`` and samples
    nothing (end 0). ``lengths``: most and fewest tokens that must have come before; ``most``: decode rows of
    a row, a power of two. What a grammar forces goes first, then what stands behind the longest run, then
    what ``others`` were answered."""
    longest, shortest = lengths
    run, bits, prime = others.numbering
    rows = columns.shape[1]
    _guess[(rows,)](
        columns, rows, *tokens.arguments, computed, limits, trusts, slots, starts, where, ends,
        padding, others.answers, others.apart, others.forced, RUN=run, BITS=bits, PRIME=prime,
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
    sources: Tensor | None = None,
) -> None:
    """After the draw: ``counts`` int32[2, R] says how many tokens each row brings, and how many it guessed;
    ``computed`` and ``trusts`` go on. ``ids`` and ``out``: input and token of each decode row; ``sources``
    int32[R]: the unit that a row's state is to be taken from, 0: it has it; others as in ``guess`` and
    ``link``."""
    rows, states = columns.shape[1], sources is not None
    _accept[(rows,)](
        columns, rows, ids, out, ends, computed, trusts, counts, sources if states else counts, STATES=states,
        MOST=most, MORE=MORE, num_warps=1,
    )  # fmt: skip


def take_leaf(
    columns: Tensor,
    ids: Tensor,
    out: Tensor,
    ends: Tensor,
    tokens: TokenTable,
    computed: Tensor,
    counts: Tensor,
    moves: Tensor,
    deep: int,
    most: int,
) -> None:
    """``accept`` in a step with leaves: of the guesses of a row the first ``deep`` follow each other, and the
    others are second guesses of the first places, in their order (``place``). Where the first wrong guess has
    one beside it that is right, the row brings that and what was drawn behind it.

    ``counts`` int32[3, R]: as in ``accept``, guesses of the chain alone; then which decode row of the row has
    drawn the last token, 0: the one behind those before. ``moves`` int32[2, R]: the place of the leaf that
    counts (0: none does), and the one that it takes now (``move``). Rows of one place draw into the same
    place of ``tokens``, so what counts is written there once more."""
    rows = columns.shape[1]
    _take_leaf[(rows,)](
        columns, rows, ids, out, ends, *tokens.arguments, computed, counts, moves, deep, MOST=most,
        num_warps=1,
    )  # fmt: skip


def move(
    columns: Tensor, moves: Tensor, page_table: Tensor, page_size: int, memory: Tensor, places: Tensor
) -> None:
    """Copy what layers keep of leaves to where their tokens stand now: ``moves`` of ``take_leaf``.
    ``memory``: integers, among which all pages are; ``places`` int64[N, 6]: of each of N tensors, where in
    there it begins, how far pages, tokens and heads are apart, how many heads there are, and how many
    integers one of a token takes."""
    rows = columns.shape[1]
    _move_kv[rows, len(places)](
        columns, rows, moves, page_table, page_table.stride(0), page_size, memory, places, BLOCK=512,
        num_warps=4,
    )  # fmt: skip


def move_hidden(columns: Tensor, moves: Tensor, ring: Tensor) -> None:
    """The same for ``ring`` (``keep``)."""
    rows, width = columns.shape[1], ring.shape[2]
    _move_ring[rows, cdiv(width, 1024)](
        columns, rows, moves, ring, width, REACH=ring.shape[1], BLOCK=1024, num_warps=4
    )


def link(columns: Tensor, ends: Tensor, reads: Tensor, writes: Tensor, runs: Tensor, most: int) -> None:
    """Decode rows of one row go on from each other's states: ``reads``, ``writes`` and ``runs`` int32 of each
    decode row, see ``gpu/states.py: DeviceStates``. ``columns`` int32[5, R]: as in ``guess``, which has set
    ``ends``; then the row's own unit, which the last of its decode rows leaves its state in, and the first of
    the units for the others."""
    rows = columns.shape[1]
    _link[(rows,)](columns, rows, ends, reads, writes, runs, MOST=most, num_warps=1)


def go_back(columns: Tensor, sources: Tensor, memory: Tensor, places: Tensor) -> None:
    """Copy the states in the units ``sources`` int32[R], where that is not 0, to the rows' own. ``memory``:
    one dimension, in which all units lie; ``places`` int64[N, 2]: of each of N tensors, where it begins in
    there and how much a unit takes."""
    rows = columns.shape[1]
    _go_back[rows, len(places), PARTS](
        columns, rows, sources, memory, places, BLOCK=WORDS, num_warps=8
    )  # fmt: skip


def place(
    columns: Tensor,
    computed: Tensor,
    limits: Tensor,
    slots: Tensor,
    starts: Tensor,
    where: Tensor,
    ends: Tensor,
    padding: int,
    most: int,
    deep: int,
) -> None:
    """``guess`` where a model has put all that may be guessed into the token table. The first ``deep``
    guesses of a row follow each other. Those behind are leaves: each samples what comes behind the second
    guess of a place, the first for the first place, and stands (``starts``) behind all guesses before it."""
    rows = columns.shape[1]
    _place[(rows,)](
        columns, rows, computed, limits, slots, starts, where, ends, padding, deep, MOST=most, num_warps=1
    )


def tell(slots: Tensor, starts: Tensor, ends: Tensor, tokens: TokenTable, told: Tensor) -> None:
    """``told`` int32[2, N], pinned: of the first N decode rows the token that each reads, and ``ends``; see
    ``guess``, which comes before."""
    count = told.shape[1]
    _tell[(cdiv(count, 128),)](slots, starts, ends, count, *tokens.arguments, told, BLOCK=128, num_warps=1)


def go_on(
    rows: Tensor,
    most: Tensor,
    computed: Tensor,
    limits: Tensor,
    floors: Tensor,
    ahead: int,
    shift: int,
    slots: Tensor,
    starts: Tensor,
    ends: Tensor,
    padding: int,
    leaves: tuple[Tensor, Tensor] | None = None,
    live: Tensor | None = None,
) -> None:
    """Fill in the step of a model that guesses ``ahead`` tokens behind the next one, of the slots ``rows``
    int32[R], which may guess ``most`` int32[R] tokens.

    Each reads as many tokens as ``slots`` and ``starts`` int32[R * width] have room for, up to the one before
    that which it guesses, and ``shift`` further back, but none before ``floors`` int32[slots]. Where a row
    does not guess so far, or has no such token, the first token of the slot ``padding`` is read. ``ends``
    int32[R]: the position of the guess, 0: there is none. ``leaves``: how many second guesses each row has,
    and where the one for this place goes (0: there is none), int32[R] each. ``live`` int32[R * width]: 1, or
    0 for the padding."""
    count, width = len(rows), len(slots) // len(rows)
    given, beside = leaves or (most, ends)
    _go_on[(count,)](
        rows, most, given, computed, limits, floors, ahead, slots, starts, ends, beside,
        slots if live is None else live, padding, SHIFT=shift, WIDTH=width, LEAVES=leaves is not None,
        LIVE=live is not None, BLOCK=next_power_of_2(width), num_warps=1,
    )  # fmt: skip


def block(
    rows: Tensor,
    most: Tensor,
    computed: Tensor,
    limits: Tensor,
    slots: Tensor,
    starts: Tensor,
    until: Tensor,
    where: Tensor,
    ends: Tensor,
    padding: int,
) -> None:
    """Fill in the tokens of blocks of the slots ``rows`` int32[R], which may guess ``most`` int32[R] tokens:
    ``slots``, ``starts`` and ``until`` int32[R * (G + 1)], slot and place of the pending token and of a guess
    each, and how much of the slot it sees; ``where`` and ``ends`` int32[R * G], slot and place of a guess.
    Where a row does not guess so far, the first token of the slot ``padding`` is read, and ``ends`` is 0."""
    count = len(ends) // len(rows)
    _block[(len(rows),)](
        rows, most, computed, limits, slots, starts, until, where, ends, padding, COUNT=count,
        BLOCK=next_power_of_2(count + 1), num_warps=1,
    )  # fmt: skip


def look_back(
    rows: Tensor,
    back: Tensor,
    computed: Tensor,
    floors: Tensor,
    shift: int,
    slots: Tensor,
    starts: Tensor,
    live: Tensor,
    padding: int,
) -> None:
    """``slots`` and ``starts`` int32[N] of tokens of the slots ``rows`` int32[N], ``back`` int32[N] before
    the pending one and ``shift`` further; those of ``padding`` where ``back`` is 0, or that is before
    ``floors`` int32[slots]: ``live`` int32[N] is 0 there, else 1."""
    count = len(rows)
    _look_back[(cdiv(count, 128),)](
        rows, back, count, computed, floors, slots, starts, live, padding, SHIFT=shift, BLOCK=128, num_warps=1
    )


def keep(values: Tensor, ring: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Put ``values`` [N, width] of tokens at ``positions`` int32[N] of ``slots`` int32[N] into ``ring``
    [slots, reach, width], which has the latest ``reach`` of each slot."""
    _move(values, ring, slots, positions, True)


def take(values: Tensor, ring: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Fill ``values`` with what ``keep`` has put there."""
    _move(values, ring, slots, positions, False)


def _move(values: Tensor, ring: Tensor, slots: Tensor, positions: Tensor, into: bool) -> None:
    count, width = values.shape
    _ring[(count, cdiv(width, 1024))](
        values, values.stride(0), ring, slots, positions, width,
        REACH=ring.shape[1], INTO=into, BLOCK=1024, num_warps=4, **_pdl(),
    )  # fmt: skip
