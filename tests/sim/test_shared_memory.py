"""Cache groups of pages in one memory: slabs change hands, and no page is in two."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Simulation, make_limits, make_submit

from sgla.cache.slabs import Slabs
from sgla.messages import CacheGroup
from sgla.sched.admission import Admission
from sgla.sched.pressure import Pressure

PAGE, WINDOW = 4, 9


def groups(slabs: int, *sizes: int, window: int = WINDOW) -> list[CacheGroup]:
    """That of whole histories, and such with windows; of a slab so many pages of each."""
    return [CacheGroup(1 + slabs * size, window * bool(g), slab=size) for g, size in enumerate(sizes)]


def simulate(slabs: int, *sizes: int, window: int = WINDOW, **changes: Any) -> Simulation:
    limits = {"context_len": 1000, "groups": groups(slabs, *sizes, window=window)}
    return Simulation(make_limits(**limits | changes))


def text(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(50) for _ in range(count)]


@settings(max_examples=examples(60))
@given(st.integers(0, 10**9), st.integers(1, 12), st.lists(st.integers(1, 6), min_size=2, max_size=3))
def test_whatever_groups_take_and_give_back_adds_up(seed: int, count: int, sizes: list[int]) -> None:
    """Pages are out, fixed or not. Who may have so many gets them when the others have lost theirs."""
    random, slabs = Random(seed), Slabs(count, sizes)
    fixed: list[list[int]] = [[] for _ in sizes]
    loose: list[list[int]] = [[] for _ in sizes]

    def some(pages: list[int]) -> list[int]:
        random.shuffle(pages)
        chosen = pages[: random.randint(0, len(pages))]
        del pages[: len(chosen)]
        return chosen

    for _ in range(30):
        g = random.randrange(len(sizes))
        if free := slabs.free(g):
            taken = slabs.take(g, random.randint(1, free))
            assert not {*taken} & {*fixed[g], *loose[g]}
            fixed[g] += taken
        for move in random.sample((slabs.give, slabs.loosen, slabs.fix), 2):
            source, target = (loose[g], fixed[g]) if move == slabs.fix else (fixed[g], loose[g])
            chosen = some(source)
            move(g, chosen)
            if move != slabs.give:
                target += chosen
        slabs.check([a + b for a, b in zip(fixed, loose)], fixed)
        wanted = [random.randint(0, 2 * size) for size in sizes]
        fits = slabs.fits(wanted)
        assert fits == (sum(map(needed, wanted, sizes, fixed)) <= count)
        assert not fits or slabs.worth(wanted) <= slabs.available
        assert slabs.obtainable(g) == most(slabs, g)
    for g, _ in enumerate(sizes):
        slabs.fix(g, loose[g])
        slabs.give(g, fixed[g] + loose[g])
    assert [slabs.free(g) for g, _ in enumerate(sizes)] == [count * size for size in sizes]


def needed(more: int, size: int, fixed: list[int]) -> int:
    """Slabs of a group that goes on with its fixed pages alone."""
    own = len({(page - 1) // size for page in fixed})
    return own - (-max(0, more - (own * size - len(fixed))) // size)


def most(slabs: Slabs, group: int) -> int:
    """Pages that fit into all slabs, by trial."""
    wanted = [0] * len(slabs.pages)
    while slabs.fits(wanted):
        wanted[group] += 1
    return wanted[group] - 1


def test_one_long_text_has_nearly_all_and_short_ones_have_it_after_that() -> None:
    """Of pages of equal bytes in 60 slabs a text with 5 pages of a window would have 30 in two pools."""
    simulation = simulate(60, 1, 1, slots=12)
    limits = simulation.limits
    assert limits.pool_tokens == (60 - 7) * PAGE  # a window takes 3 pages, and a step 4
    simulation.offer(make_submit("long", text(1, limits.pool_tokens - 20), 21))
    simulation.run()
    assert simulation.core.stats().pages_cached > 50
    for i in range(12):  # 2 pages of each group
        simulation.offer(make_submit(f"short{i}", text(2 + i, 5), 3))
    simulation.run()
    simulation.verify()
    assert simulation.core.stats().preemptions == 0
    assert max(len(plan.slots) // 4 for plan in simulation.plans[-6:]) >= 3
    simulation.assert_released()


@pytest.mark.parametrize("sizes", [(1, 1), (3, 1), (5, 2), (2, 3)])
@pytest.mark.parametrize("order", [sorted, reversed])
def test_what_was_used_last_is_left(sizes: tuple[int, int], order: Callable[..., Any]) -> None:
    """A prompt that comes again and again is found, window and all, while others pass."""
    simulation = simulate(30, *sizes, slots=2)
    for i in range(12):
        for name, tokens in order([("kept", [*text(0, 24), i]), ("other", text(1 + i, 25))]):
            simulation.offer(make_submit(f"{name} {i}", tokens, 2))
            simulation.run()
    simulation.verify()
    cached = [simulation.deltas[f"kept {i}"][0].cached_tokens for i in range(12)]
    assert cached == [0, *[24] * 11]


def test_pages_behind_a_window_go_before_the_tokens_of_others() -> None:
    """A long prompt slides past most of its pages, which nobody has found."""
    simulation = simulate(40, 1, 1)
    simulation.offer(make_submit("other", text(1, 24), 2))
    simulation.run()
    simulation.offer(make_submit("long", text(2, 80), 2))
    simulation.run()
    simulation.offer(make_submit("again", [*text(1, 24), 1], 2))
    simulation.run()
    assert simulation.deltas["again"][0].cached_tokens == 24


def test_where_nobody_can_go_on_one_begins_anew_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts in small slabs, in each of which somebody holds a page of the other group."""
    anew: list[int] = []
    begin = Admission.begin_anew

    def count(admission: Admission) -> None:
        begin(admission)
        anew.append(len(admission._memory.pool.out()))

    monkeypatch.setattr(Admission, "begin_anew", count)
    monkeypatch.setattr(Pressure, "_victim", lambda *_: None)  # who could give up pages for the first
    simulation = simulate(7, 4, 2, window=8, slots=3, reserve=0.0)
    for name, length, outputs in (("one", 10, 47), ("two", 27, 44)):
        simulation.offer(make_submit(name, [(7 * (name == "two") + i) % 50 for i in range(length)], outputs))
    simulation.run()
    simulation.verify()
    assert anew == [0]  # pages out then
    simulation.assert_released()


@settings(max_examples=examples(30))
@given(st.integers(0, 10**9))
def test_who_lacks_slabs_gets_them_from_the_last_ones(seed: int) -> None:
    """Though pages are there of what they are worth, beside others of the same group. The first goes on."""
    random = Random(seed)
    simulation = simulate(
        random.randint(6, 9), *random.choice([(4, 2), (3, 2), (2, 3)]), window=8, reserve=0.0
    )
    most = simulation.limits.pool_tokens
    for i in range(3):
        length = random.randint(1, most // 2)
        simulation.offer(make_submit(f"{i}", text(seed + i, length), random.randint(1, most - length)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Admission, "begin_anew", lambda _: pytest.fail("nobody goes on"))
        simulation.run()
    simulation.verify()
    simulation.assert_released()
