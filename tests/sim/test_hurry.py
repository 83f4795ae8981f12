"""First tokens of short prompts beside long ones; steps cost what an H200's do for a model of 8 B."""

from __future__ import annotations

from random import Random

from simulation import Simulation, make_submit

from sgla.messages import CacheGroup
from sgla.sched.hurry import SHORT
from sgla.sched.limits import Limits
from sgla.sched.policy import Auto

LONG = 16_000


def cost(tokens: int, pairs: int) -> float:
    """Weights are read, or products made; 1 ms of all else."""
    return 1e-3 + max(3.7e-3, 2.05e-5 * tokens) + 8.5e-10 * pairs


class Flood:
    """``every``: seconds between long prompts; short ones come six times a second, from ``begin`` on."""

    def __init__(self, every: float, begin: float = 0.0) -> None:
        limits = Limits(
            slots=64, groups=[CacheGroup(40_000)], page_size=16, context_len=40_000, step_tokens=8192,
            depth=2, itl_target=0.03,
        )  # fmt: skip
        self.simulation = Simulation(limits, cost=cost, check=False)
        self.every, self.begin, self.random = every, begin, Random(0)
        self.came: dict[str, float] = {}

    def offer(self, rid: str, tokens: int, at: float) -> None:
        self.came[rid] = at
        self.simulation.offer(
            make_submit(rid, [self.random.randrange(50) for _ in range(tokens)], max_new=16)
        )

    def run(self, seconds: float) -> None:
        simulation = self.simulation
        long, short = 1.0, 1.0 + self.begin
        while simulation.now < 1 + seconds:
            while long <= simulation.now:
                self.offer(f"long{len(self.came)}", LONG, long)
                long += self.every
            while short <= simulation.now:
                self.offer(f"short{len(self.came)}", 100, short)
                short += self.random.expovariate(6.0)
            if simulation.core.idle:
                simulation.now = min(long, short)
            else:
                simulation.step()

    def ttft(self, after: float) -> list[float]:
        """Of short prompts that came so many seconds after the beginning, in order."""
        done = self.simulation.core.drain_finished()
        return sorted(
            one.first_token - self.came[one.rid]
            for one in done
            if one.rid.startswith("short") and self.came[one.rid] >= 1 + after and one.first_token is not None
        )


def p95(values: list[float]) -> float:
    assert len(values) > 25
    return values[round(0.95 * (len(values) - 1))]


def test_short_prompts_under_a_flood_of_long_ones() -> None:
    """One that comes every 0.3 s takes 0.44 s of the device: more and more of them wait."""
    idle, flood, quiet = Flood(1e9), Flood(0.3), Flood(0.3, begin=1e9)
    idle.run(7.0)
    flood.run(7.0)
    quiet.run(7.0)
    assert p95(flood.ttft(after=1.0)) <= 3 * cost(100, 0) <= 3 * p95(idle.ttft(after=0.0))
    read, alone = (one.simulation.core.stats().prefilled_tokens for one in (flood, quiet))
    assert read > 0.75 * alone, "long prompts are read more slowly, but they are read"


def test_many_short_prompts_at_once_make_no_long_step() -> None:
    """Beside long ones: they are read in several."""
    flood = Flood(1e9)
    simulation = flood.simulation
    for i in range(4):
        flood.offer(f"long{i}", LONG, 1.0)
    simulation.step()
    for i in range(32):
        flood.offer(f"short{i}", 250, simulation.now)
    before = len(simulation.plans)
    while any(simulation.finish(f"short{i}") is None for i in range(32)):
        simulation.step()
    steps = [sum(memoryview(plan.q_lens).cast("i")) for plan in simulation.plans[before:]]
    assert max(steps) <= SHORT + simulation.limits.slots, steps


def test_streams_that_were_there_before_hold_up_no_long_prompt() -> None:
    flood = Flood(1e9)
    for i in range(8):
        flood.offer(f"short{i}", 100, 1.0)
    for _ in range(6):
        flood.simulation.step()
    before = len(flood.simulation.plans)
    flood.offer("long", LONG, flood.simulation.now)
    while flood.simulation.finish("long") is None:
        flood.simulation.step()
    reading = sum(len(plan.new) > 0 or max(memoryview(plan.q_lens).cast("i")) > 1
                  for plan in flood.simulation.plans[before:])  # fmt: skip
    assert reading <= 1.3 * LONG / ((0.03 - cost(8, 0)) / 2.05e-5)


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
