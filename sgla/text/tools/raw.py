"""Strings that are written without quotes: a JSON Schema of one as a regular expression."""

from __future__ import annotations

import re
from typing import Any

from sgla.errors import UnsupportedField
from sgla.grammar.schema import NARROWER, OWN, PATTERNS

ANY = r"(.|\n)"
_DAY = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"  # without the days that not every month has
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
}
TOLD = (OWN | NARROWER.keys() | PATTERNS.keys()) - {
    "unknown"
}  # by the formats that are known, of a string's characters
LENGTHS = ("minLength", "maxLength")
KEYWORDS = ("pattern", "format", *LENGTHS)
COMBINED = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef")


def expression(schema: dict[str, Any], name: str) -> str | None:
    """A regular expression, for the whole text, of what ``schema`` allows; None: anything.

    Raises UnsupportedField that names the keyword of argument ``name`` which cannot be honoured.
    """
    wanted = [key for key in KEYWORDS if key in schema and (key != "format" or schema[key] in TOLD)]
    lengths = [key for key in LENGTHS if key in schema]
    for key in COMBINED:
        if key in schema:
            raise refused(name, key)
    if not wanted:
        return None
    if wanted == lengths:
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        return f"{ANY}{{{least},{'' if most is None else int(most)}}}"
    if len(wanted) > 1:
        raise refused(name, wanted[1], f" beside {wanted[0]!r}")
    found = FORMATS.get(schema["format"]) if wanted == ["format"] else whole(schema["pattern"])
    if found is None:
        raise refused(name, wanted[0], f" {schema[wanted[0]][:80]!r}")
    return found


def refused(name: str, keyword: str, more: str = "") -> UnsupportedField:
    return UnsupportedField(
        f"tools: JSON Schema keyword {keyword!r}{more} of the argument {name!r} is not supported in calls "
        "that must fit their schema, as this model writes them; leave it out, or let the model choose with "
        "tool_choice auto",
        param="tools",
    )


_QUOTED = r"\\.?+|\[(?:[^\]\\]|\\.?+)*+\]?+"  # an escape, or a class
WITHOUT_ANCHORS = re.compile(rf"(?:[^\\\[^$]++|{_QUOTED})*+", re.DOTALL)
WITHOUT_GROUPS = re.compile(rf"(?:[^\\\[()|]++|{_QUOTED})++", re.DOTALL)


def whole(pattern: str) -> str | None:
    """``pattern``, which may be found anywhere in a text, as one for the whole text;
    None for anchors inside of it."""
    begins = pattern.startswith("^")
    body = WITHOUT_ANCHORS.match(pattern, begins)
    assert body is not None  # it may be empty
    rest = pattern[body.end() :]
    if rest not in ("", "$") or ((begins or rest) and splits(body[0])):
        return None
    return f"{'' if begins else ANY + '*'}({body[0]}){'' if rest else ANY + '*'}"


def splits(pattern: str) -> bool:
    """Whether there is a ``|`` outside of all groups."""
    depth = 0
    for mark in WITHOUT_GROUPS.sub("", pattern):
        if mark == "(":
            depth += 1
        elif mark == ")":
            depth -= 1
        elif depth == 0:
            return True
    return False
