"""How one tool call is written (``json_call``, ``named_call``, ...)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from functools import cache
from typing import Any

from sgla.text.tools.cursor import (
    ARGUMENTS,
    LIMIT,
    Cursor,
    Mismatch,
    Steps,
    tags,
)
from sgla.text.tools.values import LITERALS, Syntax, as_json, members, quoted, string, value

NAME = re.compile(r"[\w.:/-]*")
IDENTIFIER = re.compile(r"\w*")
NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
HELD = 8192  # characters of arguments that may come before the name
# Around a custom tool's text, in the place of JSON arguments.
# The line end ends what a grammar calls "the rest of the line".
RAW = ("<input>\n", "\n</input>")
KINDS = {  # of values in JSON
    bool: "boolean",
    type(None): "null",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}
QUOTES = tags('"', "'")


class Toolbox:
    """The tools of a request: ``names``, and the JSON types that the schema allows for an argument."""

    def __init__(self, tools: list[dict[str, Any]] | None = None) -> None:
        functions = [tool.get("function", tool) for tool in tools or []]
        self._schemas = {f["name"]: f.get("parameters") for f in functions if isinstance(f.get("name"), str)}
        self.names: Container[str] = self._schemas.keys()
        self.kinds = cache(self._kinds)

    def _kinds(self, name: str, argument: str) -> frozenset[str]:
        """JSON types of one argument; empty if the schema does not say."""
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return kinds_of(properties.get(argument)) if isinstance(properties, dict) else frozenset()


def kinds_of(schema: Any, depth: int = 0) -> frozenset[str]:
    """JSON types that ``schema`` allows; empty if it does not say."""
    if not isinstance(schema, dict) or depth > 8:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset([kind])
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(KINDS.get(each, "string") for each in set(map(type, values)))
    branches = schema.get("anyOf") or schema.get("oneOf")
    found = [kinds_of(branch, depth + 1) for branch in branches] if isinstance(branches, list) else []
    return frozenset().union(*found) if all(found) else frozenset()


class Call:
    """Where the arguments of one call are emitted; the first fragment begins the call."""

    def __init__(self, cur: Cursor, name: str, call_id: str | None = None) -> None:
        self._cur = cur
        self._name = name
        self._id = call_id
        self.begun = False

    def __call__(self, fragment: str) -> None:
        if not self.begun:
            self.begun = True
            self._cur.begin(self._name, self._id)
        self._cur.emit(ARGUMENTS, fragment)


# Reads one call. Raises Mismatch: before the call has begun it is none, after that its arguments end where it
# was raised. The last parameter: the names a call must have, or None for any.
CallReader = Callable[[Cursor, Toolbox, Container[str] | None], Steps[None]]


def json_call(cur: Cursor, toolbox: Toolbox, known: Container[str] | None) -> Steps[None]:
    """An object with a name and arguments, in any order and among other keys."""
    name, begun, early = None, False, ""
    yield from cur.expect("{")
    while not (closed := bool((yield from cur.follow(tags("}"))))):
        if begun:
            cur.mark(cur.position)
        key = yield from text_value(cur)
        yield from cur.expect(":")
        if key in NAME_KEYS and name is None:
            name = yield from text_value(cur)
            if not name or (known is not None and name not in known):
                raise Mismatch
            if early:
                Call(cur, name)(early)
                begun = True
        elif key in ARGUMENT_KEYS and name is not None and not begun:
            yield from json_arguments(cur, Call(cur, name))
            begun = True
        elif key in ARGUMENT_KEYS and not begun:
            held: list[str] = []
            yield from json_arguments(cur, limited(held, HELD))
            early = "".join(held)
        else:
            yield from value(cur, LITERALS, limited([], HELD))
        if begun:
            cur.unmark()
        if not (yield from cur.follow(tags(","))):
            closed = bool((yield from cur.follow(tags("}"))))
            break
    if begun:
        return  # models forget the last brace
    if name is None or not closed or known is not None:
        raise Mismatch
    Call(cur, name)("{}")


def json_arguments(cur: Cursor, emit: Callable[[str], None]) -> Steps[None]:
    """An object; or a string that holds one, as OpenAI's API writes it; or null."""
    if (yield from cur.follow(tags(RAW[0]))):
        yield from raw_input(cur, emit)
        return
    yield from cur.space()
    char = yield from cur.peek()
    if char == "{":
        yield from members(cur, LITERALS, emit)
        return
    held: list[str] = []
    yield from value(cur, LITERALS, limited(held, HELD))
    text = "".join(held)
    if text.startswith('"'):
        text = as_json(unquoted(text)) or ""
    if text == "null":
        text = "{}"
    if not text.startswith("{"):
        raise Mismatch
    emit(text)


