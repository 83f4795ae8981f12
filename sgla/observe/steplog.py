"""The last steps of the scheduler:
kept in memory, written down when asked for or after a crash, and played again.

The scheduler is pure: from the same state the same calls give the same plans. So the log is a snapshot of it
and every call since. A log holds the token ids of prompts and outputs; treat its files as you would treat the
prompts.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from sgla import messages
from sgla.errors import ConfigError
from sgla.messages import Delta, StepPlan, StepResult, Submit
from sgla.sched.core import Core
from sgla.sched.limits import Limits
from sgla.sched.snapshot import freeze, thaw
from sgla.version import __version__

T = TypeVar("T")

# A snapshot takes some ms of the loop. So a chapter goes on until the scheduler is idle, unless it takes more
# memory than this. It waits, and if need be steps are forgotten, as long as there is so much to write that it
# would take longer than ``LONGEST``, or ``BUSY`` while requests are open.
BYTES_KEPT = 4 << 20
MOST_KEPT = 4 * BYTES_KEPT  # before they are forgotten
MOST_LEFT = 2 * BYTES_KEPT  # of a chapter that has ended
LONGEST, BUSY = 0.03, 0.01  # seconds
# Seconds for a node of the cache, a request, a byte of its ``sampling_bytes``.
NODE, REQUEST, PARAMETER = 4e-6, 1e-5, 4e-9
OFFER_BYTES = 4096  # of a request without its tokens and parameters
PARAMETER_BYTES = 8  # of each byte of ``Submit.sampling_bytes``, as objects of Python
TOKEN_BYTES = 40  # of a prompt's token in lists and plans
PLAN_BYTES = 800  # of a plan and its result, without the rows
MAGIC = b"sgla steps 1\n"


class Offer(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A call of the scheduler.
    Of this one and of all below, ``raised`` is the exception that came out of it."""

    submit: Submit
    now: float
    raised: str = ""


class Ready(msgspec.Struct, array_like=True, tag=True, gc=False):
    told: messages.Ready
    raised: str = ""


class Moved(msgspec.Struct, array_like=True, tag=True, gc=False):
    told: messages.Moved
    raised: str = ""


class Cancel(msgspec.Struct, array_like=True, tag=True, gc=False):
    rid: str
    reason: str
    raised: str = ""


class Expire(msgspec.Struct, array_like=True, tag=True, gc=False):
    now: float
    raised: str = ""


class Plan(msgspec.Struct, array_like=True, tag=True, gc=False):
    now: float
    plan: StepPlan | None = None
    raised: str = ""


class Retire(msgspec.Struct, array_like=True, tag=True, gc=False):
    result: StepResult
    now: float
    raised: str = ""


class Flush(msgspec.Struct, array_like=True, tag=True, gc=False):
    raised: str = ""


AnyCall = Offer | Ready | Moved | Cancel | Expire | Plan | Retire | Flush


class Chapter(msgspec.Struct, array_like=True):
    """``calls`` of a scheduler that was in the state ``snapshot`` (``sched.snapshot``) before them."""

    snapshot: bytes
    calls: list[AnyCall]


class StepLog(msgspec.Struct, kw_only=True):
    """What is in a file. ``time``: seconds since 1970 when it was written; ``why``: what for."""

    version: str
    time: float
    why: str
    limits: Limits
    chapters: list[Chapter]


