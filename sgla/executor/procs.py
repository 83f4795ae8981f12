"""Workers as processes, one a rank; of a model on several hosts, the ranks of this one.

A worker is a fresh interpreter that imports nothing of the main process's ``__main__``. Between the two: a
socket pair for set-up and control commands, whose end of file also tells of a death; a ring of plans to every
rank and a ring of results from each that answers (``nodes.answering``); and a pipe from the worker's stdout
and stderr, shown to the user and kept as its last words. The main process imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sgla import clock
from sgla.config import Config
from sgla.device import platform
from sgla.errors import SglaError, WorkerDied
from sgla.executor.base import STACKS
from sgla.executor.merging import Ends, Results, common_facts
from sgla.executor.parting import records
from sgla.executor.ring import Ring
from sgla.messages import Control, Facts, Moved, Progress, StepPlan, StepResult
from sgla.nodes import answering, ranks_of
from sgla.processes import deaf

if TYPE_CHECKING:
    from sgla.hub.source import ModelSource

GRACE = 1.0  # seconds workers get to leave by themselves
STACKS_TIME = 0.5  # seconds that stuck workers get to print their stacks
LAST_LINES = 20
SMALLER = "serve a smaller model, or one in fewer bits"
ENTRY = "from sgla.executor.child import main; main()"


class Rank:
    """One worker process and our ends of everything shared with it. ``answers``: steps have their results
    from it."""

    def __init__(self, number: int, runner: str, answers: bool) -> None:
        self.number = number
        self.plans: Ring | None = None
        self.results: Ring | None = None
        self.facts: Facts | None = None
        self.replies: dict[int, asyncio.Future[Any]] = {}  # by the number of the command
        self.lines: deque[str] = deque([""], maxlen=LAST_LINES)  # the last one is unfinished
        self.pipe, theirs = Pipe()
        self.stderr, their_stderr = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.stderr, False)
        argv = (theirs.fileno(), os.getpid(), clock.now(), number, runner, int(answers))
        with deaf():
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", "-c", ENTRY, *map(str, argv)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.DEVNULL,
                stdout=their_stderr,
                stderr=their_stderr,
                pass_fds=[theirs.fileno()],
            )
        theirs.close()
        os.close(their_stderr)

    def forward_stderr(self) -> bool:
        """Pass on what the worker has printed; False at the end of file."""
        try:
            data = os.read(self.stderr, 1 << 16)
        except BlockingIOError:
            return True
        text = data.decode(errors="replace")
        with contextlib.suppress(OSError):  # nobody reads ours any more; the last words are kept all the same
            sys.stderr.write(text)
            sys.stderr.flush()
        first, *rest = text.split("\n")
        self.lines[-1] += first
        self.lines.extend(rest)
        return bool(data)

    async def ended(self, seconds: float) -> bool:
        """Wait until the process has ended, at most ``seconds``."""
        end = clock.now() + seconds
        while self.process.poll() is None:
            if clock.now() > end:
                return False
            await asyncio.sleep(0.001)
        return True

    def obituary(self, config: Config) -> str:
        """How it ended, and its last words. ``config``: what it was to do."""
        code = self.process.returncode
        if code >= 0:
            how = f"exited with code {code}"
        else:
            name = {known.value: known.name for known in signal.Signals}.get(-code, "a real-time signal")
            how = f"was killed by signal {-code} ({name})"
            if -code == signal.SIGKILL:
                how += f"; if nobody did that, the system was out of memory: {spare(config, self.facts)}"
        words = "\n".join(line for line in self.lines if line.strip())
        return f"worker rank {self.number} (pid {self.process.pid}) {how}" + (
            f". Its last output:\n{words}" if words else ""
        )

    def state(self) -> str:
        """What the kernel says of the process, which is asked for its stacks.
        A stopped one has none to give."""
        pid = self.process.pid
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            state = re.findall(r"^State:\s*(.*)$", status, re.MULTILINE)[0]
            where = Path(f"/proc/{pid}/wchan").read_text().strip("0\n") or "nowhere in the kernel"
        except (OSError, IndexError):
            state, where = "gone", "nowhere"
        said = f"worker rank {self.number} (pid {pid}): {state}, waits {where}"
        if state.startswith("T"):
            return f"{said}; stopped by a signal or a debugger, so it has no stack to show"
        self.process.send_signal(STACKS)
        return said

    def close(self) -> None:
        for ring in (self.plans, self.results):
            if ring is not None:
                ring.close()
        self.pipe.close()
        os.close(self.stderr)


def spare(config: Config, facts: Facts | None) -> str:
    """What to change so that a worker takes less memory. ``facts``: None while it loads."""
    if facts is None:
        return "lower --kv-cache-bytes" if config.kv_cache_bytes else SMALLER
    if facts.encodes:
        return SMALLER
    return "lower --kv-cache-bytes" if facts.groups[0].pages > 1 else "lower --step-tokens"


def runner_of(config: Config) -> str:
    """Import path of what runs steps. A device that is still open is the CPU."""
    return platform("cpu" if config.device == "auto" else config.device).runner


def runner_for(config: Config) -> str | None:
    """Of workers that are no model's; None: ``runner_of``."""
    return "sgla.executor.fake:FakeRunner" if config.executor == "fake" else None


