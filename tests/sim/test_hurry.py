"""First tokens of short prompts beside long ones; steps cost what an H200's do for a model of 8 B."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from simulation import make_submit

from sgla.messages import CacheGroup, StepCost, StepPlan, StepResult
from sgla.sched.ahead import LAUNCH
from sgla.sched.budget import Budget, pairs
from sgla.sched.core import Core
from sgla.sched.hurry import LATELY, LONGER, SHORT
from sgla.sched.limits import Limits
from sgla.sched.policy import Auto

LONG, TILE = 16_000, 256
SEND = 5e-4  # seconds from a plan to its step, and from that to its result


def cost(tokens: int, work: int, least: float = 3.7e-3) -> float:
    """Weights are read, or products made; 1 ms of all else."""
    return 1e-3 + max(least, 2.05e-5 * tokens) + 8.5e-10 * work


class Flood:
    """A scheduler, a device and their clients. Steps are as the scheduler plans them, one behind the other,
    and last as long as ``cost`` says. ``came``, ``first``: of each request."""

    def __init__(self, least: float = 3.7e-3) -> None:
        costs = [StepCost(tokens=1024, tile=TILE), StepCost(tokens=8192, tile=TILE)]
        self.limits = Limits(
            slots=64, groups=[CacheGroup(40_000)], page_size=16, context_len=40_000, step_tokens=8192,
            depth=2, itl_target=0.03, costs=costs,
        )  # fmt: skip
        self.core, self.random, self.now, self.least = Core(self.limits), Random(0), 1.0, least
        self.came: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.after: Callable[[str], None] = lambda rid: None  # called behind the end of a request
        self.plans: list[StepPlan] = []
        self.times: list[tuple[float, float, float]] = []  # of each step: planned, begun, over
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._count = 0

    def at(self, when: float, act: Callable[..., None], *given: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, act, given))

    def offer(self, rid: str, tokens: int, outputs: int = 16, yields: bool = False) -> None:
        self.came[rid] = self.now
        prompt = [self.random.randrange(50) for _ in range(tokens)]
        self.core.offer(make_submit(rid, prompt, max_new=outputs, yields=yields), self.now)

    def shorts(self, rate: float, begin: float, end: float, name: str = "short") -> None:
        """So many a second, at random."""
        while (begin := begin + self.random.expovariate(rate)) < end:
            self.at(begin, self.offer, f"{name}{self._count}", 100, 1)

    def long(self, abreast: int, outputs: int = 16, tokens: int = LONG) -> None:
        """So many follow each other without end."""

        def again(rid: str) -> None:
            if rid.startswith("long"):
                self._count += 1
                self.offer(f"long{self._count}", tokens, outputs)

        self.after = again
        for _ in range(abreast):
            again("long")

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, act, given = heapq.heappop(self._events)
            act(*given)
            self.plan()
        self.now = until

    def plan(self) -> None:
        while (plan := self.core.plan(self.now)) is not None:
            starts, counts = array("i", plan.starts), array("i", plan.q_lens)
            free = self.times[-1][2] if self.times else 0.0
            begun = max(self.now + SEND, free)
            over = begun + cost(sum(counts), sum(map(pairs, starts, counts)), self.least)
            self.plans.append(plan)
            self.times.append((self.now, begun, over))
            tokens = array("i", [7] * sum(flags & 1 for flags in plan.flags)).tobytes()
            self.at(over + SEND, self._told, StepResult(step=plan.step, tokens=tokens, seconds=over - begun))
        if self.now < self.core.next_plan < 1e9:
            self.at(self.core.next_plan, lambda: None)

    def _told(self, result: StepResult) -> None:
        for delta in self.core.retire(result, self.now):
            if delta.tokens:
                self.first.setdefault(delta.rid, self.now)
            if delta.finish:
                self.ended[delta.rid] = self.now
                self.after(delta.rid)

    def ttft(self, name: str = "short") -> list[float]:
        """In order."""
        found = [self.first[rid] - came for rid, came in self.came.items() if rid.startswith(name)]
        return sorted(found)

    def read(self, begin: float, end: float) -> float:
        """Tokens a second of prompts."""
        counts = (array("i", plan.q_lens) for plan in self.plans)
        return sum(sum(c) for c, (_, at, _) in zip(counts, self.times) if begin <= at < end) / (end - begin)


def p95(values: list[float]) -> float:
    assert len(values) > 25
    return values[round(0.95 * (len(values) - 1))]


@pytest.mark.parametrize("rate", [4.0, 20.0, 60.0])
def test_short_prompts_under_a_flood_of_long_ones(rate: float) -> None:
    """Whether short ones came before it or not, and however long it has gone on."""
    idle, flood, quiet = Flood(), Flood(), Flood()
    idle.shorts(rate, 1.0, 13.0)
    idle.run(20.0)
    quiet.long(8)
    quiet.plan()
    quiet.run(13.0)
    flood.long(8)
    flood.plan()
    flood.shorts(rate, 2.0, 13.0, "one")
    flood.shorts(rate, 3.0, 13.0)  # behind the first ones
    flood.run(14.0)
    assert p95(flood.ttft()) <= 3 * p95(idle.ttft())
    assert flood.read(3.0, 13.0) > 0.7 * quiet.read(3.0, 13.0), "long ones are read more slowly, but they are"


@pytest.mark.parametrize("least", [3.7e-3, 0.0])
def test_a_step_that_is_cut_at_its_tiles_has_room_for_the_short_one(least: float) -> None:
    flood = Flood(least)
    flood.long(8, outputs=1, tokens=3000)
    flood.plan()
    for i in range(40):
        for k in range(1 + i % 3):
            flood.at(2.0 + 0.1 * i, flood.offer, f"short{i}-{k}", 60 + i, 1)
    flood.run(7.0)
    steps = [sum(came < begun for _, begun, over in flood.times if over < flood.first[rid] - SEND / 2)
             for rid, came in flood.came.items() if rid.startswith("short")]  # fmt: skip
    assert len(steps) == 79
    assert max(steps) <= 2, "behind the next one, which may have been planned, it has been passed over"
    for plan in flood.plans:
        rows = dict(zip(array("i", plan.slots), array("i", plan.q_lens)))
        shorts = [new for new in plan.new if new.prompt_len <= SHORT]
        assert all(rows[new.slot] == new.prompt_len for new in shorts), "it has been cut"


def test_a_short_one_is_not_cut_at_a_tile() -> None:
    flood = Flood()
    flood.offer("short", 100)
    found = []
    for flood.core._hurry.on in (False, True):
        budget = Budget(1000, 1.0, (0.0, 1e-5, 0.0), 16, tile=TILE)
        budget.spend(0, 200)
        found.append(flood.core._prefill.chunk(flood.core.open["short"], budget, others=False))
    assert found == [48, 100]


def test_hurried_steps_read_no_long_prompt_a_few_tokens_at_a_time() -> None:
    flood = Flood()
    flood.long(8)
    flood.plan()
    flood.shorts(20.0, 1.2, 4.0)
    flood.run(4.0)
    hurried = [array("i", plan.q_lens) for plan, (at, *_) in zip(flood.plans, flood.times) if at > 2.0]
    lengths = [[n for n in counts if n not in (1, 100)] for counts in hurried]
    assert any(lengths), "no prompts"
    small = sum(n < 16 for counts in lengths for n in counts)
    assert small <= 0.05 * len(lengths)
    assert max(map(len, lengths)) <= 4, "parts of short ones may be there, too"


def test_who_comes_during_a_long_step_is_in_the_next_one() -> None:
    """Which is planned when that is about to end, and before it has ended."""
    flood = Flood()
    flood.long(4, outputs=1)
    flood.plan()
    flood.run(6.0)
    steps = list(pairwise(flood.times[10:]))
    assert all(over - begun > 2 * LAUNCH for (_, begun, over), _ in steps)
    assert all(over - 2 * LAUNCH < planned < over - LAUNCH / 2 for (_, _, over), (planned, *_) in steps)


def test_long_steps_do_not_begin_where_short_prompts_come_often() -> None:
    """Nor do they end much later than a short one where all came at once, which were there before."""
    often, once = Flood(), Flood()
    often.shorts(20.0, 1.0, 3.0)
    for i in range(20):
        once.at(2.5 + i * 1e-3, once.offer, f"short{i}", 100)
    for flood in (often, once):
        flood.at(3.0, flood.offer, "long", LONG, 1)
        flood.run(3.0 + LATELY / 2)
    longest = [max(over - begun for _, begun, over in flood.times) for flood in (often, once)]
    assert longest[0] < 2.2 * LONGER * cost(128, 0) < longest[1]


def test_many_short_prompts_at_once_make_no_long_step() -> None:
    """Beside long ones: they are read in several."""
    flood = Flood()
    flood.long(4)
    flood.plan()
    flood.run(2.0)
    for i in range(32):
        flood.offer(f"short{i}", 250)
    flood.run(4.0)
    assert len(flood.ttft()) == 32
    begun = next(i for i, (at, *_) in enumerate(flood.times) if at > 2.0)
    steps = [over - begun for _, begun, over in flood.times[begun + 1 :]]
    assert max(steps) <= 1.1 * max(LONGER * cost(128, 0), cost(SHORT + 64, 16 * LONG)), max(steps)


def test_streams_that_were_there_before_hold_up_no_long_prompt() -> None:
    flood = Flood()
    for i in range(8):
        flood.offer(f"short{i}", 100, 4000)
    flood.plan()
    flood.run(1.2)
    before = len(flood.plans)
    flood.offer("long", LONG)
    flood.run(3.0)
    reading = sum(max(array("i", plan.q_lens)) > 1 for plan in flood.plans[before:])
    assert reading <= 1.6 * LONG / ((0.03 - cost(8, 0)) / 2.05e-5)


def test_a_long_prompt_that_has_left_is_read_no_more() -> None:
    """Rows that run meanwhile are not planned late for it."""
    flood = Flood()
    flood.offer("stream", 100, 4000)
    flood.offer("long", 39_000)
    flood.plan()
    flood.at(1.05, flood.offer, "short", 100, 1)
    flood.run(1.6)
    assert "short" in flood.ended
    assert flood.core._hurry.on
    flood.core.cancel("long", "abort")
    flood.run(2.0)
    assert flood.times[-1][0] > 1.9, "the stream goes on"
    assert not flood.core._hurry.on


@pytest.mark.parametrize("yields", [False, True])
def test_a_long_prompt_goes_on_though_short_ones_have_no_place(yields: bool) -> None:
    """They wait for its slot, or yield, as lines of a batch, to another long one that waits for pages."""
    flood = Flood()
    changes: dict[str, Any] = {"slots": 3, "groups": [CacheGroup(2600)]} if yields else {"slots": 1}
    flood.core = Core(replace(flood.limits, step_tokens=256, costs=[], **changes))
    flood.offer("long", 39_000)
    flood.plan()
    if yields:
        flood.offer("longer", 39_500)
    for i in range(64):
        flood.offer(f"short{i}", 100, 1, yields)
    flood.run(60.0)
    assert set(flood.ended) == set(flood.came)


def test_auto_follows_the_hit_rate() -> None:
    auto = Auto()
    seen = [
        auto.look(50_000, 0),
        auto.look(60_000, 9_000),
        auto.look(160_000, 99_000),
        auto.look(160_000, 99_000),
    ]
    assert seen == ["fcfs", "fcfs", "lpm", "lpm"]
    assert auto.look(190_000, 99_000 + 6_000) == "lpm", "between the two nothing changes"
    assert auto.look(500_000, 99_000 + 6_000) == "fcfs"
