"""Logprob blocks of a step result, as lists for the request's consumer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sgla.messages import Delta, LogprobBlock, Pairs, TokenLogprob
from sgla.sched.request import Request

BYTES = 4  # of an int32 and of a float32


def _entries(block: LogprobBlock, tokens: Sequence[int]) -> list[TokenLogprob]:
    """One entry a token of ``tokens``, the first of those that the block is about."""
    values, ranks = array("f", block.values), array("i", block.ranks)
    ids, chances, width = block.top_ids, block.top_values, BYTES * block.k
    assert len(values) == len(ranks) >= len(tokens), "a logprob block of another length"
    assert len(ids) == len(chances) == width * len(values), "a logprob block of another width"

    def pairs(start: int, end: int) -> Pairs | tuple[()]:
        return Pairs(ids[start:end] + chances[start:end]) if end > start else ()

    entries = []
    likely = BYTES * (block.k - block.asked)
    for i, (token, value, rank) in enumerate(zip(tokens, values, ranks)):
        at = i * width
        entries.append(
            TokenLogprob(token, value, rank, pairs(at, at + likely), pairs(at + likely, at + width))
        )
    return entries


def collect_prompt(rows: Sequence[Request], blocks: Sequence[LogprobBlock]) -> None:
    """Append the prompt blocks of a step to their requests, which keep them until their first Delta."""
    for block in blocks:
        request = rows[block.row]
        if block.prompt and request.finish is None and request.prompt_logprobs is not None:
            skipped = len(request.prompt_logprobs) - block.start  # in front of the first that it wants
            assert skipped >= 0, "prompt logprobs out of order"
            count = len(block.values) // BYTES
            entries = _entries(block, request.tokens[block.start : block.start + count])
            request.prompt_logprobs += entries[skipped:]


def attach(rows: Sequence[Request], blocks: Sequence[LogprobBlock], deltas: Sequence[Delta]) -> None:
    """Put the blocks of output tokens into the Deltas of their requests, those that have one."""
    by_rid = {delta.rid: delta for delta in deltas}
    for block in blocks:
        delta = by_rid.get(rows[block.row].rid)
        if not block.prompt and delta is not None:
            have, count = delta.logprobs or [], len(block.values) // BYTES
            delta.logprobs = have + _entries(block, delta.tokens[len(have) : len(have) + count])
