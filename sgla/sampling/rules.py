"""Changes to a request's logits before a token is chosen. A rule belongs to one request and works on one row, in place.

Rules hold no history of their own: the outputs so far are read from the token table, so they are right after a
preemption and with steps planned ahead.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sgla.messages import RowSampling
from sgla.sampling.draw import Floats


class Rule(Protocol):
    def apply(self, logits: Floats, position: int) -> None:
        """Change ``logits`` float32[V] of the token that will stand at ``position``; all tokens before it are known."""
        ...


class Penalties:
    """Repetition (Keskar et al., 2019; as Hugging Face: prompt and outputs), then OpenAI's frequency and presence
    penalties (outputs only). ``tokens`` int32[context] is the request's row of the token table."""

    def __init__(self, tokens: NDArray[np.int32], prompt_len: int, sampling: RowSampling) -> None:
        self._tokens = tokens
        self._prompt_len = prompt_len
        self._repetition = np.float32(sampling.repetition)
        self._frequency = np.float32(sampling.frequency)
        self._presence = np.float32(sampling.presence)

    def apply(self, logits: Floats, position: int) -> None:
        if self._repetition != 1:
            seen = self._tokens[:position]
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._frequency or self._presence:
            ids, counts = np.unique(self._tokens[self._prompt_len : position], return_counts=True)
            logits[ids] -= self._presence + self._frequency * counts.astype(np.float32)


class Bias:
    """OpenAI's logit_bias. Ids the model does not have are left out."""

    def __init__(self, bias: list[tuple[int, float]], vocab_size: int) -> None:
        kept = {token: value for token, value in bias if 0 <= token < vocab_size}
        self._ids = np.fromiter(kept.keys(), np.int64, len(kept))
        self._values = np.fromiter(kept.values(), np.float32, len(kept))

    def apply(self, logits: Floats, position: int) -> None:
        logits[self._ids] += self._values


class MinTokens:
    """No stop token before ``count`` outputs exist."""

    def __init__(self, stop_ids: list[int], end: int, vocab_size: int) -> None:
        self._ids = np.array([token for token in stop_ids if 0 <= token < vocab_size], np.int64)
        self._end = end

    def apply(self, logits: Floats, position: int) -> None:
        if position < self._end:
            logits[self._ids] = -np.inf


def make_rules(
    tokens: NDArray[np.int32], prompt_len: int, sampling: RowSampling, vocab_size: int
) -> list[Rule]:
    """The rules of one request, in the order they apply."""
    rules: list[Rule] = []
    if sampling.repetition != 1 or sampling.frequency or sampling.presence:
        rules.append(Penalties(tokens, prompt_len, sampling))
    if sampling.logit_bias:
        rules.append(Bias(sampling.logit_bias, vocab_size))
    if sampling.min_tokens > 0 and sampling.stop_ids:
        rules.append(MinTokens(sampling.stop_ids, prompt_len + sampling.min_tokens, vocab_size))
    return rules
