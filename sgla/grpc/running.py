"""A request of a call: what the engine gets of it, and how its events become messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from google.protobuf.message import Message

from sgla.actors.base import in_thread
from sgla.errors import ContextTooLong, InvalidField, Overloaded, SglaError
from sgla.grpc.calls import Call
from sgla.http.access import Tally
from sgla.http.answer.collect import Choice
from sgla.http.answer.held import TOGETHER, Held
from sgla.http.answer.whole import INLINE
from sgla.http.openai.common import answer_size
from sgla.http.openai.text import token_prompt
from sgla.http.request.schema import MAX_LOGPROBS, MAX_REPEATED
from sgla.http.request.work import check_sizes, limit_hidden_states, limit_logprobs, sampled
from sgla.http.server import Server, Work
from sgla.messages import Event, Job, Rejected, SamplingParams, Usage


class Form(Protocol):
    """The messages of one protocol. ``choice``: all of it so far."""

    def chunk(self, choice: Choice, event: Event, first: bool) -> Message: ...

    def complete(self, choice: Choice) -> Message: ...


def prompt_of(server: Server, ids: Sequence[int], most: int = 0) -> dict[str, Any]:
    """Job fields of a prompt of ``most`` ids, or of as many as the context has. Raises InvalidField,
    ContextTooLong."""
    facts = server.ingress.facts
    assert facts is not None
    if len(ids) > (most or facts.context_len):
        raise ContextTooLong.of(facts.context_len, len(ids), 0)
    return token_prompt(list(ids), "input_ids")


def make_work(
    call: Call,
    prompt: Mapping[str, Any],
    sampling: SamplingParams,
    *,
    stream: bool = False,
    lora: str = "",
    **common: Any,
) -> Work:
    """As ``http.request.work`` makes one of a prompt. ``lora``: the name of an adapter. Raises SglaError."""
    server, client = call.server, call.client
    check_sizes(1, sampling.n)
    adapter = server.adapter(None, lora or None)
    owner = client.owner if server.config.isolate_keys else ""
    job = Job(
        rid=call.uid,
        sampling=sampled(sampling),
        stream=stream,
        client=client.runs_as,
        size=call.share.body,
        namespace=server.ingress.adapters.namespace(owner, adapter),
        adapter=adapter,
        deadline=call.deadline,
        **prompt,
        **common,
    )
    limit_logprobs([job], server.ingress.facts, MAX_REPEATED if stream else MAX_LOGPROBS)
    limit_hidden_states([job], server.ingress.facts, MAX_REPEATED if stream else MAX_LOGPROBS)
    call.tally = Tally(sampling.n) if server.config.log_requests else None
    return Work(
        rid=call.rid,
        uid=call.uid,
        client=client,
        jobs=[job],
        n=sampling.n,
        prompt_only=[sampling.max_tokens == 0],
        share=call.share,
        tally=call.tally,
    )


async def run(call: Call, work: Work, form: Form) -> None:
    """Send what comes of ``work``: chunks and each choice as a whole, or the latter alone.
    Raises the SglaError that refuses or ends it."""
    server = call.server
    if not work.jobs[0].stream:
        for choice in await server.collect(work):
            await call.send(await completed(form, choice, work))
        return
    stream = Stream(server, work)
    server.open(work, stream)
    choices: dict[int, Choice] = {}
    try:
        async for event in stream.events():
            first = event.index not in choices
            choice = choices.setdefault(event.index, Choice(event.index))
            choice.add(event)
            if event.tokens:
                await call.send(form.chunk(choice, event, first))
            if event.finish is not None:
                await call.send(await completed(form, choice, work))
    finally:
        stream.close()
        server.close(work)


async def completed(form: Form, choice: Choice, work: Work) -> Message:
    """The message of a whole choice; a large one is made in a thread."""
    if answer_size([choice], work) <= INLINE:
        return form.complete(choice)
    return await in_thread(form.complete, choice)


class Stream:
    """The sink of a stream. Its client reads as fast as messages are written; what comes meanwhile is held,
    and beyond the limits that HTTP's streams have, the request ends."""

    def __init__(self, server: Server, work: Work) -> None:
        self._server, self._work = server, work
        self._held = Held(work.client.name, server.unread)
        self._open = dict.fromkeys(range(work.choices), Usage())
        self._error: SglaError | None = None
        self._wake = asyncio.Event()

    def push(self, message: Event | Rejected) -> None:
        if self._error is not None:
            return
        self._wake.set()
        if isinstance(message, Rejected):
            self._error = SglaError.from_rejected(message)
            return
        if message.finish is not None:
            self._open.pop(message.index, None)
        else:
            self._open[message.index] = message.usage
        if not self._held.add(message) or self._held.size > self._server.config.sink_limit_bytes:
            self._error = Overloaded(
                f"the client left {self._held.size} bytes of its answers unread; read them as they come"
            )
            self._held.clear()
            self._server.drop_slow(self._work)

    def abort(self) -> None:
        """End the choices that are still open with finish ``abort``."""
        for index, usage in list(self._open.items()):
            self.push(Event(rid=self._work.uid, index=index, finish="abort", usage=usage))

    async def events(self) -> AsyncIterator[Event]:
        """Until every choice has ended. Raises the SglaError that ends the request."""
        sent = 0
        while True:
            while self._held:
                event = self._held.take()
                yield event
                sent += len(event.logprobs or ())
                if sent >= TOGETHER:
                    sent = 0
                    await asyncio.sleep(0)
            if self._error is not None:
                raise self._error
            if not self._open:
                return
            await self._wake.wait()
            self._wake.clear()

    def close(self) -> None:
        self._held.clear()


def only_rank(rank: int) -> None:
    """Raise InvalidField for a rank of data parallelism that a server with one has not."""
    if rank:
        raise InvalidField(
            f"data_parallel_rank is {rank}, and this server has rank 0 alone; leave it out",
            param="data_parallel_rank",
        )
