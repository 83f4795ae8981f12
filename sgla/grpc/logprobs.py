"""Logprobs as messages, which both protocols have alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.message import Message

from sgla.grpc.proto import message
from sgla.messages import SamplingParams, TokenLogprob
from sgla.text.logprobs import finite

Pair = tuple[int, float]


class Logprobs:
    """Those that a request asked for. ``asked``: the protocol has a field for tokens that are named."""

    def __init__(self, package: str, sampling: SamplingParams, asked: bool = False) -> None:
        self._output, self._input, self._token, self._top = (
            message(f"{package}.{name}")
            for name in ("OutputLogProbs", "InputLogProbs", "InputTokenLogProb", "TopLogProbs")
        )
        self._sampling = sampling
        self._asked = asked and bool(sampling.logprob_token_ids)

    def output(self, entries: Sequence[TokenLogprob] | None) -> Message | None:
        """None: there are none, or nobody asked."""
        if self._sampling.logprobs is None or not entries:
            return None
        made: Any = self._output(
            token_logprobs=[finite(entry.logprob) for entry in entries],
            token_ids=[entry.token for entry in entries],
        )
        if self._sampling.logprobs:
            made.top_logprobs.extend(self._pairs(entry.top) for entry in entries)
        if self._asked:
            made.token_ids_logprobs.extend(self._pairs(entry.asked) for entry in entries)
        return made

    def prompt(
        self, tokens: Sequence[int] | None, entries: Sequence[TokenLogprob | None] | None
    ) -> Message | None:
        """From ``SamplingParams.logprob_start`` on; the first token of a prompt has none."""
        if entries is None or tokens is None:
            return None
        begin = self._sampling.logprob_start
        rows = entries[begin:]
        made: Any = self._input(
            token_ids=tokens[begin:],
            token_logprobs=[
                self._token() if entry is None else self._token(value=finite(entry.logprob)) for entry in rows
            ],
        )
        if self._sampling.prompt_logprobs:
            made.top_logprobs.extend(self._pairs(() if entry is None else entry.top) for entry in rows)
        return made

    def _pairs(self, pairs: Iterable[Pair]) -> Message:
        listed = list(pairs)
        return self._top(
            token_ids=[token for token, _ in listed], values=[finite(value) for _, value in listed]
        )
