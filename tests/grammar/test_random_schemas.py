"""Random schemas against a validator: what is rewritten, and what the matcher accepts, is never more than the
schema says."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
from test_rewriting import NUMBERS, TEXTS, TOKENIZER, compiled
from test_schema import DOCUMENTS

from sgla.grammar.llg import make_matcher
from sgla.grammar.schema import HARD, adapt

MORE = [-2, 6, "x1", "1", "99", [[]], [[1]], ["a", "a"], ["a", "b"], [1, 1], [3, "x"], [{"a": 1}, {"a": "x"}]]
MORE += [{"a": {"b": 1}}, {"a": [1]}, {"b": "abc"}, {"abc": 1}, {"a": None}, {"a": 3, "c": -1}]
ALL = [*DOCUMENTS, *NUMBERS, *TEXTS, *MORE]
NAMES = ("a", "b", "c")
TYPES = ("string", "integer", "number", "object", "array", "null", "boolean")
VALUES = (1, "a", True, None, 0, "x", "abc", 3, [], [1], {"a": 1}, {})
KEYWORDS = (
    *("type", "const", "enum", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "pattern"),
    *("minItems", "maxItems", "items", "contains", "uniqueItems", "required", "properties", "multipleOf"),
    *("additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
    *("allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "$ref"),
)
PATTERNS = ("^a", "a", "^[ab]*$", "[^a]", "b$", "^ab$", "^[a-c]+$", r"\d", "ab")
OF_NAMES = (
    {"pattern": "^[ab]"},
    {"enum": ["a", "b"]},
    {"maxLength": 1},
    {"not": {"const": "a"}},
    {"pattern": "^[ab]+$", "maxLength": 2},
)


class Maker:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def documents(self, count: int) -> Iterator[dict[str, Any]]:
        for _ in range(count):
            yield self.schema(3) | {"$defs": {"d": self.schema(2, refers=False)}}

    def schema(self, depth: int, refers: bool = True) -> dict[str, Any]:
        keywords = self.rng.choices(
            KEYWORDS if refers else KEYWORDS[:-1], k=self.rng.choice([1, 1, 1, 2, 2, 3])
        )
        found: dict[str, Any] = {}
        for keyword in keywords:
            found[keyword] = self.value(keyword, depth, refers)
        if "if" in found:
            found |= {key: self.inner(depth, refers) for key in ("then", "else") if self.rng.random() < 0.7}
        return found

    def inner(self, depth: int, refers: bool) -> Any:
        if depth <= 1 or self.rng.random() < 0.1:
            one = {"type": self.rng.choice(TYPES)}
            return self.rng.choice([True, False, one, one, {"const": self.rng.choice(VALUES)}])
        return self.schema(depth - 1, refers)

    def value(self, keyword: str, depth: int, refers: bool) -> Any:
        rng = self.rng
        match keyword:
            case "type":
                return rng.choice([*TYPES, ["object", "null"], ["string", "integer"]])
            case "const":
                return rng.choice(VALUES)
            case "enum":
                return rng.choices(VALUES, k=rng.randint(1, 4))
            case "minimum" | "maximum" | "exclusiveMinimum":
                return rng.choice([0, 1, 1.5, 2])
            case "pattern":
                return rng.choice(PATTERNS)
            case "uniqueItems":
                return True
            case "multipleOf":
                return rng.choice([2, 3])
            case "required":
                return rng.sample(NAMES, rng.randint(1, 2))
            case "properties" | "dependentSchemas":
                return {name: self.inner(depth, refers) for name in rng.sample(NAMES, rng.randint(1, 2))}
            case "patternProperties":
                patterns = rng.sample(["^a", "b", "^.*$", "", ".+", "^[bc]$"], rng.randint(1, 2))
                return {pattern: self.inner(depth, refers) for pattern in patterns}
            case "propertyNames":
                return rng.choice(OF_NAMES)
            case "allOf" | "anyOf" | "oneOf":
                return [self.inner(depth, refers) for _ in range(rng.randint(1, 3))]
            case "dependentRequired":
                return {rng.choice(NAMES): [rng.choice(NAMES)]}
            case "$ref":
                return "#/$defs/d"
            case _ if keyword.startswith(("min", "max")):
                return rng.choice([0, 1, 2])
        return self.inner(depth, refers)


REFUSED = HARD - {"maxProperties", "minProperties", "multipleOf", "oneOf", "pattern", "patternProperties"}


def left(schema: Any) -> bool:
    """Whether the matcher will refuse it."""
    if isinstance(schema, dict):
        return bool(REFUSED & set(schema)) or any(
            left(value) for key, value in schema.items() if key not in ("const", "enum")
        )
    return isinstance(schema, list) and any(map(left, schema))


def test_rewriting_never_adds_a_document() -> None:
    exact = made = 0
    for schema in Maker(1).documents(500):
        adapted = adapt(schema)
        if left(adapted):
            continue
        before, after = (jsonschema_rs.validator_for(each) for each in (schema, adapted))
        fits = [(before.is_valid(document), after.is_valid(document)) for document in ALL]
        assert (False, True) not in fits, schema
        exact += all(a == b for a, b in fits)
        made += 1
    assert made > 300
    assert exact > 0.9 * made


def test_the_matcher_accepts_what_is_valid_alone() -> None:
    maker = Maker(2)
    accepted = valid = 0
    for schema in maker.documents(40):
        answer = compiled(schema, additional=True)
        if answer.error is not None:
            continue
        validator = jsonschema_rs.validator_for(schema)
        matcher = make_matcher(TOKENIZER, answer.source)
        for document in maker.rng.sample(ALL, 20):
            tokens = list(json.dumps(document, ensure_ascii=False).encode())
            mine = matcher.deep_copy()
            takes = mine.validate_tokens(tokens) == len(tokens) and bool(
                mine.consume_tokens(tokens) and mine.is_accepting()
            )
            fits = validator.is_valid(document)
            assert fits or not takes, (schema, document)
            accepted, valid = accepted + takes, valid + fits
    assert valid > 50
    assert accepted > 0.8 * valid