class RecordedCore(Core):
    """A Core that remembers at least its last ``steps`` steps and all that led to them;
    costs a few us a step.

    Its memory has chapters, each with a snapshot: the current one and the one before, unless that has got too
    large. A new one begins after ``steps`` steps, in ``rest``, and if possible while the scheduler is idle.
    """

    # So they are not among the vars() that decide its plans.
    __slots__ = "_bytes", "_chapters", "_size", "_start"

    def __init__(self, limits: Limits, steps: int) -> None:
        super().__init__(limits)
        self._size = steps
        self._bytes = 0
        self._chapters: deque[Chapter] = deque(maxlen=2)
        self._begin()

    def offer(self, submit: Submit, now: float) -> None:
        self._bytes += (
            OFFER_BYTES + TOKEN_BYTES * len(submit.tokens) + PARAMETER_BYTES * submit.sampling_bytes
        )
        self._do(Offer(submit, now), super().offer, submit, now)

    def ready(self, told: messages.Ready) -> None:
        self._bytes += OFFER_BYTES + PARAMETER_BYTES * told.sampling_bytes
        self._do(Ready(told), super().ready, told)

    def moved(self, moved: messages.Moved) -> None:
        self._do(Moved(moved), super().moved, moved)

    def cancel(self, rid: str, reason: str) -> Delta | None:
        return self._do(Cancel(rid, reason), super().cancel, rid, reason)

    def expire(self, now: float) -> list[Delta]:
        due = self.next_deadline
        if due is None or due > now:  # as nearly always: nothing happens
            return super().expire(now)
        return self._do(Expire(now), super().expire, now)

    def plan(self, now: float) -> StepPlan | None:
        if len(self._queues.flights) >= self.limits.depth:  # as every other time: nothing happens
            return None
        call = Plan(now)
        call.plan = plan = self._do(call, super().plan, now)
        if plan is not None:
            self._bytes += PLAN_BYTES + 4 * len(plan.slots)
        return plan

    def retire(self, result: StepResult, now: float) -> list[Delta]:
        return self._do(Retire(bare(result), now), super().retire, result, now)

    def flush_cache(self) -> bool:
        return self._do(Flush(), super().flush_cache)

    def rest(self) -> None:
        """Begin a chapter if it is time to."""
        if self._bytes < BYTES_KEPT and not (self._queues.steps - self._start >= self._size and self.idle):
            return
        if self._snapshot_seconds() <= (LONGEST if self.idle else BUSY):
            self._begin()
        elif self._bytes >= MOST_KEPT:
            self._chapters.clear()

    def written(self, why: str) -> bytes:
        """The log as the bytes of a file."""
        steps = StepLog(
            version=__version__,
            time=time.time(),
            why=why,
            limits=self.limits,
            chapters=list(self._chapters),
        )
        return MAGIC + msgspec.msgpack.encode(steps)

    def _snapshot_seconds(self) -> float:
        parameters = sum(request.submit.sampling_bytes for request in self._queues.open.values())
        return NODE * self._memory.cache.nodes + REQUEST * len(self._queues.open) + PARAMETER * parameters

    def _begin(self) -> None:
        if self._bytes > MOST_LEFT:
            self._chapters.clear()
        self._bytes = 0
        self._start = self._queues.steps
        self._chapters.append(Chapter(freeze(self), []))

    def _do(self, call: AnyCall, function: Callable[..., T], *args: Any) -> T:
        if self._chapters:
            self._chapters[-1].calls.append(call)
        try:
            return function(*args)
        except Exception as error:
            call.raised = f"{type(error).__name__}: {error}"
            raise


def bare(result: StepResult) -> StepResult:
    """Without what no plan depends on."""
    if result.logprobs or result.vectors:
        return replace(result, logprobs=[], vectors=[b""] * len(result.vectors))
    return result


def write(folder: str, core: RecordedCore, why: str) -> Path:
    """Write the log into ``folder`` under a name with the time. Raises OSError."""
    path = Path(folder) / time.strftime("steps-%Y%m%d-%H%M%S.sgla", time.gmtime())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(core.written(why))
    return path


def read(data: bytes) -> StepLog:
    """Raises ConfigError for bytes that are no log of this version."""
    if not data.startswith(MAGIC):
        raise ConfigError("this is not a step log")
    try:
        return msgspec.msgpack.decode(data[len(MAGIC) :], type=StepLog)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the step log cannot be read: {error}") from error


class Replay(msgspec.Struct, kw_only=True):
    """What came of playing a chapter.
    ``difference``: where the copy first did something else; None: nowhere."""

    calls: int = 0
    steps: int = 0
    requests: int = 0
    outputs: int = 0
    ended_by: str = ""  # the exception that came out of the last call, and comes out again
    difference: str | None = None


def replay(chapter: Chapter) -> Replay:
    """Play the calls on a copy of the scheduler. Raises ConfigError for a snapshot of another version."""
    try:
        core = thaw(chapter.snapshot)
    except (pickle.UnpicklingError, AttributeError, TypeError) as error:
        raise ConfigError(f"the snapshot is of another version of sgla: {error}") from error
    told = Replay()
    for call in chapter.calls:
        told.calls += 1
        told.ended_by = call.raised
        told.difference = play(core, call, told)
        if told.difference is not None:
            told.difference = f"call {told.calls} ({type(call).__name__.lower()}): {told.difference}"
            break
    return told


def play(core: Core, call: AnyCall, told: Replay) -> str | None:
    """Repeat one call; what is different from the record, if anything."""
    plan = None
    try:
        if isinstance(call, Offer):
            told.requests += 1
            core.offer(call.submit, call.now)
        elif isinstance(call, Ready):
            core.ready(call.told)
        elif isinstance(call, Moved):
            core.moved(call.told)
        elif isinstance(call, Cancel):
            core.cancel(call.rid, call.reason)
        elif isinstance(call, Expire):
            core.expire(call.now)
        elif isinstance(call, Plan):
            plan = core.plan(call.now)
            told.steps += plan is not None
        elif isinstance(call, Retire):
            told.outputs += sum(len(delta.tokens) for delta in core.retire(call.result, call.now))
        else:
            core.flush_cache()
    except Exception as error:  # it is compared: a crash is replayed too
        raised = f"{type(error).__name__}: {error}"
        return None if raised == call.raised else f"raised {raised}, then {call.raised or 'nothing'}"
    if call.raised:
        return f"raised nothing, then {call.raised}"
    if isinstance(call, Plan) and plan != call.plan:
        return f"planned {plan}, then {call.plan}"
    return None
