"""What can be told of JSON Schemas without a document: that two have none in common, and what the opposite of one is.

``find`` gives the target of a ``$ref``, or None. Formats say nothing here, since validators need not check them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

Json = Any
Object = dict[str, Any]

TYPES = ("array", "boolean", "null", "number", "object", "string")
KINDS = frozenset([*TYPES, "integer"])  # "number" stands for those that are no integers
STEPS = 20_000
DEPTH = 8  # of references and branches that are followed
VALUES = 64  # listed ones of which an opposite is made
PATTERN = 4096  # characters of the pattern for strings that are not listed
LOWER = (("minimum", False), ("exclusiveMinimum", True))
UPPER = (("maximum", False), ("exclusiveMaximum", True))
SIZES = {"string": "Length", "array": "Items", "object": "Properties"}


class Find:
    """Resolves pointers into ``root``. ``steps``: how many comparisons may yet be made for this document."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self.steps = STEPS

    def __call__(self, ref: str) -> Json:
        if ref != "#" and not ref.startswith("#/"):
            return None
        at = self._root
        for step in ref.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(at, dict):
                at = at.get(step)
            elif isinstance(at, list) and step.isdecimal() and int(step) < len(at):
                at = at[int(step)]
            else:
                return None
        return at


# no document in common -----------------------------------------------------------------------------------------------


def apart(a: Json, b: Json, find: Find, depth: int = DEPTH) -> bool:
    """Whether it is certain that no document fits both."""
    if a is False or b is False:
        return True
    find.steps -= 1
    if not isinstance(a, dict) or not isinstance(b, dict) or depth <= 0 or find.steps < 0:
        return False
    left, right = list(parts(a, find, depth)), list(parts(b, find, depth))
    common = kinds(left) & kinds(right)
    if not common:
        return True
    for some, whole in ((left, b), (right, a)):
        for part in some:
            for key in ("anyOf", "oneOf"):
                branches = part.get(key)
                if isinstance(branches, list) and all(
                    apart(each, whole, find, depth - 1) for each in branches
                ):
                    return True
    values, others = listed(left), listed(right)
    if values is not None and others is not None:
        return not any(same(value, other) for value in values for other in others)
    for mine, theirs in ((values, b), (others, a)):
        if mine is not None:
            return all(apart(described(value), theirs, find, depth - 1) for value in mine)
    return all(_apart_in(kind, left, right, find, depth) for kind in common)


def parts(schema: Object, find: Find, depth: int = DEPTH) -> Iterator[Object]:
    """Schemas that all hold where ``schema`` does. Beside a reference old drafts ignore everything."""
    if "$ref" in schema:
        target = find(schema["$ref"]) if isinstance(schema["$ref"], str) and depth > 0 else None
        if isinstance(target, dict):
            yield from parts(target, find, depth - 1)
        return
    yield schema
    for part in schema.get("allOf") or () if depth > 0 else ():
        if isinstance(part, dict):
            yield from parts(part, find, depth - 1)


def kinds(found: list[Object]) -> frozenset[str]:
    """That a document of all these schemas may be."""
    allowed = KINDS
    for part in found:
        given = part.get("type")
        if isinstance(given, str):
            given = [given]
        if isinstance(given, list):
            allowed &= frozenset([*given, *(("integer",) if "number" in given else ())])
        values = listed([part])
        if values is not None:
            allowed &= frozenset(map(kind, values))
    return allowed


def kind(value: Json) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return {int: "integer", str: "string", list: "array", dict: "object"}[type(value)]


def listed(found: list[Object]) -> list[Json] | None:
    """The values among which a document must be; None if they are not listed."""
    for part in found:
        if "const" in part:
            return [part["const"]]
        if isinstance(part.get("enum"), list):
            return list(part["enum"])
    return None


