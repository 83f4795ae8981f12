"""Repetition detection: against the definition by brute force, and in the scheduler."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence

import pytest
from simulation import Simulation, make_limits, make_submit

from sgla.errors import InvalidField
from sgla.messages import Repetition, RowSampling
from sgla.sched.repetition import MAX_PATTERN, Loop, check_repetition


def repeats(tokens: Sequence[int], asked: Repetition) -> bool:
    """The definition."""
    return any(
        len(tokens) >= size * asked.min_count
        and all(tokens[-i] == tokens[-i - size] for i in range(1, size * (asked.min_count - 1) + 1))
        for size in range(max(1, asked.min_pattern_size), asked.max_pattern_size + 1)
    )


@pytest.mark.parametrize(("least", "most", "count"), [(1, 3, 2), (0, 4, 3), (2, 2, 2), (3, 7, 4), (1, 1, 5)])
def test_every_place_of_random_outputs_is_told_as_the_definition_says(
    least: int, most: int, count: int
) -> None:
    asked = Repetition(min_pattern_size=least, max_pattern_size=most, min_count=count)
    rng = random.Random(most)
    for _ in range(60):
        part = [rng.randrange(3) for _ in range(rng.randrange(1, most + 2))]
        tokens = (
            [rng.randrange(3) for _ in range(10)] + part * (count + 1) + [rng.randrange(2) for _ in range(20)]
        )
        loop = Loop(asked)
        assert [loop.add(token) for token in tokens] == [
            repeats(tokens[: i + 1], asked) for i in range(len(tokens))
        ]


@pytest.mark.parametrize("tokens", [range(2000), [7] * 2000])
def test_what_it_keeps_does_not_grow_with_the_output(tokens: Sequence[int]) -> None:
    asked = Repetition(max_pattern_size=MAX_PATTERN, min_count=1 << 62)
    loop = Loop(asked)
    size = len(pickle.dumps(loop))
    assert not any(loop.add(token) for token in tokens)
    assert len(pickle.dumps(loop)) <= size + 8


def test_a_copy_goes_on_as_the_original() -> None:
    loop = Loop(Repetition(max_pattern_size=4, min_count=3))
    assert not any(loop.add(token) for token in (1, 2, 3, 1, 2, 3, 1, 2))
    copy = pickle.loads(pickle.dumps(loop))
    assert [loop.add(3), copy.add(3)] == [True, True]
    assert [loop.add(2), copy.add(2)] == [False, False]


@pytest.mark.parametrize(
    "asked",
    [
        Repetition(max_pattern_size=3),
        Repetition(max_pattern_size=3, min_count=1),
        Repetition(max_pattern_size=-1, min_count=2),
        Repetition(max_pattern_size=MAX_PATTERN + 1, min_count=2),
        Repetition(max_pattern_size=3, min_pattern_size=4, min_count=2),
        Repetition(max_pattern_size=3, min_pattern_size=-1, min_count=2),
    ],
)
def test_what_cannot_be_looked_for_is_refused(asked: Repetition) -> None:
    with pytest.raises(InvalidField) as caught:
        check_repetition(asked)
    assert caught.value.param == "repetition_detection"


def test_nothing_to_look_for() -> None:
    assert check_repetition(None) is check_repetition(Repetition(min_count=3)) is None


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("forced", [0, 6])
def test_a_request_ends_where_it_first_repeats_itself(depth: int, forced: int) -> None:
    """Whatever else runs, and however many tokens come at once; not before min_tokens, nor beyond its
    limit."""
    asked = Repetition(max_pattern_size=3, min_count=2)
    simulation = Simulation(make_limits(depth=depth, pages=65), forced=forced)
    expected: dict[str, tuple[list[int], str]] = {}
    for i in range(24):
        sampling = RowSampling(min_tokens=(0, 30)[i % 2])
        prompt, most = [i, 7, 7], 20 + 2 * i
        alone = simulation.model.continuation(prompt, sampling, frozenset(), most)
        ends = [n for n in range(1, most) if n >= sampling.min_tokens and repeats(alone[:n], asked)]
        expected[str(i)] = (alone[: ends[0]], "repetition") if ends else (alone, "length")
        simulation.offer(make_submit(str(i), prompt, most, sampling=sampling, repetition=asked))
    simulation.run()
    assert {rid: (simulation.tokens(rid), simulation.finish(rid)) for rid in expected} == expected
    assert {finish for _, finish in expected.values()} == {"repetition", "length"}
    assert simulation.core.stats().finished["repetition"] > 4
