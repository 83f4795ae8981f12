"""``Engine``: synchronous, asynchronous, batched and streaming generation in this process."""

from __future__ import annotations

import asyncio
import itertools
import math
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from sgla import messages
from sgla.actors.ingress import job_bytes
from sgla.actors.system import System
from sgla.config import Config
from sgla.defaults import Defaults
from sgla.engine.params import SamplingParams, resolved
from sgla.engine.progress import Bar, LoadBar, shown
from sgla.engine.vectors import VectorCalls
from sgla.errors import ContextTooLong, InvalidField, SglaError
from sgla.messages import MOST_PROFILED, Event, Job, Pooling, Progress, Rejected, TokenLogprob, Usage
from sgla.text.beams import MAX_WIDTH, BeamSearch, Finished, Stopping, one_token
from sgla.text.output import OutputStream

T = TypeVar("T")
Prompt = str | Sequence[int]
Messages = list[dict[str, Any]]
Message = Event | Rejected | Exception  # what a stream brings
# Bytes of prompts that one turn of the loop opens: first those of two large steps, which takes a few milliseconds; then, beside
# steps that run, so few that no result waits long.
FIRST_PART, PART = 1 << 17, 1 << 15
USUAL = 16  # tokens that a text is completed by, as in OpenAI's API


class Output(msgspec.Struct, kw_only=True):
    """One choice. ``finish``: stop | length | repetition | abort; ``matched``: the stop string or token id that ended it."""

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
    hidden_states: list[bytes] | None = (
        None  # float32[*, width], of all tokens but the last, if they were asked for
    )

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


class Chat(NamedTuple):
    """Fields of the jobs of a chat."""

    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]


class _Collector:
    """A sink on the engine's loop; ``done`` brings the request's choices in index order, or raises what it ended with, which sets
    ``failed``."""

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


