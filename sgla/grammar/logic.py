"""What can be told of JSON Schemas without a document:
that two have none in common, and what the opposite of one is.

``find`` gives the target of a ``$ref``, or None.
Formats say nothing here, since validators need not check them.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from sgla.grammar.patterns import PatternError, portable, selecting

Json = Any
Object = dict[str, Any]

TYPES = ("array", "boolean", "null", "number", "object", "string")
KINDS = frozenset([*TYPES, "integer"])  # "number" stands for those that are no integers
STEPS = 200_000
PATTERNS = 200  # steps that a comparison of two patterns counts for
DEPTH = 8  # of references and branches that are followed
VALUES = 64  # listed ones of which an opposite is made, or integers between bounds
PATTERN = 4096  # characters of the pattern for strings that are not listed
LOWER = (("minimum", False), ("exclusiveMinimum", True))
UPPER = (("maximum", False), ("exclusiveMaximum", True))
SIZES = {"string": "Length", "array": "Items", "object": "Properties"}


ROOT = "urn:schema"  # what validators know a whole document by
DATA = ("const", "default", "enum", "example", "examples")
ANNOTATIONS = frozenset(
    [
        *("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description"),
        *("examples", "readOnly", "title", "writeOnly"),
    ]
)


OLD = re.compile(r"/draft-0\d/")  # drafts that ignore what stands beside a reference


class Find:
    """Resolves pointers into ``root``. ``steps``: how many comparisons may yet be made for this document."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self.steps = STEPS
        self.schemas = 0  # that have been rewritten
        self._registry: Any = None
        draft = str(root.get("$schema", "")) if isinstance(root, dict) else ""
        # Of ``items`` are what is now ``prefixItems``.
        self.lists = re.search(r"/draft-0\d/|/2019-09/", draft) is not None

    def validator(self, schema: Json) -> Callable[[Json], bool] | None:
        """Whether a document fits ``schema``, a part of this document; None if that cannot be told."""
        import jsonschema_rs

        whole = schema if schema is self._root else absolute(schema)
        if isinstance(whole, dict) and isinstance(self._root, dict) and "$schema" in self._root:
            whole = {"$schema": self._root["$schema"]} | whole
        try:
            if self._registry is None:
                self._registry = jsonschema_rs.Registry([(ROOT, self._root)])
            return jsonschema_rs.validator_for(whole, registry=self._registry, retriever=nothing).is_valid
        except ValueError:  # a pattern or a reference that it does not know
            return None

    def fits(self, schema: Json, value: Json) -> bool | None:
        """Whether ``value`` does; None if that cannot be told."""
        self.steps -= PATTERNS
        found = self.validator(schema) if self.steps > 0 else None
        return None if found is None else found(value)

    def __call__(self, ref: str) -> Json:
        if ref != "#" and not ref.startswith("#/"):
            return None
        return pointed(self._root, ref[1:])


def pointed(root: Json, pointer: str) -> Json:
    """What a JSON pointer leads to; None if there is nothing."""
    at = root
    for step in pointer.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict):
            at = at.get(step)
        elif isinstance(at, list) and step.isdecimal() and int(step) < len(at):
            at = at[int(step)]
        else:
            return None
    return at


