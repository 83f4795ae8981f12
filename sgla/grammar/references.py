"""References within a schema, in a form that rewriting leaves alone:
all lead to the document or to one of its definitions.

``settle`` resolves identifiers, anchors and pointers to anywhere; what they do not lead to is left as it is.
``unroll`` is for the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, Self, TypeVar
from urllib.parse import unquote, urldefrag, urljoin

from sgla.grammar.logic import ANNOTATIONS, OLD, Find, Json, Object, pointed

ONE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SAFE = re.compile(r"#(/(\$defs|definitions)/[A-Za-z0-9_.-]+)?")
IDLE = ANNOTATIONS - {"$defs", "$schema", "definitions"}
COMBINED = ("allOf", "anyOf", "oneOf")
DEFINITIONS = ("$defs", "definitions")
REFERENCES = ("$dynamicRef", "$recursiveRef", "$ref")


def settle(root: Json) -> Json:
    """The same schema. Where an old draft ignores what stands beside a reference, that is left out."""
    return _Settler(root).document() if isinstance(root, dict) else root


def children(schema: Object) -> Iterator[tuple[str, Json]]:
    """Its subschemas, with their pointers from it."""
    for key, value in schema.items():
        if (key in MAPS or key == "dependencies") and isinstance(value, dict):
            yield from ((f"{key}/{name}", item) for name, item in value.items() if not isinstance(item, list))
        elif key in (*ONE, *LISTS):
            if isinstance(value, list):
                yield from ((f"{key}/{i}", item) for i, item in enumerate(value))
            else:
                yield key, value


def mapped(schema: Object, change: Callable[[Json], Json]) -> Object:
    """With changed subschemas."""

    def value_of(key: str, value: Json) -> Json:
        if (key in MAPS or key == "dependencies") and isinstance(value, dict):
            return {name: item if isinstance(item, list) else change(item) for name, item in value.items()}
        if key in ONE or key in LISTS:
            return [change(item) for item in value] if isinstance(value, list) else change(value)
        return value

    return {key: value_of(key, value) for key, value in schema.items()}


class Addable(Protocol):
    def __or__(self, other: Self, /) -> Self: ...


T = TypeVar("T", bound=Addable)


class Together(Generic[T]):
    """What all schemas say that hold for one document: a schema, what it refers to, and the parts of both.

    ``own``: what a schema says by its own keywords; ``nothing``: what says nothing; ``unknown``: what a
    reference says that leads nowhere.
    """

    def __init__(self, find: Find, own: Callable[[Object], T], nothing: T, unknown: T) -> None:
        self._find = find
        self._own = own
        self._nothing = nothing
        self._unknown = unknown
        self._targets: dict[str, T] = {}

    def of(self, schema: Json, but: str = "") -> T:
        """By ``schema`` and what it is made of, except its keyword ``but``."""
        if not isinstance(schema, dict):
            return self._nothing
        found = self._own(schema)
        if isinstance(schema.get("$ref"), str):
            found |= self._target(schema["$ref"])
        for key in COMBINED:
            if key != but:
                for part in schema.get(key, ()):
                    found |= self.of(part)
        return found

    def _target(self, ref: str) -> T:
        if ref not in self._targets:
            self._targets[ref] = self._nothing  # for references to itself
            target = self._find(ref)
            self._targets[ref] = self._unknown if target is None else self.of(target)
        return self._targets[ref]


class _Settler:
    def __init__(self, root: Object) -> None:
        self._root = root
        self._old = OLD.search(str(root.get("$schema", ""))) is not None
        self._bases: dict[str, Object] = {}  # by their URIs
        self._anchors: dict[tuple[str, str], Json] = {}
        self._moving: dict[str, list[Json]] = {}  # dynamic anchors
        self._names: dict[int, str] = {}  # of definitions that are made here, by what they are made of
        self._made: Object = {}
        self._index(root, "")

    def document(self) -> Json:
        out = self._settled(self._root, "")
        return out | {"$defs": out.get("$defs", {}) | self._made} if self._made else out

    def _index(self, schema: Json, base: str) -> None:
        if not isinstance(schema, dict):
            return
        base = self._base(schema, base)
        self._bases.setdefault(base, schema)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(key), str):
                self._anchors.setdefault((base, schema[key]), schema)
        if isinstance(schema.get("$dynamicAnchor"), str):
            self._moving.setdefault(schema["$dynamicAnchor"], []).append(schema)
        for key in ("$id", "id"):
            if isinstance(schema.get(key), str) and schema[key].startswith("#"):
                self._anchors.setdefault((base, schema[key][1:]), schema)
        for _, item in children(schema):
            self._index(item, base)

    def _base(self, schema: Object, base: str) -> str:
        """The URI that references in ``schema`` are relative to."""
        given = schema.get("$id", schema.get("id") if self._old else None)
        if not isinstance(given, str) or given.startswith("#") or ("$ref" in schema and self._old):
            return base
        return urldefrag(urljoin(base, given)).url

    def _settled(self, schema: Json, base: str) -> Json:
        if not isinstance(schema, dict):
            return schema
        base = self._base(schema, base)
        if self._old and isinstance(schema.get("$ref"), str):
            schema = {key: value for key, value in schema.items() if key in ANNOTATIONS or key == "$ref"}
        out = mapped(schema, lambda item: self._settled(item, base))
        for key in ("$anchor", "$dynamicAnchor", "$id", "id"):
            if isinstance(out.get(key), str):
                del out[key]
        for key in REFERENCES:
            if isinstance(out.get(key), str):
                place = self._place(key, out[key], base)
                if place is not None and (key == "$ref" or "$ref" not in out):
                    out = {"$ref" if k == key else k: place if k == key else v for k, v in out.items()}
        return out

    def _place(self, key: str, ref: str, base: str) -> str | None:
        """Where in the new document it leads; None if that is not known."""
        if (
            key == "$recursiveRef"
            and self._root.get("$recursiveAnchor") is True
            and base != self._base(self._root, "")
        ):
            return None
        if key == "$dynamicRef" and len(self._moving.get(ref[1:], ())) != 1:
            return None
        uri, fragment = urldefrag(urljoin(base, ref))
        home = self._bases.get(uri)
        if home is None:
            return None
        fragment = unquote(fragment)
        target, at = self._target(uri, home, fragment), home
        if target is None and home is not self._root and fragment.startswith("/"):
            target, uri, at = pointed(self._root, fragment), "", self._root
        if target is None:
            return None
        if target is self._root:
            return "#"
        if at is self._root and SAFE.fullmatch("#" + fragment):
            return "#" + fragment
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = self._free_name(fragment or uri)
            self._made[name] = True
            self._made[name] = self._settled(target, uri)
        return f"#/$defs/{name}"

    def _target(self, uri: str, home: Object, fragment: str) -> Json:
        if not fragment:
            return home
        return pointed(home, fragment) if fragment.startswith("/") else self._anchors.get((uri, fragment))

    def _free_name(self, text: str) -> str:
        name = re.sub(r"[^A-Za-z0-9_.-]+", ".", text).strip(".") or "definition"
        taken: Any = self._root.get("$defs", {})
        while name in taken or name in self._made:
            name += "_"
        return name


def unroll(root: Json) -> Json:
    """The same schema, in which nothing stands beside a reference to what contains that reference: the
    matcher resolves those alone. Of each such place a definition is made."""
    return _Unroller(root).document() if isinstance(root, dict) else root


class _Unroller:
    def __init__(self, root: Object) -> None:
        self._root = root
        self._find = Find(root)
        self._beyond: dict[str, set[str]] = {}  # reference -> those in its target
        waiting = list(references(root))
        while waiting:
            ref = waiting.pop()
            if ref not in self._beyond:
                self._beyond[ref] = set(references(self._find(ref)))
                waiting += self._beyond[ref]
        self._circular = {ref for ref in self._beyond if self._leads_to_itself(ref)}
        self._names: dict[str, str] = {}
        self._made: Object = {}

    def document(self) -> Json:
        if not self._circular:
            return self._root
        out = mapped(self._root, self._unrolled)
        if self._joins(self._root):
            out = self._opened(self._root) | {key: out[key] for key in DEFINITIONS if key in out}
        return out | {"$defs": out.get("$defs", {}) | self._made} if self._made else out

    def _leads_to_itself(self, ref: str) -> bool:
        seen: set[str] = set()
        waiting = [ref]
        while waiting:
            new = self._beyond[waiting.pop()] - seen
            seen |= new
            waiting += new
        return ref in seen

    def _unrolled(self, schema: Json) -> Json:
        if not isinstance(schema, dict):
            return schema
        if not self._joins(schema):
            whole = self._expanded(schema, ()) if "allOf" in schema else schema
            return mapped(whole, self._unrolled) if isinstance(whole, dict) else whole
        key = json.dumps(schema)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"joined.{len(self._names)}"
            self._made[name] = self._opened(schema)
        return {"$ref": f"#/$defs/{name}"}

    def _joins(self, schema: Object) -> bool:
        """Whether anything else holds where a circular reference does."""
        said = set(schema) - ANNOTATIONS
        if said == {"allOf"} and len(schema["allOf"]) == 1 and isinstance(schema["allOf"][0], dict):
            return self._joins(schema["allOf"][0])
        return self._refers(schema) and said not in ({"$ref"}, {"anyOf"}, {"oneOf"})

    def _refers(self, schema: Json) -> bool:
        return isinstance(schema, dict) and (
            schema.get("$ref") in self._circular
            or any(self._refers(part) for key in COMBINED for part in schema.get(key, ()))
        )

    def _opened(self, schema: Object) -> Json:
        """With the targets of circular references in their places."""
        out = self._expanded(schema, ())
        return self._inside(out) if isinstance(out, dict) else out

    def _expanded(self, schema: Json, within: tuple[str, ...]) -> Json:
        if not isinstance(schema, dict):
            return schema
        own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf", *DEFINITIONS)}
        for key in ("anyOf", "oneOf"):
            if key in own:
                own[key] = [self._expanded(part, within) for part in own[key]]
        found: list[Json] = []
        for key in schema:
            if key == "$ref" and schema[key] in self._circular and schema[key] not in within:
                found.append(self._expanded(self._find(schema[key]), (*within, schema[key])))
            elif key == "$ref":
                found.append({"$ref": schema[key]})
            elif key == "allOf":
                found += [self._expanded(part, within) for part in schema[key]]
            elif key in own and own not in found:
                found.append(own)
        return joined(found)

    def _inside(self, schema: Json) -> Json:
        """The matcher joins ``schema`` with others itself, so it is no reference."""
        if not isinstance(schema, dict):
            return schema
        return {
            key: [self._inside(part) for part in value]
            if key in COMBINED
            else mapped({key: value}, self._unrolled)[key]
            for key, value in schema.items()
        }


def joined(schemas: list[Json]) -> Json:
    """What all of them say, as far as possible by one schema without ``allOf``."""
    apart: list[Json] = []
    for schema in schemas:
        parts = schema["allOf"] if isinstance(schema, dict) and set(schema) == {"allOf"} else [schema]
        for part in parts:
            if apart and (whole := _joined(apart[-1], part)) is not None:
                apart[-1] = whole
            else:
                apart.append(part)
    return apart[0] if len(apart) == 1 else {"allOf": apart}


def _joined(a: Json, b: Json) -> Object | None:
    if not isinstance(a, dict) or not isinstance(b, dict) or "$ref" in a or "$ref" in b:
        return None
    out = b | a
    if isinstance(a.get("required"), list) and isinstance(b.get("required"), list):
        out["required"] = list(dict.fromkeys([*a["required"], *b["required"]]))
    if {"items", "prefixItems"} <= set(a) | set(b) or isinstance(out.get("items"), list):
        return None
    for key in ("items", "additionalProperties"):
        if key in a and key in b:
            out[key] = all_of([a[key], b[key]])
    names = dict.fromkeys([*a.get("properties", ()), *b.get("properties", ())])
    if names:
        found = {name: [_further(part, name) for part in (a, b)] for name in names}
        if any(None in each for each in found.values()):
            return None
        out["properties"] = {name: all_of(each) for name, each in found.items()}
    if "patternProperties" in a or "patternProperties" in b:
        for one, other in ((a, b), (b, a)):
            if "patternProperties" in one and other.get("additionalProperties", True) not in (True, {}):
                return None
    said = {*ANNOTATIONS, "required", "items", "additionalProperties", "properties"}
    return out if all(a[key] == b[key] for key in set(a) & set(b) - said) else None


def _further(schema: Object, name: str) -> Json:
    """What it says of a property; None if that is not sure."""
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    return None if "patternProperties" in schema else schema.get("additionalProperties", True)


def all_of(schemas: list[Json]) -> Json:
    """What all of them say."""
    said = [each for each in schemas if each is not True and each != {}]
    different = [each for i, each in enumerate(said) if each not in said[:i]]
    return True if not different else different[0] if len(different) == 1 else {"allOf": different}


def references(schema: Json) -> Iterator[str]:
    """All in a schema, except those in definitions."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for at, item in children(schema):
            if not at.startswith(DEFINITIONS):
                yield from references(item)