class Engine(VectorCalls):
    """A loaded model. ``Engine(model="demo", dtype="float32")``: keywords are the fields of ``Config``.

    Methods are thread-safe; ``a*`` variants are awaited on the caller's own loop. Errors are ``sgla.errors.SglaError``.
    Use it as a context manager or call ``shutdown``.
    """

    def __init__(
        self, model: str = "demo", *, on_progress: Callable[[Progress], None] | None = None, **config: Any
    ) -> None:
        config.setdefault("itl_target_ms", 0)  # nobody watches single tokens: prefill at full speed
        config.setdefault("max_queued_requests", 1 << 20)  # nor sends the rest of a batch elsewhere
        self.config = msgspec.convert({"model": model, **config}, Config)
        self._counter = itertools.count()
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sgla-engine", daemon=True)
        self._thread.start()
        self._system: System | None = None
        bar = LoadBar() if on_progress is None and shown(None) else None
        try:
            self._call(self._start(on_progress or bar))
        except BaseException:
            self.shutdown()
            raise
        finally:
            if bar is not None:
                bar.close()

    # synchronous -----------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Any, sampling: Any = None, *, priority: Any = 0, progress: bool | None = None
    ) -> Any:
        """Complete one prompt (text or token ids) or a batch of them.

        Without ``sampling`` the model's own defaults hold, for 16 tokens (see ``sampling``). One prompt gives an ``Output`` (a list of
        them if ``n > 1``); a batch gives a list of that, and may have a list of ``sampling`` and of ``priority``. ``progress``:
        whether a batch shows a bar; by default on a terminal and in a notebook.
        """
        return self._call(self._generate(prompts, sampling, priority, progress))

    def chat(
        self,
        messages: Any,
        sampling: Any = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        progress: bool | None = None,
        **template_kwargs: Any,
    ) -> Any:
        """Answer a conversation, or a batch of them, through the model's chat template; results are as of ``generate``.

        Without ``sampling`` the model's own defaults hold, up to the end of the context.
        """
        chat = Chat(tools, add_generation_prompt, continue_final_message, template_kwargs)
        return self._call(self._chat(messages, sampling, chat, progress))

    def beam_search(
        self,
        prompts: Any,
        width: int = 4,
        max_tokens: int = 16,
        *,
        length_penalty: float = 1.0,
        early_stopping: Stopping = False,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        concurrency: int = 64,
        progress: bool | None = None,
    ) -> Any:
        """The ``width`` best beams of a prompt, the best first, or such a list for each of many prompts, of which ``concurrency`` are searched
        at a time; see ``sgla.text.beams.BeamSearch``."""

        def search(prompt: Prompt) -> Coroutine[Any, Any, list[Output]]:
            return self._beam_search(
                prompt, width, max_tokens, length_penalty, early_stopping, ignore_eos, logprobs
            )

        return self._call(self._beam_searches(search, prompts, concurrency, progress))

    def stream(
        self,
        prompt: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
    ) -> Iterator[Event]:
        """Yield events as they come. Leaving the loop early cancels the request."""
        job = self._job(sampling, **self._input(prompt, messages), stream=True)
        inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._begin(job, inbox.put)
        try:
            yield from until_finished(job, inbox.get)
        finally:
            self._cancel(job.rid)

    # asynchronous ----------------------------------------------------------------------------------------------------

    async def agenerate(
        self, prompts: Any, sampling: Any = None, *, priority: Any = 0, progress: bool | None = None
    ) -> Any:
        """``generate`` for asyncio code."""
        return await self._acall(self._generate(prompts, sampling, priority, progress))

    async def achat(
        self,
        messages: Any,
        sampling: Any = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        progress: bool | None = None,
        **template_kwargs: Any,
    ) -> Any:
        """``chat`` for asyncio code."""
        chat = Chat(tools, add_generation_prompt, continue_final_message, template_kwargs)
        return await self._acall(self._chat(messages, sampling, chat, progress))

    async def astream(
        self,
        prompt: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
    ) -> AsyncIterator[Event]:
        """``stream`` for asyncio code."""
        job = self._job(sampling, **self._input(prompt, messages), stream=True)
        inbox: asyncio.Queue[Message] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def push(message: Message) -> None:
            try:
                loop.call_soon_threadsafe(inbox.put_nowait, message)
            except RuntimeError:  # the loop is closed
                self._cancel(job.rid)

        self._begin(job, push)
        left = job.sampling.n
        try:
            while left:
                event = checked(await inbox.get())
                left -= event.finish is not None
                yield event
        finally:
            self._cancel(job.rid)

    # the rest --------------------------------------------------------------------------------------------------------

    def sampling(self, **fields: Any) -> SamplingParams:
        """The sampling that the model's files recommend, with ``fields`` in its place. Without ``max_tokens`` an output may go on to
        the context's end."""
        defaults = self._defaults
        return SamplingParams(**{**defaults.values, "max_tokens": defaults.max_tokens(), **fields})

    @property
    def chat_params(self) -> dict[str, Any]:
        """What ``sgla chat`` and the page ask for besides, so that every answer ends (see ``sampling``)."""
        facts = self._ready().ingress.facts
        return self._defaults.talk(facts.context_len) if facts is not None else {}

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (``sgla.text.tokenizer.Tokenizer``)."""
        return self._ready().ingress.tokenizer

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests are running."""
        return self._call(self._ready().ingress.flush_cache())

    def stats(self) -> Any:
        """A snapshot of the scheduler's counters (``sgla.sched``)."""

        async def snapshot() -> Any:
            return self._ready().ingress.stats()

        return self._call(snapshot())

    def start_profile(self, folder: str | None = None, steps: int = MOST_PROFILED) -> None:
        """Record what the workers do, until ``stop_profile`` or for so many steps. The trace goes to ``folder``, or that of the settings."""
        args = {"folder": str(Path(folder or self.config.profile_folder).resolve()), "steps": steps}
        self._call(self._ready().ingress.control(messages.Control(verb="profile_start", args=args)))

    def stop_profile(self) -> list[str]:
        """Write the recording: a file for each rank, which Perfetto shows."""
        stopped = self._call(self._ready().ingress.control(messages.Control(verb="profile_stop")))
        return [rank["file"] for rank in stopped["ranks"]]

    def shutdown(self) -> None:
        """End open requests, stop the workers and the thread; idempotent."""
        if self._loop.is_closed():
            return
        if self._system is not None:
            system, self._system = self._system, None
            self._call(stop(system))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # inside ----------------------------------------------------------------------------------------------------------

    async def _start(self, on_progress: Callable[[Progress], None] | None) -> None:
        self._system = System(self.config, on_progress)
        await self._system.start()

    def _pooling(self) -> Pooling | None:
        facts = self._ready().ingress.facts
        return None if facts is None else facts.pooling

    @property
    def _defaults(self) -> Defaults:
        return self._ready().ingress.default_sampling

    def _ready(self) -> System:
        if self._system is None:
            raise SglaError("the engine is shut down")
        return self._system

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Whoever leaves, as by Ctrl-C, cancels the requests of the call."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _acall(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _job(self, sampling: messages.SamplingParams | None, **fields: Any) -> Job:
        """Without ``sampling`` the model's defaults hold, and a chat may go on to the end of the context."""
        if sampling is None:
            fields["clip"] = True
            sampling = self._defaults.params(None if "messages" in fields else USUAL)
        return Job(rid=f"engine-{next(self._counter)}", sampling=resolved(sampling), **fields)

    @staticmethod
    def _input(prompt: Prompt | None, messages: Messages | None) -> dict[str, Any]:
        if (prompt is None) == (messages is None):
            raise TypeError("give either a prompt or messages")
        if messages is not None:
            return {"messages": messages}
        return {"text": prompt} if isinstance(prompt, str) else {"token_ids": list(prompt or [])}

    def _begin(self, job: Job, push: Callable[[Message], None]) -> None:
        """Have ``job`` opened on the engine's loop, where ``push`` hears what comes of it. Not as a task: a ``_cancel`` behind this
        call also happens behind it."""
        ingress = self._ready().ingress

        def begin() -> None:
            try:
                ingress.open(job, _CallSink(push))
            except Exception as error:
                push(error)

        self._loop.call_soon_threadsafe(begin)

    async def _generate(self, prompts: Any, sampling: Any, priority: Any, progress: bool | None) -> Any:
        single = is_one(prompts)
        batch = [prompts] if single else list(prompts)
        ranks = each(priority, len(batch), "priorities")
        inputs = [self._input(prompt, None) | {"priority": rank} for prompt, rank in zip(batch, ranks)]
        results = await self._batch(inputs, sampling, self._defaults.max_tokens(USUAL), progress)
        return results[0] if single else results

    async def _beam_searches(
        self,
        search: Callable[[Prompt], Coroutine[Any, Any, list[Output]]],
        prompts: Any,
        concurrency: int,
        progress: bool | None,
    ) -> Any:
        if is_one(prompts):
            return await search(prompts)
        places = asyncio.Semaphore(concurrency)
        bar = Bar(len(prompts), "request", progress)

        async def searched(prompt: Prompt) -> list[Output]:
            async with places:
                found = await search(prompt)
            bar.add(found)
            return found

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(searched(prompt)) for prompt in prompts]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            bar.close()
        return [task.result() for task in tasks]

    async def _beam_search(
        self,
        prompt: Prompt,
        width: int,
        max_tokens: int,
        length_penalty: float,
        early_stopping: Stopping,
        ignore_eos: bool,
        logprobs: int | None,
    ) -> list[Output]:
        if not 1 <= width <= MAX_WIDTH:
            raise InvalidField(f"width must be between 1 and {MAX_WIDTH}, got {width}", param="width")
        tokenizer, facts = self.tokenizer, self._ready().ingress.facts
        assert facts is not None
        ends = frozenset() if ignore_eos else tokenizer.eos_ids
        search = BeamSearch(width, ends, max_tokens, length_penalty, early_stopping, logprobs)
        step = one_token(width, len(ends))
        ((first,),) = await self._collect([self._job(step, **self._input(prompt, None))])
        tokens = first.prompt_tokens
        if len(tokens) + max_tokens > facts.context_len:
            raise ContextTooLong.of(facts.context_len, len(tokens), max_tokens)
        search.take([(first.logprobs or [])[0]])
        while not search.done:
            jobs = [self._job(step, token_ids=tokens + beam.tokens) for beam in search.running]
            search.take([(output.logprobs or [])[0] for (output,) in await self._collect(jobs)])
        return [self._beam(one, index, first) for index, one in enumerate(search.finished)]

    def _beam(self, one: Finished, index: int, first: Output) -> Output:
        text = OutputStream(self.tokenizer, messages.SamplingParams(), first.prompt_tokens)
        beam, finish = one.beam, "length" if one.matched is None else "stop"
        piece = text.feed(beam.tokens, beam.entries or None, finish, one.matched)
        usage = Usage(len(first.prompt_tokens), len(beam.tokens), first.usage.cached_tokens)
        return Output(
            index=index,
            text=piece.text,
            tokens=piece.tokens,
            prompt_tokens=first.prompt_tokens,
            logprobs=piece.logprobs,
            finish=finish,
            matched=one.matched,
            usage=usage,
        )

    async def _chat(self, messages: Any, sampling: Any, chat: Chat, progress: bool | None) -> Any:
        single = not messages or isinstance(messages[0], dict)
        batch = [messages] if single else list(messages)
        inputs = [chat._asdict() | {"messages": one} for one in batch]
        results = await self._batch(inputs, sampling, self._defaults.max_tokens(), progress)
        return results[0] if single else results

    async def _batch(
        self, inputs: list[dict[str, Any]], sampling: Any, usual: int | None, progress: bool | None
    ) -> list[Any]:
        """The results of requests that are told by fields of their jobs; ``usual``: max_tokens without sampling."""
        params = each(sampling, len(inputs), "sampling parameters")
        known = {id(one): resolved(one) for one in params if one is not None}  # most batches share one
        params = [None if one is None else known[id(one)] for one in params]
        # The longest outputs first, or one of them may go on alone when the others have ended (R. Graham, "Bounds on
        # multiprocessing timing anomalies", 1969: longest processing time first).
        limits = [usual if one is None else one.max_tokens for one in params]
        most = [math.inf if limit is None else limit for limit in limits]
        order = sorted(range(len(inputs)), key=lambda i: most[i], reverse=True)
        bar = Bar(len(inputs), "request", progress)
        try:
            outputs = await self._collect((self._job(params[i], **inputs[i]) for i in order), bar)
        finally:
            bar.close()
        return [unwrap(choices) for _, choices in sorted(zip(order, outputs))]

    async def _collect(self, jobs: Iterable[Job], bar: Bar | None = None) -> list[list[Output]]:
        """Run jobs to their ends on the engine's loop; the choices of each. They are made and opened a part at a time: the first
        steps are computed while the rest is prepared, or waits for room."""
        ingress = self._ready().ingress
        sinks: dict[str, _Collector] = {}
        failed = asyncio.Event()
        opened, part = 0, FIRST_PART
        try:
            for job in jobs:
                await ingress.room(job)
                if failed.is_set():
                    break
                sinks[job.rid] = _Collector(job.sampling.n, failed, bar)
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


