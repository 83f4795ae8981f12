"""Logprobs of given tokens under the model's own distribution (temperature 1, before any rule)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgla.messages import LogprobBlock
from sgla.sampling.draw import Floats


class Scores(NamedTuple):
    """Of n tokens: logprob, rank (1 + number of larger logits),
    the k most probable alternatives or other tokens."""

    values: Floats  # [n]
    ranks: NDArray[np.int32]  # [n]
    top_ids: NDArray[np.int32]  # [n, k]
    top_values: Floats  # [n, k]

    @property
    def sound(self) -> bool:
        """False where logits were no numbers; a logprob may be -inf."""
        return not np.isnan(self.values).any()

    def block(self, row: int, prompt: bool, start: int, asked: int = 0) -> LogprobBlock:
        """The message for row ``row`` of the step, tokens from position ``start`` on.
        ``asked``: see ``LogprobBlock``."""
        return LogprobBlock(
            row=row,
            prompt=prompt,
            start=start,
            values=self.values.tobytes(),
            ranks=self.ranks.tobytes(),
            top_ids=self.top_ids.tobytes(),
            top_values=self.top_values.tobytes(),
            k=self.top_ids.shape[1],
            asked=asked,
        )


def score(
    logits: Floats, targets: Sequence[int] | NDArray[np.int32], k: int, asked: Sequence[int] = ()
) -> Scores:
    """Score token ``targets[i]`` under ``logits[i]``: float32[n, V], and the tokens ``asked`` for.
    Logits with a NaN or +inf, or all
    -inf, make logprobs of NaN."""
    n, k = len(targets), min(k, logits.shape[1])
    scores = Scores(
        np.empty(n, np.float32),
        np.empty(n, np.int32),
        np.empty((n, k + len(asked)), np.int32),
        np.empty((n, k + len(asked)), np.float32),
    )
    others = np.array(asked, np.intp)
    for i, (row, target) in enumerate(zip(logits, targets)):
        top = row.max()
        if not np.isfinite(top):
            scores.values[i], scores.top_values[i] = np.nan, np.nan
            scores.ranks[i], scores.top_ids[i] = 1, 0
            continue
        shifted = row - top
        norm = top + np.log(np.exp(shifted, out=shifted).sum())
        scores.values[i] = row[target] - norm
        scores.ranks[i] = 1 + np.count_nonzero(row > row[target])
        if k or asked:
            ids = np.concatenate([_largest_ids(row, k), others]) if k else others
            scores.top_ids[i] = ids
            scores.top_values[i] = row[ids] - norm
    return scores


def _largest_ids(row: Floats, k: int) -> NDArray[np.intp]:
    """Falling; of equal logits the lower id first."""
    least = np.partition(row, len(row) - k)[len(row) - k] if k < len(row) else -np.inf
    ids = np.flatnonzero(row >= least)
    return ids[np.lexsort((ids, -row[ids]))][:k]


def join(parts: list[Scores]) -> Scores:
    """Scores of consecutive tokens, in one."""
    return Scores(*(np.concatenate(columns) for columns in zip(*parts)))
