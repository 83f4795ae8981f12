"""Regular expressions that follow a text as it grows, in bounded time a character whatever the expression.

The syntax is that of Python's ``re``, whose parser is used; what no finite automaton can do (references,
look-around) is refused. Source of the automaton: V. Glushkov, "The abstract theory of automata", 1961: one
state for each character of the expression, so that a set of states is an integer. Steps are made when they
are first needed and kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from re import _parser  # type: ignore[attr-defined]  # private, but the only parser that agrees with re
from typing import Any, NamedTuple

POSITIONS = 256  # characters of all expressions of a request together, repetitions written out
PARTS = 8 * POSITIONS  # the same of everything in them: groups, branches, assertions
LENGTH = 4096  # of all expressions of a request together, as they are written
DEPTH = 50
KEPT = 16384  # groups in the steps, and masks of characters, that an automaton keeps
AUTOMATA = 8  # that are kept, of up to 5 MiB each

# What stands on either side of a boundary between characters. The end is seen only when the text is complete.
START, END, NEWLINE, WORD, OTHER, UNKNOWN = range(6)


class RegexError(ValueError):
    """The expression is wrong, too large or asks for what an automaton cannot do.
    The message is for the user."""


@dataclass(frozen=True)
class Char:
    position: int


@dataclass(frozen=True)
class At:
    """An assertion about the boundary, under the parser's name for it."""

    kind: str


@dataclass(frozen=True)
class Cat:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    branches: tuple[Node, ...]


@dataclass(frozen=True)
class Loop:
    """Once or more."""

    body: Node


Node = Char | At | Cat | Alt | Loop
EMPTY = Cat(())
Test = Callable[[str], bool]


class Span(NamedTuple):
    """What Glushkov's construction knows of a node; sets of positions are bit masks."""

    nullable: bool
    first: int
    last: int


class Tables(NamedTuple):
    """``first``: positions that begin a match; ``last``:
    those that end one; ``follow``: what may come behind each."""

    first: int
    last: int
    follow: list[int]


class State(NamedTuple):
    """The positions that the text has led to, in groups by where their match began, the earliest first. A
    position stands in one group only: of two matches that end together the longer counts."""

    groups: tuple[int, ...]
    before: int


class Match(NamedTuple):
    """``group``: of the state before the step, or one more for a match that begins with its character.
    ``early``: it ended before the character, which only decided it. ``name``: the expression."""

    group: int
    early: bool
    name: str


class Step(NamedTuple):
    """``sources``: for each group of ``state`` the one it comes from, counted as in ``Match``."""

    state: State
    sources: tuple[int, ...]
    match: Match | None