class _CallSink:
    def __init__(self, push: Callable[[Event | Rejected], None]) -> None:
        self.push = push


def checked(message: Message) -> Event:
    """The event, or the exception that the message is or stands for."""
    if isinstance(message, Exception):
        raise message
    if isinstance(message, Rejected):
        raise SglaError.from_rejected(message)
    return message


def until_finished(job: Job, get: Callable[[], Message]) -> Iterator[Event]:
    """Events of ``job`` until each of its choices has finished."""
    left = job.sampling.n
    while left:
        event = checked(get())
        left -= event.finish is not None
        yield event


def is_one(prompts: Any) -> bool:
    """Whether it is a prompt, a text or token ids, and not several."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def each(values: Any, count: int, name: str) -> list[Any]:
    """One of ``values`` for each of ``count`` inputs. Raises ValueError."""
    found = list(values) if isinstance(values, (list, tuple)) else [values] * count
    if len(found) != count:
        raise ValueError(f"{count} inputs but {len(found)} {name}")
    return found


def unwrap(choices: list[Output]) -> Any:
    return choices[0] if len(choices) == 1 else choices


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
    await system.close()
    calls = asyncio.all_tasks() - {asyncio.current_task()}
    if calls:
        await asyncio.wait(calls, timeout=1.0)
