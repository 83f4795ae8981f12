"""Changes to a request's logits before a token is chosen.
A rule belongs to one request and works on one row, in place.

Rules hold no history of their own: the outputs so far are read from the token table, so they are right after
a preemption and with steps planned ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sgla.messages import RowSampling, ThinkLimit, Transcript
from sgla.sampling.draw import Floats
from sgla.sampling.processors import Custom, Factory

FALL = np.float32(1e4)  # more than any two logits differ by


class Rule(Protocol):
    def apply(self, logits: Floats, position: int) -> None:
        """Change ``logits`` float32[V] of the token that will stand at ``position``;
        all tokens before it are known."""
        ...


class Penalties:
    """Repetition (Keskar et al., 2019; as Hugging Face: prompt and outputs), then OpenAI's frequency and
    presence penalties (outputs only). ``tokens`` int32[context] is the request's row of the token table."""

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


class NoRepeats:
    """Hugging Face's no_repeat_ngram_size, but for the output alone: a token that would make its last
    ``size`` tokens occur twice falls by FALL, so that it comes only where nothing else may, as in a grammar.

    One that has fallen does not fall again: on a GPU several threads may see the same token.
    """

    def __init__(self, tokens: NDArray[np.int32], prompt_len: int, size: int) -> None:
        self._tokens = tokens
        self._prompt_len = prompt_len
        self._size = size

    def apply(self, logits: Floats, position: int) -> None:
        output = self._tokens[self._prompt_len : position]
        last = np.arange(self._size - 1, len(output))  # where runs of ``size`` tokens end
        for back in range(1, self._size):
            if not len(last):
                return
            last = last[output[last - back] == output[-back]]
        values = logits[output[last]]
        logits[output[last]] = np.where(values > -FALL / 2, values - FALL, values)


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


class BadWords:
    """No output holds one of these sequences: the last token of one is forbidden behind the others (as vLLM:
    prompts do not count)."""

    def __init__(
        self, words: list[list[int]], tokens: NDArray[np.int32], prompt_len: int, vocab_size: int
    ) -> None:
        known = [word for word in words if max(word) < vocab_size]
        self._always = np.array([word[0] for word in known if len(word) == 1], np.int64)
        self._longer: dict[int, list[tuple[NDArray[np.int32], int]]] = {}  # by the last token but one
        for *before, last in known:
            if before:
                self._longer.setdefault(before[-1], []).append((np.array(before, np.int32), last))
        self._tokens = tokens
        self._prompt_len = prompt_len

    def apply(self, logits: Floats, position: int) -> None:
        logits[self._always] = -np.inf
        for before, last in self._longer.get(int(self._tokens[position - 1]), ()):
            start = position - len(before)
            if start >= self._prompt_len and np.array_equal(self._tokens[start:position], before):
                logits[last] = -np.inf


class Allowed:
    """No tokens but these."""

    def __init__(self, ids: list[int], vocab_size: int) -> None:
        self._ids = np.array([token for token in ids if 0 <= token < vocab_size], np.int64)

    def apply(self, logits: Floats, position: int) -> None:
        kept = logits[self._ids]
        logits[:] = -np.inf
        logits[self._ids] = kept


class ThinkingBudget:
    """The end of reasoning is the only token once as many others have been
    generated inside of it as the budget has."""

    def __init__(self, limit: ThinkLimit, tokens: NDArray[np.int32], prompt_len: int) -> None:
        self._limit = limit
        self._tokens = tokens
        self._prompt_len = prompt_len

    def apply(self, logits: Floats, position: int) -> None:
        limit, output = self._limit, self._tokens[self._prompt_len : position]
        turns = np.where(output == limit.open, 1, np.where(output == limit.close, -1, 0))
        turns = np.concatenate([[1 if limit.opened else -1], turns])
        last = np.maximum.accumulate(np.where(turns != 0, np.arange(len(turns)), 0))
        inside = turns[last] > 0  # [i]: before output i
        if inside[-1] and np.count_nonzero(inside[:-1] & (turns[1:] >= 0)) >= limit.tokens:
            logits[:] = -np.inf
            logits[limit.close] = 0


