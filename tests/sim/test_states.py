"""Cache groups of states: where a prompt leaves checkpoints, which of them serve, and what becomes of
them."""

from __future__ import annotations

from array import array

import pytest
from simulation import Simulation, make_limits, make_submit

from sgla.messages import CacheGroup, StepPlan

PAGE, EVERY = 4, 16
LONG = [(7 * i) % 50 for i in range(60)]


def simulate(states: int = 20, **changes: object) -> Simulation:
    limits = {
        "pages": 129,
        "context_len": 200,
        "windows": [CacheGroup(1 + states, every=EVERY)],
        "step_tokens": 32,
    }
    return Simulation(make_limits(**limits | changes))


def run(simulation: Simulation, rid: str, tokens: list[int], max_new: int = 4) -> int:
    """How many tokens were served from the tree."""
    simulation.offer(make_submit(rid, tokens, max_new))
    simulation.run()
    return simulation.deltas[rid][0].cached_tokens


def lengths(plans: list[StepPlan]) -> list[int]:
    """Of the checkpoints that these plans had written."""
    return sorted(array("i", b"".join(plan.checkpoints for plan in plans))[1::3])


def test_a_prompt_leaves_checkpoints_at_intervals_and_at_its_last_page() -> None:
    simulation = simulate()
    run(simulation, "r", LONG[:42], 1)
    assert lengths(simulation.plans) == [16, 32, 40]


def test_a_match_ends_at_a_checkpoint_and_leaves_one_where_texts_part() -> None:
    simulation = simulate()
    run(simulation, "first", LONG[:50])
    done = len(simulation.plans)
    assert run(simulation, "second", [*LONG[:30], 1, 2, 3, 4]) == 16  # the last whole page of both ends at 28
    assert lengths(simulation.plans[done:]) == [28, 32, 36]  # the last of its output
    assert run(simulation, "third", [*LONG[:30], 5, 6]) == 28
    assert run(simulation, "again", [*LONG[:30], 1, 2, 3, 4]) == 32
    assert run(simulation, "whole", [*LONG[:50], 9]) == 48
    simulation.verify()


def test_requests_of_one_step_do_not_share_but_those_of_the_next_do() -> None:
    simulation = simulate(slots=8)
    for i in range(4):
        simulation.offer(make_submit(f"r{i}", [*LONG[:20], i]))
    simulation.submit_plans()
    first, second = simulation.plans
    assert (len(first.new), len(second.new)) == (1, 3)
    simulation.run()
    assert [simulation.deltas[f"r{i}"][0].cached_tokens for i in range(4)] == [0, 20, 20, 20]
    assert simulation.model.computed_tokens == 21 + 3 + 4 * 7
    simulation.verify()


@pytest.mark.parametrize("states", [1, 2, 3])
def test_few_states_are_enough_for_any_number_of_requests(states: int) -> None:
    simulation = simulate(states)
    for i in range(6):
        simulation.offer(make_submit(f"r{i}", [*LONG[: 8 * i + 1], i], 20))
    simulation.run()
    simulation.verify()
    assert max(len(plan.slots) // 4 for plan in simulation.plans) == min(states, 4)


def test_a_request_takes_over_the_last_state_there_is() -> None:
    simulation = simulate(2)
    run(simulation, "first", LONG[:17])  # leaves a checkpoint
    simulation.offer(make_submit("other", [1, 2, 3], 60))
    simulation.step()
    simulation.offer(make_submit("again", LONG[:17]))
    simulation.run()
    assert simulation.deltas["again"][0].cached_tokens == 16
    simulation.verify()
    assert run(simulation, "late", LONG[:17]) == 0


def test_the_states_longest_unused_go_first_and_the_tokens_stay() -> None:
    simulation = simulate(4, slots=1)
    run(simulation, "first", LONG)  # the last three of four checkpoints are left beside its own state
    assert simulation.core.stats().pages_cached >= 15
    assert run(simulation, "short", LONG[:20]) == 0
    assert run(simulation, "again", [*LONG, 1]) == 60
    simulation.verify()


@pytest.mark.parametrize("count", [7, 25, 40])
def test_outputs_leave_a_checkpoint_for_the_next_turn(count: int) -> None:
    """At their last whole page, and their prompt keeps its own."""
    simulation = simulate()
    run(simulation, "first", LONG[:10], count)
    told = LONG[:10] + simulation.tokens("first")
    assert run(simulation, "next", [*told, 1, 2]) == (len(told) - 1) // PAGE * PAGE
    assert run(simulation, "again", LONG[:10]) == 8
    simulation.verify()


def test_an_output_that_ends_before_its_last_step_leaves_its_checkpoint() -> None:
    """Steps that were planned when it ended may have written one behind its end."""
    plain = simulate()
    run(plain, "plain", LONG[:10], 40)
    for last in plain.tokens("plain")[3:20]:
        simulation = simulate()
        simulation.offer(make_submit("first", LONG[:10], 40, stop_ids=frozenset({last})))
        simulation.run()
        told = LONG[:10] + simulation.tokens("first")
        assert run(simulation, "next", [*told, 1, 2]) >= (len(told) - 1) // PAGE * PAGE
        simulation.verify()


def test_nothing_is_left_of_a_request_that_had_no_numbers() -> None:
    simulation = simulate()
    run(simulation, "first", LONG[:50])
    simulation.offer(make_submit("broken", [*LONG[:30], 1, 2, 3, 4]))
    simulation.step(broken=0.0)
    simulation.run()
    assert run(simulation, "next", [*LONG[:30], 1, 2, 3, 4]) == 16
    simulation.verify()


@pytest.mark.parametrize(("count", "places"), [(44, [16, 32, 40, 44]), (48, [16, 32, 44, 48])])
def test_a_prompt_that_ends_with_a_page_leaves_one_checkpoint_there(count: int, places: list[int]) -> None:
    """Beside that of the page before, which who asks the same begins with; a row of one token has no two."""
    simulation = simulate()
    run(simulation, "first", LONG[:count])
    assert lengths(simulation.plans) == places
    assert run(simulation, "again", LONG[:count]) == count - PAGE
    assert run(simulation, "next", [*LONG[:count], 1, 2]) == count
    simulation.verify()
