"""Rewriting schemas: what is rewritten means the same, or less, never more."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema_rs
import pytest

from sgla.grammar.errors import GrammarError
from sgla.grammar.schema import adapt, where

SMALL: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    3,
    -1,
    1.5,
    "",
    "a",
    "abc",
    "/a~1b",
    "x y",
    [],
    [1],
    [1, 2],
    ["a", 1],
]
DOCUMENTS: list[Any] = SMALL + [
    dict(zip(keys, values))
    for size in range(4)
    for keys in itertools.combinations(("a", "b", "c"), size)
    for values in itertools.product((1, "x", True), repeat=size)
]
DOCUMENTS += [{"": 1}, {"bc": 1}, {"bc": 2}, {"日本": 1}, {"日本語": 1}, {"\n": "x"}]

SAME: list[Any] = [
    {"dependentRequired": {"a": ["b"], "c": []}},
    {"dependentRequired": {"a": ["b"]}, "required": ["a"]},
    {"dependentSchemas": {"a": {"required": ["b"]}, "b": False}},
    {
        "dependencies": {"a": ["b"], "c": {"required": ["a"]}},
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
    {"properties": {"a": {"const": 1}}, "unevaluatedProperties": False},
    {"properties": {"a": True}, "additionalProperties": {"type": "string"}, "unevaluatedProperties": False},
    {"prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
    {"items": {"type": "integer"}, "unevaluatedItems": False},
    {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
    {"propertyNames": {"const": "a"}, "properties": {"b": True, "a": {"type": "integer"}}},
    {"propertyNames": {"pattern": "^[ab]$"}, "properties": {"c": True, "a": {"const": 1}}},
    {"propertyNames": {"type": "string"}},
    {"propertyNames": {"maxLength": 1}, "additionalProperties": {"type": "integer"}},
    {"propertyNames": {"minLength": 2}, "properties": {"a": True, "bc": {"const": 1}}},
    {"propertyNames": {"type": "string", "minLength": 1, "maxLength": 2.0}},
    {"propertyNames": True},
    {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
    {"oneOf": [{"type": "integer"}], "minimum": 1},
    {"not": {"type": "string"}},
    {"not": {"type": ["integer", "number", "null"]}},
    {"not": {"required": ["a"]}},
    {"not": {"anyOf": [{"required": ["a"]}, {"type": "array"}]}},
    {"not": False},
    {"enum": ["a", "abc", None], "not": {"enum": ["a", True]}},
    {"if": True, "then": {"type": "object"}, "else": False},
    {"if": False, "then": False, "else": {"type": "object"}},
    {"if": {"type": "object"}},
    {"then": False, "else": False},
    {"contains": {"type": "integer"}, "minContains": 0},
    {"minContains": 3, "maxContains": 0},
    {"uniqueItems": True, "maxItems": 1},
    {"uniqueItems": False},
    {"minLength": 1.0, "maxLength": 3.0},
    {"format": "int8"},
]
KINDS = [{"const": "x"}, {"enum": ["x", "y"]}, {"const": True}]
SAME += [
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y", True]}, "b": True},
        "if": {"properties": {"a": kind}} | required,
        "then": then,
        "else": {"required": ["c"]},
    }
    | own
    for kind in KINDS
    for required in ({}, {"required": ["a"]})
    for then in ({"properties": {"b": {"const": 1}}}, False)
    for own in ({}, {"required": ["a"]})
]
REPLACED = {
    "unevaluatedProperties",
    "unevaluatedItems",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "then",
    "else",
    "not",
    "oneOf",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
}


@pytest.mark.parametrize("schema", SAME, ids=lambda schema: json.dumps(schema)[:70])
def test_the_rewritten_schema_means_the_same(schema: Any) -> None:
    adapted = adapt(schema)
    assert not REPLACED & set(adapted)
    before, after = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(adapted)
    for document in DOCUMENTS:
        assert before.is_valid(document) == after.is_valid(document), document
    assert adapt(adapted) == adapted


@pytest.mark.parametrize(
    "name",
    [
        "date",
        "time",
        "date-time",
        "iri",
        "idn-email",
        "json-pointer",
        "relative-json-pointer",
        "uri-reference",
        "iri-reference",
        "uri-template",
    ],
)
def test_a_format_is_replaced_by_one_that_says_no_less(name: str) -> None:
    before = jsonschema_rs.validator_for({"format": name}, validate_formats=True)
    after = jsonschema_rs.validator_for(adapt({"format": name}), validate_formats=True)
    texts = [
        "",
        "/",
        "/a/b~0",
        "/~2",
        "0/a",
        "01",
        "1#",
        "a@b.c",
        "@",
        "http://a/b?c#d",
        "//h/p",
        "a b",
        "?q",
        "#f",
        "\\",
        "%",
        "a:b",
        ":",
        "1:a",
        "a/b:c",
        "http://[",
        "%zz",
        "{",
        "{}",
        "/{a.b,c*}{?d:12}",
        "{a:0}",
        "{a..b}",
        "x{/y}'",
        *(f"{year}-02-29" for year in ("2024", "2023", "1900", "2000", "0004")),
        "2023-11-31",
        "12:30:60Z",
        "23:59:59.5+01:00",
        "24:00:00Z",
        "2023-12-31t23:59:59z",
        "2023-02-29T00:00:00Z",
    ]
    wrong = [text for text in texts if after.is_valid(text) and not before.is_valid(text)]
    assert not wrong
    assert any(after.is_valid(text) for text in texts)


def test_data_is_not_taken_for_schemas() -> None:
    schema = {"enum": [{"not": {"type": "null"}}], "default": {"if": True}, "const": {"uniqueItems": False}}
    assert adapt(schema) == schema


def test_the_place_of_a_keyword() -> None:
    schema = {"properties": {"not": {"items": [{}, {"anyOf": [True, {"not": {}}]}]}}}
    assert where(schema, "not") == "/properties/not/items/1/anyOf/1"
    assert where(schema, "uniqueItems") is None


def test_what_is_no_schema() -> None:
    for schema in (3, {"properties": {"a": "string"}}, {"allOf": [None]}):
        with pytest.raises(GrammarError, match="an object or a boolean"):
            adapt(schema)
