"""JSON, Python literals and Gemma's notation -> JSON, emitted fragment by fragment while the model writes.

The reader is lenient where models slip (single quotes, ``True``, raw newlines in strings, trailing commas);
what it emits for a complete value is valid JSON with the separators of ``json.dumps``.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

from sgla.text.tools.cursor import Cursor, Emit, Mismatch, Steps, Tags, tags

DEPTH = 64
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
WORD = re.compile(r"[\w.+-]*")
CONSTANTS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
}
PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
HEX = re.compile(r"[0-9a-fA-F]+")
KEPT_ESCAPES = frozenset('"\\/bfnrt')  # JSON has them too
ESCAPE_LENGTHS = {"x": 4, "u": 6, "U": 10}
CLOSING = {"[": "]", "(": ")"}


@dataclass(frozen=True)
class Syntax:
    """``quote`` is a delimiter without escapes, in place of quotes with them.
    ``bare``: keys and words need no quotes."""

    quote: str = ""
    bare: bool = False

    @property
    def quotes(self) -> Tags:
        return tags(self.quote) if self.quote else tags('"', "'")


LITERALS = Syntax()


def value(cur: Cursor, syntax: Syntax, emit: Emit, depth: int = 0) -> Steps[None]:
    """Read one value. Raises Mismatch at what cannot be one, with everything before it emitted."""
    yield from cur.space()
    char = yield from cur.peek()
    if char == "{":
        yield from members(cur, syntax, emit, depth)
    elif char in ("[", "("):
        yield from items(cur, syntax, emit, depth)
    elif quote := (yield from cur.follow(syntax.quotes)):
        yield from string(cur, quote, emit)
    else:
        word = yield from cur.run(WORD)
        emit(word_as_json(word, syntax.bare))
        cur.at += len(word)


def members(cur: Cursor, syntax: Syntax, emit: Emit, depth: int = 0) -> Steps[None]:
    """Read an object. Nothing is emitted before its first key, or its end, is seen."""
    check_depth(depth)
    yield from cur.expect("{")
    separator: str | None = "{"
    while not (yield from cur.follow(tags("}"))):
        if separator is None:
            raise Mismatch
        yield from key(cur, syntax, emit, separator)
        yield from cur.expect(":")
        emit(": ")
        yield from value(cur, syntax, emit, depth + 1)
        separator = ", " if (yield from cur.follow(tags(","))) else None
    emit("{}" if separator == "{" else "}")


def key(cur: Cursor, syntax: Syntax, emit: Emit, before: str) -> Steps[None]:
    if quote := (yield from cur.follow(syntax.quotes)):
        emit(before)
        yield from string(cur, quote, emit)
        return
    yield from cur.space()
    word = (yield from cur.run(WORD)) if syntax.bare else ""
    if not word:
        raise Mismatch
    emit(before + quoted(word))
    cur.at += len(word)


def items(cur: Cursor, syntax: Syntax, emit: Emit, depth: int = 0) -> Steps[None]:
    """Read a list or a tuple."""
    check_depth(depth)
    close = tags(CLOSING[cur.text[cur.at]])
    cur.at += 1
    separator: str | None = "["
    while not (yield from cur.follow(close)):
        if separator is None:
            raise Mismatch
        emit(separator)
        yield from value(cur, syntax, emit, depth + 1)
        separator = ", " if (yield from cur.follow(tags(","))) else None
    emit("[]" if separator == "[" else "]")


def check_depth(depth: int) -> None:
    if depth >= DEPTH:
        raise Mismatch


def string(cur: Cursor, quote: str, emit: Emit) -> Steps[None]:
    """Read the rest of a string whose opening quote has been stepped over."""
    emit('"')
    if quote not in PLAIN:
        if not (yield from cur.until(tags(quote), lambda text: emit(escaped(text)))):
            raise Mismatch
    else:
        yield from escaped_string(cur, quote, emit)
    emit('"')


def escaped_string(cur: Cursor, quote: str, emit: Emit) -> Steps[None]:
    plain = PLAIN[quote]
    while char := (yield from cur.peek()):
        if char == quote:
            cur.at += 1
            return
        if char == "\\":
            yield from escape(cur, emit)
        elif match := plain.match(cur.text, cur.at):
            emit(escaped(match[0]))
            cur.at = match.end()
    raise Mismatch


def escape(cur: Cursor, emit: Emit) -> Steps[None]:
    """A backslash and what it escapes; one that JSON does not know stands for itself."""
    char = (yield from cur.ahead(2))[1:]
    if not char:
        raise Mismatch
    length = ESCAPE_LENGTHS.get(char, 2)
    code = (yield from cur.ahead(length))[2:]
    written = "\\\\"
    if char in KEPT_ESCAPES:
        written = "\\" + char
    elif char == "'":
        written = "'"
    elif len(code) == length - 2 and HEX.fullmatch(code):
        written = "\\u" + code if char == "u" else character(int(code, 16))
    emit(written)
    cur.at += 1 if written == "\\\\" and char != "\\" else length


def character(code: int) -> str:
    return escaped(chr(code)) if code < 0x110000 else "\\ufffd"


def word_as_json(word: str, bare: bool) -> str:
    """A constant or a number; with ``bare`` any other word is a string. Raises Mismatch."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    if NUMBER.fullmatch(word):
        return word
    try:
        number = float(word)  # .5, 1., +1, 007
    except ValueError:
        number = math.nan
    if word and math.isfinite(number) and "_" not in word:
        return json.dumps(int(number) if number.is_integer() and "." not in word else number)
    if word and bare:
        return quoted(word)
    raise Mismatch


def escaped(text: str) -> str:
    """``text`` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def as_json(text: str) -> str | None:
    """The JSON of a complete text that is one value, or None."""
    cur = Cursor()
    cur.feed(text.strip())
    cur.ended = True
    fragments: list[str] = []
    try:
        for _ in value(cur, LITERALS, fragments.append):
            raise AssertionError("a reader waits for text after its end")
    except Mismatch:
        return None
    return "".join(fragments) if cur.at == len(cur.text) else None
