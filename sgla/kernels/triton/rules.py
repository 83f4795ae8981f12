# mypy: allow-untyped-defs
"""What requests ask to be done to their logits, by slot:
see ``sampling/device_rules.py``, which writes the records.

A record is int32[*]: HEAD numbers, then ENTRIES tokens and as many biases (their bits), then where WORDS
words begin and where the last one ends, then their tokens. A program reads the record of its row's slot, so a
launch needs nothing from the host. Sums are rounded as on the CPU: no multiplication is fused with an
addition.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.common import cdiv
from sgla.kernels.triton.tokens import TokenTable, _token

# Numbers at the beginning of a record. UNTIL: the position before which stop tokens are banned; COUNTED: 1 +
# the first position that counts for penalties; LIMIT: 1 + tokens of reasoning; NGRAM: tokens in a row that do
# not come twice. The last three are 0 where there is none.
ENTRIES = tl.constexpr(0)
WORDS = tl.constexpr(1)
PROMPT = tl.constexpr(2)
UNTIL = tl.constexpr(3)
COUNTED = tl.constexpr(4)
REPETITION = tl.constexpr(5)
FREQUENCY = tl.constexpr(6)
PRESENCE = tl.constexpr(7)
LIMIT = tl.constexpr(8)
OPEN = tl.constexpr(9)
CLOSE = tl.constexpr(10)
OPENED = tl.constexpr(11)
NGRAM = tl.constexpr(12)
HEAD = tl.constexpr(13)

SEEN = tl.constexpr(1 << 30)  # in a count: the token is in the prompt
FALL = tl.constexpr(1e4)  # ``sampling/rules.py: FALL``
HISTORY = 1024  # tokens of a history that a program looks at, or looks at together
CHUNK = 4096  # logits
SOME = 64  # words that a program compares
DEEP = 16  # tokens of each that it compares together


@triton.jit
def _float(pointer):
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["slots", "positions"])
def _count(
    tokens, pages, stride, held, page_size, base, slots, positions, records, width, counts, vocab, first,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    slot = tl.load(slots + first + n).to(tl.int64)
    record = records + slot * width
    counted = tl.load(record + COUNTED)
    if counted > 0:
        position, prompt = tl.load(positions + first + n), tl.load(record + PROMPT)
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        token = tl.load(
            _token(tokens, pages, stride, held, page_size, base, slot, i), mask=i < position, other=0
        )
        at = counts + n.to(tl.int64) * vocab + token
        tl.atomic_or(at, SEEN, mask=(i >= counted - 1) & (i < prompt) & (i < position), sem="relaxed")
        tl.atomic_add(at, 1, mask=(i >= prompt) & (i < position), sem="relaxed")


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["slots"])
def _penalize(logits, slots, records, width, counts, vocab, first, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    record = records + tl.load(slots + first + n).to(tl.int64) * width
    if tl.load(record + COUNTED) > 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = counts + n.to(tl.int64) * vocab + i
        found = tl.load(place, mask=i < vocab, other=0)
        seen, count = found != 0, (found & (SEEN - 1)).to(tl.float32)
        at = logits + (first + n).to(tl.int64) * vocab + i
        x = tl.load(at, mask=seen, other=0.0)
        repetition = _float(record + REPETITION)
        x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        less = x - (_float(record + PRESENCE) + _float(record + FREQUENCY) * count)
        tl.store(at, tl.where(count > 0, less, x), mask=seen)
        tl.store(place, 0, mask=seen)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _bias(logits, slots, positions, records, width, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    record = records + tl.load(slots + row).to(tl.int64) * width
    entries = tl.load(record + ENTRIES)
    early = tl.load(positions + row) < tl.load(record + UNTIL)
    for start in range(0, entries, BLOCK):
        i = start + tl.arange(0, BLOCK)
        entry = tl.load(record + HEAD + i, mask=i < entries, other=0)
        value = tl.load(record + HEAD + entries + i, mask=i < entries, other=0).to(tl.float32, bitcast=True)
        at = logits + row * vocab + tl.where(entry < 0, ~entry, entry)
        x = tl.load(at, mask=i < entries, other=0.0) + value
        tl.store(at, tl.where((entry < 0) & early, float("-inf"), x), mask=i < entries)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _forbid(
    logits,
    tokens,
    pages,
    stride,
    held,
    page_size,
    base,
    slots,
    positions,
    records,
    width,
    vocab,
    SOME: tl.constexpr,
    DEEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    record = records + slot * width
    words, position = tl.load(record + WORDS), tl.load(positions + row)
    begins = record + HEAD + 2 * tl.load(record + ENTRIES)
    text = begins + words + 1
    w = tl.program_id(1) * SOME + tl.arange(0, SOME)
    begin = tl.load(begins + w, mask=w < words, other=0)
    last = tl.load(begins + 1 + w, mask=w < words, other=1) - 1
    before = last - begin
    alive = (w < words) & (before <= position - tl.load(record + PROMPT))
    done = 0
    while tl.sum((alive & (before > done)).to(tl.int32), 0) > 0:
        back = done + 1 + tl.arange(0, DEEP)
        needed = alive[:, None] & (back[None, :] <= before[:, None])
        wanted = tl.load(text + last[:, None] - back[None, :], mask=needed, other=0)
        place = _token(tokens, pages, stride, held, page_size, base, slot, position - back)
        there = tl.load(place, mask=back <= position, other=0)
        wrong = needed & (wanted != there[None, :])
        alive = alive & (tl.sum(wrong.to(tl.int32), 1) == 0)
        done += DEEP
    end = tl.load(text + last, mask=alive, other=0)
    tl.store(logits + row * vocab + end, float("-inf"), mask=alive)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _fall(
    logits, tokens, pages, stride, held, page_size, base, slots, positions, records, width, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs that meet the same token write the same: what has fallen does not fall again."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    record = records + slot * width
    size = tl.load(record + NGRAM)
    if size > 0:
        position = tl.load(positions + row)
        i = tl.load(record + PROMPT) + size - 1 + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        alive = i < position
        back = 1
        while (back < size) & (tl.sum(alive.to(tl.int32), 0) > 0):
            there = tl.load(
                _token(tokens, pages, stride, held, page_size, base, slot, i - back),
                mask=alive,
                other=-1,
            )
            wanted = _token(tokens, pages, stride, held, page_size, base, slot, position - back)
            alive = alive & (there == tl.load(wanted))
            back += 1
        found = tl.load(_token(tokens, pages, stride, held, page_size, base, slot, i), mask=alive, other=0)
        at = logits + row * vocab + found
        x = tl.load(at, mask=alive, other=0.0)
        tl.store(at, tl.where(x > -FALL / 2, x - FALL, x), mask=alive)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _end_thinking(
    logits,
    tokens,
    pages,
    stride,
    held,
    page_size,
    base,
    slots,
    positions,
    records,
    width,
    vocab,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A turn at position i has the number 2i + 2, and one more if reasoning begins there:
    the largest one tells where one is."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    record = records + slot * width
    limit, close = tl.load(record + LIMIT), tl.load(record + CLOSE)
    if limit > 0:
        prompt, position = tl.load(record + PROMPT), tl.load(positions + row)
        turn, used = tl.load(record + OPENED), 0
        for start in range(prompt, position, BLOCK):
            i = start + tl.arange(0, BLOCK)
            own = _token(tokens, pages, stride, held, page_size, base, slot, i)
            before = _token(tokens, pages, stride, held, page_size, base, slot, i - 1)
            token = tl.load(own, mask=i < position, other=-2)
            ahead = tl.load(before, mask=(i > start) & (i <= position), other=-2)
            opens, closes = ahead == tl.load(record + OPEN), ahead == close
            number = tl.where(opens, 2 * i + 1, tl.where(closes, 2 * i, 0))
            inside = tl.maximum(tl.associative_scan(number, 0, _later), turn) % 2 == 1
            used += tl.sum((inside & (i < position) & (token != close)).to(tl.int32), 0)
            opens, closes = token == tl.load(record + OPEN), token == close
            number = tl.where(opens, 2 * i + 3, tl.where(closes, 2 * i + 2, 0))
            turn = tl.maximum(turn, tl.max(number, 0))
        if (turn % 2 == 1) & (used >= limit - 1):
            for start in range(0, vocab, CHUNK):
                i = start + tl.arange(0, CHUNK)
                only = tl.where(i == close, 0.0, float("-inf"))
                tl.store(logits + row * vocab + i, only, mask=i < vocab)


def penalize(
    logits: Tensor,
    tokens: TokenTable,
    slots: Tensor,
    positions: Tensor,
    records: Tensor,
    counts: Tensor,
    longest: int,
) -> None:
    """Penalties on ``logits`` float32[S, V] of the tokens that stand at ``positions`` of ``slots``, int32[S];
    ``longest`` is the largest of them. ``records`` int32[slots, *]; ``counts``
    int32[n, V] is zero, before and after."""
    rows, vocab = logits.shape
    for first in range(0, rows, len(counts)):
        some = min(len(counts), rows - first)
        _count[(some, cdiv(longest, HISTORY))](
            *tokens.arguments, slots, positions, records, records.stride(0), counts, vocab, first,
            BLOCK=HISTORY
        )  # fmt: skip
        _penalize[(some, cdiv(vocab, CHUNK))](
            logits, slots, records, records.stride(0), counts, vocab, first,
            BLOCK=CHUNK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


def bias(logits: Tensor, slots: Tensor, positions: Tensor, records: Tensor) -> None:
    """Biases, stop tokens that are too early, and words of one token; tensors as in ``penalize``."""
    _bias[(len(logits),)](logits, slots, positions, records, records.stride(0), logits.shape[1], BLOCK=1024)


def forbid(
    logits: Tensor, tokens: TokenTable, slots: Tensor, positions: Tensor, records: Tensor, most: int
) -> None:
    """The last tokens of words whose other tokens are there; ``most``: words of a row.
    Tensors as in ``penalize``."""
    _forbid[(len(logits), cdiv(most, SOME))](
        logits, *tokens.arguments, slots, positions, records, records.stride(0), logits.shape[1],
        SOME=SOME, DEEP=DEEP,
    )  # fmt: skip


def lower_repeats(
    logits: Tensor, tokens: TokenTable, slots: Tensor, positions: Tensor, records: Tensor, longest: int
) -> None:
    """Let tokens fall that would complete what the output has had; arguments as in ``penalize``."""
    _fall[(len(logits), cdiv(longest, HISTORY))](
        logits, *tokens.arguments, slots, positions, records, records.stride(0), logits.shape[1],
        BLOCK=HISTORY,
    )  # fmt: skip


def end_thinking(
    logits: Tensor, tokens: TokenTable, slots: Tensor, positions: Tensor, records: Tensor
) -> None:
    """Leave the end of reasoning alone in rows that have reasoned enough; tensors as in ``penalize``."""
    _end_thinking[(len(logits),)](
        logits, *tokens.arguments, slots, positions, records, records.stride(0), logits.shape[1],
        BLOCK=HISTORY, CHUNK=CHUNK,
    )  # fmt: skip
