"""Schemas written from the JSON Schema specification (2020-12, with a little of draft 7), one feature after
the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Schema = Any


def closed(properties: dict[str, Schema], required: list[str] | None = None, **more: Any) -> Schema:
    names = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    } | more


SCALARS: list[Schema] = [
    {"type": "string", "maxLength": 8},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "minLength": 2, "maxLength": 5.0},
    {"type": "string", "pattern": "^[a-f]{2,4}$"},
    {"type": "string", "pattern": "^(foo|bar)-[0-9]{2}$"},
    {"type": "string", "pattern": "x", "maxLength": 4},
    {"type": "string", "pattern": "^\\d{2}:\\d{2}$"},
    {"type": "string", "pattern": "^[^a-z]{1,3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email", "maxLength": 30},
    {"type": "string", "format": "json-pointer", "maxLength": 6},
    {"type": "string", "format": "password", "maxLength": 6},
    {"type": "string", "format": "uri-template", "maxLength": 9},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    {"type": "integer", "format": "int32"},
    {"type": "integer", "minimum": 1000000, "maximum": 1000010},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25},
    {"type": "number", "minimum": 10},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["boolean", "null"]},
    {"type": ["integer", "string"], "maxLength": 3, "minimum": 0, "maximum": 9},
    {"enum": ["red", "amber", "green"]},
    {"enum": [1, 2.5, -3, None, True, "x"]},
    {"enum": ["é", "日本", "😀", "a\nb", 'q"q', "back\\slash"]},
    {"enum": [[1, 2], {"a": [None]}, []]},
    {"const": "fixed"},
    {"const": 12},
    {"const": {"a": 1, "b": [True]}},
    {"type": "string", "enum": ["a", "bb"], "minLength": 2},
    {"not": {"type": ["array", "object", "string", "number"]}},
    {"enum": ["a", "b", "c"], "not": {"const": "b"}},
]
ARRAYS: list[Schema] = [
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 4.0},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False},
    {
        "type": "array",
        "prefixItems": [{"const": 1}],
        "items": {"const": 2},
        "minItems": 2,
        "maxItems": 4,
    },
    {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "maxItems": 2},
    {"type": "array", "maxItems": 0},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": False, "maxItems": 2},
    {"type": "array", "items": {"type": "null"}, "uniqueItems": True, "maxItems": 1},
    {"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False},
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "null"}, {"type": "boolean"}],
        "additionalItems": False,
    },
]
OBJECTS: list[Schema] = [
    closed({"a": {"type": "integer"}}),
    closed({"a": {"type": "integer"}, "b": {"type": "boolean"}}, ["b"]),
    closed({"a": {"type": "null"}, "b": {"type": "null"}}, []),
    closed({}),
    closed({"outer": closed({"inner": closed({"leaf": {"type": "boolean"}})})}),
    closed({"naïve key": {"const": 1}, 'quo"te': {"const": 2}, "tab\t": {"const": 3}}),
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "required": ["id"],
        "patternProperties": {"^[a-c]{1,2}$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a", "other"], "maxProperties": 3},
    {"type": "object", "properties": {"no": False, "yes": {"const": 1}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "null"}}, "unevaluatedProperties": False},
    {"type": "object", "propertyNames": {"enum": ["k1", "k2"]}, "additionalProperties": {"type": "null"}},
    {
        "type": "object",
        "propertyNames": {"minLength": 1, "maxLength": 2},
        "additionalProperties": {"const": 0},
    },
    {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": {"const": 0}},
    closed({"a": {"const": 1}, "b": {"const": 2}}, [], dependentRequired={"a": ["b"]}),
    closed({"a": {"const": 1}, "b": {"enum": [1, 2]}}, [], dependentSchemas={"a": {"required": ["b"]}}),
    closed({"a": {"const": 1}, "b": {"const": 2}}, [], dependencies={"a": ["b"]}),
    closed({"a": {"const": 1}, "b": {"const": 2}}, [], oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
    closed({"a": {"const": 1}, "b": {"const": 2}}, [], **{"not": {"required": ["a"]}}),
    {
        "type": "object",
        "properties": {"kind": {"enum": ["int", "bool"]}, "value": {"type": ["integer", "boolean"]}},
        "required": ["kind", "value"],
        "additionalProperties": False,
        "if": {"properties": {"kind": {"const": "int"}}},
        "then": {"properties": {"value": {"type": "integer"}}},
        "else": {"properties": {"value": {"type": "boolean"}}},
    },
]
COMBINED: list[Schema] = [
    {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 3}]},
    {"anyOf": [closed({"a": {"const": 1}}), closed({"b": {"const": 2}})]},
    {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
    {
        "oneOf": [
            closed({"kind": {"const": "circle"}, "r": {"type": "integer"}}),
            closed({"kind": {"const": "square"}, "side": {"type": "boolean"}}),
        ]
    },
    {"oneOf": [{"const": 1}]},
    {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 6}]},
    {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "z$"}, {"maxLength": 4}]},
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    {
        "$defs": {"flag": {"type": "boolean"}},
        "type": "array",
        "items": {"$ref": "#/$defs/flag"},
        "maxItems": 2,
    },
    {"definitions": {"n": {"type": "null"}}, "$ref": "#/definitions/n"},
    {
        "$defs": {
            "list": closed(
                {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]}}
            )
        },
        "$ref": "#/$defs/list",
    },
    {
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}},
        "$ref": "#/$defs/tree",
    },
    {"$id": "https://example.com/s", "$defs": {"a": {"$anchor": "here", "type": "null"}}, "$ref": "#here"},
    {"title": "t", "description": "d", "default": 1, "examples": [2], "$comment": "c", "type": "boolean"},
    {"type": "boolean", "unknown-keyword": {"whatever": 1}},
    {"type": "boolean", "then": {"type": "null"}, "minContains": 2},
]

CONTEXTS: dict[str, Callable[[Schema], Schema]] = {
    "alone": lambda s: s,
    "property": lambda s: closed({"id": {"type": "integer", "minimum": 0, "maximum": 9}, "value": s}),
    "optional": lambda s: closed({"value": s, "last": {"type": "null"}}, ["last"]),
    "items": lambda s: {"type": "array", "items": s, "minItems": 1, "maxItems": 2},
    "branch": lambda s: {"anyOf": [s, {"const": "else"}]},
}


def inlined(schema: Schema) -> bool:
    """Whether it can be put inside another one: pointers and dialects are those of the whole document."""
    return not {"$defs", "definitions", "$id", "$schema"} & set(schema)


CASES: dict[str, Schema] = {
    f"{kind}{i}-{name}": wrap(schema)
    for kind, schemas in (("scalar", SCALARS), ("array", ARRAYS), ("object", OBJECTS), ("combined", COMBINED))
    for i, schema in enumerate(schemas)
    for name, wrap in CONTEXTS.items()
    if name == "alone" or inlined(schema)
}

# Schemas that must be refused -> the keyword that the refusal names.
REFUSED: list[tuple[Schema, str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "null"}, "maxContains": 2}, "contains"),
    ({"type": "object", "properties": {"a": {"not": {"multipleOf": 3}}}}, "not"),
    ({"type": "number", "if": {"multipleOf": 3}, "then": False}, "if"),
    ({"type": "number", "oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf"),
    ({"type": "object", "propertyNames": {"format": "date"}}, "propertyNames"),
    ({"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"allOf": [{"prefixItems": [True]}], "unevaluatedItems": False}, "unevaluatedItems"),
    ({"$dynamicRef": "#x"}, "$dynamicRef"),
    ({"$ref": "https://example.com/other"}, "$ref"),
    (
        {
            "allOf": [
                {"patternProperties": {"a": {"type": "null"}}},
                {"patternProperties": {"b": {"type": "null"}}},
            ]
        },
        "patternProperties",
    ),
]
