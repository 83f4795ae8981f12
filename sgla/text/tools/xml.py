"""Calls with one element for each argument. The text of an element becomes JSON as the tool's schema says."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from sgla.text.tools.calls import NAME, Call, CallReader, Toolbox, limited, word
from sgla.text.tools.cursor import (
    LIMIT,
    Cursor,
    Mismatch,
    Steps,
    newline_trimmed,
    nothing_trimmed,
    tags,
)
from sgla.text.tools.values import as_json, escaped, quoted

STRING, OTHER = frozenset(["string"]), frozenset(["other"])
KINDS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


@dataclass(frozen=True)
class Markup:
    """``name_end``: comes after the name. ``key``: before and after an argument's name.
    ``value``: before and after it.

    ``key_ends``: other texts after an argument's name, with what they say of its type. ``ends`` end the call.
    ``missing_end``: also ends a value, since models forget its end. ``lines``: a value stands on lines of its
    own.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    ends: tuple[str, ...]
    name_end: str = ""
    key_ends: dict[str, frozenset[str]] = field(default_factory=dict)
    missing_end: tuple[str, ...] = ()
    lines: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.name_end, *self.key, *self.value, *self.ends)))


def xml_call(markup: Markup) -> CallReader:
    key_ends = tags(*(markup.key_ends or [markup.key[1]]))
    following = tags(markup.key[0], *markup.ends)

    def read(cur: Cursor, toolbox: Toolbox, known: Container[str] | None) -> Steps[None]:
        name = yield from word(cur, NAME)
        if markup.name_end:
            yield from cur.expect(markup.name_end)
        call = Call(cur, name)
        start = cur.position
        while (tag := (yield from cur.follow(following))) == markup.key[0]:
            if call.begun:
                cur.mark(start)
            held: list[str] = []
            key_end = yield from cur.until(key_ends, limited(held, LIMIT))
            if not key_end:
                raise Mismatch
            if markup.value[0]:
                yield from cur.expect(markup.value[0])
            cur.unmark()
            key = "".join(held).strip()
            call((", " if call.begun else "{") + quoted(key) + ": ")
            kinds = markup.key_ends.get(key_end) or toolbox.kinds(name, key)
            yield from element(cur, markup, kinds, call)
            start = cur.position
        if not tag:
            raise Mismatch
        call("}" if call.begun else "{}")

    return read


def element(cur: Cursor, markup: Markup, kinds: frozenset[str], call: Call) -> Steps[None]:
    """The text of one argument. Strings are emitted as they come, other values when they are complete."""
    trim = newline_trimmed if markup.lines else nothing_trimmed
    ends = tags(markup.value[1], *markup.missing_end)
    if markup.lines and (yield from cur.peek()) == "\n":
        cur.at += 1
    if kinds == STRING:
        call('"')
        end = yield from cur.until(ends, lambda text: call(escaped(text)), trim)
        if end:
            call('"')
    else:
        held: list[str] = []
        end = yield from cur.until(ends, held.append, trim)
        call(argument("".join(held), kinds))
    if not end:
        raise Mismatch
    if end != markup.value[1]:
        cur.at -= len(end)


def argument(text: str, kinds: frozenset[str]) -> str:
    """The JSON of an argument written as ``text``; without known kinds, what is no JSON is a string."""
    parsed = as_json(text)
    if parsed is None:
        return quoted(text)
    if "string" in kinds:
        kind = KINDS.get(parsed[0], "number")
        other = kind != "string" and (kind in kinds or (kind == "number" and "integer" in kinds))
        return parsed if other else quoted(text)
    return parsed
