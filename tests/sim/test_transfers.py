"""Copies of pages on the host: what is saved, what comes back, who is held meanwhile, and what a failure
leaves."""

from __future__ import annotations

from random import Random

import pytest
from simulation import Simulation, make_limits, make_submit

from sgla.messages import StepPlan
from sgla.sched.request import State

LONG = [(7 * i) % 50 for i in range(40)]
OTHER = [(3 * i + 1) % 50 for i in range(40)]


def simulate(**changes: object) -> Simulation:
    """The device has pages for one of the long prompts."""
    return Simulation(make_limits(**{"pages": 14, "host_pages": 40} | changes))


def run(simulation: Simulation, rid: str, tokens: list[int]) -> int:
    """How many tokens were served from the tree."""
    simulation.offer(make_submit(rid, tokens, 4))
    simulation.run()
    return simulation.deltas[rid][0].cached_tokens


def copies(plans: list[StepPlan], target: str) -> list[int]:
    """Pages of each copy."""
    return [len(copy.targets) // 4 for plan in plans for copy in plan.copies if copy.target == target]


def held(simulation: Simulation, rid: str) -> bool:
    return simulation.core._queues.open[rid].state is State.HELD


def evicted() -> Simulation:
    """A long prompt has been computed, saved and evicted but for its first two pages."""
    simulation = simulate()
    run(simulation, "first", LONG)
    run(simulation, "other", OTHER)
    simulation.plans.clear()
    return simulation


def test_what_was_computed_is_saved_once() -> None:
    simulation = simulate()
    run(simulation, "first", LONG)
    assert copies(simulation.plans, "host") == [10]
    run(simulation, "again", [*LONG, 1, 2, 3, 4, 5])
    assert copies(simulation.plans, "host") == [10, 2]
    simulation.verify()


def test_an_evicted_prefix_comes_back() -> None:
    simulation = evicted()
    assert run(simulation, "again", [*LONG, 1, 2]) == 40
    assert copies(simulation.plans, "device") == [8]
    simulation.verify()


def test_a_plan_may_have_no_rows() -> None:
    simulation = evicted()
    simulation.offer(make_submit("again", LONG))
    simulation.submit_plans()
    [plan] = simulation.plans
    assert (plan.slots, len(plan.copies)) == (b"", 1)
    assert held(simulation, "again")
    simulation.run()
    simulation.verify()


def test_others_run_while_a_request_is_held_and_those_of_the_same_prefix_wait_for_it() -> None:
    simulation = evicted()
    for rid, tokens in (("again", LONG), ("same", [*LONG[:24], 1]), ("else", [1, 2, 3])):
        simulation.offer(make_submit(rid, tokens))
    while simulation.finish("else") is None:
        simulation.step()
    assert (held(simulation, "again"), held(simulation, "same")) == (True, True)
    simulation.run()
    assert copies(simulation.plans, "device") == [7]  # the last token of a prompt is computed in any case
    assert [simulation.deltas[rid][0].cached_tokens for rid in ("again", "same")] == [36, 24]
    simulation.verify()


def test_the_host_tells_media_apart() -> None:
    simulation = simulate()
    for rid, digest in (("cat", b"cat"), ("dog", b"dog")):
        simulation.offer(make_submit(rid, LONG, 4, media=[(9, digest)]))
        simulation.run()
    assert [simulation.deltas[rid][0].cached_tokens for rid in ("cat", "dog")] == [0, 8]
    simulation.offer(make_submit("again", LONG, 4, media=[(9, b"cat")]))
    simulation.run()
    assert simulation.deltas["again"][0].cached_tokens == 36
    simulation.verify()


def test_a_failed_copy_leaves_nothing_and_is_not_tried_again() -> None:
    simulation = evicted()
    simulation.offer(make_submit("again", [*LONG, 1, 2]))
    simulation.step()
    simulation.core.moved(simulation.model.move(simulation.copies.pop(), ok=False))
    simulation.core.check()
    assert not held(simulation, "again")
    simulation.run()
    assert simulation.deltas["again"][0].cached_tokens == 8
    assert copies(simulation.plans, "device") == [8]
    simulation.verify()


def test_what_a_retracted_request_leaves_is_not_copied() -> None:
    simulation = simulate(pages=18, depth=1, slots=4)
    simulation.offer(make_submit("first", LONG[:8], 12))
    simulation.run()
    simulation.evict()
    simulation.offer(make_submit("yields", LONG[:8], 12, yields=True))
    while len(simulation.tokens("yields")) < 5:
        simulation.step()
    simulation.offer(make_submit("reader", OTHER, 2))
    run(simulation, "high", [*LONG[:8], *simulation.tokens("first")])
    assert simulation.core.stats().preemptions > 0
    assert simulation.deltas["high"][0].cached_tokens >= 12
    simulation.verify()


def test_a_copy_outlives_the_request_it_was_made_for() -> None:
    simulation = evicted()
    simulation.offer(make_submit("again", LONG))
    simulation.step()
    simulation.cancel("again")
    simulation.core.check()
    assert not simulation.core.idle
    simulation.run()
    simulation.plans.clear()
    assert run(simulation, "later", LONG) == 36
    assert not copies(simulation.plans, "device")
    simulation.verify()


def test_a_text_that_had_no_numbers_is_forgotten_on_the_host() -> None:
    simulation = evicted()
    simulation.offer(make_submit("broken", [*LONG, 1, 2]))
    while simulation.finish("broken") is None:
        row = simulation.core._queues.flights and simulation.core._queues.flights[0].rows
        simulation.step(broken=0.0 if row else None)
    simulation.run()
    assert run(simulation, "next", LONG) == 0
    simulation.verify()


@pytest.mark.parametrize("pages", [1, 3])
def test_the_host_keeps_what_was_used_last(pages: int) -> None:
    simulation = simulate(host_pages=pages)
    run(simulation, "first", LONG)
    run(simulation, "other", OTHER)
    run(simulation, "third", LONG[::-1])
    assert run(simulation, "back", LONG[::-1]) == 36
    assert run(simulation, "last", OTHER) <= 4 * pages
    simulation.verify()


def play(random: Random) -> Simulation:
    """Requests with few prefixes, of which the device always loses some."""
    limits = make_limits(
        pages=random.choice((10, 14, 20)),
        host_pages=random.choice((5, 20, 60)),
        slots=random.choice((1, 2, 4)),
        depth=random.randint(1, 3),
        drafts=random.choice((0, 3)),
        policy=random.choice(("fcfs", "lpm", "dfs-weight", "lof")),
    )
    simulation = Simulation(limits)
    stems = [[random.randrange(3) for _ in range(24)] for _ in range(3)]
    pending = 14
    while pending or not simulation.core.idle:
        if pending and random.random() < 0.3:
            pending -= 1
            tokens = random.choice(stems)[: random.randint(4, 24)] + [random.randrange(3) for _ in range(3)]
            simulation.offer(make_submit(f"r{pending}", tokens, random.choice((0, 1, 9))))
        if random.random() < 0.3:
            simulation.end_a_copy(random, failures=0.3)
        if random.random() < 0.2:
            simulation.evict()
        if random.random() < 0.02 and simulation.submits:
            simulation.cancel(random.choice(list(simulation.submits)))
        simulation.step(broken=random.random() if random.random() < 0.01 else None)
    return simulation


def test_text_is_the_same_whatever_becomes_of_copies() -> None:
    loaded = 0
    for seed in range(100):
        simulation = play(Random(seed))
        simulation.verify()
        loaded += len(copies(simulation.plans, "device"))
    assert loaded > 200
