"""The last steps of the scheduler:
kept in memory, written down when asked for or after a crash, and played again.

The scheduler is pure: from the same state the same calls give the same plans. So the log is a snapshot of it
and every call since. A log holds the token ids of prompts and outputs; treat its files as you would treat the
prompts.
"""

from __future__ import annotations

import pickle
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from sgla import messages
from sgla.errors import ConfigError
from sgla.messages import Delta, NewRow, RowSampling, StepPlan, StepResult, Submit
from sgla.sched.core import Core
from sgla.sched.limits import Limits
from sgla.sched.snapshot import freeze, scheduled, thaw
from sgla.version import __version__

T = TypeVar("T")

# A snapshot takes some ms of the loop. So a chapter goes on until the scheduler is idle, unless it takes more
# memory than this. It waits, and if need be steps are forgotten, as long as there is so much to write that it
# would take longer than ``LONGEST``, or ``BUSY`` while requests are open.
BYTES_KEPT = 2 << 20
MOST_KEPT = 4 * BYTES_KEPT  # before they are forgotten
LONGEST, BUSY = 0.03, 0.01  # seconds
NODE, REQUEST, UNIT = 4e-6, 1e-5, 5e-7  # seconds for a node of the cache, a request, a unit of a tier
MAGIC = b"sgla steps 2\n"
UNWRITABLE = (ValueError, OverflowError)  # a name that is no text; an integer of more than 64 bits
_encode = msgspec.msgpack.Encoder().encode