def reached(root: Json) -> list[str]:
    """All references that a document leads to, each once, with those in their targets behind them."""
    find, seen, waiting = Find(root), dict[str, None](), list(references(root))
    while waiting:
        ref = waiting.pop()
        if ref not in seen:
            seen[ref] = None
            waiting += references(find(ref))
    return list(seen)


def endless(root: Json, inside: bool = False) -> bool:
    """Whether all that a document says is that it is what its references lead to, which is itself; with what
    its values must have ``inside``, whether each of these must have another one."""
    find, refs, ended = Find(root), reached(root)[::-1], set[str]()

    def ends(schema: Json) -> bool:
        if not isinstance(schema, dict):
            return True
        if isinstance(schema.get("$ref"), str) and schema["$ref"] not in ended:
            return False
        choices = (schema[key] for key in ("anyOf", "oneOf") if schema.get(key))
        every = [*schema.get("allOf", ()), *(wanted(schema) if inside else ())]
        return all(map(ends, every)) and all(any(map(ends, each)) for each in choices)

    known = -1
    while known < len(ended):
        known = len(ended)
        for ref in refs:
            if ref not in ended and ends(find(ref)):
                ended.add(ref)
    return not ends(root)


def wanted(schema: dict[str, Any]) -> Iterator[Json]:
    """The schemas of what each value must have inside, as far as its own keywords say so."""
    if "enum" in schema or "const" in schema:
        return
    kind = schema.get("type")
    if kind in ("object", ["object"]):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if "patternProperties" not in schema:
            yield from (known.get(name, others) for name in schema.get("required", ()))
            if not known and schema.get("minProperties", 0) > 0:
                yield others
    elif kind in ("array", ["array"]):
        least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
        rest = schema.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems", True)
        yield from (item for i, item in enumerate(first) if i < least)
        if least > len(first):
            yield rest


def bare(root: Json) -> Json:
    """Without descriptions, and without definitions that nothing refers to."""
    if not isinstance(root, dict):
        return root
    seen = reached(root)
    there = set(seen)
    used = {
        key: {name: each for name, each in root[key].items() if f"#/{key}/{name}" in there}
        for key in DEFINITIONS
        if isinstance(root.get(key), dict) and all(SAFE.fullmatch(ref) for ref in seen if ref.startswith("#"))
    }
    return _bare(root | used)


def _bare(schema: Json) -> Json:
    if not isinstance(schema, dict):
        return schema
    return mapped({key: value for key, value in schema.items() if key not in IDLE and key[:2] != "x-"}, _bare)
