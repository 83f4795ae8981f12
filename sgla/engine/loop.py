"""The loop in a thread on which the actors of an ``Engine`` live, and what its calls put there."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import difflib
import itertools
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
from msgspec import UNSET

from sgla import messages
from sgla.actors.cost import job_bytes
from sgla.actors.system import System
from sgla.config import Config
from sgla.defaults import Defaults
from sgla.engine.inputs import Messages, Prompt
from sgla.engine.outputs import Collector, Output
from sgla.engine.params import SamplingParams, is_constrained, resolved
from sgla.engine.pictures import NOTHING, Given, Loader, Shown, chat_given, prompt_given
from sgla.engine.progress import Bar, LoadBar, shown
from sgla.errors import ConfigError, SglaError
from sgla.messages import Event, Job, Pooling, Progress, Rejected
from sgla.validation import fault, root

T = TypeVar("T")
Message = Event | Rejected | Exception  # what a stream brings
# Bytes of prompts that one turn of the loop opens: first those of two large steps, which takes a few
# milliseconds; then, beside steps that run, so few that no result waits long.
FIRST_PART, PART = 1 << 17, 1 << 15
SHUT_DOWN = "the engine is shut down"
FORKED = "this process was forked from that of the engine, which answers there alone; make an engine here"
LEAVING = 10.0  # seconds that the end of the interpreter waits for an engine that nobody has shut down
SAVING = 5.0  # seconds that a disk or a store may still take for what requests have left
USUAL = 16  # tokens that a text is completed by, as in OpenAI's API


class Meant(NamedTuple):
    """``clip``: nobody has said how long an output may be, so it ends where the context does."""

    sampling: messages.SamplingParams
    clip: bool


class EngineLoop:
    """What the calls of ``Engine`` have in common. Use it as a context manager or call ``shutdown``."""

    def __init__(
        self, model: str = "demo", *, on_progress: Callable[[Progress], None] | None = None, **config: Any
    ) -> None:
        config.setdefault("itl_target_ms", 0)  # nobody watches single tokens: prefill at full speed
        config.setdefault("max_queued_requests", 1 << 20)  # nor sends the rest of a batch elsewhere
        self.config = settings({"model": model, **config})
        self._counter = itertools.count()
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sgla-engine", daemon=True)
        self._thread.start()
        self._process = os.getpid()
        self._system: System | None = None
        _OPEN.add(self)
        bar = LoadBar() if on_progress is None and shown(None) else None
        try:
            self._call(self._start(on_progress or bar))
        except BaseException:
            self.shutdown()
            raise
        finally:
            if bar is not None:
                bar.close()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (``sgla.text.tokenizer.Tokenizer``)."""
        return self._ready().ingress.tokenizer

    def shutdown(self) -> None:
        """End open requests, stop the workers and the thread; idempotent. In a forked process, which has
        none of these, nothing."""
        if self._loop.is_closed() or self._process != os.getpid():
            return
        if self._system is not None:
            system, self._system = self._system, None
            self._call(stop(system))
        self._end_loop(None)

    def _end_loop(self, seconds: float | None) -> None:
        """``seconds``: how long to wait for its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._loop.close()
            _OPEN.discard(self)

    def _leave(self) -> None:
        """The interpreter ends: whatever a timer of the loop calls then is no longer there, which is a
        segmentation fault. In a forked process the thread does not exist."""
        if self._process != os.getpid():
            return
        system, self._system = self._system, None
        if system is not None:
            with contextlib.suppress(Exception):
                self._put(stop(system)).result(LEAVING)
        self._end_loop(LEAVING)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # inside

    async def _start(self, on_progress: Callable[[Progress], None] | None) -> None:
        self._system = System(self.config, on_progress)
        await self._system.start()

    def _pooling(self) -> Pooling | None:
        facts = self._ready().ingress.facts
        return None if facts is None else facts.pooling

    @property
    def _defaults(self) -> Defaults:
        return self._ready().ingress.default_sampling

    def _gone(self) -> str | None:
        """Why nobody will answer, if so."""
        if self._process != os.getpid():
            return FORKED
        return SHUT_DOWN if self._loop.is_closed() else None

    def _ready(self) -> System:
        why = self._gone()
        if self._system is None or why:
            raise SglaError(why or SHUT_DOWN)
        return self._system

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Whoever leaves, as by Ctrl-C, cancels the requests of the call."""
        future = self._put(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _acall(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._put(work))

    def _put(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if why := self._gone():
            work.close()
            raise SglaError(why)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _job(self, sampling: messages.SamplingParams | None, **fields: Any) -> Job:
        return self._job_of(self._meant(sampling, fields), fields)

    def _job_of(self, meant: Meant, fields: dict[str, Any]) -> Job:
        return Job(rid=f"engine-{next(self._counter)}", sampling=meant.sampling, clip=meant.clip, **fields)

    def _meant(self, sampling: messages.SamplingParams | None, fields: dict[str, Any]) -> Meant:
        """What ``sampling`` does not set is the model's default; a chat may go on to the context's end.
        ``fields``: of a job of this kind."""
        sampling = SamplingParams() if sampling is None else sampling
        clip = isinstance(sampling, SamplingParams) and sampling.max_tokens is UNSET
        chat = "messages" in fields
        words = chat and not fields.get("tools") and not is_constrained(sampling)
        defaults = self._defaults.in_words() if words else self._defaults
        return Meant(resolved(sampling, defaults.fields(None if chat else USUAL)), clip)

    def _adapter(self, name: str | None) -> dict[str, Any]:
        """Fields of a job with the adapter of this name; None: with none. Raises BadRequest kinds."""
        if name is None:
            return {}
        adapters = self._ready().ingress.adapters
        number = adapters.named(name).number
        return {"adapter": number, "namespace": adapters.namespace("", number)}

    async def _input(
        self, prompt: Prompt | None, messages: Messages | None, shown: Shown = NOTHING
    ) -> dict[str, Any]:
        """Fields of a job. On the engine's loop."""
        if (prompt is None) == (messages is None):
            raise TypeError("give either a prompt or messages")
        given = prompt_given(prompt, shown) if messages is None else chat_given(messages, shown)
        return (await self._inputs([given]))[0]

    async def _inputs(self, given: Sequence[Given]) -> list[dict[str, Any]]:
        """Fields of jobs, with their media. On the engine's loop."""
        if not any(one.media for one in given):
            return [one.fields for one in given]
        ingress = self._ready().ingress
        loader = Loader(self.config, ingress.facts, ingress.media, ingress.pictures)
        loaded = await asyncio.gather(*map(loader.load, given))
        return [one.fields | {"pictures": media} for one, media in zip(given, loaded)]

    def _begin(self, job: Job, push: Callable[[Message], None]) -> None:
        """Have ``job`` opened on the engine's loop, where ``push`` hears what comes of it. Not as a task: a
        ``_cancel`` behind this call also happens behind it."""
        ingress = self._ready().ingress

        def begin() -> None:
            try:
                ingress.open(job, _CallSink(push))
            except Exception as error:
                push(error)

        self._loop.call_soon_threadsafe(begin)

    async def _collect(self, jobs: Iterable[Job], bar: Bar | None = None) -> list[list[Output]]:
        """Run jobs to their ends on the engine's loop; the choices of each. They are made and opened a part
        at a time: the first steps are computed while the rest is prepared, or waits for room."""
        ingress = self._ready().ingress
        sinks: dict[str, Collector] = {}
        failed = asyncio.Event()
        opened, part = 0, FIRST_PART
        try:
            for job in jobs:
                await ingress.room(job)
                if failed.is_set():
                    break
                sinks[job.rid] = Collector(job.sampling.n, failed, bar)
                ingress.open(job, sinks[job.rid])
                opened += job_bytes(job)
                if opened >= part:
                    opened, part = 0, PART
                    await asyncio.sleep(0)
            return await asyncio.gather(*(sink.done for sink in sinks.values()))
        finally:
            for rid in sinks:
                ingress.cancel(rid, "client")

    def _cancel(self, rid: str) -> None:
        if self._system is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._system.ingress.cancel, rid, "client")


_OPEN: set[EngineLoop] = set()


@atexit.register
def _leave() -> None:
    for engine in list(_OPEN):
        engine._leave()


class _CallSink:
    def __init__(self, push: Callable[[Event | Rejected], None]) -> None:
        self.push = push


def settings(fields: dict[str, Any]) -> Config:
    """Raises ConfigError, which names the field."""
    for name in fields.keys() - {*Config.__struct_fields__}:
        close = difflib.get_close_matches(name, Config.__struct_fields__, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"Engine has no setting {name}{meant}", param=name)
    try:
        return msgspec.convert(fields, Config)
    except msgspec.ValidationError as error:
        path, text = fault(error, Config)
        raise ConfigError(text, param=root(path) or None) from None


def new_loop() -> asyncio.AbstractEventLoop:
    """A uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def stop(system: System) -> None:
    """End all requests and the workers; the calls that wait for requests raise what these ended with."""
    await system.drain(0.0)
    await system.saved(SAVING)
    await system.close()
    calls = asyncio.all_tasks() - {asyncio.current_task()}
    if calls:
        await asyncio.wait(calls, timeout=1.0)