def raw_input(cur: Cursor, emit: Callable[[str], None]) -> Steps[None]:
    """A text up to its end tag, as the only argument of a custom tool."""
    emit('{"input": "')
    yield from cur.until(tags(RAW[1]), lambda text: emit(quoted(text)[1:-1]))
    emit('"}')


def text_value(cur: Cursor) -> Steps[str]:
    """A short quoted string."""
    quote = yield from cur.follow(QUOTES)
    if not quote:
        raise Mismatch
    held: list[str] = []
    yield from string(cur, quote, limited(held, 2 * LIMIT))
    return unquoted("".join(held))


def unquoted(text: str) -> str:
    """The text of a JSON string. Raises Mismatch if it has unpaired surrogates."""
    plain: str = json.loads(text)
    try:
        plain.encode()
    except UnicodeEncodeError as error:
        raise Mismatch from error
    return plain


def limited(held: list[str], limit: int) -> Callable[[str], None]:
    """Gathers fragments in ``held``. Raises Mismatch when they are longer than ``limit`` together."""
    size = 0

    def add(fragment: str) -> None:
        nonlocal size
        size += len(fragment)
        if size > limit:
            raise Mismatch
        held.append(fragment)

    return add


def named_call(
    separators: tuple[str, ...] = (),
    syntax: Syntax = LITERALS,
    id_tag: str = "",
    identity: Callable[[str], tuple[str, str | None]] = lambda name: (name, None),
) -> CallReader:
    """A name, any of ``separators``, and an object. ``id_tag``: comes before an id.
    ``identity``: what is in the name."""

    def read(cur: Cursor, toolbox: Toolbox, known: Container[str] | None) -> Steps[None]:
        name, call_id = identity((yield from word(cur, NAME)))
        if not name or (known is not None and name not in known):
            raise Mismatch
        if id_tag and (yield from cur.follow(tags(id_tag))):
            call_id = yield from word(cur, IDENTIFIER)
        if separators:
            while (yield from cur.follow(tags(*separators))):
                pass
        if (yield from cur.follow(tags(RAW[0]))):
            yield from raw_input(cur, Call(cur, name, call_id))
        else:
            yield from members(cur, syntax, Call(cur, name, call_id))

    return read


def listed_or_named_call(separators: tuple[str, ...], id_tag: str) -> CallReader:
    """Mistral's two forms: objects in a list, or a name in front of the arguments."""
    named = named_call(separators, id_tag=id_tag)

    def read(cur: Cursor, toolbox: Toolbox, known: Container[str] | None) -> Steps[None]:
        yield from cur.space()
        reader = json_call if (yield from cur.peek()) == "{" else named
        yield from reader(cur, toolbox, known)

    return read


def word(cur: Cursor, characters: re.Pattern[str]) -> Steps[str]:
    """Step over a word. Raises Mismatch if there is none."""
    yield from cur.space()
    text = yield from cur.run(characters)
    if not text:
        raise Mismatch
    cur.at += len(text)
    return text


def numbered(name: str) -> tuple[str, str]:
    """Kimi's ``functions.NAME:INDEX``, which is the call's id, too."""
    bare, _, index = name.removeprefix("functions.").rpartition(":")
    return (bare, name) if bare and index.isdecimal() else (name.removeprefix("functions."), name)


def python_call(cur: Cursor, toolbox: Toolbox, known: Container[str] | None) -> Steps[None]:
    """``name(key=value, ...)`` with literals as values."""
    name = yield from word(cur, NAME)
    if known is not None and name not in known:
        raise Mismatch
    yield from cur.expect("(")
    call = Call(cur, name)
    more = True
    while not (yield from cur.follow(tags(")"))):
        if not more:
            raise Mismatch
        if call.begun:
            cur.mark(cur.position)
        key = yield from word(cur, IDENTIFIER)
        yield from cur.expect("=")
        cur.unmark()
        call((", " if call.begun else "{") + quoted(key) + ": ")
        yield from value(cur, LITERALS, call)
        more = bool((yield from cur.follow(tags(","))))
    call("}" if call.begun else "{}")
