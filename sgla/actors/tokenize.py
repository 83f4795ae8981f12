"""The tokenizer pool: Job -> Submit. Short prompts are encoded in the loop, long ones in lanes; a job whose grammar is new waits for
the compiler before that."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sgla.actors.base import Actor
from sgla.actors.cost import cost, size_beside
from sgla.actors.lanes import Lanes
from sgla.errors import SglaError
from sgla.messages import Cancel, Grammar, Job, Opened, Rejected, Submit

if TYPE_CHECKING:
    from sgla.actors.detokenize import Detokenize
    from sgla.actors.schedule import Schedule
    from sgla.grammar.compiler import Compiler

log = logging.getLogger(__name__)

# What one turn of the loop prepares, in bytes of text (~1 us per 20): about 8 ms, so that a batch of ordinary size comes to the
# scheduler whole, and a quarter of it in each turn for what is left over, so that others need not wait for several such turns.
TURN = 1 << 17

Outcome = list[Submit] | Rejected


class Tokenize(Actor[Job]):
    """``prepare`` renders, encodes and checks one job, whose grammar is compiled; it is pure and runs here or in a thread of the
    pool."""

    def __init__(
        self,
        prepare: Callable[[Job, str], list[Submit]],
        detokenize: Detokenize,
        schedule: Schedule,
        reject: Callable[[Rejected], None],
        on_crash: Callable[[str, BaseException], None],
        lanes: Lanes,
        compiler: Compiler | None = None,
    ) -> None:
        super().__init__(on_crash)
        self._compiler = compiler
        self._prepare = prepare
        self._detokenize = detokenize
        self._schedule = schedule
        self._reject = reject
        self._lanes = lanes
        self._turn_bytes = TURN
        self._pending: dict[str, Job] = {}
        self._compiling: dict[str, asyncio.Task[str | Rejected]] = {}  # of jobs that wait for their grammars

    def post(self, message: Job) -> None:
        super().post(message)
        self._pending[message.rid] = message

    def preparing(self, rid: str) -> bool:
        """Whether the request has not gone on to the scheduler yet."""
        return rid in self._pending

    def cancel(self, rid: str, n: int, reason: str) -> None:
        """Stop a request wherever it is: still here, or handed on as ``n`` children."""
        if rid in self._pending:
            job = self._pending.pop(rid)
            if rid in self._compiling:
                self._compiling.pop(rid).cancel()
            self._lanes.drop(job.client, rid)
        else:
            for index in range(n):
                self._schedule.post(Cancel(child_rid(rid, index), reason))

    def handle(self, messages: deque[Job]) -> None:
        spent = 0
        while messages:
            if spent > self._turn_bytes:
                self._turn_bytes = TURN // 4
                self.put_back(messages)
                return
            job = messages.popleft()
            if self._pending.get(job.rid) is not job:
                continue
            spent += cost(job)
            source = self._source(job)
            if isinstance(source, Rejected):
                self._finish(job, source)
            elif source is not None:
                self._go_on(job, source)
        self._turn_bytes = TURN

    def _source(self, job: Job) -> str | Rejected | None:
        """Of the job's grammar, "" without one; None: it is compiled now, and the job comes back to the mailbox."""
        grammar = job.sampling.grammar
        if grammar is None or self._compiler is None:
            return ""
        if job.rid in self._compiling:
            return self._compiling.pop(job.rid).result()
        try:
            source = self._compiler.find(grammar)
        except SglaError as error:
            return error.rejected(job.rid)
        if source is None:
            task = asyncio.ensure_future(self._compile(self._compiler, grammar, job))
            task.add_done_callback(lambda done: None if done.cancelled() else self._again(job))
            self._compiling[job.rid] = task
        return source

    async def _compile(self, compiler: Compiler, grammar: Grammar, job: Job) -> str | Rejected:
        try:
            return await compiler.compile(grammar, job.client)
        except SglaError as error:
            return error.rejected(job.rid)
        except Exception:
            log.exception("compiling the grammar of request %s failed", job.rid)
            failed = SglaError("the grammar could not be compiled; see the server's log")
            return failed.rejected(job.rid)

    def _again(self, job: Job) -> None:
        """By the mailbox, since thousands may have waited for the same grammar."""
        super().post(job)

    def _go_on(self, job: Job, grammar: str) -> None:
        size = size_beside(job)
        if size is None:
            self._finish(job, self._run(job, grammar))
        else:
            work = partial(self._run, job, grammar)
            self._lanes.put(job.client, job.rid, size, work, partial(self.guard, self._finish, job))

    def close(self) -> None:
        self._lanes.close()
        for task in list(self._compiling.values()):
            task.cancel()
        if self._compiler is not None:
            self._compiler.close()

    def _run(self, job: Job, grammar: str) -> Outcome:
        if self._pending.get(job.rid) is not job:  # cancelled before the thread began
            return []
        try:
            return self._prepare(job, grammar)
        except SglaError as error:
            return error.rejected(job.rid)
        # One request's prompt must not take the server down, and Rust's panics are no Exceptions.
        except BaseException:
            log.exception("preparing request %s failed", job.rid)
            return SglaError("the prompt could not be prepared; see the server's log").rejected(job.rid)

    def _finish(self, job: Job, outcome: Outcome) -> None:
        if self._pending.get(job.rid) is not job:
            return
        del self._pending[job.rid]
        if isinstance(outcome, Rejected):
            self._reject(outcome)
            return
        for submit in outcome:
            self._detokenize.open(Opened(submit, job.sampling))
        for submit in outcome:
            self._schedule.post(submit)


def child_rid(rid: str, index: int) -> str:
    """The id of choice ``index`` of request ``rid`` (counted within its own job)."""
    return f"{rid}-{index}"
