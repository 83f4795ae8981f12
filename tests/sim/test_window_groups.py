"""Cache groups with windows: what a request holds, what the tree may lose, and what is served then."""

from __future__ import annotations

import pytest
from simulation import Simulation, make_limits, make_submit

from sgla.messages import CacheGroup

WINDOW, PAGE = 9, 4  # one token reads 3 pages at most
LONG = [(7 * i) % 50 for i in range(60)]


def simulate(pages: int, **changes: object) -> Simulation:
    limits = {"pages": 65, "context_len": 200, "windows": [CacheGroup(1 + pages, WINDOW)]}
    return Simulation(make_limits(**limits | changes))


def run(simulation: Simulation, rid: str, tokens: list[int], max_new: int = 4) -> int:
    """How many tokens were served from the tree."""
    simulation.offer(make_submit(rid, tokens, max_new))
    simulation.run()
    return simulation.deltas[rid][0].cached_tokens


def test_a_request_holds_what_its_next_token_reads() -> None:
    simulation = simulate(60, prefix_cache=False)
    simulation.offer(make_submit("r", LONG, 60))
    most = 0
    while simulation.step():
        [window] = simulation.core.stats().windows
        most = max(most, window.total - window.free)
    simulation.verify()
    assert most <= 3 + 2 * 16 // PAGE  # and what two steps of 16 tokens write
    [window] = simulation.core.stats().windows
    assert window.free == window.total


def test_as_few_pages_as_one_token_reads_are_enough() -> None:
    simulation = simulate(3, slots=3)
    for i in range(3):
        simulation.offer(make_submit(f"r{i}", LONG[i:], 20))
    simulation.run()
    simulation.verify()


def test_a_prefix_is_served_where_its_window_is_left() -> None:
    simulation = simulate(60)
    run(simulation, "first", LONG)
    assert run(simulation, "whole", [*LONG, 1]) == 60
    assert run(simulation, "branch", [*LONG[:30], 1, 2, 3]) == 28
    simulation.verify()


def test_the_tree_loses_pages_of_windows_before_tokens() -> None:
    simulation = simulate(20)
    run(simulation, "first", LONG)
    run(
        simulation, "other", LONG[::-1]
    )  # takes 20 pages of the window, so the first ones of the other prompt go
    assert simulation.core.stats().pages_cached > 20
    assert run(simulation, "branch", [*LONG[:30], 1, 2, 3]) < 28
    assert run(simulation, "again", [*LONG[:30], 1, 2, 3]) == 32  # it brought them back
    simulation.verify()


def test_a_long_prompt_leaves_half_of_the_pool_to_ends_of_others() -> None:
    """What a request computes and slides past takes no more of it than what texts go on from."""
    simulation = Simulation(make_limits(pages=400, windows=[CacheGroup(30, 6)], context_len=600))
    texts = [[(i + 3 + 7 * j) % 50 for j in range(40)] for i in range(8)]
    for i, text in enumerate(texts):
        run(simulation, f"first{i}", text)
    run(simulation, "long", [(11 * j * j + 5 * j) % 50 for j in range(500)])
    latest = [run(simulation, f"again{i}", [*texts[i], 1, 2]) for i in range(7, 3, -1)]
    assert latest == [40] * 4
    simulation.verify()


def test_a_prefix_that_many_begin_with_is_served_though_the_pool_is_full() -> None:
    """The first one slides past its end; the second finds it, after which it goes like ends."""
    simulation = Simulation(make_limits(pages=400, windows=[CacheGroup(60, 6)], context_len=600))
    for i in range(12):
        run(simulation, f"other{i}", [(i + 13 * j * j + j) % 50 for j in range(100)])
    system = [(17 * j * j + 3 * j) % 50 for j in range(80)]
    served = [run(simulation, f"{i}", system + [(i + 5 * j) % 50 for j in range(30)]) for i in range(6)]
    assert served == [0] + [80] * 5
    run(simulation, "long", [(11 * j * j + 5 * j) % 50 for j in range(300)])
    assert run(simulation, "last", [*system, 1, 2, 3]) == 80
    simulation.verify()


@pytest.mark.parametrize(("pages", "window"), [(10, 6), (13, 12)])
def test_prompts_longer_than_half_of_the_pool_are_found_again(pages: int, window: int) -> None:
    """What was passed goes before what others went on from later, though it is less."""
    simulation = Simulation(make_limits(pages=400, windows=[CacheGroup(1 + pages, window)], context_len=600))
    system = [(17 * j * j + 3 * j) % 50 for j in range(24)]
    served = []
    for i in range(12):
        prompt = system + [(7 * i + 5 * j + i * j) % 50 for j in range(9)]
        served.append([run(simulation, f"{i} {k}", prompt, max_new=40) for k in range(1 + i % 2)])
    assert served == [[0], *[[24, 32], [24]] * 5, [24, 32]]
    simulation.verify()