def same(a: Json, b: Json) -> bool:
    """As JSON has it: 1 is 1.0, but not true."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def described(value: Json) -> Object:
    """A schema of ``value`` by keywords that ``apart`` compares."""
    of = kind(value)
    if of == "object":
        inner = {key: {"const": each} for key, each in value.items()}
        return {"type": of, "properties": inner, "required": list(value), "additionalProperties": False}
    if of in ("integer", "number"):
        return {"type": of, "minimum": value, "maximum": value}
    if of in SIZES:
        return {"type": of, f"min{SIZES[of]}": len(value), f"max{SIZES[of]}": len(value)}
    return {"type": of}


def _apart_in(of: str, left: list[Object], right: list[Object], find: Find, depth: int) -> bool:
    """For documents that are ``of`` this kind."""
    if of in ("integer", "number"):
        return _above(left, right) or _above(right, left)
    if of == "object" and _apart_by_name(left, right, find, depth):
        return True
    if of not in SIZES:
        return False
    (low, high), (other_low, other_high) = _sizes(SIZES[of], left), _sizes(SIZES[of], right)
    return low > other_high or other_low > high


def _above(left: list[Object], right: list[Object]) -> bool:
    low, open_low = max(_bounds(left, LOWER, -math.inf))
    high, open_high = min((value, not strict) for value, strict in _bounds(right, UPPER, math.inf))
    return low > high or (low == high and (open_low or not open_high))


def _bounds(found: list[Object], keys: tuple[tuple[str, bool], ...], none: float) -> list[tuple[float, bool]]:
    given = [(part.get(key), strict) for part in found for key, strict in keys]
    return [
        (none, False),
        *((v, s) for v, s in given if isinstance(v, (int, float)) and not isinstance(v, bool)),
    ]


def _sizes(name: str, found: list[Object]) -> tuple[float, float]:
    lows = [part[f"min{name}"] for part in found if isinstance(part.get(f"min{name}"), (int, float))]
    highs = [part[f"max{name}"] for part in found if isinstance(part.get(f"max{name}"), (int, float))]
    return max(lows, default=0), min(highs, default=math.inf)


def _apart_by_name(left: list[Object], right: list[Object], find: Find, depth: int) -> bool:
    """Whether a property that there must be cannot fit both."""
    names = {name for part in (*left, *right) for name in part.get("required") or () if isinstance(name, str)}
    return any(
        apart(_property(a, name), _property(b, name), find, depth - 1)
        for name in names
        for a in left
        for b in right
    )


def _property(schema: Object, name: str) -> Json:
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


# opposites -----------------------------------------------------------------------------------------------------------

# Keywords of which no opposite is made. What is in none of these lists forbids nothing.
ASSERTIONS = frozenset(
    [
        *("additionalItems", "additionalProperties", "contains", "dependencies", "dependentRequired"),
        *("dependentSchemas", "if", "items", "maxProperties", "multipleOf", "pattern", "patternProperties"),
        *("prefixItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
        *("$dynamicRef", "$recursiveRef"),
    ]
)
BEYOND = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
BEYOND_SIZES = {f"{end}{name}": (of, end, name) for of, name in SIZES.items() for end in ("min", "max")}


def opposite(schema: Json, find: Find, depth: int = DEPTH, partly: bool = False) -> list[Json] | None:
    """Schemas one of which every document fits that does not fit ``schema``, and no other; None if that cannot be said.

    ``partly``: not every such document need fit one, so keywords without an opposite are left out.
    """
    if isinstance(schema, bool):
        return [] if schema else [True]
    if not isinstance(schema, dict) or depth <= 0:
        return None
    if "$ref" in schema:
        target = find(schema["$ref"]) if isinstance(schema["$ref"], str) else None
        return opposite(target, find, depth - 1, partly)
    inner = partial(opposite, find=find, depth=depth - 1, partly=partly)
    return _any_of((_opposite_of(key, value, inner, partly) for key, value in schema.items()), partly)


Inner = Callable[[Json], "list[Json] | None"]


def _any_of(each: Iterable[list[Json] | None], partly: bool) -> list[Json] | None:
    found: list[Json] = []
    for some in each:
        if some is None and not partly:
            return None
        found += some or []
    return found


def _opposite_of(key: str, value: Json, inner: Inner, partly: bool) -> list[Json] | None:
    """Of one keyword."""
    match key, value:
        case "type", str() | list():
            return _other_types([value] if isinstance(value, str) else value)
        case "const", _:
            return _unlisted([value])
        case "enum", list():
            return _unlisted(value)
        case "required", list():
            return [{"type": "object", "properties": {name: False}} for name in value]
        case "properties", dict():
            return _any_of((_wrong_property(name, inner(each)) for name, each in value.items()), partly)
        case "allOf", list():
            return _any_of(map(inner, value), partly)
        case "anyOf", list():
            return _all_wrong(list(map(inner, value)))
        case "oneOf", list():
            return _all_wrong(list(map(inner, value))) if partly else None
        case "not", _:
            return [value]
    if key in ASSERTIONS:
        return None
    return _beyond(key, value) if key in BEYOND or key in BEYOND_SIZES else []


def _wrong_property(name: str, wrongs: list[Json] | None) -> list[Json] | None:
    if wrongs is None:
        return None
    return [{"type": "object", "required": [name], "properties": {name: wrong}} for wrong in wrongs]


def _all_wrong(each: list[list[Json] | None]) -> list[Json] | None:
    found: list[Json] = []
    for wrongs in each:
        if wrongs is None:
            return None
        if not wrongs:
            return []
        found.append(wrongs[0] if len(wrongs) == 1 else {"anyOf": wrongs})
    return [{"allOf": found}]


def _other_types(types: list[str]) -> list[Json] | None:
    if "integer" in types and "number" not in types:  # the other numbers cannot be told
        return None
    others = [t for t in TYPES if t not in types]
    return [{"type": others}] if others else []


def _beyond(key: str, value: Json) -> list[Json] | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):  # a draft 4 flag
        return None
    if key in BEYOND:
        return [{"type": "number", BEYOND[key]: value}]
    of, end, name = BEYOND_SIZES[key]
    if of == "object":
        return [{"const": {}}] if value == 1 and end == "min" else None
    if end == "max":
        return [{"type": of, f"min{name}": int(value) + 1}]
    return [{"type": of, f"max{name}": int(value) - 1}] if value >= 1 else []


def _unlisted(values: list[Json]) -> list[Json] | None:
    """Any other value."""
    by: dict[str, list[Json]] = {}
    for value in values:
        of = kind(value)
        by.setdefault("number" if of == "integer" else of, []).append(value)
    if len(values) > VALUES or "array" in by or "object" in by:
        return None
    free = [t for t in TYPES if t not in by]
    found: list[Json] = [{"type": free}]
    if numbers := sorted(set(by.get("number", ()))):
        for low, high in zip([None, *numbers], [*numbers, None]):
            ends = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            found.append({"type": "number"} | {key: end for key, end in ends.items() if end is not None})
    if "boolean" in by and len(set(by["boolean"])) == 1:
        found.append({"const": not by["boolean"][0]})
    if "string" in by:
        found.append({"type": "string", "pattern": unlisted_pattern(by["string"])})
    return found if "string" not in by or len(found[-1]["pattern"]) <= PATTERN else None


def unlisted_pattern(texts: list[str]) -> str:
    """A regular expression for all strings but ``texts``."""
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"^({_unlisted_rest(trie)})$"


def _unlisted_rest(node: dict[str, Any]) -> str:
    """What may follow a prefix."""
    nexts = [char for char in node if char]
    ways = [] if "" in node else [""]
    if nexts:
        ways.append(f"[^{''.join(map(_in_class, nexts))}]" + r"[\s\S]*")
        ways += [f"{_in_class(char)}({_unlisted_rest(node[char])})" for char in nexts]
    else:
        ways.append(r"[\s\S]+" if "" in node else r"[\s\S]*")
    return "|".join(ways)


def _in_class(char: str) -> str:
    """As a character inside or outside of a class."""
    return f"\\{char}" if char in r"\.+*?()|[]{}^$-&~#/" else char