class Transcribing:
    """Whisper's rules, as transformers has them (SuppressTokens, SuppressTokensAtBegin and
    WhisperTimeStampLogitsProcessor)."""

    def __init__(self, transcript: Transcript, tokens: NDArray[np.int32], prompt_len: int) -> None:
        self._said = transcript
        self._suppressed = np.array(transcript.suppressed, np.int64)
        self._first_suppressed = np.array(transcript.first_suppressed, np.int64)
        self._tokens = tokens
        self._prompt_len = prompt_len

    def apply(self, logits: Floats, position: int) -> None:
        logits[self._suppressed[self._suppressed < len(logits)]] = -np.inf
        output = self._tokens[self._prompt_len : position]
        if not len(output):
            logits[self._first_suppressed[self._first_suppressed < len(logits)]] = -np.inf
        if self._said.timed:
            self._pair(logits, output)
            self._prefer(logits)

    def _pair(self, logits: Floats, output: NDArray[np.int32]) -> None:
        """Timestamps come in pairs, but for the first and the last, and never fall."""
        first = self._said.first_time
        logits[self._said.untimed] = -np.inf
        if not len(output):
            logits[:first] = -np.inf
            if self._said.latest >= 0:
                logits[first + self._said.latest + 1 :] = -np.inf
            return
        times = output[output >= first]
        ended = output[-1] >= first
        paired = len(output) < 2 or output[-2] >= first
        if ended and paired:
            logits[first:] = -np.inf
        elif ended:
            logits[: self._said.end] = -np.inf
        if len(times):
            logits[first : times[-1] + (0 if ended and not paired else 1)] = -np.inf

    def _prefer(self, logits: Floats) -> None:
        """A timestamp comes where all together are more probable than any other token."""
        first = self._said.first_time
        times, words = logits[first:], logits[:first]
        most = times.max(initial=-np.inf)
        if most == -np.inf:
            return
        together = most + np.log(np.exp(times - most).sum())
        if together > words.max(initial=-np.inf):
            words[:] = -np.inf


def forbids(sampling: RowSampling) -> bool:
    """Whether a request has rules that may forbid what its grammar forces."""
    early = sampling.min_tokens > 0 and sampling.stop_ids
    return bool(sampling.bad_words or sampling.allowed or early or sampling.processors)


def make_rules(
    tokens: NDArray[np.int32],
    prompt_len: int,
    sampling: RowSampling,
    vocab_size: int,
    processors: Mapping[str, Factory] = MappingProxyType({}),
) -> list[Rule]:
    """The rules of one request, in the order they apply: biases before penalties, as in transformers, vLLM
    and llama.cpp. ``processors``: those that the server has."""
    rules: list[Rule] = []
    if sampling.logit_bias:
        rules.append(Bias(sampling.logit_bias, vocab_size))
    if sampling.repetition != 1 or sampling.frequency or sampling.presence:
        rules.append(Penalties(tokens, prompt_len, sampling))
    if sampling.ngram:
        rules.append(NoRepeats(tokens, prompt_len, sampling.ngram))
    if sampling.min_tokens > 0 and sampling.stop_ids:
        rules.append(MinTokens(sampling.stop_ids, prompt_len + sampling.min_tokens, vocab_size))
    if sampling.bad_words:
        rules.append(BadWords(sampling.bad_words, tokens, prompt_len, vocab_size))
    if sampling.allowed:
        rules.append(Allowed(sampling.allowed, vocab_size))
    if sampling.thinking is not None:
        rules.append(ThinkingBudget(sampling.thinking, tokens, prompt_len))
    if sampling.transcript is not None:
        rules.append(Transcribing(sampling.transcript, tokens, prompt_len))
    for asked in sampling.processors:
        rules.append(Custom(processors[asked.name], asked, tokens, prompt_len))
    return rules
