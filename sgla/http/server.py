"""What all handlers share: the engine, the settings, and the table of requests that are running."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Protocol

import msgspec
from aiohttp import web

from sgla import clock
from sgla.actors.ingress import Sink
from sgla.config import Config
from sgla.defaults import Defaults
from sgla.errors import InvalidField, ModelNotFound, SglaError
from sgla.http.access import TALLY, Tallied, Tally
from sgla.http.answer.collect import Choice, Collector, PromptOnly
from sgla.http.answer.unread import Unread
from sgla.http.batches import files
from sgla.http.batches import store as batches
from sgla.http.batches.files import Files, file_bounds
from sgla.http.bodies import SHARE, RequestMemory, Share
from sgla.http.clients import CLIENT, Client, Proxies
from sgla.http.conversations import store as conversations
from sgla.http.conversations.store import ConversationStore
from sgla.http.errors import Aborted
from sgla.http.mcp.servers import ToolServers
from sgla.http.native.session_store import Sessions
from sgla.http.ports import Ingress
from sgla.http.probe import Probe
from sgla.http.request.grammar import ignored_formats
from sgla.http.request.schema import MAX_CHOICES, MAX_LOGPROBS, MAX_NAME, OpenAIFields, RequestFields
from sgla.http.responses import items, store
from sgla.http.responses.store import ResponseStore
from sgla.http.state import leftovers, shelf
from sgla.http.state.database import Database
from sgla.http.state.shelf import bounds
from sgla.http.turns import MANY, Door, paced, pause
from sgla.messages import MAX_GRAMMAR, Facts, Job, SamplingParams
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
DAY = 86400.0  # seconds: the longest retention that OpenAI has a word for
ABORTED = "the request was aborted"
_counter = itertools.count()


async def make_work(
    request: web.Request,
    fields: RequestFields | OpenAIFields,
    prompts: Sequence[Mapping[str, Any]],
    sampling: SamplingParams | Sequence[SamplingParams],
    rid: str | None = None,
    **common: Any,
) -> Work:
    """A Work of one job for each of ``prompts`` (the Job fields that differ); ``common`` is the same for all.
    Many are made with pauses.

    ``rid`` is the id that the body asks for. ``sampling`` may be one for each prompt, with the same ``n``.
    """
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    shared = sampled(each[0])
    n = each[0].n
    check_sizes(len(prompts), n, rid=rid, cache_salt=fields.cache_salt, extra_key=fields.extra_key)
    uid = request[UID] if rid is None else unique(rid)
    common["deadline"] = None if fields.timeout is None else clock.now() + fields.timeout
    client = request[CLIENT]
    owner = client.owner if request[ASKED].config.isolate_keys else ""
    space = "\0".join(filter(None, (owner, fields.cache_salt, fields.extra_key)))
    named = getattr(fields, "lora_path", None)
    adapters = [
        request[ASKED].adapter(fields.model, named[i] if isinstance(named, list) else named)
        for i in range(len(prompts))
    ]
    jobs = await paced(
        Job(
            rid=uid if len(prompts) == 1 else f"{uid}.{i}",
            sampling=shared if params is each[0] else sampled(params),
            stream=bool(fields.stream),
            priority=fields.priority or 0,
            yields=YIELDS in request,
            index_base=i * n,
            client=client.runs_as,
            size=request[SHARE].body,
            namespace=request[ASKED].ingress.adapters.namespace(space, adapter),
            adapter=adapter,
            cache_ttl=cache_ttl(fields),
            **prompt,
            **common,
        )
        for i, (prompt, params, adapter) in enumerate(zip(prompts, each, adapters))
    )
    limit_logprobs(jobs, request[ASKED].ingress.facts, MAX_LOGPROBS)
    limit_hidden_states(jobs, request[ASKED].ingress.facts, MAX_LOGPROBS)
    tell_ignored(request, each)
    trace(request, rid or request[RID], jobs)
    if YIELDS in request:
        request[YIELDS](len(jobs) * n)
    tally = request[TALLY] = Tally(n) if request[ASKED].config.log_requests else None
    if len(jobs) > MANY:
        await pause()
    return Work(
        rid=rid or request[RID],
        uid=uid,
        client=client,
        jobs=jobs,
        n=n,
        prompt_only=[params.max_tokens == 0 for params in each],
        share=request[SHARE],
        tally=tally,
    )


def cache_ttl(fields: RequestFields | OpenAIFields) -> float:
    """Seconds for which the prefix is to be kept."""
    if fields.cache_ttl is not None:
        return fields.cache_ttl
    return DAY if getattr(fields, "prompt_cache_retention", None) == "24h" else 0.0


def check_sizes(prompts: int, n: int, **names: str | None) -> None:
    """Raise InvalidField for more choices than a request may have, and for a name that is too long."""
    if prompts * n > MAX_CHOICES:
        raise InvalidField(
            f"{prompts} prompts with n={n} are more than {MAX_CHOICES} choices in one request", param="n"
        )
    for name, text in names.items():
        if len(text or "") > MAX_NAME:
            raise InvalidField(f"{name} may have at most {MAX_NAME} characters", param=name)


def tell_ignored(request: web.Request, sampling: Iterable[SamplingParams]) -> None:
    """Have the answer's header name what is ignored of the grammars,
    as far as these are looked through in one turn of the loop."""
    room = MAX_GRAMMAR  # characters
    for grammar in dict.fromkeys(params.grammar for params in sampling if params.grammar is not None):
        room -= len(grammar.text)
        if room < 0:
            break
        request.setdefault(IGNORED_FIELDS, []).extend(ignored_formats(grammar))


def sampled(params: SamplingParams) -> SamplingParams:
    """The engine makes at least one token."""
    return params if params.max_tokens != 0 else msgspec.structs.replace(params, max_tokens=1)


def limit_logprobs(jobs: Sequence[Job], facts: Facts | None, limit: int, outputs: bool = True) -> None:
    """Raise InvalidField for more logprobs than an answer may have. How many tokens a prompt has is known
    when it is prepared, so this sets for how many there is room in each job's ``prompt_logprobs``. Without
    ``outputs`` those of prompts alone count."""
    context = facts.context_len if facts is not None else 0
    most, later = 0, counted_later(jobs)
    for job in jobs:
        sampling = job.sampling
        if sampling.logprobs is not None and outputs:
            named = 1 + sampling.logprobs + len(sampling.logprob_token_ids)
            tokens = context if sampling.max_tokens is None else min(sampling.max_tokens, context)
            most += sampling.n * tokens * named
        if sampling.prompt_logprobs is not None:
            named = 1 + sampling.prompt_logprobs + len(sampling.logprob_token_ids)
            room = limit - most if later else sampling.n * most_tokens(job, context) * named
            job.prompt_logprobs = room if job.prompt_logprobs is None else min(room, job.prompt_logprobs)
            most += 0 if later else room
    if most > limit:
        raise InvalidField(
            f"the answer may have {most} logprobs, {limit} is the limit of one request; send fewer prompts, "
            "or ask for fewer choices, alternatives or tokens",
            param="logprobs",
        )


def limit_hidden_states(jobs: Sequence[Job], facts: Facts | None, limit: int) -> None:
    """Raise InvalidField for hidden states of more numbers than an answer may have, and set for how many
    there is room in each job's ``hidden_states``: as ``limit_logprobs`` does."""
    if facts is None:
        return
    most, context, later = 0, facts.context_len, counted_later(jobs)
    for job in jobs:
        if job.sampling.hidden_states:
            prompt, outputs = 0 if later else most_tokens(job, context), job.sampling.max_tokens
            tokens = context if outputs is None else min(prompt + outputs, context)
            room = job.sampling.n * tokens * facts.hidden
            most += room
            room = limit if later else room
            job.hidden_states = room if job.hidden_states is None else min(room, job.hidden_states)
    if most > limit:
        raise InvalidField(
            f"the hidden states of the answer may have {most} numbers, {limit} is the limit of one request; "
            "send fewer or shorter prompts, or ask for fewer choices or tokens",
            param="return_hidden_states",
        )


