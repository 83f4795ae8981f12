"""The life of a request: the table in the code, the table in the docs, and a scheduler that walks every
edge."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
from simulation import Simulation, make_limits, make_submit

from sgla.messages import Tier
from sgla.sched.request import LIFE, OWNERS, Request, State

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
EDGES = {(state, event, after) for state, events in LIFE.items() for event, after in events.items()}


def test_the_docs_have_the_table() -> None:
    section = DESIGN.read_text().split("## The life of a request")[1].split("\n## ")[0]
    rows = [re.findall(r"[^|]+", line) for line in section.splitlines() if line.startswith("| ")][1:]
    told = [[cell.strip() for cell in row] for row in rows]
    assert {(State(row[0]), row[1], State(row[2])) for row in told} == EDGES
    assert len(told) == len(EDGES)
    for row in told:
        assert (row[4] == "the request's") == (State(row[0]) in OWNERS)


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> set[tuple[State, str, State]]:
    """The edges that requests have gone along."""
    walked = set()
    step = Request._on

    def on(self: Request, event: str) -> None:
        before = self.state
        step(self, event)
        walked.add((before, event, self.state))

    monkeypatch.setattr(Request, "_on", on)
    return walked


def state_of(simulation: Simulation, rid: str) -> State:
    return simulation.core._queues.open[rid].state


def test_every_edge_is_walked(walked: set[tuple[State, str, State]]) -> None:
    simulation = Simulation(make_limits(pages=9, slots=2, tiers=[Tier("host", [20])]))
    simulation.offer(make_submit("held", [1, 2, 3], holds=frozenset(("grammar", "adapter"))))
    simulation.offer(make_submit("lost", [1, 2, 3], holds=frozenset(("grammar",))))
    simulation.offer(make_submit("late", [4, 5, 6], deadline=3.0, holds=frozenset(("grammar",))))
    simulation.offer(make_submit("long", [7, 8, 9], 20))
    simulation.offer(make_submit("other", [9, 8, 7], 20))  # both together do not fit: one is retracted
    simulation.offer(make_submit("cut", [1], 20))
    assert state_of(simulation, "held") is State.HELD
    simulation.cancel("lost")
    simulation.cancel("cut")
    for _ in range(4):
        simulation.step()
    assert (simulation.finish("late"), state_of(simulation, "long")) == ("error", State.RUNNING)
    simulation.ready("held")
    assert state_of(simulation, "held") is State.WAITING
    simulation.run()
    simulation.evict()
    simulation.offer(make_submit("again", [*simulation.submits["long"].tokens, *simulation.tokens("long")]))
    simulation.submit_plans()
    assert state_of(simulation, "again") is State.HELD  # its pages come from the host
    simulation.run()
    simulation.verify()
    assert walked == EDGES


@pytest.mark.parametrize("state", list(State))
def test_nothing_else_changes_a_state(state: State) -> None:
    request: Any = Request.__new__(Request)
    request.rid = "r"
    for event in {event for events in LIFE.values() for event in events} - LIFE[state].keys():
        request.state = state
        with pytest.raises(AssertionError, match=f"r: {event} while {state.value}"):
            request._on(event)


def test_nothing_of_a_request_stays_behind_it() -> None:
    simulation = Simulation(make_limits())
    simulation.offer(make_submit("a request alone", [1, 2, 3]))
    simulation.run()
    assert not [each for each in gc.get_objects() if type(each) is Request and each.rid == "a request alone"]
