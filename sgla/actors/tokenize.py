"""The tokenizer pool: Job -> Submit. Short prompts are encoded in the loop, long ones in lanes. A new grammar
is compiled meanwhile; the scheduler holds its request until then."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sgla.actors.base import Actor
from sgla.actors.cost import cost, lane_size
from sgla.actors.lanes import Lanes
from sgla.errors import SglaError
from sgla.messages import GRAMMAR, Cancel, Grammar, Job, Opened, Ready, Rejected, Submit
from sgla.sched.limits import with_grammar
from sgla.text.pictures import of_prompt
from sgla.text.prepare import child_rid

if TYPE_CHECKING:
    from sgla.actors.detokenize import Detokenize
    from sgla.actors.pictures import PictureRoom
    from sgla.actors.schedule import Schedule
    from sgla.grammar.compiler import Compiler

log = logging.getLogger(__name__)

# What one turn of the loop prepares, in bytes of text (~1 us per 20): about 8 ms, so that a batch of ordinary
# size comes to the scheduler whole, and a quarter of it in each turn for what is left over, so that others
# need not wait for several such turns.
TURN = 1 << 17

Outcome = list[Submit] | Rejected


class Tokenize(Actor[Job]):
    """``prepare`` renders, encodes and checks one job;
    it is pure and runs here or in a thread of the pool."""

    def __init__(
        self,
        prepare: Callable[[Job], list[Submit]],
        detokenize: Detokenize,
        schedule: Schedule,
        reject: Callable[[Rejected], None],
        on_crash: Callable[[str, BaseException], None],
        lanes: Lanes,
        compiler: Compiler | None = None,
        pictures: PictureRoom | None = None,
    ) -> None:
        super().__init__(on_crash)
        self._compiler = compiler
        self._pictures = pictures
        self._prepare = prepare
        self._detokenize = detokenize
        self._schedule = schedule
        self._reject = reject
        self._lanes = lanes
        self._turn_bytes = TURN
        self._pending: dict[str, Job] = {}
        self._grammars: dict[str, asyncio.Future[str | Rejected]] = {}  # of jobs that pend or are held
        self._held: dict[str, list[Submit]] = {}  # in the scheduler, for their grammars
        self._looks: dict[str, asyncio.Task[None]] = {}  # at the pictures of jobs that pend

    def post(self, message: Job) -> None:
        super().post(message)
        self._pending[message.rid] = message

    def preparing(self, rid: str) -> bool:
        """Whether the request cannot be run yet, so that it may still be refused."""
        return rid in self._pending or rid in self._held

    def cancel(self, rid: str, n: int, reason: str) -> None:
        """Stop a request wherever it is: still here, or handed on as ``n`` children."""
        if (grammar := self._grammars.pop(rid, None)) is not None:
            grammar.cancel()
        self._held.pop(rid, None)
        if (look := self._looks.pop(rid, None)) is not None:
            look.cancel()
        if rid in self._pending:
            job = self._pending.pop(rid)
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
            if job.sampling.grammar is not None and self._compiler is not None:
                self._ask_grammar(self._compiler, job.sampling.grammar, job)
            if job.rid not in self._pending:
                continue
            if job.pictures and self._pictures is not None:
                self._looks[job.rid] = asyncio.ensure_future(self._look(self._pictures, job))
            else:
                self._start(job)
        self._turn_bytes = TURN

    def _ask_grammar(self, compiler: Compiler, grammar: Grammar, job: Job) -> None:
        """Have the job's grammar compiled, unless it is already; end the job if it cannot be."""
        try:
            source = compiler.find(grammar)
        except SglaError as error:
            self._hand_on(job, error.rejected(job.rid))
            return
        if source is None:
            self._grammars[job.rid] = asyncio.ensure_future(self._compile(compiler, grammar, job))
        else:
            found = self._grammars[job.rid] = self._loop.create_future()
            found.set_result(source)

    async def _compile(self, compiler: Compiler, grammar: Grammar, job: Job) -> str | Rejected:
        try:
            return await compiler.compile(grammar, job.client)
        except SglaError as error:
            return error.rejected(job.rid)
        except Exception:
            log.exception("compiling the grammar of request %s failed", job.rid)
            failed = SglaError("the grammar could not be compiled; see the server's log")
            return failed.rejected(job.rid)

    async def _look(self, room: PictureRoom, job: Job) -> None:
        """Have the job's pictures prepared, then its prompt."""
        failed: Rejected | None = None
        try:
            job.prepared = await room.prepare(job.pictures, job.client, job.media_kwargs, job.window)
        except SglaError as error:
            failed = of_prompt(error, job).rejected(job.rid)
        except Exception:
            log.exception("preparing the pictures of request %s failed", job.rid)
            failed = SglaError("a picture could not be prepared; see the server's log").rejected(job.rid)
        self._looks.pop(job.rid, None)
        if self._pending.get(job.rid) is not job:
            return
        job.pictures = []
        if failed is None:
            self.guard(self._start, job)
        else:
            self.guard(self._hand_on, job, failed)

    def _start(self, job: Job) -> None:
        """Prepare the job, here or in a lane, then hand it on."""
        size = lane_size(job)
        if size is None:
            self._hand_on(job, self._prepared(job))
        else:
            work = partial(self._prepared, job)
            self._lanes.put(job.client, job.rid, size, work, partial(self.guard, self._hand_on, job))

    def close(self) -> None:
        self._lanes.close()
        for look in self._looks.values():
            look.cancel()
        for grammar in self._grammars.values():
            grammar.cancel()
        if self._compiler is not None:
            self._compiler.close()

    def _prepared(self, job: Job) -> Outcome:
        if self._pending.get(job.rid) is not job:  # cancelled before the thread began
            return []
        try:
            return self._prepare(job)
        except SglaError as error:
            return error.rejected(job.rid)
        # One request's prompt must not take the server down, and Rust's panics are no Exceptions.
        except BaseException:
            log.exception("preparing request %s failed", job.rid)
            return SglaError("the prompt could not be prepared; see the server's log").rejected(job.rid)

    def _hand_on(self, job: Job, outcome: Outcome) -> None:
        """The job is prepared: its children go to detokenize, then to schedule."""
        if self._pending.get(job.rid) is not job:
            return
        del self._pending[job.rid]
        grammar = self._grammars.get(job.rid)
        if isinstance(outcome, Rejected):
            if grammar is not None:
                self._grammars.pop(job.rid).cancel()
            self._reject(outcome)
            return
        for submit in outcome:
            if grammar is not None:
                submit.holds = frozenset((GRAMMAR,))
            self._detokenize.open(Opened(submit, job.sampling))
        for submit in outcome:
            self._schedule.post(submit)
        if grammar is not None:
            self._held[job.rid] = outcome
            if grammar.done():
                self._release(job.rid, grammar)
            else:
                grammar.add_done_callback(partial(self.guard, self._release, job.rid))

    def _release(self, rid: str, grammar: asyncio.Future[str | Rejected]) -> None:
        """The grammar of a held request is compiled: it need not be held for that any longer."""
        if grammar.cancelled():
            return
        del self._grammars[rid]
        submits, found = self._held.pop(rid), grammar.result()
        if isinstance(found, Rejected):
            self._reject(found)
            return
        try:
            given = [with_grammar(submit, found) for submit in submits]
        except SglaError as error:
            self._reject(error.rejected(rid))
            return
        for submit, (sampling, size) in zip(submits, given):
            self._schedule.post(Ready(rid=submit.rid, reason=GRAMMAR, sampling=sampling, sampling_bytes=size))
