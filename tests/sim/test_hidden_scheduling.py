"""Requests for hidden states: what the scheduler does with them, against the fake model."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from simulation import VOCAB, Simulation, make_limits, make_submit

from sgla.messages import RowSampling
from sgla.sched.limits import STATES, Limits

WIDTH = 4


def stating(limits: Limits) -> Simulation:
    """Grammars of other requests force up to three tokens at once."""
    return Simulation(limits, forced=3)


@pytest.mark.parametrize("seed", range(60))
def test_every_token_has_its_own_state(seed: int) -> None:
    random = Random(seed)
    simulation = stating(
        make_limits(
            slots=random.randint(1, 5),
            pages=random.choice((14, 33)),
            step_tokens=random.choice((3, 16, 64)),
            depth=random.randint(1, 3),
            policy=random.choice(("fcfs", "lpm", "priority")),
            reserve=random.choice((0.0, 0.5)),
            hidden=WIDTH,
        )
    )
    stem = [random.randrange(VOCAB) for _ in range(30)]
    for i in range(20):
        tokens = stem[: random.randint(1, 30)] + [random.randrange(3) for _ in range(random.randint(0, 4))]
        sampling = RowSampling(
            hidden=random.random() < 0.6,
            temperature=random.choice((0.0, 1.0)),
            seed=i,
            prompt_logprobs=random.choice((-1, -1, 1)),
        )
        deadline = simulation.now + random.uniform(0, 9) if random.random() < 0.1 else None
        changes = {"sampling": sampling, "deadline": deadline, "priority": random.randint(0, 2)}
        stop_ids = frozenset(random.sample(range(VOCAB), 3))
        simulation.offer(make_submit(f"r{i}", tokens, random.randint(0, 12), stop_ids=stop_ids, **changes))
        if random.random() < 0.4:
            simulation.step()
        if random.random() < 0.1:
            simulation.cancel(f"r{random.randint(0, i)}")
    simulation.run()
    simulation.verify_states()


def test_retracted_requests_bring_each_state_once() -> None:
    simulation = stating(make_limits(slots=5, pages=14, reserve=0.0, hidden=WIDTH))
    for i in range(5):
        simulation.offer(make_submit(f"r{i}", [i, 1, 2, 3], 30, sampling=RowSampling(hidden=True)))
    simulation.run()
    assert simulation.core.stats().preemptions > 0
    simulation.verify_states()


def test_a_step_brings_few_states_of_one_prompt() -> None:
    width = STATES // 4 // 10  # of ten tokens
    simulation = stating(make_limits(pages=200, context_len=400, step_tokens=64, hidden=width))
    for i in range(2):
        simulation.offer(make_submit(f"r{i}", [i] * 35, 2, sampling=RowSampling(hidden=True)))
    simulation.run()
    simulation.verify_states()
    longest = [max(array("i", plan.q_lens)) for plan in simulation.plans]
    assert max(longest) == 10
    assert all(
        sum(array("i", plan.q_lens)) <= 11 for plan in simulation.plans
    )  # no other prompt, one decode row


def test_who_wants_states_reads_no_cached_prefix() -> None:
    simulation = stating(make_limits(hidden=WIDTH))
    for i, hidden in enumerate((False, True, True, False)):
        simulation.offer(make_submit(f"r{i}", [*range(20), i], 3, sampling=RowSampling(hidden=hidden)))
        simulation.run()
    simulation.verify_states()
    cached = [sum(d.cached_tokens for d in simulation.deltas[f"r{i}"]) for i in range(4)]
    assert cached == [0, 0, 0, 20]
