"""References in a schema: they lead where they led, whatever else is rewritten."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from test_rewriting import accepted, compiled
from test_schema import DOCUMENTS

from sgla.grammar.references import bare, endless, settle, unroll

OLD = "http://json-schema.org/draft-07/schema#"
STRING = {"type": "string"}
LIST_AGAIN = {"$ref": "#"}
LIST = {"type": "object", "properties": {"next": LIST_AGAIN}}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/tree"}, "b": {"type": "integer"}},
    "required": ["b"],
}
LEADS: list[Any] = [
    {"properties": {"a": {"$ref": "#/more/x%20y"}}, "more": {"x y": {"not": STRING}}},
    {"properties": {"a": {"$ref": "#/properties/b/not"}, "b": {"not": STRING}}},
    {"properties": {"a": {"$ref": "#/$defs/x%20y~1"}}, "$defs": {"x y/": STRING}},
    {"properties": {"a": {"$ref": "#here"}}, "$defs": {"x": {"$anchor": "here"} | STRING}},
    {
        "$id": "http://a/b.json",
        "properties": {"a": {"$ref": "b.json#/$defs/x"}, "b": {"$ref": "c.json"}},
        "$defs": {
            "x": STRING,
            "y": {"$id": "c.json", "$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}},
        },
    },
    {"properties": {"a": {"$dynamicRef": "#d"}}, "$defs": {"x": {"$dynamicAnchor": "d"} | STRING}},
    {
        "$schema": OLD,
        "properties": {"a": {"$ref": "#/definitions/x", "type": "null"}},
        "definitions": {"x": STRING},
    },
    {"$schema": OLD, "properties": {"a": {"$ref": "#x"}}, "definitions": {"y": {"$id": "#x"} | STRING}},
    {"properties": {"a": {"$ref": "#"}}, "required": ["b"]},
]


@pytest.mark.parametrize("schema", LEADS, ids=str)
def test_they_lead_where_they_led(schema: Any) -> None:
    settled = settle(schema)
    before, after = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(settled)
    documents = [*DOCUMENTS, {"a": {"b": 1}, "b": 1}, {"a": {"a": {}}, "b": 1}]
    assert [before.is_valid(each) for each in documents] == [after.is_valid(each) for each in documents]
    assert settle(settled) == settled
    assert compiled(schema, additional=True).error is None


CIRCULAR: list[Any] = [
    {"$ref": "#/$defs/tree", "minProperties": 1, "$defs": {"tree": TREE}},
    {"allOf": [{"$ref": "#/$defs/tree"}, {"properties": {"c": STRING}}], "$defs": {"tree": TREE}},
    {
        "$defs": {
            "tree": TREE
            | {"properties": {"a": {"anyOf": [STRING, {"$ref": "#/$defs/tree"}], "minLength": 1}}}
        },
        "$ref": "#/$defs/tree",
    },
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"a": {"items": {"$ref": "#/$defs/tree"}}, "b": {"type": "integer"}},
                "patternProperties": {"": {"items": {"$ref": "#/$defs/tree", "required": ["b"]}}},
            }
        },
        "$ref": "#/$defs/tree",
    },
]


@pytest.mark.parametrize("schema", CIRCULAR, ids=str)
def test_circular_ones_stand_alone(schema: Any) -> None:
    before, after = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(unroll(schema))
    inner = [
        {"b": 1},
        {"b": 1, "a": "x"},
        {"b": 1, "a": ""},
        {"a": 1},
        {},
        {"b": 2, "a": {"b": 1, "c": 2}},
        [{}],
        [{"b": 1}],
    ]
    documents = [
        *DOCUMENTS,
        *inner,
        *({"a": each, "b": 1} for each in inner),
        *({"a": [each]} for each in inner),
    ]
    assert [before.is_valid(each) for each in documents] == [after.is_valid(each) for each in documents]
    assert compiled(schema, additional=True).error is None


def test_a_tree_of_any_depth() -> None:
    schema = CIRCULAR[1]
    assert accepted(schema, '{"a": {"a": {"b": 1}, "b": 2}, "b": 3, "c": "x"}', additional=True)
    assert not accepted(schema, '{"a": {"a": {"b": "1"}, "b": 2}, "b": 3}', additional=True)


def test_what_the_matcher_does_not_need_is_left_out() -> None:
    schema = {
        "description": "d",
        "properties": {"description": {"title": "t", "$ref": "#/$defs/a"}},
        "default": {"title": "x"},
        "const": {"title": 1},
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": STRING, "c": STRING},
    }
    assert bare(schema) == {
        "properties": {"description": {"$ref": "#/$defs/a"}},
        "const": {"title": 1},
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": STRING},
    }


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "#"}, "'$ref' (at /) leads back to itself"),
        ({"$ref": "#", "type": "object"}, "'$ref' (at /) leads back to itself"),
        ({"allOf": [STRING, {"$ref": "#"}]}, "'$ref' (at /allOf/1) leads back to itself"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
            },
            "'$ref' (at /) leads back to itself",
        ),
        (
            {"type": "array", "items": {"$ref": "#/$defs/a"}},
            "(at /items) leads to #/$defs/a, which is not in",
        ),
        ({"$ref": "http://a/b"}, "(at /) leads to http://a/b, which is not in"),
        ({"not": {"$ref": "#"}}, "no output fits"),
        ({**LIST, "required": ["next"]}, "'$ref' (at /properties/next) wants another such value"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "(at /items) wants another such value"),
        (
            {"type": "array", "prefixItems": [STRING, {"$ref": "#"}], "minItems": 2},
            "(at /prefixItems/1) wants another such value",
        ),
        (
            {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
            "(at /additionalProperties) wants another such value",
        ),
    ],
    ids=str,
)
def test_those_without_an_end_are_refused_in_our_words(schema: Any, words: str) -> None:
    error = compiled(schema).error
    assert error is not None
    assert words in error


def test_a_choice_beside_a_reference_to_itself_is_an_end() -> None:
    either = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    assert accepted(either, "null")
    assert not accepted(either, "1")


@pytest.mark.parametrize(
    ("schema", "output"),
    [
        (LIST, "{}"),
        (
            {**LIST, "required": ["next"], "properties": {"next": {"anyOf": [LIST_AGAIN, STRING]}}},
            '{"next": "x"}',
        ),
        ({**LIST, "required": ["next"], "type": ["object", "string"]}, '"x"'),
        ({**LIST, "required": ["next"], "enum": [{"next": {}}]}, None),
        ({"type": "array", "items": {"$ref": "#"}}, "[[]]"),
        ({"type": "array", "prefixItems": [STRING, {"$ref": "#"}], "minItems": 1}, '["x"]'),
    ],
    ids=str,
)
def test_a_value_that_may_go_without_another_has_an_end(schema: Any, output: str | None) -> None:
    assert not endless(settle(schema), inside=True)
    assert output is None or accepted(schema, output)
