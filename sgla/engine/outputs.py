"""What calls of ``Engine`` give: the choices of a request, and the sink that gathers them."""

from __future__ import annotations

import asyncio

import msgspec

from sgla.engine.progress import Bar
from sgla.errors import SglaError
from sgla.messages import Event, Rejected, TokenLogprob, Usage


class Output(msgspec.Struct, kw_only=True):
    """One choice. ``finish``: stop | length | repetition | abort;
    ``matched``: the stop string or token id that ended it."""

    index: int
    text: str = ""
    tokens: list[int] = []
    prompt_tokens: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: str | None = None
    matched: str | int | None = None
    usage: Usage = msgspec.field(default_factory=Usage)
    vector: bytes | None = None  # float32[*], of a job with ``pool``
    # float32[*, width], of all tokens but the last, if they were asked for; of a request for
    # ``routed_experts`` these, int32[*, layers, experts of a token]
    hidden_states: list[bytes] | None = None

    def add(self, event: Event) -> None:
        """Append an event of this choice."""
        self.text += event.text
        self.tokens.extend(event.tokens)
        if event.prompt_tokens is not None:
            self.prompt_tokens = event.prompt_tokens
        if event.logprobs is not None:
            self.logprobs = (self.logprobs or []) + event.logprobs
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.hidden is not None:
            self.hidden_states = (self.hidden_states or []) + event.hidden
        self.finish, self.matched, self.usage = event.finish, event.matched, event.usage
        self.vector = event.vector


class Collector:
    """A sink on the engine's loop; ``done`` brings the request's choices in index order, or raises what it
    ended with, which sets ``failed``."""

    def __init__(self, n: int, failed: asyncio.Event, bar: Bar | None) -> None:
        self.done: asyncio.Future[list[Output]] = asyncio.get_running_loop().create_future()
        self._choices = [Output(index=index) for index in range(n)]
        self._left = n
        self._failed = failed
        self._bar = bar

    def push(self, message: Event | Rejected) -> None:
        if self.done.done():  # nobody waits for it any more
            return
        if isinstance(message, Rejected):
            self.done.set_exception(SglaError.from_rejected(message))
            self._failed.set()
            return
        self._choices[message.index].add(message)
        self._left -= message.finish is not None
        if not self._left:
            self.done.set_result(self._choices)
            if self._bar is not None:
                self._bar.add(self._choices)