def absolute(schema: Json) -> Json:
    """With references that mean the same outside of its document."""
    if isinstance(schema, list):
        return [absolute(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: value if key in DATA else absolute(value) for key, value in schema.items()}
    ref = out.get("$ref")
    return out | {"$ref": ROOT + ref} if isinstance(ref, str) and ref.startswith("#") else out


def nothing(uri: str) -> None:
    raise ValueError(f"{uri} is not part of the schema")


# no document in common


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
            return all(
                apart(described(value), theirs, find, depth - 1) or find.fits(theirs, value) is False
                for value in mine
            )
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


def few_values(schema: Json, find: Find, depth: int = DEPTH) -> list[Json] | None:
    """Values among which a document must be, more than once or not fitting some of them;
    None if they are not few."""
    find.steps -= 1
    if not isinstance(schema, dict) or find.steps < 0:
        return [] if schema is False else None
    found = list(parts(schema, find, depth))
    values = listed(found)
    if values is not None:
        return values
    for part in found if depth > 0 else ():
        for key in ("anyOf", "oneOf"):
            branches = part.get(key)
            some = (
                [few_values(each, find, depth - 1) for each in branches]
                if isinstance(branches, list)
                else [None]
            )
            if None not in some:
                return [value for each in some for value in each or ()]
    allowed = kinds(found)
    if not allowed <= {"boolean", "null", "integer"}:
        return None
    values = [True, False] * ("boolean" in allowed) + [None] * ("null" in allowed)
    if "integer" in allowed:
        least, most = (
            [math.trunc(part[key]) for part in found for key in keys if _finite(part.get(key))]
            for keys in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
        )
        if not least or not most or min(most) - max(least) > VALUES:
            return None
        values += range(max(least), min(most) + 1)
    return values


def _finite(value: Json) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


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
    if of == "string" and _apart_by_pattern(left, right, find):
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
    properties, patterns = schema.get("properties"), schema.get("patternProperties", {})
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    for pattern, each in patterns.items():
        if (match := matches(pattern, name)) is not False:
            return each if match else True
    return schema.get("additionalProperties", True)


def matches(pattern: str, text: str) -> bool | None:
    """None: it cannot be told."""
    if text.endswith("\n"):  # before which Python's ``$`` matches
        return None
    try:
        return re.search(portable(pattern), text, re.ASCII) is not None
    except (PatternError, re.error):
        return None


def _apart_by_pattern(left: list[Object], right: list[Object], find: Find) -> bool:
    mine, theirs = (
        [part["pattern"] for part in some if isinstance(part.get("pattern"), str)] for some in (left, right)
    )
    for a in mine:
        for b in theirs:
            find.steps -= PATTERNS
            if find.steps > 0 and not together(a, b):
                return True
    return False


@functools.lru_cache(4096)
def together(*patterns: str) -> str:
    """Why the matcher says that a string may match two of these; "" if none can."""
    from llguidance import LLMatcher

    try:
        source = LLMatcher.grammar_from_json_schema(
            {"patternProperties": dict.fromkeys(map(portable, patterns), True)}
        )
    except PatternError as error:
        return str(error)
    return str(LLMatcher.validate_grammar(source))


# in one, not in the other


def differing(own: Json, other: Json, find: Find, depth: int = DEPTH) -> list[Json] | None:
    """Schemas one of which every document of ``own`` fits that does not fit ``other``, and none that does;
    only some such schemas if not all can be said; None if that leaves none."""
    if isinstance(own, dict) and isinstance(other, dict):
        allowed = kinds(list(parts(own, find)))
        other = {"allOf": [_about(part, allowed) for part in parts(other, find)]}
    exact = opposite(other, find)
    if exact is not None:
        return [wrong for wrong in exact if not apart(own, wrong, find)]
    wrongs = [*_telling(own, other, find, depth), *(opposite(other, find, partly=True) or ())]
    return [wrong for wrong in wrongs if not apart(own, wrong, find)] or None


def _about(schema: Object, allowed: frozenset[str]) -> Object:
    """What ``schema`` itself says of documents of these kinds."""
    return {key: value for key, value in schema.items() if key != "allOf" and allowed & ABOUT.get(key, KINDS)}


def _telling(own: Json, other: Json, find: Find, depth: int) -> list[Json]:
    """What no document of both fits."""
    find.steps -= 1
    if not isinstance(own, dict) or not isinstance(other, dict) or depth <= 0 or find.steps < 0:
        return []
    left, right = list(parts(own, find)), list(parts(other, find))
    common = kinds(left) & kinds(right)
    found: list[Json] = []
    if "array" in common and any(apart(_items(a), _items(b), find) for a in left for b in right):
        found.append({"type": "array", "minItems": 1})
    if "object" not in common:
        return found
    names = dict.fromkeys(name for part in left for name in part.get("properties", ()))
    for part in right:
        if part.get("additionalProperties") is False:
            further = [name for name in names if _property(part, name) is False]
            found += [{"type": "object", "required": [name]} for name in further]
    for name in names:
        for a in left:
            for b in right:
                for way in _telling(_property(a, name), _property(b, name), find, depth - 1):
                    found.append({"type": "object", "required": [name], "properties": {name: way}})
    return found


def _items(schema: Object) -> Json:
    """Of every item."""
    items = schema.get("items", True)
    return True if "prefixItems" in schema or isinstance(items, list) else items


# opposites

# Keywords of which no opposite is made. What is in none of these lists forbids nothing.
ASSERTIONS = frozenset(
    [
        *("additionalItems", "additionalProperties", "contains", "dependencies", "dependentRequired"),
        *("dependentSchemas", "if", "items", "maxProperties", "multipleOf", "pattern", "patternProperties"),
        *("prefixItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
        *("$dynamicRef", "$recursiveRef"),
    ]
)
ABOUT = {
    key: frozenset(about)
    for keys, about in (
        (
            (
                "additionalProperties dependencies dependentRequired "
                "dependentSchemas maxProperties minProperties"
            ),
            ["object"],
        ),
        ("patternProperties properties propertyNames required unevaluatedProperties", ["object"]),
        (
            "additionalItems contains items maxItems minItems prefixItems unevaluatedItems uniqueItems",
            ["array"],
        ),
        ("format maxLength minLength pattern", ["string"]),
        ("exclusiveMaximum exclusiveMinimum maximum minimum multipleOf", ["integer", "number"]),
    )
    for key in keys.split()
}  # keyword -> kinds of documents that it says something of
BEYOND = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
# Of which there are some opposites.
SOME = "additionalProperties", "items", "patternProperties", "propertyNames"
LITERAL = re.compile(r"\^[A-Za-z0-9_ -]+\$")
BEYOND_SIZES = {f"{end}{name}": (of, end, name) for of, name in SIZES.items() for end in ("min", "max")}


def opposite(schema: Json, find: Find, depth: int = DEPTH, partly: bool = False) -> list[Json] | None:
    """Schemas one of which every document fits that does not fit ``schema``, and no other;
    None if that cannot be said.

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
    return _any_of((_opposite_of(key, value, schema, inner, partly) for key, value in schema.items()), partly)


Inner = Callable[[Json], "list[Json] | None"]


def _any_of(each: Iterable[list[Json] | None], partly: bool) -> list[Json] | None:
    found: list[Json] = []
    for some in each:
        if some is None and not partly:
            return None
        found += some or []
    return found


def _opposite_of(key: str, value: Json, schema: Object, inner: Inner, partly: bool) -> list[Json] | None:
    """Of one keyword of ``schema``."""
    match key, value:
        case "type", str() | list():
            return _other_types([value] if isinstance(value, str) else value, partly)
        case "const", _:
            return _unlisted([value])
        case "enum", list():
            return _unlisted(value)
        case "pattern", str():
            return _other_pattern(value)
        case "required", list():
            return [{"type": "object", "properties": {name: False}} for name in value]
        case "properties", dict():
            return _any_of((_wrong_property(name, inner(each)) for name, each in value.items()), partly)
        case (("dependencies" | "dependentRequired" | "dependentSchemas"), dict()):
            each = (
                (name, {"required": then} if isinstance(then, list) else then) for name, then in value.items()
            )
            return _any_of(
                (_beside({"type": "object", "required": [name]}, inner(then)) for name, then in each), partly
            )
        case "contains", _ if not {"maxContains", "minContains"} & set(schema):
            wrongs = inner(value)
            return None if wrongs is None else [{"type": "array", "items": _one(wrongs)}]
        case "allOf", list():
            return _any_of(map(inner, value), partly)
        case "anyOf", list():
            return _all_wrong(list(map(inner, value)))
        case "oneOf", list():
            return _all_wrong(list(map(inner, value))) if partly else None
        case "if", _:
            then, other = inner(schema.get("then", True)), inner(schema.get("else", True))
            unmet = [] if other == [] else _all_wrong([inner(value), [_one(other)]]) if other else None
            return _any_of([_beside(value, then), unmet], partly)
        case "not", _:
            return [value]
    if key in SOME and partly:
        return _some_opposite(key, value, schema, inner)
    if key in ASSERTIONS:
        return None
    return _beyond(key, value) if key in BEYOND or key in BEYOND_SIZES else []


def _some_opposite(key: str, value: Json, schema: Object, inner: Inner) -> list[Json] | None:
    """Not one item or property fits, and there is one."""
    if isinstance(value, list) or (key == "items" and "prefixItems" in schema):
        return None
    if key == "patternProperties":
        found: list[Json] = []
        for pattern, each in value.items():
            found += [
                {"type": "object", "minProperties": 1, key: {pattern: wrong}, "additionalProperties": False}
                for wrong in inner(each) or ()
            ]
        return found
    wrongs = inner(value)
    if not wrongs:
        return wrongs
    wrong: Object = {key: _one(wrongs)}
    if key == "items":
        return [{"type": "array", "minItems": 1} | wrong]
    if key == "additionalProperties":
        for known in ("properties", "patternProperties"):
            if known in schema:
                wrong[known] = dict.fromkeys(schema[known], False)
    return [{"type": "object", "minProperties": 1} | wrong]


def _one(schemas: list[Json]) -> Json:
    """What one of them says."""
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas} if schemas else False


def _beside(schema: Json, wrongs: list[Json] | None) -> list[Json] | None:
    return None if wrongs is None else [{"allOf": [schema, wrong]} for wrong in wrongs]


# Patterns of a kind of characters: that strings have none but these, at least one of these, ...
CLASS = r"(\[\^?(?:[^\[\]\\]|\\[^pP])+\]|\\[dDwWsS]|[A-Za-z0-9_ -])"
CLASSES = (
    (re.compile(rf"\^{CLASS}\*\$"), "{}"),
    (re.compile(rf"\^{CLASS}\+\$"), "{}|^$"),
    (re.compile(rf"{CLASS}\+?"), "^{}*$"),
    (re.compile(rf"\^{CLASS}\+?"), "^{}|^$"),
    (re.compile(rf"{CLASS}\+?\$"), "{}$|^$"),
)


def _other_pattern(pattern: str) -> list[Json] | None:
    """For all other strings."""
    for form, other in CLASSES:
        if found := form.fullmatch(pattern):
            return [{"type": "string", "pattern": other.format(_other_class(found[1]))}]
    if LITERAL.fullmatch(pattern):
        return [{"type": "string", "pattern": unlisted_pattern([pattern[1:-1]])}]
    rest = selecting((), (pattern,))
    return None if rest is None else [{"type": "string", "pattern": rest}]


def _other_class(text: str) -> str:
    if text.startswith("\\"):
        return text.swapcase()
    if not text.startswith("["):
        return f"[^{text}]"
    return f"[{text[2:]}" if text.startswith("[^") else f"[^{text[1:]}"


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
        found.append(_one(wrongs))
    return [{"allOf": found}]


def _other_types(types: list[str], partly: bool) -> list[Json] | None:
    others = [t for t in TYPES if t not in types]
    if "integer" in types and "number" in others:  # the other numbers cannot be told
        if not partly:
            return None
        others.remove("number")
    return [{"type": others}] if others else []


def _beyond(key: str, value: Json) -> list[Json] | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):  # a draft 4 flag
        return None
    if key in BEYOND:
        return [{"type": "number", BEYOND[key]: value}]
    of, end, name = BEYOND_SIZES[key]
    if key == "minProperties" and value == 1:
        return [{"const": {}}]
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
