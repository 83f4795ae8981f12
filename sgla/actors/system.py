"""The supervisor: builds the actors in order, watches the workers, drains and closes."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from sgla import clock
from sgla.actors.adapters import check_folders
from sgla.actors.base import in_thread
from sgla.actors.detokenize import Detokenize
from sgla.actors.encoding import Encoding
from sgla.actors.ingress import Ingress
from sgla.actors.pictures import PictureRoom
from sgla.actors.placing import Balancer
from sgla.actors.prefilling import Prefilling
from sgla.actors.schedule import Schedule
from sgla.actors.setup import (
    find_model,
    make_core,
    make_local,
    make_output,
    make_pictures,
    settle_device,
    spawn_workers,
)
from sgla.actors.tokenize import Tokenize
from sgla.actors.watchdog import Watchdog
from sgla.config import Config
from sgla.errors import Draining, Overloaded, SglaError, WorkerStuck
from sgla.grammar.compiler import Compiler
from sgla.hub.remote import files_of
from sgla.messages import Control, Facts, Progress
from sgla.model.sizes import outline
from sgla.observe import kv_events, steplog
from sgla.observe.kv_events import Publisher
from sgla.observe.metrics import Metrics
from sgla.observe.steplog import RecordedCore
from sgla.sched.core import Core
from sgla.sched.parts import PartedCore
from sgla.text.prepare import Preparer
from sgla.text.tokenizer import load_text, vocabulary

if TYPE_CHECKING:
    from sgla.executor.base import Executor
    from sgla.hub.source import ModelSource
    from sgla.text.process import BoundedTemplate
    from sgla.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# Commands that the workers have not answered; above ASKED those of routes are refused, so that grammars have
# places of their own. A command is below 5 KiB, and the pipe takes 200 KiB: sending one never waits for a
# worker that does not read.
COMMANDS, ASKED = 16, 8


class System:
    """One engine: ingress at once, the rest when ``start`` returns. Lives on the running loop.

    ``died`` resolves to the error if a worker or an actor fails; open requests have got it by then.
    """

    def __init__(self, config: Config, on_progress: Callable[[Progress], None] | None = None) -> None:
        self.config = config
        self.ingress = Ingress(config)
        self.metrics = Metrics(self.ingress.model_names[0], config.metrics_compat)
        self.died: asyncio.Future[SglaError] = asyncio.get_running_loop().create_future()
        self._on_progress = on_progress or (lambda progress: None)
        self._executor: Executor | None = None
        self._tokenize: Tokenize | None = None
        self._schedule: Schedule | None = None
        self._core: Core | PartedCore | None = None
        self._watchdog: Watchdog | None = None
        self.prefilling: Prefilling | None = None  # of a server that reads prompts for others
        self._encoding: Encoding | None = None  # where features of pictures are made, if that is not here
        self._publisher: Publisher | None = None
        self._pictures: PictureRoom | None = None
        self._waking: asyncio.Task[None] | None = None  # what prepares pictures
        self._balancing: asyncio.Task[None] | None = None
        self._inquest: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Task[dict[str, Any]]] = set()  # to commands

    async def start(self) -> Facts:
        """Fetch and load the model, connect the actors.
        Raises ConfigError or WorkerDied; ``close`` is still due."""
        loop = asyncio.get_running_loop()

        def report(progress: Progress) -> None:
            loop.call_soon_threadsafe(self._progress, progress)

        finding = in_thread(find_model, self.config, report)
        settled = await in_thread(settle_device, self.config)
        workers = self._executor = spawn_workers(settled)
        config, source, defaults = await finding
        check_folders(config)
        if workers is not None and config.device != settled.device:
            await workers.close()
            workers = self._executor = spawn_workers(config)
        if workers is not None:
            workers.assign(config, source)
        self._executor = workers or make_local(config, source)
        self._executor.on_death(self._fail)
        loading = asyncio.ensure_future(self._executor.start(self._progress))
        try:
            facts, (tokenizer, template) = await asyncio.gather(loading, in_thread(load_text, config, source))
        except BaseException:  # a broken tokenizer need not wait for the weights
            loading.cancel()
            await asyncio.wait([loading])
            raise
        if self.died.done():
            raise self.died.result()
        self.ingress.default_sampling = defaults
        if config.lora_modules:
            await self.ingress.adapters.begin(self._executor.control)
        self._connect(config, facts, source, tokenizer, template)
        if config.encode_url is not None and self._pictures is not None:
            self._encoding = self._pictures.encoding = Encoding(config, facts.identity)
            await in_thread(self._encoding.begin)
        if config.role == "prefill":
            self.prefilling = Prefilling(config, facts, self.ingress)
        if self._pictures is not None:
            self._waking = loop.create_task(self._pictures.wake())
        if config.rebalance_interval:
            balancer = self.metrics.balancer = Balancer(config, self.ingress)
            self._balancing = loop.create_task(balancer.run())
        tune_interpreter()
        return facts

    def _connect(
        self,
        config: Config,
        facts: Facts,
        source: ModelSource,
        tokenizer: Tokenizer,
        template: BoundedTemplate | None,
    ) -> None:
        ingress, executor = self.ingress, self._executor
        assert executor is not None
        core = self._core = make_core(config, facts)
        compiler = self._compiler(tokenizer, facts) if facts.grammars else None
        detokenize = Detokenize(
            lambda opened: make_output(tokenizer, opened),
            ingress.deliver,
            ingress.reject,
            lambda cancel: schedule.post(cancel),  # made below: the two actors know each other
            self.metrics,
            self._crashed,
            compiler.check if compiler else None,
        )
        watchdog = self._watchdog = Watchdog(config.watchdog_timeout, self._stuck)
        schedule = Schedule(core, executor, detokenize, self.metrics, watchdog, self._crashed)
        speller, self._pictures = make_pictures(config, source) if facts.media else (None, None)
        preparer = Preparer(
            tokenizer, template, facts, ingress.random, compiler is not None, facts.processors, speller
        )
        tokenize = Tokenize(
            preparer,
            detokenize,
            schedule,
            ingress.reject,
            self._crashed,
            ingress.lanes,
            compiler,
            self._pictures,
        )
        self._schedule, self._tokenize = schedule, tokenize
        ingress.tokenizer, ingress.template = tokenizer, template
        ingress.pictures, ingress.speller = self._pictures, speller
        self.metrics.media = None if self._pictures is None else self._pictures.kept
        ingress.model = outline(source.config, source.quantization)
        ingress.files = files_of(source)
        ingress.adapters.connect(self._control, schedule.post)
        self.metrics.started(facts, facts.timings)
        if (events := kv_events.read(config.kv_events_config)) is not None:
            self._publisher = Publisher(events)
            medium = "CPU" if facts.device == "cpu" else "GPU"
            schedule.after = partial(self._publisher.publish, core.tell_events(medium))
        if isinstance(core, RecordedCore):
            ingress.step_log, schedule.rest = core.written, core.rest
        ingress.connect(
            tokenize,
            facts,
            core.stats,
            self._control,
            schedule.flush_cache,
            lambda: watchdog.trouble,
            schedule.pause,
            core.renew,
        )

    def _compiler(self, tokenizer: Tokenizer, facts: Facts) -> Compiler:
        async def tell(command: Control) -> dict[str, Any]:
            told = (await self._control(command, COMMANDS))["ranks"]
            return next(filter(None, told), {})  # of the rank that samples

        config = self.config
        self.metrics.compiler = Compiler(
            lambda: vocabulary(tokenizer, facts.vocab_size),
            tell,
            config.json_whitespace,
            config.json_additional_properties,
        )
        return self.metrics.compiler

    async def _control(self, command: Control, limit: int = ASKED) -> dict[str, Any]:
        """Send the workers a command; the watchdog sees to it that an answer comes, or that all ends. The
        answer is owed even when nobody waits for it any more. Raises Overloaded if ``limit`` answers are
        owed."""
        assert self._executor is not None
        assert self._watchdog is not None
        if len(self._answers) >= limit:
            raise Overloaded(
                f"the workers have not answered {limit} commands yet, which is the limit; retry later",
                retry_after=5.0,
            )
        self._watchdog.expect()
        answer = asyncio.ensure_future(self._executor.control(command))
        self._answers.add(answer)
        answer.add_done_callback(self._answered)
        waits: list[asyncio.Future[Any]] = [answer, self.died]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise self.died.result()
        return answer.result()

    def _answered(self, answer: asyncio.Task[dict[str, Any]]) -> None:
        assert self._watchdog is not None
        self._answers.discard(answer)
        if not answer.cancelled():
            answer.exception()  # nobody may wait for it
            self._watchdog.received()

    def _stuck(self) -> None:
        self._inquest = asyncio.get_running_loop().create_task(self._end_stuck())

    async def _end_stuck(self) -> None:
        """Say where the workers are, then give them up:
        requests end with a typed 503, and so does the process."""
        assert self._executor is not None
        assert self._watchdog is not None
        error = WorkerStuck(f"{self._watchdog.trouble}; the server is stopping")
        log.error("%s; the workers:\n%s", error.message, await self._executor.inquire())
        self._fail(error)
        if self._executor is not None:
            self._executor.kill()

    def _progress(self, progress: Progress) -> None:
        """Of the start, or, once that is over, of workers that read weights again."""
        if self._watchdog is not None:
            self._watchdog.moves()
            return
        self.ingress.show(progress)
        self._on_progress(progress)

    def _crashed(self, actor: str, error: BaseException) -> None:
        log.error("actor %s failed", actor, exc_info=error)
        self._fail(SglaError(f"internal error in the {actor.lower()} actor; the server is stopping"))

    def _fail(self, error: SglaError) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        if self._schedule is not None:
            self._schedule.close()
        if not self.died.done():
            self._dump_steps(error)
        self.ingress.fail(error)
        if not self.died.done():
            self.died.set_result(error)

    def _dump_steps(self, error: SglaError) -> None:
        folder = self.config.crash_dump_folder
        if folder is None or not isinstance(self._core, RecordedCore):
            return
        try:
            log.error(
                "the scheduler's last steps are in %s", steplog.write(folder, self._core, error.message)
            )
        except OSError as problem:
            log.error("the scheduler's last steps could not be written: %s", problem)

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, let open ones finish for ``timeout`` seconds, then end the rest with a typed
        503. Those that yield end at once: a batch goes on when the server is there again. What is left of the
        time, a disk or a store has for what requests have left."""
        if self._schedule is not None:
            self._schedule.pause(False)
        self.ingress.phase = "draining"
        self.end_requests(yielding=True)
        deadline = clock.now() + timeout
        while self.ingress.open_requests and clock.now() < deadline and not self.died.done():
            await asyncio.sleep(0.02)
        self.end_requests()
        await self.saved(deadline - clock.now())

    async def saved(self, timeout: float) -> None:
        """Wait until tiers that outlive the server have what requests have left, but no longer."""
        if self._core is None or not (self.config.kv_disk or self.config.kv_store):
            return
        deadline = clock.now() + timeout
        while not self._core.idle and clock.now() < deadline and not self.died.done():
            await asyncio.sleep(0.02)

    def end_requests(self, yielding: bool = False) -> None:
        """End the open requests, or those that yield, with a typed 503."""
        error = Draining("the server shut down before the request finished", retry_after=5.0)
        for rid in self.ingress.rids(yielding):
            self.ingress.reject(error.rejected(rid))

    async def close(self) -> None:
        """Stop the actors and the workers; idempotent."""
        if self.prefilling is not None:
            self.prefilling.close()
        if self._watchdog is not None:
            self._watchdog.close()
        if self._schedule is not None:
            self._schedule.close()
        if self._tokenize is not None:
            self._tokenize.close()
        for task in (self._waking, self._balancing):
            if task is not None:
                task.cancel()
        if self._pictures is not None:
            await self._pictures.close()
        if self._encoding is not None:
            await in_thread(self._encoding.close)
        if self._publisher is not None:
            self._publisher.close()
        await self.ingress.media.close()
        if self._executor is not None:
            await self._executor.close()
            self._executor = None

    def abandon(self) -> None:
        """``close`` in any thread, for a process that ends although its loop hangs:
        no process and no file is left behind."""
        if self._executor is not None:
            self._executor.kill()
        if self._tokenize is not None:
            self._tokenize.close()


def tune_interpreter() -> None:
    """Keep Python's own pauses away from the step: short switch interval, start-up objects out of the
    collector, and full passes, which hold the loop for 35 to 50 ms with 500 open streams, ten times rarer.
    The youngest objects get time to die by themselves: a burst of 2,000 streams then takes a fourth less of
    the loop. What is looked through together, 10,000 objects, takes up to 5 ms."""
    sys.setswitchinterval(0.0005)
    gc.set_threshold(2000, 5, 70)
    gc.collect()
    gc.freeze()
