"""Prefixes that a request wants to be kept: evicted after all others, until their time is over."""

from __future__ import annotations

import pytest
from simulation import Simulation, make_limits, make_submit

KEPT = [(7 * i) % 50 for i in range(24)]


def others(simulation: Simulation, first: int) -> None:
    for i in range(first, first + 6):
        simulation.offer(make_submit(f"o{i}", [(i * x + i) % 50 for x in range(30)], 4))
        simulation.run()


def cached(simulation: Simulation, rid: str) -> int:
    simulation.offer(make_submit(rid, [*KEPT, 1]))
    simulation.run()
    return simulation.deltas[rid][0].cached_tokens


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "mru", "cost"])
def test_what_is_kept_outlives_what_is_not_until_its_time_is_over(policy: str) -> None:
    simulation = Simulation(make_limits(pages=21, eviction=policy))
    others(simulation, 1)
    simulation.offer(make_submit("kept", KEPT, 4, cache_ttl=500.0, arrival=simulation.now))
    simulation.run()
    others(simulation, 7)
    assert cached(simulation, "again") == 24
    simulation.now += 500
    others(simulation, 13)
    others(simulation, 19)
    assert cached(simulation, "late") < 24
    simulation.verify()


def test_what_is_used_is_kept_for_as_long_again() -> None:
    simulation = Simulation(make_limits(pages=21))
    simulation.offer(make_submit("kept", KEPT, 4, cache_ttl=500.0))
    simulation.run()
    simulation.now += 400
    assert cached(simulation, "hit") == 24, "by whoever has not said how long"
    simulation.now += 400
    others(simulation, 1)
    assert cached(simulation, "again") == 24
    simulation.offer(make_submit("part", [*KEPT[:12], 9, 9], 1))
    simulation.run()
    simulation.now += 400
    simulation.offer(make_submit("part again", [*KEPT[:12], 8, 8], 1))
    simulation.run()
    simulation.now += 200
    others(simulation, 7)
    simulation.verify()
    assert simulation.core._memory.cache._kept == 3, "the rest has not been used since"
    assert cached(simulation, "beginning") == 12
    simulation.now += 500
    others(simulation, 1)
    assert simulation.core._memory.cache._kept == 0
    simulation.verify()


def test_half_of_the_pages_can_be_kept() -> None:
    simulation = Simulation(make_limits(pages=21, context_len=64))
    for i in range(4):
        text = [(3 * i + x) % 50 for x in range(24)]
        simulation.offer(make_submit(f"k{i}", text, 1, cache_ttl=1e6, arrival=simulation.now))
        simulation.run()
    assert simulation.core._memory.cache._kept == 6
    simulation.offer(make_submit("long", [1] * 60))
    simulation.run()
    assert simulation.finish("long") == "length", "what is kept gives way to what runs"
    simulation.verify()


def test_a_branch_of_what_is_kept_loses_its_time_with_it() -> None:
    simulation = Simulation(make_limits(pages=41))
    simulation.offer(make_submit("kept", KEPT, 4, cache_ttl=50.0, arrival=simulation.now))
    simulation.run()
    simulation.offer(make_submit("branch", [*KEPT[:12], 1, 2, 3, 4, 5, 6], 4))
    simulation.run()
    cache = simulation.core._memory.cache
    assert [node.kept > 0 for node in cache.walk()].count(True) >= 2
    cache.evict(cache.evictable - 3)
    simulation.now += 60
    simulation.offer(make_submit("next", [1]))
    simulation.run()
    assert not any(node.kept for node in cache.walk())
    simulation.verify()