_early: dict[tuple[int, str, bool], Rank] = {}


def _roles(config: Config, runner: str) -> list[tuple[int, str, bool]]:
    """What makes each ``Rank`` of this host."""
    return [(number, runner, number in answering(config)) for number in ranks_of(config)]


def spawn_early(config: Config) -> None:
    """Start the workers before there is a loop or an executor:
    they import torch while the server imports the rest of itself.

    ``config.device`` is settled. The next ``ProcsExecutor`` for such workers takes them over.
    """
    for role in _roles(config, runner_of(config)):
        _early[role] = Rank(*role)


class ProcsExecutor:
    """See ``executor.base.Executor``.
    ``runner`` names the class that does the work (tests have their own)."""

    def __init__(
        self, config: Config, source: ModelSource | None = None, *, runner: str | None = None
    ) -> None:
        self._config = config
        self._source = source
        self._runner = runner or runner_of(config)
        self._ranks: list[Rank] = []
        self._rendezvous = ""
        self._ready: asyncio.Future[Facts] | None = None
        self._on_progress: Callable[[Progress], None] = lambda progress: None
        self._on_death: Callable[[WorkerDied], None] | None = None
        self._gone = False  # a worker died, or we are closing
        self._obituary: asyncio.Task[None] | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(StepResult).decode
        self._ends = Ends(config.local_ranks)
        self._moved: list[Moved] = []  # to hand on
        self._told = -1  # readable while they wait, where no rank of this host answers
        self._answering: list[Rank] = []  # of this host
        self._results = Results(0)
        self._any: select.epoll | None = None  # readable while one of several has answered
        self._store = -1  # where the ranks of all hosts find each other; rank 0 listens on it
        self._commands = 0

    def spawn(self) -> None:
        """Start the processes.
        ``start`` does it if need be; earlier, they import torch while the model is looked up."""
        if self._ranks:
            return
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        if self._config.nnodes > 1:
            self._told = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        elif self._config.ranks > 1:
            self._rendezvous = tempfile.mkdtemp(prefix="sgla-")
        for role in _roles(self._config, self._runner):
            rank = _early.pop(role, None) or Rank(*role)
            self._ranks.append(rank)
            self._loop.add_reader(rank.pipe.fileno(), self._on_message, rank)
            # uvloop has made it non-blocking, but a message may come in parts.
            os.set_blocking(rank.pipe.fileno(), True)
            self._loop.add_reader(rank.stderr, self._on_stderr, rank)
        every = answering(self._config)
        self._answering = [rank for rank in self._ranks if rank.number in every]
        self._results = Results(len(self._answering))
        if len(self._answering) > 1:
            self._any = select.epoll()

    def assign(self, config: Config, source: ModelSource) -> None:
        """Replace what the constructor was told, before ``start``; the number of ranks stays."""
        assert (config.tp, config.pp) == (self._config.tp, self._config.pp)
        self._config, self._source = config, source

    def meet(self, meeting: str, store: int = -1) -> None:
        """Where the ranks of all hosts find each other (``dist/meeting.py``), before ``start``. ``store``:
        the descriptor on which rank 0 listens there, if it is on this host."""
        self._rendezvous, self._store = meeting, store

    @property
    def ready(self) -> asyncio.Future[Facts]:
        """Settled when all have loaded, or one has ended; there once they are spawned."""
        assert self._ready is not None
        return self._ready

    async def start(self, on_progress: Callable[[Progress], None]) -> Facts:
        self._on_progress = on_progress
        self.spawn()
        assert self._ready is not None
        try:
            # The description of a model can be larger than the pipe,
            # which the worker reads when torch is imported.
            await asyncio.to_thread(self._send_setup)
            return await self._ready
        except BaseException:
            await self.close()
            raise
        finally:
            self._remove_rendezvous()

    def _send_setup(self) -> None:
        for rank in self._ranks:
            try:
                rank.pipe.send((self._config, self._source, self._config.ranks, self._rendezvous))
                if self._store >= 0 and rank.number == 0:
                    send_handle(rank.pipe, self._store, rank.process.pid)
            except OSError:
                pass  # it died: the end of file on the pipe says so, with more words

    def _on_message(self, rank: Rank) -> None:
        assert self._ready is not None
        try:
            kind, payload = rank.pipe.recv()
            if kind == "rings":
                rings = [Ring.attach(recv_handle(rank.pipe), recv_handle(rank.pipe)) for _ in range(payload)]
                rank.plans, rank.results = rings[0], rings[1] if payload > 1 else None
                if self._any is not None and rank.results is not None:
                    self._any.register(rank.results.fileno(), select.EPOLLIN)
        except (EOFError, OSError):
            self._loop.remove_reader(rank.pipe.fileno())
            self._lose(rank)
            return
        if kind == "progress" and rank is self._ranks[0]:
            self._on_progress(payload)
        elif kind == "reply":
            number, answer = payload
            future = rank.replies.pop(number)
            if not future.done():
                future.set_result(answer)
        elif kind == "moved":
            self._merge(payload)
        elif kind == "error" and not self._ready.done():
            self._gone = True
            self._ready.set_exception(payload)
        elif kind == "facts":
            rank.facts = payload
            facts = [r.facts for r in self._ranks if r.facts]
            if len(facts) == len(self._ranks) and not self._ready.done():
                self._ready.set_result(common_facts(facts))

    def _merge(self, moved: Moved) -> None:
        """Hand on the end of a copy when every rank has told of it. The ranks' pipes bring them, which step
        results do not wait for; the descriptor is that of the results."""
        if (common := self._ends.add(moved)) is not None:
            self._moved.append(common)
            os.eventfd_write(self.results_fd(), 1)

    def _on_stderr(self, rank: Rank) -> None:
        if not rank.forward_stderr():
            self._loop.remove_reader(rank.stderr)

    def _lose(self, rank: Rank, failed: str = "") -> None:
        """A rank's end of the pipe is closed, or a step ``failed`` and the rank is about to leave."""
        if not self._gone:
            self._gone = True
            self._obituary = self._loop.create_task(self._lost(rank, failed))

    async def _lost(self, rank: Rank, failed: str) -> None:
        """Find out why, end the others, tell.
        Where one rank is killed, the step of the others fails: the killed one is the cause."""
        assert self._ready is not None
        if not await rank.ended(1.0):
            rank.process.kill()
            await rank.ended(GRACE)
        killed = [other for other in self._ranks if (other.process.poll() or 0) < 0]
        if killed and rank not in killed:
            rank, failed = killed[0], ""
        self._on_stderr(rank)
        error = WorkerDied(f"a model step failed: {failed}" if failed else rank.obituary(self._config))
        error.killed = rank in killed
        for other in self._ranks:
            if other.process.poll() is None:
                other.process.kill()
        self._fail_replies(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        elif self._on_death is not None:
            self._on_death(error)

    def _fail_replies(self, error: SglaError) -> None:
        for rank in self._ranks:
            for number in list(rank.replies):
                future = rank.replies.pop(number)
                if not future.done():
                    future.set_exception(error)

    def submit(self, plan: StepPlan) -> None:
        if self._gone:
            return
        told = records(plan, ranks_of(self._config), self._encode)
        for rank, record in zip(self._ranks, told, strict=True):
            assert rank.plans is not None
            rank.plans.push(record)

    def results_fd(self) -> int:
        if self._any is not None:
            return self._any.fileno()
        found = [rank.results for rank in self._answering if rank.results is not None]
        return found[0].fileno() if found else self._told

    def drain(self) -> list[StepResult | Moved]:
        if self._gone:
            return []
        told = None if self._any is None else {fd for fd, _ in self._any.poll(0)}
        for at, rank in enumerate(self._answering):
            if told is None or (rank.results is not None and rank.results.fileno() in told):
                self._results.add(at, self._steps(rank))
        if self._moved and not self._answering:
            os.eventfd_read(self._told)
        results: list[StepResult | Moved] = [*self._results.whole(), *self._moved]
        self._moved.clear()
        return results

    def _steps(self, rank: Rank) -> list[StepResult]:
        ring, results = rank.results, []
        assert ring is not None
        ring.clear()
        while (record := ring.pop()) is not None:
            result = self._decode(record)
            if result.error is not None:
                self._lose(rank, result.error)
                break
            results.append(result)
        return results

    async def control(self, command: Control) -> dict[str, Any]:
        """``{"ranks": [reply of each rank]}``. Raises the ranks' SglaError, or WorkerDied. The caller limits
        how many are unanswered: ``send`` would wait for a worker that does not read once the pipe is full."""
        if self._gone:
            raise WorkerDied("the workers are gone")
        futures = []
        self._commands += 1
        for rank in self._ranks:
            future = self._loop.create_future()
            rank.replies[self._commands] = future
            futures.append(future)
            try:
                rank.pipe.send((self._commands, command))
            except OSError:
                pass  # the death watch fails the future
        replies = await asyncio.gather(*futures)
        for reply in replies:
            if isinstance(reply, SglaError):
                raise reply
        return {"ranks": replies}

    def on_death(self, callback: Callable[[WorkerDied], None]) -> None:
        self._on_death = callback

    async def close(self) -> None:
        """Closing the pipe asks a worker to leave after its step;
        one that is loading, or takes too long, is killed."""
        self._gone = True
        if self._obituary is not None:
            await self._obituary
        ranks, self._ranks, self._answering = self._ranks, [], []
        self._fail_replies(WorkerDied("the workers are gone"))
        for rank in ranks:
            self._loop.remove_reader(rank.pipe.fileno())
            rank.pipe.close()
            if rank.facts is None:
                rank.process.kill()
        left = await asyncio.gather(*(rank.ended(GRACE) for rank in ranks))
        for rank, ended in zip(ranks, left):
            if not ended:
                rank.process.kill()
        for rank in ranks:
            await rank.ended(GRACE)
            self._loop.remove_reader(rank.stderr)
            rank.forward_stderr()
            rank.close()
        if self._any is not None:
            self._any.close()
        if self._told >= 0:
            os.close(self._told)
            self._told = -1
        self._remove_rendezvous()

    async def inquire(self) -> str:
        states = [rank.state() for rank in self._ranks]
        await asyncio.sleep(STACKS_TIME)
        return "\n".join(states)

    def kill(self) -> None:
        self._gone = True
        for rank in self._ranks:
            rank.process.kill()
        self._remove_rendezvous()

    def _remove_rendezvous(self) -> None:
        if self._rendezvous and self._config.nnodes == 1:
            shutil.rmtree(self._rendezvous, ignore_errors=True)
            self._rendezvous = ""