class Automaton:
    """All expressions of a request. Immutable but for what it keeps, so requests share it.
    Raises RegexError."""

    start = State((), START)

    def __init__(self, expressions: Sequence[str]) -> None:
        self._names = tuple(expressions)
        self._tests: dict[Test, int] = {}  # test of a character -> positions that it leads to
        self._ends: list[int] = []  # the first position behind each expression
        self._size = self._parts = 0
        self._asserts = False
        if sum(map(len, expressions)) > LENGTH:
            raise RegexError(f"the expressions have more than {LENGTH} characters together")
        self._root = Alt(tuple(self._expression(pattern) for pattern in expressions))
        self._known: dict[tuple[int, int], Tables] = {}
        self._accepting: dict[str, int] = {}
        self._steps: dict[tuple[State, str], Step] = {}
        self._kept = 0

    def step(self, state: State, char: str) -> Step:
        found = self._steps.get((state, char))
        if found is None:
            if self._kept >= KEPT:
                self._steps.clear()
                self._kept = 0
            found = self._steps[state, char] = self._make_step(state, char)
            self._kept += 1 + len(state.groups)
        return found

    def end(self, state: State) -> Match | None:
        """The match that ends with the text."""
        return self._match(state.groups, self._tables(state.before, END).last, range(len(state.groups)), True)

    def _make_step(self, state: State, char: str) -> Step:
        kind = kind_of(char) if self._asserts else OTHER
        tables, accepting = self._tables(state.before, kind), self._accepts(char)
        early = self._match(state.groups, tables.last, range(len(state.groups)), True)
        follow, groups, sources = tables.follow, [], []
        for source, group in enumerate((*state.groups, 0)):
            reach = tables.first if source == len(state.groups) else 0
            while group:  # ``bits``, in the place where its time counts
                lowest = group & -group
                reach |= follow[lowest.bit_length() - 1]
                group ^= lowest
            moved = reach & accepting
            if moved:
                accepting ^= moved
                groups.append(moved)
                sources.append(source)
        match = early or self._match(groups, self._tables(kind, UNKNOWN).last, sources, False)
        return Step(State(tuple(groups), kind), tuple(sources), match)

    def _match(self, groups: Sequence[int], last: int, sources: Sequence[int], early: bool) -> Match | None:
        for group, source in zip(groups, sources, strict=True):
            if ended := group & last:
                lowest = (ended & -ended).bit_length() - 1
                name = next(name for name, end in zip(self._names, self._ends) if lowest < end)
                return Match(source, early, name)
        return None

    def _accepts(self, char: str) -> int:
        """The positions that ``char`` may stand at."""
        mask = self._accepting.get(char)
        if mask is None:
            if len(self._accepting) >= KEPT:
                self._accepting.clear()
            mask = self._accepting[char] = sum(mask for test, mask in self._tests.items() if test(char))
        return mask

    def _tables(self, before: int, after: int) -> Tables:
        """For a boundary between characters of these kinds."""
        key = (before, after) if self._asserts else (OTHER, OTHER)
        tables = self._known.get(key)
        if tables is None:
            follow = [0] * self._size
            _, first, last = span(self._root, partial(holds, before=before, after=after), follow)
            tables = self._known[key] = Tables(first, last, follow)
        return tables

    def _expression(self, pattern: str) -> Node:
        try:
            parsed = _parser.parse(pattern)
            node = self._sequence(parsed, parsed.state.flags, 0, last=True)
        except RegexError as error:
            raise RegexError(f"{shown(pattern)} {error}") from error
        except (re.error, OverflowError, ValueError) as error:
            raise RegexError(f"{shown(pattern)} is no regular expression: {error}") from error
        except RecursionError as error:
            raise RegexError(f"{shown(pattern)} is nested too deeply") from error
        if span(node, lambda kind: True, [0] * self._size).nullable:
            raise RegexError(f"{shown(pattern)} matches the empty text, which is everywhere")
        self._ends.append(self._size)
        return node

    # What the parser makes of an expression: pairs of an operator and its argument.

    def _sequence(self, items: Any, flags: int, depth: int, last: bool = False) -> Node:
        """``last``: nothing of the expression follows."""
        if depth > DEPTH:
            raise RegexError("is nested too deeply")
        self._parts += 1 + len(items)
        if self._parts > PARTS:
            raise RegexError(f"is too large: with repetitions written out it has over {PARTS} parts")
        final = len(items) - 1 if last else -1
        return Cat(
            tuple(
                self._item(operator.name, argument, flags, depth, i == final)
                for i, (operator, argument) in enumerate(items)
            )
        )

    def _item(self, operator: str, argument: Any, flags: int, depth: int, last: bool) -> Node:
        match operator:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return self._char(char_test(operator, argument, flags))
            case "AT":
                return self._at(argument.name, flags, last)
            case "BRANCH":
                branches = (self._sequence(branch, flags, depth + 1, last) for branch in argument[1])
                return Alt(tuple(branches))
            case "SUBPATTERN":
                _, added, removed, body = argument
                return self._sequence(body, (flags | added) & ~removed, depth + 1, last)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, repeated = argument
                return self._repeat(least, most, repeated, flags, depth)
        raise RegexError(
            f"has {operator.lower().replace('_', ' ')}: references, look-around and possessive repetitions "
            "are not supported"
        )

    def _char(self, test: Test) -> Char:
        if self._size == POSITIONS:
            raise RegexError(f"is too large: with repetitions written out it has over {POSITIONS} characters")
        self._tests[test] = self._tests.get(test, 0) | 1 << self._size
        self._size += 1
        return Char(self._size - 1)

    def _at(self, kind: str, flags: int, last: bool) -> Node:
        if kind == "AT_BEGINNING":
            kind = "AT_BEGINNING_LINE" if flags & re.MULTILINE else "AT_BEGINNING_STRING"
        elif kind == "AT_END" and flags & re.MULTILINE:
            kind = "AT_END_LINE"
        elif kind in ("AT_END", "AT_END_STRING"):
            if last:  # a match always ends where the text does, as far as it is written
                return EMPTY
            raise RegexError("asks for the end of the text before its own; (?m)$ is a line's end")
        elif flags & re.ASCII and "BOUNDARY" in kind:
            raise RegexError("has a word boundary with the flag a, which is not supported")
        self._asserts = True
        return At(kind)

    def _repeat(self, least: int, most: int, body: Any, flags: int, depth: int) -> Node:
        size = self._size
        once = partial(self._sequence, body, flags, depth + 1)
        parts = [once()]
        if self._size == size:  # nothing but assertions
            return parts[0] if least else EMPTY
        if most == 0:
            return EMPTY
        endless = most == _parser.MAXREPEAT
        while len(parts) < (max(least, 1) if endless else most):
            parts.append(once())
        if endless:
            parts[-1] = Loop(parts[-1])
        return Cat((*parts[:least], *(Alt((part, EMPTY)) for part in parts[least:])))


