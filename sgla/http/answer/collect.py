"""Gathering events: one accumulator a choice, and the sink of requests that are answered in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from sgla.actors.ingress import Sink
from sgla.errors import SglaError
from sgla.http.bodies import Share
from sgla.messages import Event, Rejected, TokenLogprob, Usage

COUNTED = 16 << 10  # bytes that are counted together
TOKEN, LOGPROB, PAIR = 100, 160, 8  # bytes of a token and its text, of its logprob, and of each alternative


def weight(event: Event) -> int:
    """About the bytes that an event's content takes where it is kept."""
    size = (
        TOKEN * len(event.tokens)
        + len(event.text)
        + len(event.vector or b"")
        + sum(map(len, event.hidden or ()))
    )
    for entries in (event.logprobs, event.prompt_logprobs):
        if entries and (last := entries[-1]) is not None:
            size += len(entries) * (LOGPROB + PAIR * (len(last.top) + len(last.asked)))
    return size


class Choice:
    """The events of one choice, appended in linear time."""

    __slots__ = (
        "finish",
        "hidden",
        "index",
        "logprobs",
        "matched",
        "prompt_logprobs",
        "prompt_tokens",
        "rid",
        "size",
        "texts",
        "tokens",
        "usage",
        "vector",
    )

    def __init__(self, index: int, rid: str = "") -> None:
        self.index = index
        self.rid = rid
        self.size = 0  # bytes, as its holder counts
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.prompt_tokens: list[int] | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.finish: str | None = None
        self.matched: str | int | None = None
        self.usage = Usage()
        self.vector: bytes | None = None
        self.hidden: list[bytes] = []  # of Event.hidden

    def add(self, event: Event) -> None:
        if event.text:
            self.texts.append(event.text)
        self.tokens.extend(event.tokens)
        if event.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs.extend(event.logprobs)
        if event.prompt_tokens is not None:
            self.prompt_tokens = event.prompt_tokens
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.hidden is not None:
            self.hidden += event.hidden
        self.rid, self.finish, self.matched, self.usage = event.rid, event.finish, event.matched, event.usage
        self.vector = event.vector

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def event(self) -> Event:
        """Everything gathered so far as a single event."""
        return Event(
            rid=self.rid,
            index=self.index,
            text=self.text,
            tokens=self.tokens,
            logprobs=self.logprobs,
            prompt_tokens=self.prompt_tokens,
            prompt_logprobs=self.prompt_logprobs,
            finish=self.finish,
            matched=self.matched,
            usage=self.usage,
            hidden=self.hidden or None,
        )


class Collector:
    """A sink that resolves ``done`` when every choice has finished or the request was rejected.

    What it holds is counted in ``share``;
    a request for which there is no memory left ends with Overloaded or TooLarge.
    """

    def __init__(self, choices: int, share: Share | None = None) -> None:
        self.choices = [Choice(index) for index in range(choices)]
        self.done: asyncio.Future[Rejected | None] = asyncio.get_running_loop().create_future()
        self._left = choices
        self._share = share
        self._due = 0  # bytes that ``share`` does not know of yet

    def push(self, message: Event | Rejected) -> None:
        if self.done.done():
            return
        if isinstance(message, Rejected):
            self.done.set_result(message)
            return
        self._hold(message)
        if self.done.done():
            return
        self._due += weight(message)
        if self._due > COUNTED and self._share is not None:
            due, self._due = self._due, 0
            try:
                self._share.take(due)
            except SglaError as error:
                self.done.set_result(error.rejected(message.rid))
                return
        if message.finish is not None:
            self._left -= 1
            if not self._left:
                self.done.set_result(None)

    def _hold(self, event: Event) -> None:
        self.choices[event.index].add(event)

    def abort(self) -> None:
        """End the choices that are still open with finish ``abort``."""
        for choice in self.choices:
            if choice.finish is None:
                choice.finish = "abort"
        if not self.done.done():
            self.done.set_result(None)


class PromptOnly:
    """A sink for ``max_tokens: 0``:
    the engine makes one token, this hides it and lets only the prompt's data pass."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def push(self, message: Event | Rejected) -> None:
        if isinstance(message, Event):
            message.text, message.tokens, message.matched = "", [], None
            message.logprobs = None if message.logprobs is None else []
            message.usage = Usage(message.usage.prompt_tokens, 0, message.usage.cached_tokens)
            if message.finish in ("stop", "repetition"):
                message.finish = "length"
        self._sink.push(message)


def total_usage(usages: Iterable[tuple[int, Usage]], n: int) -> Usage:
    """Sum over (choice index, its usage), ``n`` choices a prompt: a prompt and its cached part count once."""
    total = Usage()
    for index, usage in usages:
        total.completion_tokens += usage.completion_tokens
        total.verifies += usage.verifies
        total.guessed += usage.guessed
        total.right += usage.right
        if index % n == 0:
            total.prompt_tokens += usage.prompt_tokens
            total.cached_tokens += usage.cached_tokens
    return total
