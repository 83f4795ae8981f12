"""Batches whose results nobody waits for one by one: prompts that can wait are read in small steps."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from simulation import Simulation, make_submit

from sgla.executor.fake import ints
from sgla.messages import CacheGroup, RowSampling, StepCost, Submit
from sgla.sched.limits import Limits

MIXED, PROMPTS = 32, 3
LARGEST = StepCost(tokens=256)
COSTS = [StepCost(tokens=MIXED, prompts=PROMPTS), LARGEST]


def play(submits: list[Submit], **changes: Any) -> Simulation:
    """All ``submits`` at once, to the end."""
    values: dict[str, Any] = {
        "slots": 64,
        "groups": [CacheGroup(3000)],
        "page_size": 4,
        "context_len": 400,
        "step_tokens": 256,
    }
    simulation = Simulation(Limits(**(values | changes)), check=False)
    for submit in submits:
        simulation.offer(submit)
    simulation.run()
    simulation.verify()
    return simulation


def batch(random: Random, count: int, shortest: int, longest: int, **changes: Any) -> list[Submit]:
    """The longest output first."""
    outputs = sorted((random.randint(shortest, longest) for _ in range(count)), reverse=True)
    return [
        make_submit(
            f"r{i}", [i, *random.choices(range(50), k=random.randint(5, 90))], max_new=most, **changes
        )
        for i, most in enumerate(outputs)
    ]


def prompt_sizes(simulation: Simulation) -> list[tuple[int, int]]:
    """Tokens and prompts of the steps that have both kinds of rows."""
    columns = [ints(plan.q_lens) for plan in simulation.plans]
    return [(sum(q), sum(n > 1 for n in q)) for q in columns if min(q) == 1 and max(q) > 1]


@pytest.mark.parametrize("seed", range(12))
def test_small_steps_make_no_batch_longer(seed: int) -> None:
    random = Random(seed)
    submits = batch(random, random.choice((10, 40, 64)), random.choice((1, 40, 150)), 150)
    small = play(submits, costs=COSTS)
    assert len(small.plans) == len(play(submits).plans)


def test_prompts_that_can_wait_are_read_in_small_steps() -> None:
    submits = batch(Random(1), 40, 1, 150)
    small = prompt_sizes(play(submits, costs=COSTS))
    # Beside many decode rows as many prompt tokens are read.
    assert all(tokens <= max(MIXED, 80) and prompts <= PROMPTS for tokens, prompts in small)
    assert len(small) > 2 * len(prompt_sizes(play(submits)))


@pytest.mark.parametrize(
    "changes",
    [
        {"itl_target": 1.0},  # somebody watches
        {"slots": 8},  # others wait for a slot
        {"groups": [CacheGroup(300)]},  # or for pages
        {"shortest": 150},  # all outputs are equally long
        {"stop_ids": frozenset({77})},  # nobody knows which will be
        {"sampling": RowSampling(prompt_logprobs=0)},  # small steps are no cheaper
        {"costs": [StepCost(tokens=MIXED, prompts=PROMPTS, longest=5), LARGEST]},  # nor for long prompts
    ],
)
def test_other_prompts_do_not_wait(changes: dict[str, Any]) -> None:
    wanted = {name: changes.pop(name) for name in ("stop_ids", "sampling") if name in changes}
    submits = batch(Random(2), 40, changes.pop("shortest", 1), 150, **wanted)
    small, full = (
        play(submits, **more) for more in ({"costs": COSTS} | changes, changes | {"costs": [LARGEST]})
    )
    assert small.plans[:5] == full.plans[:5]
    if changes.keys().isdisjoint({"slots", "groups"}):  # the last ones have a place
        assert small.plans == full.plans


def test_prompts_that_share_a_prefix_do_not_wait() -> None:
    submits = batch(Random(3), 40, 1, 150)
    for submit in submits:
        submit.tokens = [1] * 16 + submit.tokens
    small = play(submits, costs=COSTS)
    assert small.plans == play(submits).plans
