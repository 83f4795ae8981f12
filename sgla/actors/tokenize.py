"""The tokenizer pool: Job -> Submit. Short prompts are encoded in the loop, long ones in a thread; a job whose grammar is
new waits for the compiler before that."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from sgla.actors.base import Actor
from sgla.actors.ingress import job_bytes
from sgla.errors import SglaError
from sgla.messages import Cancel, Grammar, Job, Opened, Rejected, Submit

if TYPE_CHECKING:
    from sgla.actors.detokenize import Detokenize
    from sgla.actors.schedule import Schedule
    from sgla.grammar.compiler import Compiler

log = logging.getLogger(__name__)

# Up to this many bytes, encoding (~1 us per 10 bytes) is cheaper than a thread hop and does not delay a step. Token ids are
# only looked at (~1 us per 100).
INLINE_BYTES = 4096
INLINE_IDS = 32768
# What one turn of the loop prepares, in bytes of text (~1 us per 10): about 25 ms, so that a batch of ordinary size comes to the
# scheduler whole. A job, a choice and an id cost as much as so many bytes.
TURN = 1 << 18
JOB, CHOICE, IDS_A_BYTE = 512, 512, 10


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
        compiler: Compiler | None = None,
        threads: int = 2,
    ) -> None:
        super().__init__(on_crash)
        self._compiler = compiler
        self._prepare = prepare
        self._detokenize = detokenize
        self._schedule = schedule
        self._reject = reject
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._chats = ThreadPoolExecutor(threads, thread_name_prefix="chats")  # they wait for the template
        self._pending: set[str] = set()
        self._compiling: dict[str, asyncio.Task[None]] = {}  # jobs that wait for their grammars

    def post(self, message: Job) -> None:
        super().post(message)
        self._pending.add(message.rid)

    def preparing(self, rid: str) -> bool:
        """Whether the request has not gone on to the scheduler yet."""
        return rid in self._pending

    def cancel(self, rid: str, n: int, reason: str) -> None:
        """Stop a request wherever it is: still here, or handed on as ``n`` children."""
        if rid in self._pending:
            self._pending.discard(rid)
            if rid in self._compiling:
                self._compiling.pop(rid).cancel()
        else:
            for index in range(n):
                self._schedule.post(Cancel(child_rid(rid, index), reason))

    def handle(self, messages: deque[Job]) -> None:
        spent = 0
        while messages:
            if spent > TURN:
                self._mailbox.extendleft(reversed(messages))
                self.wake()
                return
            job = messages.popleft()
            if job.rid not in self._pending:
                continue
            spent += cost(job)
            grammar = job.sampling.grammar
            if grammar is None or self._compiler is None:
                self._go_on(job, "")
                continue
            try:
                source = self._compiler.find(grammar)
            except SglaError as error:
                self._finish(job, error.rejected(job.rid))
                continue
            if source is not None:
                self._go_on(job, source)
            else:
                self._compiling[job.rid] = asyncio.ensure_future(self._compile(self._compiler, grammar, job))

    async def _compile(self, compiler: Compiler, grammar: Grammar, job: Job) -> None:
        try:
            source = await compiler.compile(grammar, job.client)
        except SglaError as error:
            self.guard(self._finish, job, error.rejected(job.rid))
        except Exception:
            log.exception("compiling the grammar of request %s failed", job.rid)
            failed = SglaError("the grammar could not be compiled; see the server's log")
            self.guard(self._finish, job, failed.rejected(job.rid))
        else:
            self.guard(self._go_on, job, source)
        finally:
            self._compiling.pop(job.rid, None)

    def _go_on(self, job: Job, grammar: str) -> None:
        pool = self._place(job)
        if pool is None:
            self._finish(job, self._run(job, grammar))
        else:
            future = pool.submit(self._run, job, grammar)
            future.add_done_callback(lambda done: self._back(job, done))

    def _place(self, job: Job) -> ThreadPoolExecutor | None:
        """Where to prepare the job; None: here."""
        added = added_bytes(job)
        if job.token_ids is not None and added <= INLINE_BYTES:
            return None if len(job.token_ids) <= INLINE_IDS else self._pool
        if job_bytes(job) + added > INLINE_BYTES:
            return self._pool
        return None if job.messages is None else self._chats

    def close(self) -> None:
        for pool in (self._pool, self._chats):
            pool.shutdown(wait=False, cancel_futures=True)
        for task in list(self._compiling.values()):
            task.cancel()
        if self._compiler is not None:
            self._compiler.close()

    def _run(self, job: Job, grammar: str) -> list[Submit] | Rejected:
        if job.rid not in self._pending:  # cancelled while it waited for a thread
            return []
        try:
            return self._prepare(job, grammar)
        except SglaError as error:
            return error.rejected(job.rid)
        # One request's prompt must not take the server down, and Rust's panics are no Exceptions.
        except BaseException:
            log.exception("preparing request %s failed", job.rid)
            return SglaError("the prompt could not be prepared; see the server's log").rejected(job.rid)

    def _back(self, job: Job, done: Future[list[Submit] | Rejected]) -> None:
        if not done.cancelled() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.guard, self._finish, job, done.result())

    def _finish(self, job: Job, outcome: list[Submit] | Rejected) -> None:
        if job.rid not in self._pending:
            return
        self._pending.discard(job.rid)
        if isinstance(outcome, Rejected):
            self._reject(outcome)
            return
        for submit in outcome:
            self._detokenize.open(Opened(submit, job.sampling))
        for submit in outcome:
            self._schedule.post(submit)


def cost(job: Job) -> int:
    """Of preparing the job, in bytes of text. What has many is prepared in a thread, and costs the loop no more than a few."""
    text = job_bytes(job) if job.token_ids is None else len(job.token_ids) // IDS_A_BYTE
    return JOB + CHOICE * job.sampling.n + min(INLINE_BYTES, text + added_bytes(job))


def added_bytes(job: Job) -> int:
    """Of the texts beside the prompt that are encoded or made an automaton of; an id that is checked and sorted (~0.1 us)
    costs as much as a byte."""
    sampling = job.sampling
    ids = len(sampling.allowed_token_ids or ()) + len(sampling.logit_bias)
    texts = (*sampling.bad_words, *sampling.stop, *sampling.stop_regex)
    return ids + len(job.suffix or "") + sum(map(len, texts))


def child_rid(rid: str, index: int) -> str:
    """The id of choice ``index`` of request ``rid`` (counted within its own job)."""
    return f"{rid}-{index}"
