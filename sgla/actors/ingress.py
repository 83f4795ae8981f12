"""Where requests enter and answers leave. HTTP handlers and the Python Engine talk to this object only."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sgla import clock
from sgla.actors.adapters import AdapterTable
from sgla.actors.blocks import check_blocks
from sgla.actors.cost import job_bytes
from sgla.actors.experts import MovesExperts
from sgla.actors.lanes import Lanes
from sgla.actors.resting import RESTS
from sgla.config import Config
from sgla.defaults import Defaults
from sgla.errors import BadRequest, Draining, InvalidField, Loading, Overloaded, SglaError, UnsupportedTask
from sgla.media.pool import Pool, processes_of
from sgla.media.sound import RATE
from sgla.messages import Control, Event, Facts, Job, Progress, Rejected
from sgla.model.sizes import Outline

if TYPE_CHECKING:
    from sgla.actors.pictures import PictureRoom
    from sgla.actors.tokenize import Tokenize
    from sgla.sched.core import Stats
    from sgla.text.pictures import Speller
    from sgla.text.process import BoundedTemplate
    from sgla.text.tokenizer import Tokenizer

# Prompt bytes that may be open at once; keeps a flood of maximal bodies from exhausting the host's memory.
OPEN_BYTES = 256 << 20
SPARE = 1 / 8  # of the capacity: clients that have no more than that open may open as much beyond it
# Of memory that a process for media may take: what any task needs, what a pixel does, a second of sound.
PROCESS, PIXEL, SECOND = 256 << 20, 32, 16 * RATE
SILENT = 30.0  # seconds of a start without progress that are worth telling
SHUTTING_DOWN = "the server is shutting down"
PRODUCTS = {"embed": "embeddings", "classify": "classifications"}


class Sink(Protocol):
    """Where one request's output goes.
    ``push`` must not block; after the last finish or a Rejected it is not called."""

    def push(self, message: Event | Rejected) -> None: ...


class _Open:
    """One admitted request: its sink, and which children have not finished."""

    __slots__ = ("adapter", "children", "client", "cost", "more", "more_bytes", "n", "sink", "yields")

    def __init__(
        self,
        sink: Sink,
        client: str,
        n: int,
        cost: int,
        more: int,
        more_bytes: int,
        yields: bool,
        adapter: int,
    ) -> None:
        self.sink = sink
        self.client = client
        self.n = n
        self.children = n
        self.cost = cost
        self.more = more  # choices by which it raises the capacity while it is open
        self.more_bytes = more_bytes  # bytes by which it raises the room for prompts while it is open
        self.yields = yields
        self.adapter = adapter


class Ingress(MovesExperts):
    """Bounded admission, the table of open requests, and the read-only facts that handlers need.

    Nobody else refuses for want of room. The capacity, slots and ``max_queued_requests`` together, bounds the
    choices that are open, wherever they are. One client may fill it, and a request that comes alone may go
    beyond it, which raises it while that request is open; clients that have little open then find an eighth
    more. Lines of batches (``Job.yields``) are counted apart: one may be opened while fewer of their choices
    are open than there are slots. Invariant: every rid accepted by ``open`` gets, unless it is cancelled
    first, a finish for each of its ``n`` children or one Rejected; then it is forgotten.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        # unloaded | starting | download | spawn | compile | load | warmup | ready | draining | dead
        self.phase = "starting"
        self.progress = Progress(phase="starting")
        self._progressed = clock.now()  # when it was told
        self.started = clock.now()
        self.model_names: list[str] = config.served_model_name or [config.model]
        self.facts: Facts | None = None
        self.tokenizer: Tokenizer | None = None
        self.template: BoundedTemplate | None = None
        self.model: Outline | None = None  # once it is loaded
        self.default_sampling = Defaults()
        self.random = random.Random(config.random_seed)
        self.lanes = Lanes()
        self.adapters = AdapterTable(config)
        self.media = Pool(
            processes_of(config.media_processes),
            PROCESS
            + max(PIXEL * config.max_image_pixels, int(SECOND * config.max_audio_seconds))
            + 4 * config.max_media_bytes,
            config.media_cpu_seconds,
            ["sgla.media.decode"],
        )
        self.pictures: PictureRoom | None = None  # of a model that takes pictures, and so
        self.speller: Speller | None = None
        self._failure: SglaError | None = None
        self._trouble: Callable[[], str] = lambda: ""
        self._open: dict[str, _Open] = {}
        self._children = 0  # open choices
        self._held_by: Counter[str] = Counter()  # of them, by client
        self._yielding = 0  # of them, those that yield
        self._bytes = 0
        self._more_bytes = 0  # than OPEN_BYTES, for requests that came alone
        self._capacity = 0  # most open choices
        self._freed = asyncio.Event()  # set when a choice ends or a request is forgotten
        self._last_end: float | None = None
        self._interval = 1.0  # smoothed seconds between these ends
        self._refused = 0  # requests, for want of room
        self._tokenize: Tokenize | None = None
        self._stats: Callable[[], Stats] | None = None
        self._control: Callable[[Control], Awaitable[Any]] | None = None
        self._flush: Callable[[bool], bool] | None = None
        self._pause: Callable[[bool], None] | None = None
        self.paused = False
        self.files: dict[str, Path] = {}  # of the model, by name
        self.step_log: Callable[[str], bytes] | None = None  # None: no steps are kept

    def connect(
        self,
        tokenize: Tokenize,
        facts: Facts,
        stats: Callable[[], Stats],
        control: Callable[[Control], Awaitable[Any]],
        flush: Callable[[bool], bool],
        trouble: Callable[[], str],
        pause: Callable[[bool], None],
        renew: Callable[[str], bool] = lambda weights: True,
    ) -> None:
        """The supervisor plugs in the running engine; from here on requests are accepted."""
        self._tokenize, self.facts, self._stats = tokenize, facts, stats
        self._control, self._flush, self._trouble, self._pause = control, flush, trouble, pause
        self._renew = renew
        self._capacity = facts.slots + self.config.max_queued_requests
        self.phase = "ready"

    # state

    @property
    def ready(self) -> bool:
        """True while requests are accepted and no step is overdue."""
        waits = self.phase == "unloaded" or (self.phase == "sleeping" and self.dozing)
        return waits or (self.phase == "ready" and not self._trouble())

    @property
    def trouble(self) -> str:
        """Why the server is not ready; "" if it is."""
        if self._failure is not None:
            return self._failure.message
        if self.phase == "draining":
            return SHUTTING_DOWN
        if self.phase in RESTS:
            return self._trouble() or RESTS[self.phase]
        if self._tokenize is not None:
            return self._trouble()
        silent = clock.now() - self._progressed
        return self.progress.message + (f" (no news for {silent:.0f} s)" if silent > SILENT else "")

    def show(self, progress: Progress) -> None:
        """How far the start is."""
        self.phase, self.progress, self._progressed = progress.phase, progress, clock.now()

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def require_ready(self, resting: bool = False) -> None:
        """Raise the typed 503 that says why requests are not accepted now. ``resting``: a server that sleeps,
        or whose weights are being updated, is ready enough."""
        if self._failure is not None:
            raise self._failure
        if self.phase == "draining":
            raise Draining(f"{SHUTTING_DOWN}; send the request elsewhere", retry_after=5.0)
        if self.phase in RESTS and not resting:
            raise Loading(RESTS[self.phase], retry_after=5.0)
        if self._tokenize is None:
            detail = f": {self.trouble}" if self.trouble else ""
            raise Loading(f"the model is not loaded yet (phase {self.phase}{detail})", retry_after=1.0)

    def stats(self) -> Stats | None:
        if self._stats is None:
            return None
        stats = self._stats()
        stats.rejected += self._refused
        return stats

    # requests

    def open(self, job: Job, sink: Sink) -> None:
        """Admit a request or raise the SglaError that refuses it; never waits. ``job.rid`` must be new."""
        self.open_all([(job, sink)])

    def open_all(self, jobs: Sequence[tuple[Job, Sink]], extra: bool = False) -> None:
        """``open`` for jobs that belong together: all of them are admitted, or none. With ``extra`` they are
        never refused for want of room, and take none from others. Either all yield, or none."""
        self.require_ready()
        assert self._tokenize is not None
        for job, _ in jobs:
            if job.rid in self._open:
                raise BadRequest(f"a request with id {job.rid!r} is already running", param="request_id")
            check_task(job, self.facts)
        yields, n = jobs[0][0].yields, sum(job.sampling.n for job, _ in jobs)
        costs = [0 if yields else job_bytes(job) for job, _ in jobs]
        if yields:
            extra = True
            self._check_yielding(n)
        elif full := self._full(jobs[0][0].client, 0 if extra else n, sum(costs)):
            self._refused += 1
            raise Overloaded(full, retry_after=self._retry_after())
        for number in {job.adapter for job, _ in jobs}:
            self.adapters.check(number)
        now = clock.now()
        # What goes beyond the room there is belongs to the first jobs, which end first.
        alone = not self._open
        left = n if extra else max(0, n - self._capacity) if alone else 0
        left_bytes = max(0, sum(costs) - OPEN_BYTES) if alone else 0
        for (job, sink), cost in zip(jobs, costs):
            job.arrival = now
            more, more_bytes = min(left, job.sampling.n), min(left_bytes, cost)
            left, left_bytes = left - more, left_bytes - more_bytes
            entry = _Open(sink, job.client, job.sampling.n, cost, more, more_bytes, yields, job.adapter)
            self.adapters.use(job.adapter)
            self._open[job.rid] = entry
            self._held_by[entry.client] += entry.n
            self._capacity += entry.more
            self._more_bytes += entry.more_bytes
            self._yielding += entry.n if yields else 0
            self._children += entry.n
            self._bytes += cost
            self._tokenize.post(job)

    async def room(self, job: Job) -> None:
        """Wait until ``open`` would refuse ``job`` no longer for want of room."""
        n, cost = job.sampling.n, job_bytes(job)
        while self._yielding_full() if job.yields else self._full(job.client, n, cost):
            self._freed.clear()
            await self._freed.wait()

    def _full(self, client: str, n: int, cost: int) -> str:
        """Why ``n`` more choices of prompts of ``cost`` bytes are too much; "" if they are not.
        Alone, a request always has room."""
        if not self._open:
            return ""
        held = self._held_by[client]
        room = 1 + SPARE if held < self._children and held + n <= SPARE * self._capacity else 1
        if self._children + n > room * self._capacity:
            return (
                f"{self._children} requests are open, which is the limit; "
                "retry later or raise --max-queued-requests"
            )
        if self._bytes + cost > room * (OPEN_BYTES + self._more_bytes):
            return (
                "the prompts of the open requests fill the "
                f"{OPEN_BYTES >> 20} MiB there are for them; retry later"
            )
        return ""

    def _check_yielding(self, n: int) -> None:
        """Raise the error that refuses ``n`` more choices that yield:
        Overloaded while as many as there are slots are open."""
        assert self.facts is not None
        if n > self.facts.slots:
            raise InvalidField(
                f"a line of a batch may have {self.facts.slots} choices, n for each prompt, not {n}; split "
                "it into several lines, or start the server with a larger --max-running-requests",
                param="n",
            )
        if self._yielding_full():
            raise Overloaded(
                f"{self._yielding} requests of batches are open, which is the limit", retry_after=1.0
            )

    def _yielding_full(self) -> bool:
        assert self.facts is not None
        return self._yielding >= self.facts.slots

    def cancel(self, rid: str, reason: str) -> bool:
        """Forget the request and free what it holds; False if it is not open.
        Nothing more reaches its sink."""
        entry = self._close(rid)
        if entry is None or self._tokenize is None:
            return False
        self._tokenize.cancel(rid, entry.n, reason)
        return True

    def preparing(self, rid: str) -> bool:
        """Whether the request is still on its way to the scheduler, so that it may yet be refused."""
        return self._tokenize is not None and self._tokenize.preparing(rid)

    def rids(self, yielding: bool = False) -> list[str]:
        """Of the open requests, or of those that yield."""
        return [rid for rid, entry in self._open.items() if entry.yields or not yielding]

    def deliver(self, event: Event) -> None:
        """Hand an event of an open request to its sink; events of forgotten requests are dropped."""
        entry = self._open.get(event.rid)
        if entry is None:
            return
        if event.finish is not None:
            entry.children -= 1
            self._leave(entry, 1)
            if entry.children == 0:
                del self._open[event.rid]
                self._give_back(entry)
            self._free()
        entry.sink.push(event)

    def reject(self, rejected: Rejected) -> None:
        """End a whole request with a typed error; its other children are cancelled."""
        entry = self._close(rejected.rid)
        if entry is None:
            return
        if self._tokenize is not None and self._failure is None:
            self._tokenize.cancel(rejected.rid, entry.n, "error")
        entry.sink.push(rejected)

    def fail(self, error: SglaError) -> None:
        """The engine is gone: every open request ends with ``error``, and so does every later one."""
        self._failure = error
        self.phase = "dead"
        for rid in list(self._open):
            self.reject(error.rejected(rid))

    def _close(self, rid: str) -> _Open | None:
        entry = self._open.pop(rid, None)
        if entry is not None:
            self._leave(entry, entry.children)
            self._give_back(entry)
            self._free()
        return entry

    def _give_back(self, entry: _Open) -> None:
        """None of its choices is open any more."""
        self._bytes -= entry.cost
        self._capacity -= entry.more
        self._more_bytes -= entry.more_bytes
        self.adapters.leave(entry.adapter)

    def _leave(self, entry: _Open, count: int) -> None:
        """So many of its choices are open no longer."""
        self._children -= count
        self._yielding -= count if entry.yields else 0
        self._held_by[entry.client] -= count
        if not self._held_by[entry.client]:
            del self._held_by[entry.client]

    def _free(self) -> None:
        now = clock.now()
        if self._last_end is not None:
            self._interval = 0.9 * self._interval + 0.1 * (now - self._last_end)
        self._last_end = now
        self._freed.set()

    def _retry_after(self) -> float:
        """Seconds until about a quarter of the open choices has gone, as choices end now; within [1, 60]."""
        return min(60.0, 1.0 + self._interval * self._children / 4)

    # services

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; False if requests are running (nothing is flushed then)."""
        self.require_ready()
        assert self._flush is not None
        return self._flush(True)

    def pause(self, paused: bool) -> None:
        """Stop generating, or go on; a server that rests does so when it no longer does. While paused,
        requests are accepted and wait."""
        self.require_ready(resting=True)
        assert self._pause is not None
        self.paused = paused
        if self.phase not in RESTS:
            self._pause(paused)

    async def control(self, command: Control) -> Any:
        """Send an out-of-step command to the workers and return rank 0's answer."""
        self.require_ready()
        assert self._control is not None
        return await self._control(command)


def check_task(job: Job, facts: Facts | None) -> None:
    """Raise UnsupportedTask for a job that the model cannot do."""
    assert facts is not None
    if facts.speech is not None and job.window is None:
        raise UnsupportedTask(
            "this server's model writes what it hears; send it a sound by /v1/audio/transcriptions or "
            "/v1/audio/translations, or serve another model for this route"
        )
    if facts.canvas and job.pool is None:
        check_blocks(job.sampling)
    pooling = facts.pooling
    if facts.encodes:
        raise UnsupportedTask(facts.untaken["image"])
    if pooling is not None and job.pool is None:
        raise UnsupportedTask(
            f"this server's model makes {PRODUCTS[pooling.task]}, not text; "
            "serve a model that generates for this route"
        )
    if pooling is None and job.pool is not None and not (job.pool and facts.scores):
        raise UnsupportedTask(
            "label_token_ids are not scored on this device; serve the model with --device cpu"
            if job.pool
            else "this server's model makes text, not vectors; serve an "
            "embedding or classification model for this route"
        )
