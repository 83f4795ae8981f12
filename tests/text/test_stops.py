"""Stop strings: the same output for every way of cutting the text, and nothing of a stop in it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgla.text.stops import StopMatcher

ALPHABET = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=5)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the match that ends first, of these the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[list[str], str | None]:
    matcher, shown = StopMatcher(stops, include), []
    for piece in pieces:
        emitted, matched = matcher.feed(piece)
        shown.append(emitted)
        if matched is not None:
            return shown, matched
    return [*shown, matcher.flush()], None


@settings(max_examples=400, deadline=None)
@given(ALPHABET, STOPS, st.booleans(), st.randoms())
def test_any_split_gives_what_the_definition_says(
    text: str, stops: list[str], include: bool, chance: random.Random
) -> None:
    cuts = sorted(chance.randint(0, len(text)) for _ in range(chance.randint(0, 6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    shown, matched = run(pieces, stops, include)
    assert ("".join(shown), matched) == naive(text, stops, include)


@settings(max_examples=300, deadline=None)
@given(ALPHABET, STOPS)
def test_only_the_longest_possible_beginning_of_a_stop_is_held(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for at, char in enumerate(text, 1):
        emitted, matched = matcher.feed(char)
        shown += emitted
        if matched is not None:
            return
        seen = text[:at]
        tails = [
            n for n in range(len(seen) + 1) if any(stop.startswith(seen[len(seen) - n :]) for stop in stops)
        ]
        assert matcher.held == max(tails)
        assert shown == seen[: at - matcher.held]


def test_thousands_of_stops_cost_no_more_than_one() -> None:
    stops = [f"stop{i:04d}" for i in range(4000)]
    text = "stop399 " * 200 + "stop3999 tail"
    assert run([text], stops, include=False) == (["stop399 " * 200], "stop3999")


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stops_everything_passes(stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert matcher.feed("abc") == ("abc", None)
    assert matcher.held == 0
