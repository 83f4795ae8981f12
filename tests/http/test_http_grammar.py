"""Every name under which a client asks for structured output reaches the engine as one Grammar."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from http_site import Site

from sgla.messages import Grammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
    "triggers": ["<f>"],
}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def expected(kind: str, value: Any, param: str, whitespace: str | None = None) -> Grammar:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return Grammar(kind=kind, text=text, param=param, whitespace=whitespace)


CASES: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, expected("json_object", "", "response_format")),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        expected("json_schema", SCHEMA, "response_format"),
    ),
    (
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        expected("json_schema", SCHEMA, "response_format"),
    ),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        expected("json_schema", SCHEMA, "response_format"),
    ),
    ({"response_format": TAG}, expected("structural_tag", TAG, "response_format")),
    ({"structured_outputs": {"json": SCHEMA}}, expected("json_schema", SCHEMA, "structured_outputs")),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        expected("json_schema", json.dumps(SCHEMA), "structured_outputs"),
    ),
    ({"structured_outputs": {"regex": "a+", "json": None}}, expected("regex", "a+", "structured_outputs")),
    ({"structured_outputs": {"choice": ["x", "y"]}}, expected("choice", ["x", "y"], "structured_outputs")),
    (
        {"structured_outputs": {"grammar": "root ::= 'x'"}},
        expected("ebnf", "root ::= 'x'", "structured_outputs"),
    ),
    (
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        expected("structural_tag", json.dumps(TAG), "structured_outputs"),
    ),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        expected("json_object", "", "structured_outputs", ""),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
        expected("json_schema", SCHEMA, "structured_outputs", " ?"),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}},
        expected("json_schema", SCHEMA, "structured_outputs", "free"),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
        msgspec.structs.replace(expected("json_schema", SCHEMA, "structured_outputs"), additional=True),
    ),
    ({"structured_outputs": {}}, None),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "\n", "guided_decoding_backend": "outlines"},
        expected("json_schema", SCHEMA, "guided_json", "\n"),
    ),
    ({"guided_regex": "a+"}, expected("regex", "a+", "guided_regex")),
    ({"guided_choice": ["a", "ü"]}, expected("choice", '["a","ü"]', "guided_choice")),
    ({"guided_choice": []}, None),
    ({"guided_grammar": 'start: "a"'}, expected("ebnf", 'start: "a"', "guided_grammar")),
    ({"guided_json_object": True}, expected("json_object", "", "guided_json_object")),
    ({"guided_json_object": False, "regex": None}, None),
    ({"regex": "a+"}, expected("regex", "a+", "regex")),
    ({"ebnf": 'root ::= "a"'}, expected("ebnf", 'root ::= "a"', "ebnf")),
    ({"grammar": 'root ::= "a"'}, expected("ebnf", 'root ::= "a"', "grammar")),
    ({"json_schema": json.dumps(SCHEMA)}, expected("json_schema", json.dumps(SCHEMA), "json_schema")),
    ({"json_schema": SCHEMA}, expected("json_schema", SCHEMA, "json_schema")),
    ({"structural_tag": TAG}, expected("structural_tag", TAG, "structural_tag")),
]


@pytest.mark.parametrize(("fields", "grammar"), CASES)
async def test_fields_become_a_grammar(site: Site, fields: dict[str, Any], grammar: Grammar | None) -> None:
    for path, body in (
        ("/v1/chat/completions", CHAT | fields),
        ("/v1/completions", {"prompt": "hi"} | fields),
        ("/generate", {"text": "hi", "sampling_params": fields}),
    ):
        status, reply = await site.post(path, body)
        assert status == 200, reply
        assert site.ingress.jobs[-1].sampling.grammar == grammar


async def test_unknown_formats_are_told_in_a_header(site: Site) -> None:
    inner = {
        "a": {"format": "uuid"},
        "format": {"format": "x-odd", "default": {"format": "data"}},
        "b": {"format": "cron"},
    }
    schema = {"type": "object", "properties": inner}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with site.http.post("/v1/chat/completions", json=CHAT | {"response_format": form}) as response:
        assert response.headers["x-ignored-fields"].split(", ") == ["format.cron", "format.x-odd"]


async def test_formats_of_many_large_schemas_are_not_all_looked_for(site: Site) -> None:
    """It takes the loop a while."""
    schemas = [json.dumps({"format": f"odd-{i}", "title": "a" * 100_000}) for i in range(5)]
    body = {"text": ["hi"] * 5, "sampling_params": [{"json_schema": schema} for schema in schemas]}
    async with site.http.post("/generate", json=body) as response:
        assert response.headers["x-ignored-fields"].split(", ") == ["format.odd-0", "format.odd-1"]
