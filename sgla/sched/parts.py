"""Several schedulers whose steps are computed together: each has requests, pages and slots of one rank."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from msgspec.structs import asdict

from sgla.cache.events import KvEvent
from sgla.messages import Delta, Keep, Moved, Ready, StepPlan, StepResult, Submit
from sgla.sched.core import Core
from sgla.sched.limits import Limits
from sgla.sched.request import Prompt, Request
from sgla.sched.stats import Finished, Stats, WindowStats

ROW = 32  # tokens of a prompt that are as much work as a request that runs


class PartedCore:
    """A ``Core`` for each of ``count`` ranks, as one. A request stays with one of them: the one that has
    least to do, which counts what it would have to read of the prompt. ``limits``: of each."""

    def __init__(self, limits: Limits, count: int) -> None:
        assert not limits.tiers, "copies are of one scheduler"
        assert not limits.adapters, "places of adapters are of one scheduler"
        self.limits = limits
        self.cores = [Core(limits) for _ in range(count)]
        self._unread = {core: list[Request]() for core in self.cores}  # but those that were seen to be read
        self._home: dict[str, Core] = {}  # of each request that was not seen to end
        self._families: dict[str, Core] = {}  # of choices of one prompt, which has been read once
        self._flights: deque[list[bool]] = deque()  # which have a part of each step
        self._steps = 0
        self.next_plan = 0.0  # as of ``Core``

    def offer(self, submit: Submit, now: float) -> None:
        """Raises as ``Core.offer``."""
        core = self._families.get(submit.parent)
        if core is None or core.idle:
            prompt = Prompt(submit.tokens)
            core = min(self.cores, key=lambda core: self._work(core) - core.cached(submit, prompt))
        core.offer(submit, now)
        self._unread[core].append(core.open[submit.rid])
        self._home[submit.rid] = self._families[submit.parent] = core
        if len(self._home) > 2 * sum(len(core.open) for core in self.cores) + 64:
            self._forget()

    def _work(self, core: Core) -> int:
        """Tokens of prompts that are unread, and ``ROW`` for each request."""
        unread = [request for request in self._unread[core] if not (request.finish or request.has_read)]
        self._unread[core] = unread
        return sum(request.prompt_len - request.planned for request in unread) + ROW * len(core.open)

    def _forget(self) -> None:
        """Those that have ended."""
        self._home = {rid: core for rid, core in self._home.items() if rid in core.open}
        parents = {core.open[rid].submit.parent for rid, core in self._home.items()}
        self._families = {parent: core for parent, core in self._families.items() if parent in parents}

    def ready(self, told: Ready) -> None:
        if (core := self._home.get(told.rid)) is not None:
            core.ready(told)

    def moved(self, moved: Moved) -> None:
        raise AssertionError("there are no tiers")

    def keep(self, told: Keep) -> None:
        raise AssertionError("there are no adapters")

    def cancel(self, rid: str, reason: str) -> Delta | None:
        core = self._home.get(rid)
        return None if core is None else core.cancel(rid, reason)

    def expire(self, now: float) -> list[Delta]:
        return [delta for core in self.cores for delta in core.expire(now)]

    @property
    def next_deadline(self) -> float | None:
        return min((at for core in self.cores if (at := core.next_deadline) is not None), default=None)

    def plan(self, now: float, paused: bool = False) -> StepPlan | None:
        """One step of all, where some have no part; or None as ``Core.plan``."""
        if len(self._flights) >= self.limits.depth:
            self.next_plan = math.inf
            return None
        self.next_plan = max(core.ahead.when(now) for core in self.cores)
        if now < self.next_plan:
            return None
        parts = [core.plan(now, paused) for core in self.cores]
        if not any(parts):
            return None
        self._steps += 1
        self._flights.append([part is not None for part in parts])
        return StepPlan(step=self._steps, slots=b"", starts=b"", q_lens=b"", flags=b"", parts=parts)

    def retire(self, result: StepResult, now: float) -> list[Delta]:
        deltas: list[Delta] = []
        for core, there, part in zip(self.cores, self._flights.popleft(), result.parts, strict=True):
            if there:
                deltas += core.retire(part, now)
        return deltas

    @property
    def idle(self) -> bool:
        return all(core.idle for core in self.cores)

    @property
    def rids(self) -> list[str]:
        return [rid for core in self.cores for rid in core.rids]

    def tell_events(self, medium: str) -> Callable[[], list[KvEvent]]:
        raise AssertionError("events are of one scheduler")

    def flush_cache(self, tiers: bool = True) -> bool:
        flushed = [core.flush_cache(tiers) for core in self.cores]
        return all(flushed)

    def renew(self, weights: str) -> bool:
        """All or none of them."""
        if self._flights:
            return False
        renewed = [core.renew(weights) for core in self.cores]
        return all(renewed)

    def drain_finished(self) -> list[Finished]:
        return [finished for core in self.cores for finished in core.drain_finished()]

    def stats(self) -> Stats:
        """Sums, but for numbers of steps."""
        told = [core.stats() for core in self.cores]
        columns = zip(*(asdict(stats).values() for stats in told), strict=True)
        sums = dict(zip(Stats.__struct_fields__, map(_together, columns), strict=True))
        longest = {name: max(getattr(s, name) for s in told) for name in ("step_seconds", "gap_seconds")}
        return Stats(**sums | longest | {"steps": self._steps, "in_flight": len(self._flights)})

    def check(self) -> None:
        for core in self.cores:
            core.check()


def _together(values: Sequence[Any]) -> Any:
    """One field of the statistics of all."""
    first = values[0]
    if isinstance(first, dict):
        return {key: sum(own.get(key, 0) for own in values) for own in values for key in own}
    if isinstance(first, list):
        columns = zip_longest(*values, fillvalue=0)
        return [_windows(same) if isinstance(same[0], WindowStats) else sum(same) for same in columns]
    return sum(values)


def _windows(same: Sequence[WindowStats]) -> WindowStats:
    total, free, evictable = (sum(getattr(s, name) for s in same) for name in ("total", "free", "evictable"))
    return WindowStats(window=same[0].window, total=total, free=free, evictable=evictable)
