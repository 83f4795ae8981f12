"""What all handlers share: the engine, the settings, and the table of requests that are running."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable
from copy import copy
from typing import Any, Protocol

import msgspec
from aiohttp import web

from sgla.actors.ingress import Sink
from sgla.config import Config
from sgla.defaults import Defaults
from sgla.errors import InvalidField, ModelNotFound, SglaError
from sgla.http.access import Tallied, Tally
from sgla.http.answer.collect import Choice, Collector, PromptOnly
from sgla.http.answer.unread import Unread
from sgla.http.batches import files
from sgla.http.batches import store as batches
from sgla.http.batches.files import Files, file_bounds
from sgla.http.bodies import RequestMemory, Share
from sgla.http.clients import Client, Proxies
from sgla.http.conversations import store as conversations
from sgla.http.conversations.store import ConversationStore
from sgla.http.errors import Aborted
from sgla.http.mcp.servers import ToolServers
from sgla.http.media.load import Media
from sgla.http.native.session_store import Sessions
from sgla.http.ports import Ingress
from sgla.http.probe import Probe
from sgla.http.responses import items, store
from sgla.http.responses.store import ResponseStore
from sgla.http.state import leftovers, shelf
from sgla.http.state.database import Database
from sgla.http.state.shelf import bounds
from sgla.http.turns import MANY, Door, paced, pause
from sgla.messages import Job
from sgla.observe.metrics import Metrics
from sgla.observe.requests import RequestDump
from sgla.version import __version__

SCHEMAS = (
    shelf.SCHEMA,
    leftovers.SCHEMA,
    items.SCHEMA,
    store.SCHEMA,
    conversations.SCHEMA,
    files.SCHEMA,
    batches.SCHEMA,
)  # in the order in which they refer to each other
SWEEP = 60.0  # seconds


class Work(msgspec.Struct, kw_only=True):
    """What the engine has to do for one HTTP request: a job for each prompt, ``n`` choices for each job.

    Choice ``j`` of prompt ``i`` has index ``i * n + j``. The engine makes at least one token, so
    ``prompt_only[i]`` tells that prompt ``i`` asked for none (``max_tokens: 0``).
    """

    rid: str  # as the client knows it
    uid: str  # unique among all requests of this server
    client: Client
    jobs: list[Job]
    n: int
    prompt_only: list[bool]
    share: Share  # what the request holds of the server's ``memory``
    tally: Tally | None = None  # for whoever wants to know when its first token came

    @property
    def choices(self) -> int:
        return len(self.jobs) * self.n


class EndableSink(Sink, Protocol):
    """A sink whose unfinished choices can be ended from outside."""

    def abort(self) -> None: ...


class Server:
    """What handlers have: a model, and beside it all that the models of a server share. ``app[SERVER]`` is
    that of the first one, ``request[ASKED]`` that of the one which the request is for."""

    def __init__(self, ingress: Ingress, config: Config, metrics: Metrics) -> None:
        self.ingress = ingress
        self.config = config
        self.metrics = metrics
        self.created = int(time.time())
        self.fingerprint = (
            "fp_" + hashlib.blake2s(f"{__version__}|{self.created}".encode(), digest_size=5).hexdigest()
        )
        self.database = Database(config.state_path, SCHEMAS)
        metrics.unstored = lambda: self.database.failures
        metrics.stored = lambda: {each.kind: each.held for each in self.shelves}
        kept, in_memory = bounds(config, self.database.on_disk), bounds(config, on_disk=False)
        self.responses = ResponseStore(self.database, kept)
        self.conversations = ConversationStore(self.database, kept)
        self.files = Files(self.database, file_bounds(config))
        self.shelves: list[shelf.Shelf] = [self.responses.shelf, self.conversations.shelf, self.files.shelf]
        for each in self.shelves:
            self.database.at_start(each.trim)
        self.dump = metrics.dump = RequestDump(config.dump_requests) if config.dump_requests else None
        self.memory = RequestMemory(config.request_memory_bytes)
        self.unread = Unread(config.request_memory_bytes // 2)
        self.door = Door()
        self.sessions = Sessions(in_memory.limit, in_memory.ttl)
        self.proxies = Proxies(config.forwarded_allow_ips)
        self.tools = ToolServers(config.tool_server, config.tool_timeout)
        self.media = Media(config)
        self.probe = Probe(ingress)
        # The description of the API, once somebody has asked.
        self.openapi: asyncio.Future[bytes] | None = None
        self._live: dict[str, tuple[Work, EndableSink, Ingress]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def beside(self, ingress: Ingress, config: Config, metrics: Metrics) -> Server:
        """The same server with another model."""
        other = copy(self)
        other.ingress, other.config, other.metrics = ingress, config, metrics
        other.probe, other.openapi = Probe(ingress), None
        return other

    async def sweep(self) -> None:
        """Remove what is too old, whether or not something new comes."""
        while True:
            await asyncio.sleep(SWEEP)
            for each in self.shelves:
                each.sweep()
            self.database.give_back()

    # facts

    def names(self) -> list[str]:
        """Of the base, and of its adapters."""
        return [*self.ingress.model_names, *self.ingress.adapters.loaded]

    def knows(self, name: str) -> bool:
        """Whether the model, or an adapter of it, has this name."""
        names = self.ingress.model_names
        return name in names or self.ingress.adapters.find(name, names) is not None

    def model(self, asked: str | None) -> str:
        """The model name to answer with, that of an adapter or of the base.
        Raises ModelNotFound; an empty or missing name means the first model."""
        names, adapters = self.ingress.model_names, self.ingress.adapters
        if not asked:
            return names[0]
        if not self.knows(asked):
            there = ", ".join([*names, *list(adapters.loaded)[:20]])
            raise ModelNotFound(
                f"model {asked[:200]!r} does not exist; this server has {there}", param="model"
            )
        return asked

    def adapter(self, model: str | None, named: str | None) -> int:
        """The number of the adapter that a request asks for by ``model``, or that is ``named`` in lora_path;
        0: none. Raises ModelNotFound, UnsupportedField, InvalidField if the two differ."""
        names, adapters = self.ingress.model_names, self.ingress.adapters
        found = None if not model or model in names else adapters.find(model, names)
        if not named:
            return 0 if found is None else found.number
        wanted = adapters.named(named)
        if found is not None and found is not wanted:
            raise InvalidField(
                f"model asks for adapter {found.name!r} and lora_path for {wanted.name!r}; give one of them",
                param="lora_path",
            )
        return wanted.number

    @property
    def sampling_defaults(self) -> Defaults:
        return self.ingress.default_sampling

    def observe(self) -> None:
        """Bring what the metrics show of the engine up to date."""
        facts, stats = self.ingress.facts, self.ingress.stats()
        if facts is not None:
            self.metrics.started(facts, facts.timings)
        if stats is not None:
            self.metrics.gauges(stats)

    # running requests

    def open(self, work: Work, sink: EndableSink) -> None:
        """Admit all jobs or none of them; raises the SglaError that refuses them."""
        sinks: list[Sink] = [PromptOnly(sink) if prompt_only else sink for prompt_only in work.prompt_only]
        if work.tally is not None:
            usages = work.tally.begin()
            sinks = [Tallied(counted, work.tally, usages) for counted in sinks]
        self.ingress.open_all(list(zip(work.jobs, sinks)))
        self.register(work, sink)

    def register(self, work: Work, sink: EndableSink) -> None:
        """From now on ``abort`` finds ``work`` by its ids, though it may be opened later."""
        self._live[work.uid] = (work, sink, self.ingress)

    def close(self, work: Work, reason: str = "client") -> None:
        """Cancel what is still running of ``work``; idempotent."""
        if (live := self._live.pop(work.uid, None)) is not None:
            for job in work.jobs:
                live[2].cancel(job.rid, reason)

    def drop_slow(self, work: Work) -> None:
        """The client of a stream does not read."""
        self.metrics.slow_reader()
        self.close(work, "slow")

    async def abort(self, rid: str | None, client: Client | None = None) -> int:
        """End the running requests of the model with this id, or all of them for None; those of ``client``
        alone, if it is given and no admin. Returns how many there were."""
        found = [
            work.uid
            for work, _, ingress in self._live.values()
            if ingress is self.ingress
            and (rid is None or rid in (work.rid, work.uid))
            and (client is None or client.admin or client.owner == work.client.owner)
        ]
        await paced(map(self.end, found))
        return len(found)

    def end(self, uid: str) -> None:
        """End one running request; no effect on one that has ended."""
        if uid in self._live:
            work, sink, _ = self._live[uid]
            self.close(work)
            sink.abort()

    async def collect(self, work: Work) -> list[Choice]:
        """Run ``work`` to its end; the choices in index order. A request that is rejected raises."""
        sink = Collector(work.choices, work.share)
        if work.choices > MANY:
            await pause()
        self.open(work, sink)
        return await self.wait(work, sink)

    async def wait(self, work: Work, sink: Collector) -> list[Choice]:
        try:
            rejected = await sink.done
        finally:
            self.close(work)
        if rejected is not None:
            raise SglaError.from_rejected(rejected)
        return sink.choices

    def spawn(self, running: Coroutine[Any, Any, Any] | asyncio.Task[Any], done: Callable[[], None]) -> None:
        """Run something that no handler waits for; then call ``done``, however it ends."""
        task = asyncio.ensure_future(running)
        self._tasks.add(task)
        self.ingress.enter()
        task.add_done_callback(lambda _: self.ingress.leave())
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: done())


SERVER = web.AppKey("server", Server)
ASKED = web.RequestKey("asked", Server)
TAKEN = web.RequestKey("taken", str)  # the model that answers a request which names none, of several
IGNORED_FIELDS = web.RequestKey("ignored_fields", list[str])  # for the x-ignored-fields header
RID = web.RequestKey("rid", str)  # the id that the client sees
UID = web.RequestKey("uid", str)  # its unique form
# Of a line of a batch (messages.Job.yields): it is told how many choices are opened at once.
YIELDS: web.RequestKey[Callable[[int], None]] = web.RequestKey("yields", Callable)  # type: ignore[arg-type]
TRACE: web.RequestKey[Any] = web.RequestKey("trace", object)  # observe.tracing.Trace, if there are traces
PATH_ID = web.RequestKey("path_id", str)  # what stands for {id} in the route
ABORTED = "the request was aborted"
_counter = itertools.count()


def unique(rid: str) -> str:
    """An id for the engine made of one that a client chose, and may have chosen before."""
    return f"{rid}-{next(_counter)}"


def raise_aborted(choices: Iterable[Choice]) -> None:
    """Raise Aborted if a choice was ended from outside: OpenAI's responses have no finish_reason for that."""
    if any(choice.finish == "abort" for choice in choices):
        raise Aborted(ABORTED)