@lru_cache(maxsize=AUTOMATA)
def automaton(expressions: tuple[str, ...]) -> Automaton:
    return Automaton(expressions)


def span(node: Node, holds: Callable[[str], bool], follow: list[int]) -> Span:
    """Glushkov's construction where the assertions for which ``holds`` are true; fills ``follow``."""
    match node:
        case Char(position):
            return Span(False, 1 << position, 1 << position)
        case At(kind):
            return Span(holds(kind), 0, 0)
        case Alt(branches):
            spans = [span(branch, holds, follow) for branch in branches]
            first = last = 0
            for _, begins, ends in spans:
                first, last = first | begins, last | ends
            return Span(any(nullable for nullable, _, _ in spans), first, last)
        case Loop(body):
            inner = span(body, holds, follow)
            link(follow, inner.last, inner.first)
            return inner
        case Cat(parts):
            nullable, first, last = True, 0, 0
            for part in reversed(parts):
                inner = span(part, holds, follow)
                link(follow, inner.last, first)
                last |= inner.last if nullable else 0
                first = inner.first | (first if inner.nullable else 0)
                nullable &= inner.nullable
            return Span(nullable, first, last)


def link(follow: list[int], ends: int, begins: int) -> None:
    for position in bits(ends):
        follow[position] |= begins


def bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def holds(kind: str, before: int, after: int) -> bool:
    """Whether an assertion is true of a boundary. What is not known yet is not true yet."""
    match kind:
        case "AT_BEGINNING_STRING":
            return before == START
        case "AT_BEGINNING_LINE":
            return before in (START, NEWLINE)
        case "AT_END_LINE":
            return after in (NEWLINE, END)
        case "AT_BOUNDARY":
            return after != UNKNOWN and (before == WORD) != (after == WORD)
    assert kind == "AT_NON_BOUNDARY"
    return after != UNKNOWN and (before == WORD) == (after == WORD)


def kind_of(char: str) -> int:
    return NEWLINE if char == "\n" else WORD if is_word(char) else OTHER


def is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


CATEGORIES: dict[str, Test] = {"DIGIT": str.isdecimal, "SPACE": str.isspace, "WORD": is_word}


@lru_cache(maxsize=1024)
def _set_test(operator: str, items: tuple[Any, ...], flags: int) -> Test:
    """One test for equal sets, so that the copies of a repetition are asked once."""
    negate = bool(items) and items[0][0].name == "NEGATE"

    def test(char: str) -> bool:
        variants = {char, char.lower(), char.upper(), char.swapcase()} if flags & re.IGNORECASE else {char}
        found = any(within(item, one, flags) for item in items for one in variants if len(one) == 1)
        return found != (negate or operator == "NOT_LITERAL")

    return test


def char_test(operator: str, argument: Any, flags: int) -> Test:
    """Whether a character is one of those that the parser describes."""
    if operator == "ANY":
        return any_char if flags & re.DOTALL else not_newline
    items = tuple(argument) if operator == "IN" else ((_parser.LITERAL, argument),)
    return _set_test(operator, items, flags & (re.IGNORECASE | re.ASCII))


def any_char(char: str) -> bool:
    return True


def not_newline(char: str) -> bool:
    return char != "\n"


def within(item: tuple[Any, Any], char: str, flags: int) -> bool:
    """Whether ``char`` is in one item of a set."""
    operator, argument = item
    match operator.name:
        case "LITERAL":
            return ord(char) == int(argument)
        case "RANGE":
            return bool(argument[0] <= ord(char) <= argument[1])
        case "CATEGORY":
            name = argument.name.removeprefix("CATEGORY_")
            known = CATEGORIES[name.removeprefix("NOT_")](char) and (char.isascii() or not flags & re.ASCII)
            return known != name.startswith("NOT_")
    return False  # NEGATE


def shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 40 else pattern[:40] + "...")
