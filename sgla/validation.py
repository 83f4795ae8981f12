"""What is wrong with a value that msgspec refuses, in words for the user: with the place, and with what an
enumeration may be. And which numbers a number may be."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from sgla.errors import ConfigError
from sgla.homes import expanded

_PATH = re.compile(r"(?P<text>.*?)(?: - at `(?P<key>key in )?\$(?P<path>.*)`)?", re.DOTALL)
_REQUIRED = re.compile(r"Object missing required field `(\w+)`")
_GOT = re.compile(r"(?:nvalid (?:enum )?value |, got )(.*)", re.DOTALL)
_KEY = re.compile(r"\[[^]]*\]|[^.[]+")
UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
MOST_SHOWN = 60  # characters of a wrong value
# Kinds that a field may have beside an enumeration.
KINDS: dict[type[inspect.Type], tuple[str, ...]] = {
    inspect.BoolType: ("true", "false"),
    inspect.IntType: ("an integer",),
    inspect.FloatType: ("a number",),
}


class Range(msgspec.Struct, frozen=True):
    """Allowed values of a number. ``open_low``: ``low`` itself is excluded."""

    low: float
    high: float | None = None
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < math.inf if self.high is None else value <= self.high)

    def __str__(self) -> str:
        low = f"greater than {self.low}" if self.open_low else f"at least {self.low}"
        if self.high is None:
            return low
        return f"{low} and at most {self.high}" if self.open_low else f"between {self.low} and {self.high}"


def fault(error: msgspec.ValidationError, kind: Any = Any) -> tuple[str, str]:
    """Where in a value of type ``kind`` the error is (``tools[0].type``; "" for the value itself), and what
    to say of it, which begins with that place."""
    match = _PATH.fullmatch(str(error))
    assert match is not None
    path = (match["path"] or "").lstrip(".")
    text = match["text"].replace("`", "").replace(" | null", "")
    missing = _REQUIRED.match(match["text"])
    if missing:
        path = f"{path}.{missing[1]}".lstrip(".")
    listed = " or ".join(", ".join(valid(kind, path)).rsplit(", ", 1))
    if missing:
        return path, f"{path} is required" + (f": {listed}" if listed else "")
    if listed:
        got = _GOT.search(text)
        return path, f"{path} must be {listed}" + (f", got {got[1][:MOST_SHOWN]}" if got else "")
    reason = text[:1].lower() + text[1:]
    return path, f"{path}: {reason}" if path else reason


def root(path: str) -> str:
    """The field that a path begins with."""
    return re.split(r"[.\[]", path)[0]


def valid(kind: Any, path: str) -> list[str]:
    """What an enumeration at ``path`` may be; nothing for a field that is none."""
    nodes = list(_alternatives(_described(kind)))
    for key in _KEY.findall(path):
        nodes = [leaf for node in nodes for inner in _inside(node, key) for leaf in _alternatives(inner)]
    values = [str(value) for node in nodes if isinstance(node, inspect.LiteralType) for value in node.values]
    kinds = [word for node in nodes for word in KINDS.get(type(node), ())]
    return list(dict.fromkeys(kinds + values)) if values else []


@cache
def _described(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _alternatives(node: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(node, inspect.UnionType):
        for each in node.types:
            yield from _alternatives(each)
    elif isinstance(node, inspect.Metadata):
        yield from _alternatives(node.type)
    else:
        yield node


def _inside(node: inspect.Type, key: str) -> Iterator[inspect.Type]:
    """What stands at ``key`` of a value of this type."""
    if isinstance(node, inspect.ListType) and key.startswith("["):
        yield node.item_type
    elif isinstance(node, inspect.DictType) and key == "[...]":
        yield node.value_type
    elif isinstance(node, inspect.StructType):
        if key == node.tag_field:
            yield inspect.LiteralType((node.tag,))
        yield from (field.type for field in node.fields if field.encode_name == key)


def parse_bytes(text: str) -> int:
    """``"512M"``, ``"2GiB"``, ``"1.5g"``, ``"4096"`` -> bytes; a unit is a power of 1024.
    Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None:
        raise ValueError(f"'{text}' is no size; write 512M, 2G or a number of bytes")
    return int(float(match[1]) * (1 << UNITS[match[2]]))


def folder_and_size(setting: str) -> tuple[Path, int]:
    """Of ``--kv-disk PATH:BYTES``. Raises ConfigError."""
    path, _, size = setting.rpartition(":")
    try:
        if path:
            return expanded(path), parse_bytes(size)
    except ValueError:
        pass
    raise ConfigError(
        f"--kv-disk takes PATH:BYTES, such as /var/cache/sgla:100G, got {setting[:99]!r}", param="kv_disk"
    )