def counted_later(jobs: Sequence[Job]) -> bool:
    """Whether it is one prompt, whose tokens count when it is prepared: a session may put others before."""
    return len(jobs) == 1


def most_tokens(job: Job, context: int) -> int:
    """That the job's prompt may have: a text one for each byte, and one at either end."""
    if job.suffix is not None or job.messages is not None:
        return context
    if job.token_ids is not None or len(job.text or "") >= context:
        return min(len(job.token_ids or job.text or ""), context)
    assert job.text is not None
    return min(len(job.text.encode("utf-8", "surrogatepass")) + 2, context)


def trace(request: web.Request, rid: str, jobs: Sequence[Job]) -> None:
    """Let the jobs' phases become part of the request's trace, if there are traces."""
    tracing = request[ASKED].metrics.tracing
    if tracing is None:
        return
    if TRACE not in request:
        request[TRACE] = tracing.begin(request.headers, request.method, request.path, rid, jobs[0])
    tracing.add(request[TRACE], jobs)


def unique(rid: str) -> str:
    """An id for the engine made of one that a client chose, and may have chosen before."""
    return f"{rid}-{next(_counter)}"


def raise_aborted(choices: Iterable[Choice]) -> None:
    """Raise Aborted if a choice was ended from outside: OpenAI's responses have no finish_reason for that."""
    if any(choice.finish == "abort" for choice in choices):
        raise Aborted(ABORTED)
