"""Logprob blocks of a step result, as lists for the request's consumer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sgla.messages import LogprobBlock, TokenLogprob


def entries(block: LogprobBlock, tokens: Sequence[int]) -> list[TokenLogprob]:
    """One entry a token of ``tokens``, the tokens that the block is about."""
    values, ranks = array("f", block.values), array("i", block.ranks)
    top_ids, top_values = array("i", block.top_ids), array("f", block.top_values)
    k = block.k
    assert len(values) == len(ranks) == len(tokens), "a logprob block of another length"
    assert len(top_ids) == len(top_values) == k * len(tokens), "a logprob block of another width"
    return [
        TokenLogprob(
            token,
            values[i],
            ranks[i],
            list(zip(top_ids[i * k : (i + 1) * k], top_values[i * k : (i + 1) * k])),
        )
        for i, token in enumerate(tokens)
    ]
