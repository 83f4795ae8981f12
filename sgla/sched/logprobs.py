"""Logprob blocks of a step result, as lists for the request's consumer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sgla.messages import Delta, LogprobBlock, TokenLogprob
from sgla.sched.request import Request

FLOAT_BYTES = 4


def _entries(block: LogprobBlock, tokens: Sequence[int]) -> list[TokenLogprob]:
    """One entry a token of ``tokens``, the tokens that the block is about."""
    values, ranks = array("f", block.values), array("i", block.ranks)
    top_ids, top_values = array("i", block.top_ids), array("f", block.top_values)
    k, likely = block.k, block.k - block.asked
    assert len(values) == len(ranks) == len(tokens), "a logprob block of another length"
    assert len(top_ids) == len(top_values) == k * len(tokens), "a logprob block of another width"
    return [
        TokenLogprob(
            token,
            values[i],
            ranks[i],
            tuple(zip(top_ids[i * k : i * k + likely], top_values[i * k : i * k + likely])),
            tuple(zip(top_ids[i * k + likely : (i + 1) * k], top_values[i * k + likely : (i + 1) * k])),
        )
        for i, token in enumerate(tokens)
    ]


def collect_prompt(rows: Sequence[Request], blocks: Sequence[LogprobBlock]) -> None:
    """Append the prompt blocks of a step to their requests, which keep them until their first Delta."""
    for block in blocks:
        request = rows[block.row]
        if block.prompt and request.finish is None and request.prompt_logprobs is not None:
            assert block.start == len(request.prompt_logprobs), "prompt logprobs out of order"
            count = len(block.values) // FLOAT_BYTES
            request.prompt_logprobs += _entries(block, request.tokens[block.start : block.start + count])


def attach(rows: Sequence[Request], blocks: Sequence[LogprobBlock], deltas: Sequence[Delta]) -> None:
    """Put the blocks of output tokens into the Deltas of their requests, those that have one."""
    by_rid = {delta.rid: delta for delta in deltas}
    for block in blocks:
        delta = by_rid.get(rows[block.row].rid)
        if not block.prompt and delta is not None:
            delta.logprobs = _entries(block, delta.tokens)
