"""Clients take turns: nobody waits for all that another client has asked for."""

from __future__ import annotations

from typing import Any

import pytest
from simulation import Simulation, make_limits, make_submit

from sgla.sched.turns import SPARE, Turns


def many(simulation: Simulation, client: str, count: int, max_new: int = 4, **changes: Any) -> None:
    for i in range(count):
        simulation.offer(
            make_submit(f"{client}{i}", [len(client), i], max_new=max_new, client=client, **changes)
        )


def begun(simulation: Simulation) -> list[str]:
    """Requests in the order in which they got their slots."""
    steps = simulation.core.drain_finished()
    return [one.rid for one in sorted(steps, key=lambda one: (one.scheduled or 0.0, one.rid))]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_single_request_does_not_wait_for_all_of_another_client(policy: str) -> None:
    simulation = Simulation(make_limits(policy=policy, slots=2, patience=1e9))
    many(simulation, "noisy", 40)
    for _ in range(4):
        simulation.step()
    many(simulation, "quiet", 1)
    simulation.run()
    simulation.verify()
    assert begun(simulation).index("quiet0") <= 5, "behind those of this turn and of the next"


def test_clients_are_served_in_turn_whoever_came_first() -> None:
    simulation = Simulation(make_limits(slots=1))
    for client in ("a", "bb", "ccc"):
        many(simulation, client, 4 if client == "a" else 2, max_new=1)
    simulation.run()
    assert begun(simulation) == ["a0", "bb0", "ccc0", "a1", "bb1", "ccc1", "a2", "a3"]


def test_one_client_alone_is_served_in_the_order_of_arrival() -> None:
    """Also where its earlier requests still run: the newest one is the first to give its pages back."""
    simulation = Simulation(make_limits(slots=3, pages=200))
    many(simulation, "a", 3, max_new=50)
    for _ in range(5):
        simulation.step()
    many(simulation, "later", 3)
    ranks = [request.rank for request in simulation.core._queues.running + simulation.core._queues.waiting]
    assert ranks == sorted(ranks)
    simulation.run()
    assert begun(simulation) == ["a0", "a1", "a2", "later0", "later1", "later2"]


def test_new_clients_without_end_do_not_hold_up_the_later_requests_of_an_older_one() -> None:
    simulation = Simulation(make_limits(slots=1))
    many(simulation, "old", 3, max_new=1)
    for i in range(60):
        simulation.offer(make_submit(f"new{i}", [3, i], max_new=4, client=f"new{i}"))
        simulation.step()
    assert all(simulation.finish(f"old{i}") for i in range(3))
    simulation.run()
    simulation.verify()


def test_lines_of_batches_go_behind_all_clients() -> None:
    simulation = Simulation(make_limits(slots=1))
    many(simulation, "batches", 3, max_new=1, yields=True)
    many(simulation, "a", 3, max_new=1)
    simulation.run()
    assert begun(simulation) == ["a0", "a1", "a2", "batches0", "batches1", "batches2"]


def test_a_client_that_pauses_loses_nothing_and_gains_nothing() -> None:
    turns = Turns()
    assert [turns.take("a", alone=not i) for i in range(3)] == [1, 2, 3]
    assert turns.take("b", alone=False) == 1
    turns.serve(3, waiting=1)
    assert (turns.take("b", alone=False), turns.take("c", alone=False)) == (4, 4)
    assert turns.take("a", alone=True) == 5, "nobody waits, so it is behind all that still run"


def test_clients_that_are_gone_are_forgotten_while_others_wait() -> None:
    turns = Turns()
    for i in range(10 * SPARE):
        turns.serve(turns.take(f"{i}", alone=False), waiting=2)
    assert len(turns._last) <= SPARE + 5
