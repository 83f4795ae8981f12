"""Regular expressions of JSON Schemas, which are those of ECMA-262 with its flag u, in a form that the
matcher and Python read alike.

The dialects differ in what shorthand classes and a dot stand for, in what is special inside of a class, and
in where anchors may be. What is no part of ECMA-262, but means one thing wherever it is read (flags, ``\\A``,
``\\z``), is read so; the rest is refused.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
SIZE = 20_000  # characters that a pattern may become
NAMES = 64  # texts that are listed
LENGTH = 256  # characters of one
# Of automata, to select texts: states of the two kinds, and characters of the result.
NONDETERMINED, DETERMINED, SELECTED = 4000, 64, 4096

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included


class PatternError(ValueError):
    """The pattern cannot be honoured. The message says why."""


@dataclass(frozen=True)
class Chars:
    """One character of ``ranges`` or ``properties`` (as they are written), or one of all others."""

    ranges: Ranges
    properties: str = ""
    negated: bool = False


@dataclass(frozen=True)
class Edge:
    """``^`` or ``$``."""

    sign: str


@dataclass(frozen=True)
class Seq:
    items: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Alt:
    ways: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Repeat:
    item: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Flags:
    """``item`` under flags of other dialects, of which that for dots is done with."""

    given: str
    item: Node


@dataclass(frozen=True)
class Look:
    """Nothing, where ``item`` comes, or does not."""

    positive: bool
    item: Node


Node = Chars | Edge | Seq | Alt | Repeat | Flags | Look


def merged(ranges: Ranges) -> Ranges:
    """In order, apart and without surrogates, which no text has."""
    found: list[tuple[int, int]] = []
    first, last = SURROGATES
    cut = [(low, min(high, first - 1)) for low, high in ranges if low < first]
    cut += [(max(low, last + 1), high) for low, high in ranges if high > last]
    for low, high in sorted(cut):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def others(ranges: Ranges) -> Ranges:
    """All other characters."""
    lows = [0, *(high + 1 for _, high in ranges)]
    highs = [*(low - 1 for low, _ in ranges), LAST]
    return merged(tuple((low, high) for low, high in zip(lows, highs) if low <= high))


DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
# WhiteSpace and LineTerminator of ECMA-262, 12.2 and 12.3.
SPACE: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
BREAKS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
ZERO: Ranges = ((0, 0),)
EVERY = others(())
SHORT = {"d": DIGIT, "w": WORD, "s": SPACE}
SHORT |= {name.upper(): others(ranges) for name, ranges in SHORT.items()}
CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
ANY = Repeat(Chars(EVERY), 0, None)

_TIMES = re.compile(r"\{([0-9]{1,9})(,?)([0-9]{0,9})\}")
_CODE = re.compile(
    r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|(?:u\{([0-9A-Fa-f]{1,6})\}|U([0-9A-Fa-f]{8}))|c([A-Za-z])|0(?!\d)"
)
_LOW = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")
_PROPERTY = re.compile(r"([pP])(?:\{([A-Za-z0-9_=]+)\}|([A-Z]))")
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")
_NAMED = re.compile(r"P?<[A-Za-z_$][\w$]*>")
_FLAGS = re.compile(r"([ims]+)([:)])")


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def whole(self) -> Node:
        node = self._choice()
        if self._at < len(self._text):
            raise PatternError("a parenthesis closes nothing")
        return node

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _match(self, form: re.Pattern[str]) -> re.Match[str] | None:
        found = form.match(self._text, self._at)
        if found:
            self._at = found.end()
        return found

    def _next(self) -> str:
        if self._at == len(self._text):
            raise PatternError("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _choice(self, dot: Chars = Chars(BREAKS, negated=True)) -> Node:
        ways: list[Node] = []
        items: list[Node] = []
        flags: list[tuple[str, list[Node]]] = []  # that hold for the rest, and what stands before them
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._take("|"):
                ways.append(Seq(tuple(items)))
                items = []
            elif self._take("(?"):
                node = self._group(dot)
                if isinstance(node, str):
                    if ways or items or flags:
                        raise PatternError("flags stand at the beginning")
                    flags.append((node, items))
                    dot = Chars(EVERY) if "s" in node else dot
                else:
                    items.append(self._times(node))
            elif self._take("("):
                items.append(self._times(self._closed(self._choice(dot))))
            else:
                items.append(self._times(self._one(dot)))
        ways.append(Seq(tuple(items)))
        node = ways[0] if len(ways) == 1 else Alt(tuple(ways))
        return _flagged(flags[0][0], node) if flags else node

    def _group(self, dot: Chars) -> Node | str:
        """Behind ``(?``. A text: flags for the rest."""
        if self._take(":") or self._match(_NAMED):
            return self._closed(self._choice(dot))
        for sign in ("=", "!"):
            if self._take(sign):
                return Look(sign == "=", self._closed(self._choice(dot)))
        if self._take("<"):
            raise PatternError("looking behind is not supported")
        found = self._match(_FLAGS)
        if found is None or "m" in found[1]:
            raise PatternError(f"'(?{self._text[self._at : self._at + 1]}' is not supported")
        if found[2] == ")":
            return found[1]
        return _flagged(found[1], self._closed(self._choice(Chars(EVERY) if "s" in found[1] else dot)))

    def _closed(self, node: Node) -> Node:
        if not self._take(")"):
            raise PatternError("a parenthesis is not closed")
        return node

    def _times(self, item: Node) -> Node:
        """``item`` with the quantifier behind it."""
        least: int = 1
        most: int | None = 1
        if self._take("*"):
            least, most = 0, None
        elif self._take("+"):
            least, most = 1, None
        elif self._take("?"):
            least, most = 0, 1
        elif found := self._match(_TIMES):
            least = int(found[1])
            most = int(found[3]) if found[3] else None if found[2] else least
            if most is not None and most < least:
                raise PatternError(f"{found[0]} has its ends in the wrong order")
        else:
            return item
        self._take("?")  # which of the matches is found makes no difference
        if self._text[self._at : self._at + 1] in ("*", "+", "?") or self._match(_TIMES):
            raise PatternError("a quantifier stands behind a quantifier")
        return Repeat(item, least, most)

    def _one(self, dot: Chars) -> Node:
        char = self._next()
        if char in "^$":
            return Edge(char)
        if char == ".":
            return dot
        if char == "[":
            return self._class()
        if char in "*+?":
            raise PatternError("a quantifier has nothing to repeat")
        if char == "{" and self._text[self._at : self._at + 1] in (*"0123456789", ","):
            raise PatternError("a brace is no quantifier of ECMA-262")
        if char != "\\":
            return Chars(((ord(char), ord(char)),))
        name = self._text[self._at : self._at + 1]
        if name in ("b", "B"):
            raise PatternError("word boundaries are not supported")
        if name in ("k", *"123456789"):
            raise PatternError("backreferences are not supported")
        if name in ("A", "z", "Z"):
            self._at += 1
            return Edge("^" if name == "A" else "$")
        return self._escape()

    def _escape(self) -> Chars:
        """Behind a backslash, inside or outside of a class."""
        if found := self._match(_PROPERTY):
            return Chars((), f"\\{found[1]}{{{found[2] or found[3]}}}")
        if found := self._match(_CODE):
            hexadecimal = found[1] or found[2] or found[3] or found[4]
            code = int(hexadecimal, 16) if hexadecimal else ord(found[5]) % 32 if found[5] else 0
            if 0xD800 <= code < 0xDC00 and found[2] and (low := self._match(_LOW)):
                code = 0x10000 + (code - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
            if code > LAST:
                raise PatternError(f"there is no character {code:#x}")
            return Chars(((code, code),))
        name = self._next()
        if name in SHORT:
            return Chars(SHORT[name])
        code = CONTROLS.get(name, ord(name))
        if name not in CONTROLS and name.isalnum():
            raise PatternError(f"'\\{name}' is no escape of ECMA-262")
        return Chars(((code, code),))

    def _class(self) -> Chars:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        properties = ""
        while not self._take("]"):
            low = self._member()
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._member()
                ends = (low.ranges[:1] + high.ranges[:1]) if not (low.properties or high.properties) else ()
                if any(first != last for first, last in ends) or len(ends) != 2:
                    ranges += [*low.ranges, (0x2D, 0x2D), *high.ranges]
                    properties += low.properties + high.properties
                    continue
                if ends[0][0] > ends[1][0]:
                    raise PatternError("a range of characters has its ends in the wrong order")
                ranges.append((ends[0][0], ends[1][0]))
            else:
                ranges += low.ranges
                properties += low.properties
        return Chars(merged(tuple(ranges)), properties, negated)

    def _member(self) -> Chars:
        if self._match(_POSIX):
            raise PatternError("classes of POSIX are no part of ECMA-262")
        char = self._next()
        if char != "\\":
            return Chars(((ord(char), ord(char)),))
        if self._take("b"):
            return Chars(((0x08, 0x08),))
        return self._escape()


def _flagged(given: str, node: Node) -> Node:
    return Flags("i", node) if "i" in given else node


# Written

_SPECIAL = frozenset("\\^$.|?*+()[]{}&~-#/")


def _character(code: int) -> str:
    char = chr(code)
    if char in _SPECIAL:
        return f"\\{char}"
    if char == " " or (char.isprintable() and not char.isspace()):
        return char
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _class(chars: Chars) -> str:
    if not chars.properties:
        if chars.ranges == EVERY and not chars.negated:
            return "(?s:.)"
        if len(chars.ranges) == 1 and chars.ranges[0][0] == chars.ranges[0][1] and not chars.negated:
            return _character(chars.ranges[0][0])
        if not chars.ranges:
            return "(?s:.)" if chars.negated else f"[^{_character(0)}-{_character(LAST)}]"
    inside = "".join(
        _character(low) if low == high else f"{_character(low)}-{_character(high)}"
        for low, high in _joined(chars.ranges)
    )
    return f"[{'^' * chars.negated}{inside}{chars.properties}]"


def _joined(ranges: Ranges) -> Ranges:
    """With surrogates where they stand between two ranges, as no dialect has them as ends."""
    first, last = SURROGATES
    for (low, end), (start, high) in itertools.pairwise(ranges):
        if end == first - 1 and start == last + 1:
            at = ranges.index((low, end))
            return (*ranges[:at], (low, high), *ranges[at + 2 :])
    return ranges


def _text(node: Node) -> str:
    match node:
        case Chars():
            return _class(node)
        case Edge():
            return node.sign
        case Seq():
            return "".join(
                f"(?:{_text(item)})" if isinstance(item, Alt) else _text(item) for item in node.items
            )
        case Alt():
            return "|".join(map(_text, node.ways)) if node.ways else _class(Chars(()))
        case Flags():
            return f"(?{node.given}:{_text(node.item)})"
        case Look():
            raise PatternError("looking ahead is supported at the beginning alone")
        case Repeat():
            inner = _text(node.item)
            once = isinstance(node.item, (Chars, Flags))
            return (inner if once else f"(?:{inner})") + _quantifier(node.least, node.most)


def _quantifier(least: int, most: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    return short or (f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}")


# Anchors


def _edges(node: Node, signs: str = "^$") -> bool:
    match node:
        case Edge():
            return node.sign in signs
        case Seq():
            return any(_edges(item, signs) for item in node.items)
        case Alt():
            return any(_edges(way, signs) for way in node.ways)
        case Repeat() | Flags():
            return _edges(node.item, signs)
    return False


def _plain(node: Node) -> bool:
    """Whether anchors stand at the ends alone, where the matcher takes them."""
    items = node.items if isinstance(node, Seq) else (node,)
    first = 1 if items and items[0] == Edge("^") else 0
    last = len(items) - (1 if len(items) > first and items[-1] == Edge("$") else 0)
    return not any(map(_edges, items[first:last]))


def _nullable(node: Node) -> bool:
    """Whether it matches the empty text."""
    match node:
        case Chars():
            return False
        case Edge() | Look():
            raise PatternError("anchors are not supported here")
        case Seq():
            return all(map(_nullable, node.items))
        case Alt():
            return any(map(_nullable, node.ways))
        case Flags():
            return _nullable(node.item)
    return node.least == 0 or _nullable(node.item)


def _read(pattern: str) -> Node:
    """Without looking ahead: what must come at the beginning is part of the whole."""
    node = _Reader(pattern).whole()
    items: list[Node] = list(node.items) if isinstance(node, Seq) else [node]
    if items and isinstance(last := items[-1], Look) and last.positive:
        items[-1] = last.item
    if len(items) > 1 and items[0] == Edge("^"):
        rest = list(itertools.dropwhile(lambda item: isinstance(item, Look), items[1:]))
        looks = [item for item in items[1 : len(items) - len(rest)] if isinstance(item, Look)]
        if looks:
            wanted = [
                Seq((Edge("^"), *rest)),
                *(Seq((Edge("^"), each.item)) for each in looks if each.positive),
            ]
            unwanted: list[Node] = [Seq((Edge("^"), each.item)) for each in looks if not each.positive]
            return _Reader(_selecting(wanted, unwanted)).whole()
    return Seq(tuple(items))


def _quotable(node: Node) -> Node:
    """Without U+0000 where a class has that and lacks the quotation mark or the backslash: the matcher would
    take the escapes of these two for it, too."""
    match node:
        case Chars():
            held = others(node.ranges) if node.negated else node.ranges
            zero, *both = (any(low <= code <= high for low, high in held) for code in (0x00, 0x22, 0x5C))
            if not zero or all(both):
                return node
            if node.negated:
                return Chars(merged(node.ranges + ZERO), node.properties, True)
            return Chars(others(merged(others(node.ranges) + ZERO)), node.properties)
        case Seq():
            return Seq(tuple(map(_quotable, node.items)))
        case Alt():
            return Alt(tuple(map(_quotable, node.ways)))
        case Repeat():
            return Repeat(_quotable(node.item), node.least, node.most)
        case Flags():
            return Flags(node.given, _quotable(node.item))
    return node


def _bounded(node: Node, sign: str, beyond: Node) -> Node:
    """``node`` with ``beyond`` on the side of this anchor, which is no part of the result."""
    if not _edges(node, sign):
        return Seq((node, beyond) if sign == "$" else (beyond, node))
    match node:
        case Edge():
            return Seq() if _nullable(beyond) else Alt()
        case Seq():
            for item in reversed(node.items) if sign == "$" else node.items:
                beyond = _bounded(item, sign, beyond)
            return beyond
        case Alt():
            if len(node.ways) * len(_text(beyond)) > SIZE:
                raise PatternError("it is too long when written out")
            return Alt(tuple(_bounded(way, sign, beyond) for way in node.ways))
        case Repeat(item, 0, 1):
            return _bounded(Alt((item, Seq())), sign, beyond)
        case Repeat(item, 1, 1):
            return _bounded(item, sign, beyond)
        case Repeat(item, 0, None):  # what holds at the end holds for the last one alone
            last = _bounded(Alt((item, Seq())), sign, beyond)
            inner = Repeat(_without(item, sign), 0, None)
            return Seq((inner, last) if sign == "$" else (last, inner))
        case Repeat(item, 1, None):
            both = (item, Repeat(item, 0, None))
            return _bounded(Seq(both if sign == "$" else both[::-1]), sign, beyond)
        case Flags(given, item) if beyond in (ANY, Seq()):  # to which flags make no difference
            return Flags(given, _bounded(item, sign, beyond))
    raise PatternError("anchors are not supported here")


def _without(node: Node, sign: str) -> Node:
    """What of ``node`` does without this anchor."""
    match node:
        case Edge() if node.sign == sign:
            return Alt()
        case Seq():
            return Seq(tuple(_without(item, sign) for item in node.items))
        case Alt():
            return Alt(tuple(_without(way, sign) for way in node.ways))
        case Repeat():
            return Repeat(_without(node.item, sign), node.least, node.most)
        case Flags():
            return Flags(node.given, _without(node.item, sign))
    return node


def _anchored(node: Node) -> Node:
    """For whole texts, without anchors."""
    return _bounded(_bounded(node, "$", ANY), "^", ANY)


# What others ask


@functools.lru_cache(4096)
def portable(pattern: str, quoted: bool = False) -> str:
    """The same for the matcher and for Python (``re.search``; there ``$`` is also
    before a line feed at the end). ``quoted``: for JSON strings, without some texts that hold U+0000.
    Raises PatternError."""
    node = _quotable(_read(pattern)) if quoted else _read(pattern)
    text = _text(node) if _plain(node) else f"^(?:{_text(_anchored(node))})$"
    if len(text) > SIZE:
        raise PatternError("it is too long when written out")
    return text


@functools.lru_cache(4096)
def texts(pattern: str) -> list[str] | None:
    """All that match; None if these are more than ``NAMES``, or cannot be told."""
    try:
        return list(_texts(_anchored(_read(pattern))))
    except PatternError:
        return None


def _texts(node: Node) -> dict[str, None]:
    """Raises PatternError where they are too many."""
    found: dict[str, None] = {}
    match node:
        case Chars() if not (node.negated or node.properties):
            if sum(high - low + 1 for low, high in node.ranges) <= NAMES:
                return {chr(code): None for low, high in node.ranges for code in range(low, high + 1)}
        case Seq():
            found = {"": None}
            for item in node.items:
                found = _products(found, _texts(item))
            return found
        case Alt():
            for way in node.ways:
                found |= _texts(way)
            return _few(found)
        case Repeat():
            once = _texts(node.item)
            if once.keys() <= {""}:
                return {"": None} if once or not node.least else {}
            if node.most is not None and node.most <= NAMES:
                some = {"": None}
                for times in range(node.most + 1):
                    some = _products(some, once) if times else some
                    found |= some if times >= node.least else {}
                return _few(found)
    raise PatternError("too many texts match")


def _products(heads: dict[str, None], tails: dict[str, None]) -> dict[str, None]:
    return _few({head + tail: None for head in heads for tail in tails})


def _few(found: dict[str, None]) -> dict[str, None]:
    if len(found) > NAMES or any(len(text) > LENGTH for text in found):
        raise PatternError("too many texts match")
    return found


# Sets of texts


@functools.lru_cache(1024)
def selecting(every: tuple[str, ...], none: tuple[str, ...] = ()) -> str | None:
    """The pattern of all texts that match each of ``every`` and none of ``none``;
    None if that is too long or cannot be told."""
    try:
        return _selecting([_read(each) for each in every], [_read(each) for each in none])
    except PatternError:
        return None


def _selecting(every: Sequence[Node], none: Sequence[Node]) -> str:
    """Raises PatternError."""
    wanted = len(every)
    machine = _Machine([_anchored(node) for node in (*every, *none)])
    moves, ends = machine.determined(lambda hits: hits == tuple(i < wanted for i in range(len(hits))))
    text = _text(_expression(*_smallest(moves, ends), machine.classes))
    if len(text) > SELECTED:
        raise PatternError("it is too long when written out")
    return f"^(?:{text})$"


class _Machine:
    """Thompson's automaton of several expressions: ``steps`` of a state by classes of
    characters, ``jumps`` by none."""

    def __init__(self, nodes: list[Node]) -> None:
        self.steps: list[tuple[frozenset[int], int] | None] = []
        self.jumps: list[list[int]] = []
        self._chars: dict[Chars, frozenset[int]] = {}
        self.classes = self._classes(nodes)
        self._ends = [self._state() for _ in nodes]
        self._starts = [self._built(node, end) for node, end in zip(nodes, self._ends)]

    def _classes(self, nodes: list[Node]) -> list[Ranges]:
        """Characters that none of the expressions tells apart."""
        found = dict.fromkeys(itertools.chain(*map(_characters, nodes)))
        if any(chars.properties for chars in found):
            raise PatternError("properties of characters cannot be told apart")
        cuts = sorted(
            {0, LAST + 1, *(at for chars in found for low, high in chars.ranges for at in (low, high + 1))}
        )
        classes: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
        for low, end in itertools.pairwise(cuts):
            if not merged(((low, end - 1),)):  # surrogates
                continue
            held = tuple(
                any(first <= low <= last for first, last in chars.ranges) != chars.negated for chars in found
            )
            classes.setdefault(held, []).append((low, end - 1))
        for i, chars in enumerate(found):
            self._chars[chars] = frozenset(at for at, held in enumerate(classes) if held[i])
        return [merged(tuple(ranges)) for ranges in classes.values()]

    def _state(self, step: tuple[frozenset[int], int] | None = None, jumps: tuple[int, ...] = ()) -> int:
        if len(self.steps) == NONDETERMINED:
            raise PatternError("it has too many states")
        self.steps.append(step)
        self.jumps.append(list(jumps))
        return len(self.steps) - 1

    def _built(self, node: Node, end: int) -> int:
        """The first state of what leads to ``end``."""
        match node:
            case Chars():
                return self._state((self._chars[node], end))
            case Seq():
                for item in reversed(node.items):
                    end = self._built(item, end)
                return end
            case Alt():
                return self._state(None, tuple(self._built(way, end) for way in node.ways))
            case Repeat():
                if node.most is None:
                    loop = self._state(None, (end,))
                    self.jumps[loop].append(self._built(node.item, loop))
                    start = loop
                else:
                    start = end
                    for _ in range(node.most - node.least):
                        start = self._state(None, (end, self._built(node.item, start)))
                for _ in range(node.least):
                    start = self._built(node.item, start)
                return start
        raise PatternError("flags and anchors are not supported here")

    def determined(self, wanted: Callable[[tuple[bool, ...]], bool]) -> tuple[list[list[int]], set[int]]:
        """For each state the next one by class, from state 0; and the states
        whose ``wanted`` is true of what ends there."""
        start = self._reached(self._starts)
        numbers, waiting = {start: 0}, [start]
        moves: list[list[int]] = []
        for states in waiting:
            nexts: list[list[int]] = [[] for _ in self.classes]
            for state in states:
                if (step := self.steps[state]) is not None:
                    for at in step[0]:
                        nexts[at].append(step[1])
            row = []
            for each in map(self._reached, nexts):
                if each not in numbers:
                    if len(numbers) == DETERMINED:
                        raise PatternError("it has too many states")
                    numbers[each] = len(numbers)
                    waiting.append(each)
                row.append(numbers[each])
            moves.append(row)
        ends = {at for states, at in numbers.items() if wanted(tuple(end in states for end in self._ends))}
        return moves, ends

    def _reached(self, states: list[int]) -> frozenset[int]:
        seen, waiting = set(states), list(states)
        while waiting:
            for state in self.jumps[waiting.pop()]:
                if state not in seen:
                    seen.add(state)
                    waiting.append(state)
        return frozenset(seen)


def _characters(node: Node) -> Iterator[Chars]:
    match node:
        case Chars():
            yield node
        case Seq():
            for item in node.items:
                yield from _characters(item)
        case Alt():
            for way in node.ways:
                yield from _characters(way)
        case Repeat() | Flags():
            yield from _characters(node.item)


def _smallest(moves: list[list[int]], ends: set[int]) -> tuple[list[list[int]], set[int]]:
    """The same with as few states as there can be (Moore's algorithm). State 0 stays the first."""
    groups = [int(state in ends) for state in range(len(moves))]
    while True:
        numbers: dict[tuple[int, ...], int] = {}
        finer = [
            numbers.setdefault((groups[state], *(groups[to] for to in row)), len(numbers))
            for state, row in enumerate(moves)
        ]
        if len(numbers) == len(set(groups)):
            break
        groups = finer
    rows: dict[int, list[int]] = {}
    for state, row in enumerate(moves):
        rows.setdefault(finer[state], [finer[to] for to in row])
    return [rows[group] for group in range(len(rows))], {finer[state] for state in ends}


def _expression(moves: list[list[int]], ends: set[int], classes: list[Ranges]) -> Node:
    """Of an automaton, by taking one state after the other out of it."""
    first, last = -1, -2
    ways: dict[tuple[int, int], Node] = {(first, 0): Seq()}
    ways |= {(end, last): Seq() for end in ends}
    left = _leading(moves, ends)
    for state in left:
        row = moves[state]
        for to in left.intersection(row):
            held = merged(tuple(itertools.chain(*(classes[at] for at, each in enumerate(row) if each == to))))
            rest = others(held)
            ways[state, to] = Chars(held) if len(held) <= len(rest) + 1 else Chars(rest, negated=True)
    while left:
        befores, behinds = Counter(j for i, j in ways if i != j), Counter(i for i, j in ways if i != j)
        cost = {state: befores[state] * behinds[state] for state in sorted(left)}
        out = min(cost, key=cost.__getitem__)
        left.remove(out)
        loop = Repeat(ways.pop((out, out)), 0, None) if (out, out) in ways else Seq()
        before = [(i, node) for (i, j), node in ways.items() if j == out]
        behind = [(j, node) for (i, j), node in ways.items() if i == out]
        ways = {pair: node for pair, node in ways.items() if out not in pair}
        for i, head in before:
            for j, tail in behind:
                through = _row(head, loop, tail)
                ways[i, j] = _either(ways[i, j], through) if (i, j) in ways else through
                if len(_text(ways[i, j])) > SELECTED:
                    raise PatternError("it is too long when written out")
    return ways.get((first, last), Alt())


def _leading(moves: list[list[int]], ends: set[int]) -> set[int]:
    """States from which an end can be reached."""
    found = set(ends)
    while more := {
        state for state, row in enumerate(moves) if state not in found and not found.isdisjoint(row)
    }:
        found |= more
    return found


def _row(*nodes: Node) -> Node:
    items = tuple(itertools.chain(*(node.items if isinstance(node, Seq) else (node,) for node in nodes)))
    return items[0] if len(items) == 1 else Seq(items)


def _either(a: Node, b: Node) -> Node:
    ways = tuple(itertools.chain(*(node.ways if isinstance(node, Alt) else (node,) for node in (a, b))))
    if Seq() in ways:
        rest = tuple(way for way in ways if way != Seq())
        return Repeat(rest[0] if len(rest) == 1 else Alt(rest), 0, 1) if rest else Seq()
    return Alt(tuple(dict.fromkeys(ways)))
