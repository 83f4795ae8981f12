"""How many tokens models guess, on a clock of the test's own."""

from __future__ import annotations

import numpy as np
import pytest

from sgla.worker.pace import RARE, TIMED, Curve, Line, Pace

SLOTS = np.arange(4, dtype=np.int32)


def pace_of(base: float, each: float, guess: float, share: float) -> Pace:
    """Steps take ``base`` and ``each`` for a token, a guess of all rows ``guess``; as many are right."""
    pace = Pace(8, adaptive=True)
    for tokens in (4, 8, 12, 20) * 5:
        pace.step(tokens, base + each * tokens)
        pace._guess.add(4, guess)
    rng = np.random.default_rng(0)
    for _ in range(60):
        right = np.array([np.argmin([*(rng.random(4) < share), False]) for _ in SLOTS], np.int32)
        pace.learn(SLOTS, np.full(4, 4, np.int32), right)
    return pace


@pytest.mark.parametrize(
    ("base", "each", "guess", "share", "expected"),
    [
        (10.0, 0.0, 0.1, 0.9, {8}),  # guesses cost next to nothing
        (1.0, 0.1, 0.2, 0.0, {0}),  # none is right
        (0.0, 1.0, 0.0, 0.7, {0}),  # a token more takes as long as a step more
        (1.0, 0.0, 2.0, 0.8, {1}),  # the first is made in any case
        (10.0, 0.1, 1.0, 0.6, {2, 3, 4}),
    ],
)
def test_as_many_as_pay(base: float, each: float, guess: float, share: float, expected: set[int]) -> None:
    pace = pace_of(base, each, guess, share)
    found = [pace.most(SLOTS, 8, 4) for _ in range(2 * RARE)]
    assert set(found) <= expected | {1}
    assert sum(count in expected for count in found) >= 2 * RARE - 2
    if expected == {0}:
        assert found.count(1) == 2  # to see whether that is still so


def test_what_is_right_is_learned_and_forgotten() -> None:
    pace = Pace(8, adaptive=True)
    one = SLOTS[:1]
    for _ in range(40):
        pace.learn(one, np.array([3], np.int32), np.array([3], np.int32))
    assert pace._right[0] > 0.98
    assert pace._right[1] == pytest.approx(0.7)
    for _ in range(40):
        pace.learn(one, np.array([3], np.int32), np.array([0], np.int32))
    assert pace._right[0] < 0.05
    pace.learn(one, np.array([0], np.int32), np.array([-1], np.int32))  # it had ended
    assert pace._right[0] < 0.05
    pace.admit(0)
    assert pace._right[0] == pytest.approx(0.7)


def test_all_is_guessed_before_anything_is_known_or_where_nobody_learns() -> None:
    pace = Pace(8, adaptive=True)
    for _ in range(TIMED):
        assert pace.most(SLOTS, 5, 4) == 5
        pace.step(500, 1.0)  # a part of a prompt
    assert pace.most(SLOTS, 5, 4) == 5
    fixed = pace_of(0.0, 1.0, 1.0, 0.0)
    fixed.adaptive = False
    assert fixed.most(SLOTS, 5, 4) == 5


def test_a_line_follows_what_comes() -> None:
    line = Line()
    assert line.at(np.array([7])).tolist() == [0.0]
    assert line.at(np.array([[7], [8]])).tolist() == [[0.0], [0.0]]
    for _ in range(5):
        line.add(4, 2.0)
    assert line.at(np.array([4, 40])) == pytest.approx([2.0, 2.0])
    for x in (4, 8, 16) * 30:
        line.add(x, 1.0 + 0.5 * x)
    assert line.at(np.array([10, 20])) == pytest.approx([6.0, 11.0], rel=1e-3)


