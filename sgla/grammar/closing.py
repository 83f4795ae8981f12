"""Objects that have the properties which their schema declares, and no others.

A schema with ``properties`` says nothing of further ones, so a model may invent them. ``close`` adds
``additionalProperties: false`` wherever a schema declares properties and says nothing of others itself: every
document of the result fits the schema. What holds for one document together (``allOf``, a reference with
something beside it) is closed together; each branch of ``anyOf`` is closed by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sgla.grammar.logic import ANNOTATIONS, DEPTH, Find, Json, Object
from sgla.grammar.references import COMBINED, Together

SAYS_IT = ("additionalProperties", "unevaluatedProperties")
MAPS = ("$defs", "definitions", "patternProperties", "properties")
INSIDE = ("additionalItems", "additionalProperties", "items")


def close(schema: Json) -> Json:
    """For a whole document, after ``schema.adapt``."""
    return _Closer(schema).document() if isinstance(schema, dict) else schema


@dataclass(frozen=True)
class Declared:
    """By all schemas that hold for one document: ``names`` and ``patterns`` of properties. ``whether`` there
    is a list of properties; ``open``: one of them says itself what else there may be, or is not known."""

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    whether: bool = False
    open: bool = False

    def __or__(self, other: Declared) -> Declared:
        return Declared(
            self.names | other.names,
            self.patterns | other.patterns,
            self.whether or other.whether,
            self.open or other.open,
        )


class _Closer:
    def __init__(self, root: Object) -> None:
        self._root = root
        self._find = Find(root)
        self._shared: set[str] = set()  # references with something beside them: their targets stay open
        self._together = Together(self._find, _declared, Declared(), Declared(open=True))

    def document(self) -> Json:
        self._look(self._root, beside=False)
        return self._closed(self._root, own_ref="#")

    # which targets stay open

    def _look(self, schema: Json, beside: bool) -> None:
        """``beside``: something else holds for the same document."""
        if not isinstance(schema, dict):
            return
        ref = schema.get("$ref")
        alone = not beside and not _says_more(schema, "$ref")
        if isinstance(ref, str) and not alone:
            self._share(ref, DEPTH)
        parts = schema.get("allOf", ())
        for part in parts:
            self._look(part, beside or len(parts) > 1 or _says_more(schema, "allOf"))
        for key in ("anyOf", "oneOf"):
            for branch in schema.get(key, ()):
                self._look(branch, beside or _says_more(schema, key))
        for inner in _inner(schema):
            self._look(inner, beside=False)

    def _share(self, ref: str, depth: int) -> None:
        if ref not in self._shared and depth > 0:
            self._shared.add(ref)
            self._share_in(self._find(ref), depth - 1)

    def _share_in(self, schema: Json, depth: int) -> None:
        """A target that stays open is made of targets that do."""
        if not isinstance(schema, dict) or depth <= 0:
            return
        if isinstance(schema.get("$ref"), str):
            self._share(schema["$ref"], depth)
        for key in COMBINED:
            for each in schema.get(key, ()):
                self._share_in(each, depth - 1)

    # closing

    def _closed(self, schema: Json, around: Declared | None = None, own_ref: str = "") -> Json:
        """``around``: what holds for the same document. ``own_ref``: by which others refer to this schema."""
        if not isinstance(schema, dict):
            return schema
        if own_ref in self._shared:
            return self._inside(schema)
        if set(schema) - ANNOTATIONS == {"allOf"} and len(schema["allOf"]) == 1:
            return self._inside(schema, but="allOf") | {"allOf": [self._closed(schema["allOf"][0], around)]}
        if "anyOf" in schema and "oneOf" not in schema:
            outer = self._together.of(schema, but="anyOf") | (around or Declared())
            branches = [self._closed(branch, outer) for branch in schema["anyOf"]]
            return self._inside(schema, but="anyOf") | {"anyOf": branches}
        ref = schema.get("$ref")
        if ref is not None and not _says_more(schema, "$ref") and (around is None or around == Declared()):
            inside = self._inside(schema)
            return (
                inside
                if ref not in self._shared
                else self._closed_together(inside, self._together.of(schema))
            )
        whole = self._together.of(schema) | (around or Declared())
        if whole.open or not whole.whether or not _may_be_object(schema):
            return self._inside(schema)
        if any(key in schema for key in ("$ref", "allOf", "oneOf")):
            return self._closed_together(self._inside(schema), whole)
        return _shut(self._inside(schema), whole)

    def _closed_together(self, schema: Object, whole: Declared) -> Json:
        if whole.open or not whole.whether:
            return schema
        return {key: value for key, value in schema.items() if key != "allOf"} | {
            "allOf": [*schema.get("allOf", ()), _shut({}, whole)]
        }

    def _inside(self, schema: Object, but: str = "") -> Object:
        """``schema`` with what lies inside of its documents closed;
        in its parts, too, except those of ``but``."""
        out = dict(schema)
        for key in MAPS:
            if isinstance(out.get(key), dict):
                refs = {name: f"#/{key}/{name}" if schema is self._root else "" for name in out[key]}
                out[key] = {name: self._closed(each, own_ref=refs[name]) for name, each in out[key].items()}
        for key in INSIDE:
            if isinstance(out.get(key), list):
                out[key] = [self._closed(each) for each in out[key]]
            elif key in out:
                out[key] = self._closed(out[key])
        if "prefixItems" in out:
            out["prefixItems"] = [self._closed(each) for each in out["prefixItems"]]
        for key in COMBINED:
            if key in out and key != but:
                out[key] = [self._inside(each) if isinstance(each, dict) else each for each in out[key]]
        return out


def _declared(schema: Object) -> Declared:
    """By its own keywords."""
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    names = [*(properties if isinstance(properties, dict) else ()), *schema.get("required", ())]
    return Declared(
        dict.fromkeys(names),
        dict.fromkeys(patterns if isinstance(patterns, dict) else ()),
        isinstance(properties, dict),
        any(key in schema for key in SAYS_IT),
    )


def _says_more(schema: Object, key: str) -> bool:
    """Whether it says anything about documents beside ``key``."""
    return bool(set(schema) - ANNOTATIONS - {key})


def _inner(schema: Object) -> list[Json]:
    """Schemas of what lies inside of a document, and of definitions."""
    found: list[Json] = []
    for key in MAPS:
        if isinstance(schema.get(key), dict):
            found += schema[key].values()
    for key in (*INSIDE, "prefixItems"):
        value = schema.get(key)
        found += value if isinstance(value, list) else [value]
    return found


def _may_be_object(schema: Object) -> bool:
    kinds = schema.get("type", "object")
    return "object" in (kinds if isinstance(kinds, list) else [kinds])


def _shut(schema: Object, whole: Declared) -> Object:
    """``schema`` for objects that have no other properties than those of ``whole``."""
    properties = dict.fromkeys(whole.names, True) | schema.get("properties", {})
    patterns = dict.fromkeys(whole.patterns, True) | schema.get("patternProperties", {})
    out = schema | {"properties": properties, "additionalProperties": False}
    return out | {"patternProperties": patterns} if patterns else out