class Offer(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A call of the scheduler.
    Of this one and of all below, ``raised`` is the exception that came out of it.

    ``repeats``: the prompt is that of the offer before, and in the file there."""

    submit: Submit
    now: float
    repeats: bool = False
    raised: str = ""


class Ready(msgspec.Struct, array_like=True, tag=True, gc=False):
    told: messages.Ready
    raised: str = ""


class Moved(msgspec.Struct, array_like=True, tag=True, gc=False):
    told: messages.Moved
    raised: str = ""


class Keep(msgspec.Struct, array_like=True, tag=True, gc=False):
    told: messages.Keep
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
    paused: bool = False


class Retire(msgspec.Struct, array_like=True, tag=True, gc=False):
    result: StepResult
    now: float
    raised: str = ""


class Flush(msgspec.Struct, array_like=True, tag=True, gc=False):
    tiers: bool = True
    raised: str = ""


class Renew(msgspec.Struct, array_like=True, tag=True, gc=False):
    weights: str = ""
    raised: str = ""


AnyCall = Offer | Ready | Moved | Keep | Cancel | Expire | Plan | Retire | Flush | Renew


class Chapter(msgspec.Struct, array_like=True):
    """``calls`` of a scheduler that was in the state ``snapshot`` (``sched.snapshot``) before them."""

    snapshot: bytes
    calls: list[AnyCall]


class Kept:
    """A chapter in memory. Its calls are one piece of msgpack: as objects, which live for minutes among those
    that live for a step, they would keep much of the memory of these from being used again."""

    __slots__ = ("calls", "count", "prompt", "snapshot")

    def __init__(self, snapshot: bytes) -> None:
        self.snapshot = snapshot
        self.calls = bytearray()
        self.count = 0
        self.prompt: list[int] = []  # of the latest offer

    def add(self, call: AnyCall) -> None:
        if isinstance(call, Offer):
            call = self._bare(call)
        self.calls += _encode(call)
        self.count += 1

    def _bare(self, call: Offer) -> Offer:
        """Without the prompt if a choice before has it, and with the parameters that the scheduler reads."""
        submit = call.submit
        repeats, self.prompt = submit.tokens is self.prompt, submit.tokens
        tokens = [] if repeats else submit.tokens
        bare = replace(submit, tokens=tokens, sampling=scheduled(submit.sampling))
        return Offer(bare, call.now, repeats, call.raised)

    def written(self) -> tuple[bytes, msgspec.Raw]:
        """As a Chapter is encoded: an array of 32 bits, and its items."""
        return self.snapshot, msgspec.Raw(b"\xdd" + self.count.to_bytes(4, "big") + self.calls)


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

    Its memory has chapters, each with a snapshot: the current one and the one before. A new one begins after
    ``steps`` steps, in ``rest``, and if possible while the scheduler is idle.
    """

    # So they are not among the vars() that decide its plans.
    __slots__ = "_chapters", "_size", "_start"

    def __init__(self, limits: Limits, steps: int, found: Sequence[Sequence[bytes]] = ()) -> None:
        super().__init__(limits, found)
        self._size = steps
        self._chapters: deque[Kept] = deque(maxlen=2)
        self._begin()

    def offer(self, submit: Submit, now: float) -> None:
        self._do(Offer(submit, now), super().offer, submit, now)

    def ready(self, told: messages.Ready) -> None:
        sampling = None if told.sampling is None else scheduled(told.sampling)
        self._do(Ready(replace(told, sampling=sampling)), super().ready, told)

    def moved(self, moved: messages.Moved) -> None:
        self._do(Moved(moved), super().moved, moved)

    def keep(self, told: messages.Keep) -> None:
        self._do(Keep(told), super().keep, told)

    def cancel(self, rid: str, reason: str) -> Delta | None:
        return self._do(Cancel(rid, reason), super().cancel, rid, reason)

    def expire(self, now: float) -> list[Delta]:
        due = self.next_deadline
        if due is None or due > now:  # as nearly always: nothing happens
            return super().expire(now)
        return self._do(Expire(now), super().expire, now)

    def plan(self, now: float, paused: bool = False) -> StepPlan | None:
        self.next_plan = self.ahead.when(now)
        if now < self.next_plan:  # as every other time: nothing happens
            return None
        return self._do(Plan(now, paused=paused), super().plan, now, paused)

    def retire(self, result: StepResult, now: float) -> list[Delta]:
        return self._do(Retire(bare(result), now), super().retire, result, now)

    def flush_cache(self, tiers: bool = True) -> bool:
        return self._do(Flush(tiers), super().flush_cache, tiers)

    def renew(self, weights: str) -> bool:
        return self._do(Renew(weights), super().renew, weights)

    def rest(self) -> None:
        """Begin a chapter if it is time to."""
        if self._bytes < BYTES_KEPT and not (self._queues.steps - self._start >= self._size and self.idle):
            return
        if self._snapshot_seconds() <= (LONGEST if self.idle else BUSY):
            self._begin()

    def written(self, why: str) -> bytes:
        """The log as the bytes of a file."""
        steps = {
            "version": __version__,
            "time": time.time(),
            "why": why,
            "limits": self.limits,
            "chapters": [kept.written() for kept in self._chapters],
        }
        return MAGIC + _encode(steps)

    @property
    def _bytes(self) -> int:
        """Of the current chapter; more than any may have where all is forgotten."""
        return len(self._chapters[-1].calls) if self._chapters else MOST_KEPT

    def _snapshot_seconds(self) -> float:
        memory = self._memory
        return NODE * memory.cache.nodes + REQUEST * len(self._queues.open) + UNIT * memory.transfers.units

    def _begin(self) -> None:
        self._start = self._queues.steps
        try:
            self._chapters.append(Kept(freeze(self)))
        except UNWRITABLE:
            self._chapters.clear()

    def _do(self, call: AnyCall, function: Callable[..., T], *args: Any) -> T:
        try:
            result = function(*args)
            if isinstance(call, Plan) and isinstance(result, StepPlan):
                call.plan = compared(result)
            return result
        except Exception as error:
            call.raised = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._keep(call)

    def _keep(self, call: AnyCall) -> None:
        if self._chapters:
            try:
                self._chapters[-1].add(call)
            except UNWRITABLE:
                self._chapters.clear()
            if self._bytes >= MOST_KEPT:
                self._chapters.clear()


def bare(result: StepResult) -> StepResult:
    """Without what no plan depends on."""
    if result.logprobs or result.vectors:
        return replace(result, logprobs=[], vectors=[b""] * len(result.vectors))
    return result


def compared(plan: StepPlan) -> StepPlan:
    """With a checksum for the tokens of each new row, and without what its request brought."""

    def row(new: NewRow) -> NewRow:
        return replace(new, tokens=zlib.crc32(new.tokens).to_bytes(4, "little"), sampling=RowSampling())

    return replace(plan, new=[row(new) for new in plan.new]) if plan.new else plan


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
        log = msgspec.msgpack.decode(data[len(MAGIC) :], type=StepLog)
    except (msgspec.DecodeError, AssertionError) as error:  # AssertionError: limits that cannot be
        raise ConfigError(f"the step log cannot be read: {error}") from error
    for chapter in log.chapters:
        prompt: list[int] = []
        for call in chapter.calls:
            if isinstance(call, Offer):
                prompt = call.submit.tokens = prompt if call.repeats else call.submit.tokens
    return log


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
    except pickle.UnpicklingError as error:
        raise ConfigError(f"the snapshot is damaged, or of another version of sgla: {error}") from error
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
        elif isinstance(call, Keep):
            core.keep(call.told)
        elif isinstance(call, Moved):
            core.moved(call.told)
        elif isinstance(call, Cancel):
            core.cancel(call.rid, call.reason)
        elif isinstance(call, Expire):
            core.expire(call.now)
        elif isinstance(call, Plan):
            if (made := core.plan(call.now, call.paused)) is not None:
                told.steps, plan = told.steps + 1, compared(made)
        elif isinstance(call, Retire):
            told.outputs += sum(len(delta.tokens) for delta in core.retire(call.result, call.now))
        elif isinstance(call, Renew):
            core.renew(call.weights)
        else:
            core.flush_cache(call.tiers)
    except Exception as error:  # it is compared: a crash is replayed too
        raised = f"{type(error).__name__}: {error}"
        return None if raised == call.raised else f"raised {raised}, then {call.raised or 'nothing'}"
    if call.raised:
        return f"raised nothing, then {call.raised}"
    if isinstance(call, Plan) and plan != call.plan:
        return f"planned {plan}, then {call.plan}"
    return None
