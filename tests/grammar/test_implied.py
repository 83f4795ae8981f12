"""A schema without a type means the types that its keywords are for."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from test_random_schemas import ALL, Maker
from test_rewriting import accepted

from sgla.grammar.implied import imply
from sgla.grammar.references import settle
from sgla.text.tools.writing import arguments_schema

NODE = {"properties": {"next": {"$ref": "#/$defs/node"}}}
BASE = {"properties": {"a": {"type": "integer"}}}
MEANT: list[tuple[Any, str, str]] = [  # schema, a document that is meant, one that JSON Schema allows besides
    (BASE, '{"a": 1}', '"text"'),
    (BASE, "{}", "[]"),
    ({"required": ["a"]}, '{"a": null}', "1"),
    ({"items": {"minLength": 2}}, '["ab"]', "[1]"),
    ({"properties": {"a": {"minimum": 3}}}, '{"a": 3.5}', '{"a": "b"}'),
    ({"format": "date"}, '"2024-02-29"', "1"),
    ({"format": "int32"}, "7", '"7"'),
    ({"minLength": 2, "minItems": 1}, "[0]", "0"),
    ({"anyOf": [{"type": "null"}, BASE]}, "null", '""'),
    (BASE | {"anyOf": [{"type": "null"}, {"required": ["a"]}]}, "null", '""'),
    ({"allOf": [BASE, {"required": ["a"]}]}, '{"a": 1}', '""'),
    ({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, '{"next": {"next": {}}}', '{"next": 1}'),
    ({"$defs": {"base": BASE}, "allOf": [{"$ref": "#/$defs/base"}, {"required": ["a"]}]}, '{"a": 1}', "[]"),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a": 1}', '{"a": 1, "b": 1}'),
    ({"properties": {"a": {"oneOf": [BASE]}}}, '{"a": {"a": 1}}', "0"),
]


@pytest.mark.parametrize(("schema", "meant", "besides"), MEANT)
def test_keywords_tell_the_type(schema: Any, meant: str, besides: str) -> None:
    assert accepted(schema, meant)
    assert not accepted(schema, besides)


@pytest.mark.parametrize(("schema", "meant", "besides"), MEANT)
def test_a_setting_reads_schemas_as_they_are_written(schema: Any, meant: str, besides: str) -> None:
    assert accepted(schema, meant, additional=True)
    assert accepted(schema, besides, additional=True) == jsonschema_rs.is_valid(schema, json.loads(besides))


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"title": "anything"},
        {"enum": [1, "a"], "minLength": 1},
        {"type": ["object", "null"], "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"not": {"required": ["a"]}},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"oneOf": [{"type": "string"}, BASE]},
        {"$ref": "https://elsewhere.example/schema"},
    ],
)
def test_what_says_its_type_or_is_about_none_stays(schema: Any) -> None:
    assert imply(settle(schema)) == schema


def test_what_stands_where_less_would_be_more_stays() -> None:
    base = {"$defs": {"base": BASE}, "not": {"properties": {"x": {"$ref": "#/$defs/base"}}}}
    beside = {"$defs": {"base": BASE}, "properties": {"x": {"type": "null", "$ref": "#/$defs/base"}}}
    assert imply(base)["$defs"] == imply(beside)["$defs"] == {"base": BASE}


def test_no_document_is_added() -> None:
    narrower = 0
    for schema in Maker(3).documents(500):
        before, after = (jsonschema_rs.validator_for(each) for each in (schema, imply(settle(schema))))
        fits = [(before.is_valid(document), after.is_valid(document)) for document in ALL]
        assert (False, True) not in fits, schema
        narrower += (True, False) in fits
    assert narrower > 50


@pytest.mark.parametrize("schema", [None, {}, {"description": "any"}, BASE])
def test_arguments_of_a_tool_are_an_object(schema: Any) -> None:
    found = arguments_schema(schema)
    assert accepted(found, "{}")
    assert not accepted(found, '"text"')
    assert not accepted(found, '"text"', additional=True)
