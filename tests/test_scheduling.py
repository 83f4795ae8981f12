"""Work is given out to the end, also after a process has died; processes are played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from scheduling import OneWaits

FILES = {"tests/server/test_a.py": 5, "tests/cpu/test_b.py": 7, "tests/test_c.py": 1, "tests/test_d.py": 1}
FILES |= {"tests/server/test_e.py": 3, "tests/test_f.py": 1, "tests/test_g.py": 4}
TESTS = [f"{file}::test_{i}" for file, count in FILES.items() for i in range(count)]


class Played:
    """A process as pytest-xdist's: it runs a test as soon as it knows the next one, or that there is none."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="played")
        self.queue: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def next(self) -> int | None:
        return self.queue[0] if len(self.queue) > (0 if self.shutting_down else 1) else None


def join(scheduler: OneWaits) -> Played:
    node: Any = Played()
    scheduler.add_node(node)
    scheduler.add_node_collection(node, TESTS)
    if scheduler.collection_is_completed:
        scheduler.schedule()
    return node


@pytest.mark.parametrize("dead", range(3))
@pytest.mark.parametrize("after", range(len(TESTS)))
def test_every_test_runs_once_also_when_a_process_dies(dead: int, after: int) -> None:
    option = SimpleNamespace(loadscopereorder=False, debug=False)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: ["3*popen"])
    scheduler = OneWaits(config)
    nodes = [join(scheduler) for _ in range(3)]
    ran: list[str] = []
    while ready := [node for node in nodes if node.next() is not None]:
        if len(ran) >= after and dead >= 0:
            victim: Any = nodes.pop(dead)
            dead = -1
            crashed = scheduler.remove_node(victim)
            if crashed:
                ran.append(crashed)
            nodes.append(join(scheduler))  # pytest-xdist replaces it
            continue
        node: Any = ready[len(ran) % len(ready)]
        index = node.queue.pop(0)
        ran.append(TESTS[index])
        scheduler.mark_test_complete(node, index)
        if scheduler.tests_finished:
            for one in scheduler.nodes:
                one.shutdown()
    assert sorted(ran) == sorted(TESTS)
    assert not scheduler.workqueue
