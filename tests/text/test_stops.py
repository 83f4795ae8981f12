"""Stop strings and expressions: the same output for every way of cutting the text, and nothing of a stop in
it."""

from __future__ import annotations

import random
import re

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sgla.messages import SamplingParams
from sgla.text.regex import KEPT, Automaton, RegexError
from sgla.text.stops import RegexMatcher, StopMatcher, Stops, make_stops

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


def run(pieces: list[str], matcher: Stops) -> tuple[list[str], str | None]:
    shown = []
    for piece in pieces:
        emitted, matched = matcher.feed(piece)
        shown.append(emitted)
        if matched is not None:
            return shown, matched
    emitted, matched = matcher.flush()
    return [*shown, emitted], matched


def cut(text: str, chance: random.Random) -> list[str]:
    cuts = sorted(chance.randint(0, len(text)) for _ in range(chance.randint(0, 6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]


@settings(max_examples=examples(400), deadline=None)
@given(ALPHABET, STOPS, st.booleans(), st.randoms())
def test_any_split_gives_what_the_definition_says(
    text: str, stops: list[str], include: bool, chance: random.Random
) -> None:
    shown, matched = run(cut(text, chance), StopMatcher(stops, include))
    assert ("".join(shown), matched) == naive(text, stops, include)


@settings(max_examples=examples(300), deadline=None)
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
    assert run([text], StopMatcher(stops)) == (["stop399 " * 200], "stop3999")


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stops_everything_passes(stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert matcher.feed("abc") == ("abc", None)
    assert matcher.held == 0


# expressions

ATOMS = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\n", r"\w", r"\s", "(?i:A)"])
EDGES = st.sampled_from([r"\b", r"\B", "^", "$", r"\A"])
BODIES = st.recursive(
    ATOMS | EDGES,
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{0,2}?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        )
    ),
    max_leaves=6,
)
# All their matches end with a character, so they are told at once; or all with an assertion, and the next
# character tells.
ENDED = st.tuples(st.just("(?m)"), BODIES, ATOMS).map("".join)
EXPRESSIONS = st.lists(ENDED, min_size=1, max_size=2) | st.tuples(ENDED, EDGES).map(
    lambda pair: ["".join(pair)]
)


def searched(text: str, expressions: list[str], include: bool) -> tuple[str, str | None]:
    """The definition, by Python's own engine: the match that ends first, of these the longest, of these the
    first."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            for expression in expressions:
                body = expression.removeprefix("(?m)")
                whole = re.compile(rf"(?:{body})(?=[\s\S]{{{len(text) - end}}}\Z)", re.MULTILINE)
                if whole.match(text, start):
                    return text[: end if include else start], expression
    return text, None


@settings(max_examples=examples(300), deadline=None)
@given(st.text("aabc \n", max_size=12), EXPRESSIONS, st.booleans(), st.randoms())
def test_any_split_gives_what_python_finds(
    text: str, expressions: list[str], include: bool, chance: random.Random
) -> None:
    known = Automaton(expressions)
    pieces = cut(text, chance)
    expected = searched(text, expressions, include)
    for _ in range(2):  # the second time with the steps that the first has made
        shown, matched = run(pieces, RegexMatcher(known, include=include))
        assert ("".join(shown), matched) == expected


@settings(max_examples=examples(200), deadline=None)
@given(ALPHABET, STOPS, st.booleans(), st.randoms())
def test_strings_among_expressions(text: str, stops: list[str], include: bool, chance: random.Random) -> None:
    shown, matched = run(cut(text, chance), RegexMatcher(Automaton(["never"]), stops, include))
    assert ("".join(shown), matched) == naive(text, stops, include)


@settings(max_examples=examples(200), deadline=None)
@given(st.text("aabc \n", max_size=12), st.lists(ENDED, max_size=2), STOPS, st.booleans(), st.randoms())
def test_strings_beside_expressions(
    text: str, expressions: list[str], stops: list[str], include: bool, chance: random.Random
) -> None:
    shown, matched = run(cut(text, chance), RegexMatcher(Automaton(expressions), stops, include))
    assert ("".join(shown), matched) == searched(text, [*expressions, *stops], include)


@pytest.mark.parametrize("expression", ["END$", r"END\Z", "(END$)", "(?:END|STOP$)", "(?:END$|STOP)"])
def test_the_end_of_the_text_is_where_a_match_ends(expression: str) -> None:
    """As where ``re.search`` looks at what is written so far, after each character."""
    shown, matched = run(["an E", "ND!"], RegexMatcher(Automaton([expression])))
    assert ("".join(shown), matched) == ("an ", expression)


def test_strings_beside_expressions_may_be_long() -> None:
    stops = make_stops(SamplingParams(stop=["x" * 1000, "y" * 1000], stop_regex=["z+!"]))
    assert stops is not None
    assert run(["a" + "x" * 999 + "y" * 1000], stops) == (["a" + "x" * 999], "y" * 1000)


@pytest.mark.parametrize(
    ("expression", "text", "held"),
    [
        (r"\n+User:", "a\n\nUs", "\n\nUs"),
        (r"\n+User:", "a\n\nUx", ""),
        (r"END\b", "an END", "END"),
        (r"END\b", "an ENDS", ""),
        (r"<[^>]*x>", "1 < 2 and", "< 2 and"),
        (r"(ab)+c", "xababa", "ababa"),
    ],
)
def test_only_what_may_become_a_match_is_held(expression: str, text: str, held: str) -> None:
    matcher = RegexMatcher(Automaton([expression]))
    shown = "".join(matcher.feed(char)[0] for char in text)
    assert (shown, matcher.held) == (text.removesuffix(held), len(held))
    with_it = RegexMatcher(Automaton([expression]), include=True)
    assert "".join(with_it.feed(char)[0] for char in text) == text


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("(", "no regular expression"),
        ("[z-a]", "no regular expression"),
        ("a{2,1}", "no regular expression"),
        ("a*", "matches the empty text"),
        (r"\b", "matches the empty text"),
        (r"(a)\1", "groupref"),
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        ("a++", "possessive"),
        ("a$b", "end of the text"),
        (r"(?:a\Z)+b", "end of the text"),
        ("(?:a$)+", "end of the text"),
        ("(?a)a\\b", "flag a"),
        ("(?a)(?u)x", "no regular expression"),
        ("a{1000}", "too large"),
        ("(?:a" + "()" * 500 + "){250}", "too large"),
        ("(?:a" + "^" * 500 + "){250}", "too large"),
        ("(?:a" + "|" * 500 + "b){100}", "too large"),
        ("(((a{9}){9}){9}){9}", "too large"),
        ("((((x{0}){999999999}){999999999}){999999999}){999999999}a{300}", "too large"),
        ("(" * 400 + "a" + ")" * 400, "nested too deeply"),
        ("(" * 60 + "a" + ")" * 60, "nested too deeply"),
    ],
)
def test_refused_expressions(expression: str, told: str) -> None:
    with pytest.raises(RegexError, match=re.escape(told)):
        Automaton([expression])


def test_long_expressions_are_refused() -> None:
    with pytest.raises(RegexError, match="4096 characters"):
        Automaton(["[" + "a-b" * 300 + "]"] * 5)


def test_what_is_kept_of_hostile_expressions_is_bounded() -> None:
    known = Automaton(["(a|b)*a(a|b){60}[cd]", "((a?){3}){40}[xy]"])
    matcher = RegexMatcher(known)
    chance = random.Random(0)
    text = "".join(chance.choice("ab") for _ in range(3000)) + "a" + "b" * 60
    assert matcher.feed(text) == ("", None)
    assert sum(1 + len(state.groups) for state, _ in known._steps) <= 2 * KEPT
    assert matcher.feed("c") == ("", "(a|b)*a(a|b){60}[cd]")