def test_measured_times_give_way_to_those_of_steps() -> None:
    """A step of four tokens takes twice as long as it was measured, one of two tokens does not."""
    pace = Pace(8, adaptive=True, rare=1000)
    nothing = Curve([1, 8], [0.0, 0.0])
    pace.know(Curve([1, 2, 4], [1.0, 1.1, 1.2]), nothing, nothing)
    assert pace.most(SLOTS[:1], 3, 1) == 3
    for _ in range(40):
        pace.took(1, 3, 4, 2.4)
        pace.took(1, 1, 2, 1.1)
    assert pace._target.at(np.array([1, 2, 4])) == pytest.approx([1.0, 1.1, 2.4], rel=0.05)
    assert pace.most(SLOTS[:1], 3, 1) == 1
    for _ in range(1000):
        pace.took(1, 1, 2, 1.1)
    assert pace.most(SLOTS[:1], 3, 1) == 3  # it may be worth another try


@pytest.mark.parametrize(("guess", "expected"), [(0.01, 8), (0.3, 2), (50.0, 0)])
def test_costs_that_are_known_at_the_start(guess: float, expected: int) -> None:
    """Before any step: the share of right guesses is the one that requests begin with."""
    pace = Pace(8, adaptive=True, rare=1000)
    target = Curve([1, 2, 16], [1.0, 1.01, 1.02])
    pace.know(target, Curve([1, 8], [guess, guess]), Curve([1, 8], [guess, guess]))
    assert pace.most(SLOTS[:1], 8, 1) == expected


def test_second_guesses_where_they_pay() -> None:
    """Beside the first guesses, as long as what they bring is worth a row; fewer than there is room for."""
    pace = pace_of(10.0, 0.1, 1.0, 0.6)
    one = SLOTS[:1]
    assert pace.tree(one, 8, 1, 16)[1] > 0
    for room in range(1, 17):
        deep, beside = pace.tree(one, 8, 1, room)
        assert deep + beside <= room
        assert beside <= deep
    for _ in range(60):
        pace.learn_second(one, np.array([False]))
    assert pace.tree(one, 8, 1, 16) == (pace.most(one, 8, 1), 0)
    for _ in range(60):
        pace.learn_second(one, np.array([True]))
    deep, beside = pace.tree(one, 8, 1, 16)
    assert deep == beside > 1
    pace.admit(0)
    assert pace._second[0] == pace._second[5]
    pace.adaptive = False
    assert [pace.tree(one, 8, 1, room) for room in (16, 10, 3, 1)] == [(8, 8), (5, 5), (2, 1), (1, 0)]


def test_a_row_that_is_never_right_is_left_out_beside_others() -> None:
    """Once it has been wrong a few times, but for rare tries; what others guess does not change."""
    pace, alone = pace_of(1.0, 0.05, 0.2, 0.9), pace_of(1.0, 0.05, 0.2, 0.9)
    pace.admit(1)
    found = []
    for _ in range(10 * RARE):
        counts = pace.each(SLOTS, 8, 4)
        found.append(counts)
        pace.learn(SLOTS, counts, np.where(SLOTS == 1, 0, counts).astype(np.int32))
        kept = np.delete(SLOTS, 1)
        expected = alone.each(kept, 8, 4)
        alone.learn(kept, expected, expected)
    wrong = np.array(found)[:, 1]
    assert (wrong[:4] > 0).all()
    assert (wrong[20:] > 0).sum() <= 10
    assert wrong[20:].max() == 1
    assert np.delete(found[-2], 1).tolist() == expected.tolist()
    for _ in range(40):
        pace.learn(SLOTS, np.full(4, 8, np.int32), np.full(4, 8, np.int32))
    assert (pace.each(SLOTS, 8, 4) > 1).all()  # it is right again


def test_rows_alike_are_asked_for_alike() -> None:
    for base, each, guess, share in ((10.0, 0.0, 0.1, 0.9), (10.0, 0.1, 1.0, 0.6), (1.0, 0.1, 0.2, 0.0)):
        pace = pace_of(base, each, guess, share)
        pace._right[SLOTS] = pace._right[0]
        most = pace.most(SLOTS, 8, 4)
        assert pace.each(SLOTS, 8, 4).tolist() == [most] * 4
    fixed = pace_of(0.0, 1.0, 1.0, 0.0)
    fixed.adaptive = False
    assert fixed.each(SLOTS, 5, 4).tolist() == [5] * 4
