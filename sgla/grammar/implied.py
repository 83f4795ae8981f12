"""Types that a schema means and does not say.

Keywords constrain documents of their own type alone, so ``{"properties": ...}`` allows any string. ``imply``
adds ``type`` wherever a schema has such keywords and nothing that holds for the same document has ``type``,
``enum`` or ``const``: every document of the result fits the schema. What stands inside of ``oneOf``, ``not``,
``if`` and their like is left as it is, since fewer documents there may be more of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sgla.grammar.logic import ANNOTATIONS, Find, Json, Object
from sgla.grammar.references import COMBINED, Together, children, references
from sgla.grammar.schema import BOUNDS, NARROWER, OWN, PATTERNS

KEYWORDS = {
    "array": (
        *("additionalItems", "contains", "items", "maxContains", "maxItems", "minContains", "minItems"),
        *("prefixItems", "unevaluatedItems", "uniqueItems"),
    ),
    "number": ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"),
    "object": (
        *("additionalProperties", "dependencies", "dependentRequired", "dependentSchemas", "maxProperties"),
        *("minProperties", "patternProperties", "properties", "propertyNames", "required"),
        "unevaluatedProperties",
    ),
    "string": ("maxLength", "minLength", "pattern"),
}
KIND_OF = {key: kind for kind, keys in KEYWORDS.items() for key in keys}
TEXTS = (OWN - {"unknown"}) | NARROWER.keys() | PATTERNS.keys()  # formats of strings
VALUES = ("const", "enum", "type")
# Where fewer documents may be more of the whole, or which hold for a part of the documents.
LEFT = ("dependencies", "dependentSchemas", "else", "if", "not", "oneOf", "propertyNames", "then")


def imply(schema: Json) -> Json:
    """For a whole document, after ``references.settle``."""
    return _Reader(schema).document() if isinstance(schema, dict) else schema


@dataclass(frozen=True)
class Said:
    """By all schemas that hold for one document. ``typed``: some of them, or a branch of them, say a type;
    ``kinds``: those that their keywords are for."""

    typed: bool = False
    kinds: frozenset[str] = frozenset()

    def __or__(self, other: Said) -> Said:
        return Said(self.typed or other.typed, self.kinds | other.kinds)


class _Reader:
    def __init__(self, root: Object) -> None:
        self._root = root
        self._find = Find(root)
        self._kept: set[str] = set()  # references whose targets stay as they are
        self._together = Together(self._find, said, Said(), Said(typed=True))

    def document(self) -> Json:
        self._look(self._root, beside=False)
        return self._root if "#" in self._kept else self._read(self._root)

    # which targets stay

    def _look(self, schema: Json, beside: bool) -> None:
        """``beside``: something else holds for the same document."""
        if not isinstance(schema, dict):
            return
        if isinstance(schema.get("$ref"), str) and (beside or not alone(schema)):
            self._keep(schema["$ref"])
        for at, item in children(schema):
            key = at.partition("/")[0]
            if key in LEFT:
                for ref in references(item):
                    self._keep(ref)
            else:
                self._look(item, key in COMBINED and (beside or not alone(schema)))

    def _keep(self, ref: str) -> None:
        waiting = [ref]
        while waiting:
            ref = waiting.pop()
            if ref not in self._kept:
                self._kept.add(ref)
                waiting += references(self._find(ref))

    # reading

    def _read(self, schema: Json, around: Said = Said()) -> Json:
        """``around``: what else holds for the same document."""
        if not isinstance(schema, dict):
            return schema
        beside = around | self._together.of(schema, but="anyOf")
        out: Object = {}
        for key, value in schema.items():
            match key:
                case "$defs" | "definitions":
                    out[key] = {
                        name: each if f"#/{key}/{name}" in self._kept else self._read(each)
                        for name, each in value.items()
                    }
                case "patternProperties" | "properties":
                    out[key] = {name: self._read(each) for name, each in value.items()}
                case "allOf":
                    one = around if alone(schema) else Said(typed=True)
                    out[key] = [self._read(each, one) for each in value]
                case "anyOf":
                    out[key] = [self._read(each, beside) for each in value]
                case "additionalItems" | "additionalProperties" | "items" | "prefixItems":
                    out[key] = (
                        [self._read(each) for each in value] if isinstance(value, list) else self._read(value)
                    )
                case _:
                    out[key] = value
        whole = around | self._together.of(schema)
        if whole.typed or not whole.kinds or alone(schema):
            return out
        kinds = sorted(whole.kinds)
        return out | {"type": kinds[0] if len(kinds) == 1 else kinds}


def said(schema: Object) -> Said:
    """By its own keywords."""
    return Said(any(key in schema for key in VALUES), frozenset(spoken_of(schema)))


def spoken_of(schema: Object) -> Iterator[str]:
    """The types that its own keywords are for."""
    yield from (KIND_OF[key] for key in schema if key in KIND_OF)
    name = schema.get("format")
    if isinstance(name, str) and (name in BOUNDS or name in TEXTS):
        yield "number" if name in BOUNDS else "string"


def alone(schema: Object) -> bool:
    """Whether it is nothing but another schema, or a choice of others."""
    keys = set(schema) - ANNOTATIONS
    return keys in ({"$ref"}, {"anyOf"}) or (keys == {"allOf"} and len(schema["allOf"]) == 1)
