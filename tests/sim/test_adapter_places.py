"""Requests with adapters: they wait for a place and for the copy that fills it, and nobody waits for ever."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from examples import examples
from simulation import Simulation, make_limits, make_submit

from sgla.messages import ADAPTER, Keep, Moved, StepResult, Submit, int32
from sgla.sched.adapters import AHEAD, Adapters
from sgla.sched.core import Core
from sgla.sched.moving import Numbers


def wanted(rid: str, adapter: int, max_new: int = 4, **changes: object) -> Submit:
    tokens = [adapter + 1, 2, 3, 4, 5, 6, 7, 8]
    return make_submit(rid, tokens, max_new, adapter=adapter, namespace=f"{adapter}", **changes)


def started(simulation: Simulation) -> list[str]:
    """Those that have run, in the order of their first step."""
    seen = {rid: deltas for rid, deltas in simulation.deltas.items() if deltas}
    return sorted(seen, key=lambda rid: simulation.submits[rid].arrival)


def copied(simulation: Simulation) -> list[int]:
    """Adapters, in the order of their copies."""
    copies = [copy for plan in simulation.plans for copy in plan.copies]
    return [int(np.frombuffer(copy.sources[0], np.int32)[0]) for copy in copies]


def test_a_request_is_held_while_its_adapter_is_copied() -> None:
    simulation = Simulation(make_limits(adapters=2))
    simulation.offer(wanted("a", 1))
    simulation.offer(wanted("base", 0))
    simulation.submit_plans()
    plan = simulation.plans[0]
    (copy,) = plan.copies
    assert (copy.source, copy.target) == ("adapters", "places")
    assert [new.place for new in plan.new] == [0], "the base's request waits for nobody"
    assert simulation.core._queues.held["a"].holds == {ADAPTER}
    simulation.run()
    assert [new.place for plan in simulation.plans for new in plan.new] == [0, 1]
    simulation.verify()


def test_a_burst_of_adapters_begins_in_one_step() -> None:
    """While nobody runs, whose adapter has come waits for those whose copies are under way; a request of the
    base does not, and beside rows that run nobody does. Adapters that have come keep their places."""
    core = Core(make_limits(adapters=3, slots=8, step_tokens=64))
    for i in range(5):
        core.offer(wanted(f"a{i}", 1 + i), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    assert not plan.new
    assert len(plan.copies) == 3
    core.retire(StepResult(step=plan.step, tokens=b""), 0.0)
    for copy in plan.copies[:2]:
        core.moved(Moved(copy.transfer, ok=True))
        assert core.plan(0.0) is None
    core.offer(wanted("base", 0, max_new=1), 0.0)
    alone = core.plan(0.0)
    assert alone is not None
    assert [new.place for new in alone.new] == [0]
    core.retire(StepResult(step=alone.step, tokens=int32([1])), 0.0)
    core.moved(Moved(plan.copies[2].transfer, ok=True))
    together = core.plan(0.0)
    assert together is not None
    assert [new.place for new in together.new] == [1, 2, 3]
    core.check()


@pytest.mark.parametrize(("tokens", "begin"), [(64, 3), (16, 2)])
def test_a_burst_waits_for_no_more_than_a_step_has_room_for(tokens: int, begin: int) -> None:
    """Nor does it begin because a plan of copies alone is in flight; and as many adapters come as there are
    slots."""
    core = Core(make_limits(adapters=8, slots=3, step_tokens=tokens))
    for i in range(5):
        core.offer(wanted(f"a{i}", 1 + i), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    assert len(plan.copies) == 3
    for copy in plan.copies[: begin - 1]:
        core.moved(Moved(copy.transfer, ok=True))
        assert core.plan(0.0) is None
    core.moved(Moved(plan.copies[begin - 1].transfer, ok=True))
    together = core.plan(0.0)
    assert together is not None
    assert len(together.new) == begin


def test_a_burst_begins_with_those_whose_adapters_are_there() -> None:
    """They wait for the others before them, and nobody who comes later overtakes these."""
    core = Core(make_limits(adapters=8, slots=4, step_tokens=64))
    core.offer(wanted("before", 1, max_new=1), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    core.retire(StepResult(step=plan.step, tokens=b""), 0.0)
    core.moved(Moved(plan.copies[0].transfer, ok=True))
    plan = core.plan(0.0)
    assert plan is not None
    core.retire(StepResult(step=plan.step, tokens=int32([1])), 0.0)
    for i, adapter in enumerate((2, 1, 3, 4, 1, 1)):
        core.offer(wanted(f"r{i}", adapter), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    assert (len(plan.new), len(plan.copies)) == (0, 3)
    for copy in plan.copies:
        assert core.plan(0.0) is None
        core.moved(Moved(copy.transfer, ok=True))
    assert core.plan(0.0) is not None
    assert [request.rid for request in core._queues.running] == ["r0", "r1", "r2", "r3"]
    core.check()


def test_a_burst_waits_for_nobody_who_comes_later() -> None:
    """Though there always is one whose adapter is on its way."""
    core = Core(make_limits(adapters=8, slots=8, step_tokens=64))
    copies: list[int] = []
    for i in range(8):
        core.offer(wanted(f"a{i}", 1 + i), 0.0)
        if i == 2:
            core.moved(Moved(copies[0], ok=True))
        plan = core.plan(0.0)
        assert plan is not None
        if plan.new:
            break
        copies += [copy.transfer for copy in plan.copies]
        core.retire(StepResult(step=plan.step, tokens=b""), 0.0)
    assert [request.rid for request in core._queues.running] == ["a0"]
    assert (len(copies), len(plan.copies)) == (2, 1), "those of who came later are on their way, too"
    core.check()


def test_a_batch_of_many_adapters_reads_prompts_in_as_few_steps_as_one_of_few() -> None:
    """Rows that begin together end together, and so those begin together that come next."""
    limits, random = make_limits(adapters=16, slots=8, step_tokens=64, pages=129), Random(1)
    for adapters in (2, 60):
        simulation = Simulation(limits)
        for batch in range(6):
            before = len(simulation.plans)
            for i in range(32):
                simulation.offer(wanted(f"{batch}-{i}", random.randint(1, adapters), max_new=8))
            simulation.run()
            assert [len(plan.new) for plan in simulation.plans[before:] if plan.new] == [8] * 4
        simulation.verify()


def test_a_burst_waits_for_nobody_who_has_left() -> None:
    core = Core(make_limits(adapters=3, slots=8, step_tokens=64))
    for i in range(2):
        core.offer(wanted(f"a{i}", 1 + i), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    core.retire(StepResult(step=plan.step, tokens=b""), 0.0)
    core.moved(Moved(plan.copies[0].transfer, ok=True))
    assert core.plan(0.0) is None
    core.cancel("a1", "abort")
    alone = core.plan(0.0)
    assert alone is not None
    assert [new.place for new in alone.new] == [1]
    core.moved(Moved(plan.copies[1].transfer, ok=True))
    core.check()


def test_adapters_come_before_the_turn_of_who_wants_them() -> None:
    """While others run, to places that nobody uses, a few at a time, and none instead of another one that is
    expected."""
    simulation = Simulation(make_limits(adapters=8, slots=1))
    simulation.offer(wanted("first", 1, max_new=8))
    for i in range(12):
        simulation.offer(wanted(f"r{i}", 2 + i, max_new=8))
    simulation.run()
    begun = {new.place: at for at, plan in enumerate(simulation.plans) for new in plan.new}
    come = {
        int(np.frombuffer(copy.targets[0], np.int32)[0]): at
        for at, plan in enumerate(simulation.plans)
        for copy in plan.copies
    }
    assert len(copied(simulation)) == 13, "each once"
    assert all(len(plan.copies) <= AHEAD for plan in simulation.plans)
    assert all(begun[place] > come[place] + 1 for place in begun)
    assert all(plan.slots for plan in simulation.plans[1:]), "nobody waits for a copy"
    simulation.verify()


def test_places_are_kept_and_the_one_unused_for_longest_goes() -> None:
    simulation = Simulation(make_limits(adapters=2))
    for i, adapter in enumerate((1, 2, 1, 3, 1, 2)):
        simulation.offer(wanted(f"r{i}", adapter))
        simulation.run()
    copies = [copy.sources[0][0] for plan in simulation.plans for copy in plan.copies]
    assert copies == [1, 2, 3, 2], "1 is used too often to go"
    simulation.verify()


def test_two_thousand_adapters_take_turns_at_64_places() -> None:
    """By Zipf's law, one after the other: exactly those are copied that a list of the 64 used last has
    not. Then one request for each adapter, a hundred at once: each is copied once, and all are answered."""
    count, places, random = 2000, 64, Random(1)
    simulation = Simulation(make_limits(adapters=places, slots=places))
    odds, recent, missed = [1 / (i + 1) for i in range(count)], list[int](), list[int]()
    for i, adapter in enumerate(random.choices(range(1, count + 1), odds, k=300)):
        simulation.offer(wanted(f"r{i}", adapter, max_new=1))
        simulation.run()
        if adapter not in recent:
            missed.append(adapter)
        recent = [adapter, *(other for other in recent if other != adapter)][:places]
    assert copied(simulation) == missed
    assert 100 < len(missed) < 250

    simulation = Simulation(make_limits(adapters=places, slots=places, pages=129))
    for first in range(1, count, 100):
        for adapter in range(first, first + 100):
            simulation.offer(wanted(f"a{adapter}", adapter, max_new=1))
        simulation.run()
    assert sorted(copied(simulation)) == list(range(1, count + 1))
    assert all(simulation.finish(f"a{adapter}") is not None for adapter in range(1, count + 1))
    assert simulation.core._memory.adapters.used == places


def test_a_pinned_adapter_stays_and_one_that_is_gone_leaves_its_place() -> None:
    simulation = Simulation(make_limits(adapters=2))
    simulation.core.keep(Keep(1, pinned=True))
    for i, adapter in enumerate((1, 2, 3, 4, 1)):
        simulation.offer(wanted(f"r{i}", adapter))
        simulation.run()
    assert [copy.sources[0][0] for plan in simulation.plans for copy in plan.copies] == [1, 2, 3, 4]
    simulation.core.keep(Keep(1, pinned=False))
    simulation.offer(wanted("last", 5))
    simulation.run()
    assert simulation.plans[-1].step
    assert [copy.targets[0][0] for plan in simulation.plans for copy in plan.copies][-1] == 1
    simulation.verify()


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_nobody_waits_for_ever(policy: str) -> None:
    """One adapter is always wanted by somebody; another one gets the only place all the same, and as soon as
    those that were there before it are done."""
    simulation = Simulation(make_limits(adapters=1, slots=2, policy=policy, patience=5.0))
    simulation.offer(wanted("r0", 1, max_new=6))
    for i in range(40):
        simulation.step()
        if i == 3:
            simulation.offer(wanted("other", 2, arrival=simulation.now))
        simulation.offer(wanted(f"r{i + 1}", 1, max_new=6, arrival=simulation.now))
    assert simulation.finish("other") is not None
    simulation.run()
    simulation.verify()


def test_random_adapters() -> None:
    """More adapters than places, some pinned, some that go and come again: each request has the text that it
    has alone with its adapter, and all places are given back."""
    for seed in range(examples(300)):
        random = Random(seed)
        places = random.randint(1, 4)
        limits = make_limits(
            adapters=places,
            slots=random.randint(1, 5),
            pages=random.choice((9, 33)),
            depth=random.randint(1, 3),
            policy=random.choice(("fcfs", "lpm", "priority")),
        )
        simulation = Simulation(limits)
        for number in random.sample(range(1, 7), places - 1):
            simulation.core.keep(Keep(number, pinned=True))
        for i in range(random.randint(2, 14)):
            priority = random.choice((0, 0, 3))
            adapter = random.choice((0, *range(1, 7)))
            simulation.offer(wanted(f"r{i}", adapter, random.randint(1, 9), priority=priority))
            for _ in range(random.choice((0, 0, 1, 3))):
                simulation.step()
            if random.random() < 0.3:
                simulation.end_a_copy(random, failures=0.3)
            if random.random() < 0.1:
                simulation.cancel(random.choice(list(simulation.submits)))
            if random.random() < 0.1:
                wanted_now = {request.adapter for request in simulation.core._queues.open.values()}
                for number in set(range(1, 7)) - wanted_now:
                    simulation.core.keep(Keep(number, pinned=False))
                simulation.core.check()
        simulation.run()
        for number in range(1, 7):
            simulation.core.keep(Keep(number, pinned=False))
        assert simulation.core._memory.adapters.used == 0
        simulation.verify()


def test_an_adapter_that_is_expected_goes_last() -> None:
    """Though another one was used later."""
    adapters = Adapters(3, Numbers())
    adapters.expect([1, 0, 2, 3])
    for number, copy in enumerate(adapters.copies, 1):
        assert not adapters.has(number)
        adapters.moved(Moved(copy.transfer, ok=True))
        assert adapters.has(number)
    adapters.expect([1, 3, 0, 4])
    places = {int(np.frombuffer(copy.sources[0], np.int32)[0]): copy.targets[0] for copy in adapters.copies}
    assert places[4] == places[2]
    adapters.check([])
