"""What becomes of a schema as a whole: closed objects, compact JSON, logic that is exact, refusals that say
where."""

from __future__ import annotations

import itertools
import json
import socket
from typing import Any

import jsonschema_rs
import pytest
from test_schema import DOCUMENTS

from sgla.grammar.closing import close
from sgla.grammar.llg import load_tokenizer, make_matcher
from sgla.grammar.logic import Find, apart, opposite, unlisted_pattern
from sgla.grammar.protocol import Answer, Vocabulary
from sgla.grammar.sandbox import compile_grammar
from sgla.grammar.schema import adapt
from sgla.grammar.source import flaw
from sgla.messages import Grammar

TOKENIZER = load_tokenizer(Vocabulary([bytes([i]) for i in range(256)] + [b"</s>"], [256], [256]))
A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "boolean"}}}
OBJECT: dict[str, Any] = {"type": "object"} | A


def compiled(schema: Any, **more: Any) -> Answer:
    return compile_grammar(TOKENIZER, {}, Grammar(kind="json_schema", text=json.dumps(schema), **more))


def accepted(schema: Any, text: str, **more: Any) -> bool:
    answer = compiled(schema, **more)
    assert answer.error is None, answer.error
    matcher = make_matcher(TOKENIZER, answer.source)
    tokens = list(text.encode())
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return bool(matcher.is_accepting())


# closed objects

CLOSED = [
    OBJECT,
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {"o": OBJECT}},
    {"allOf": [OBJECT, B]},
    {"anyOf": [OBJECT, {"type": "object"} | B]},
    {"$defs": {"base": OBJECT}, "allOf": [{"$ref": "#/$defs/base"}, B]},
    {"$defs": {"base": OBJECT}, "$ref": "#/$defs/base"},
    {"$defs": {"base": OBJECT}, "type": "array", "items": {"$ref": "#/$defs/base"}},
    {"$defs": {"base": OBJECT}, "allOf": [{"$ref": "#/$defs/base"}], "description": "pydantic"},
    {
        "$defs": {"base": OBJECT},
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/base"}, "y": {"allOf": [{"$ref": "#/$defs/base"}, B]}},
    },
    OBJECT | {"required": ["other"]},
    OBJECT | {"patternProperties": {"^x": {"type": "null"}}},
    OBJECT | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
]


@pytest.mark.parametrize("schema", CLOSED, ids=json.dumps)
def test_closing_leaves_a_part_of_the_documents(schema: Any) -> None:
    closed = close(adapt(schema))
    before, after = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(closed)
    kept = [document for document in DOCUMENTS if after.is_valid(document)]
    assert all(map(before.is_valid, kept))
    assert not any("c" in document for document in kept if isinstance(document, dict))


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        (OBJECT, {"a": 1}),
        ({"allOf": [OBJECT, B]}, {"a": 1, "b": True}),
        ({"anyOf": [OBJECT, {"type": "object"} | B]}, {"b": True}),
        (CLOSED[5], {"a": 1, "b": True}),
        (CLOSED[9], {"x": {"a": 1}, "y": {"a": 1, "b": True}}),
        (OBJECT | {"required": ["other"]}, {"a": 1, "other": {"free": 1}}),
        (OBJECT | {"patternProperties": {"^x": {"type": "null"}}}, {"a": 1, "xy": None}),
        (OBJECT | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1, "b": 2}),
        ({"type": "object"}, {"a": 1}),
    ],
)
def test_what_is_declared_stays(schema: Any, document: Any) -> None:
    assert jsonschema_rs.is_valid(schema, document)
    assert accepted(schema, json.dumps(document))


def test_a_branch_has_its_own_properties_alone() -> None:
    schema = {"anyOf": [OBJECT, {"type": "object"} | B]}
    assert not accepted(schema, '{"a": 1, "b": true}')


@pytest.mark.parametrize("additional", [True, {"type": "integer"}])
def test_a_schema_that_opens_its_objects_is_open(additional: Any) -> None:
    assert accepted(OBJECT | {"additionalProperties": additional}, '{"a": 1, "c": 2}')


def test_a_setting_opens_objects() -> None:
    assert not accepted(OBJECT, '{"a": 1, "c": 2}')
    assert accepted(OBJECT, '{"a": 1, "c": 2}', additional=True)


def test_what_closing_leaves_nothing_of_stays_open() -> None:
    schema = OBJECT | {
        "required": ["a", "b", "c", "d"],
        "propertyNames": {"minLength": 1},
        "minProperties": 4,
    }
    assert accepted(schema, '{"a": 1, "b": 2, "c": 3, "d": 4}')


# white space


def test_json_has_one_form_unless_it_is_asked_for() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {}}}
    compact, tight, wide = '{"a": [1, 2], "b": 3}', '{"a":[1,2],"b":3}', '{\n  "a": [1 , 2],\n  "b": 3\n}'
    for whitespace, texts in {
        None: [compact],
        "compact": [compact],
        "": [tight],
        "free": [compact, tight, wide],
        " ": [compact, tight],
    }.items():
        found = [text for text in (compact, tight, wide) if accepted(schema, text, whitespace=whitespace)]
        assert found == texts, whitespace


# formats


def test_formats_are_bounds_or_annotations() -> None:
    for name, inside, outside in (
        ("int64", 2**62, 2**64),
        ("int32", -(2**31), 2**31),
        ("uint8", 255, -1),
        ("uint64", 2**62, -1),
    ):
        schema = {"type": "integer", "format": name}
        found = accepted(schema, str(inside)), accepted(schema, str(outside))
        assert found == (True, False), name
    assert accepted({"type": "string", "format": "int64"}, '"12"')
    assert accepted({"type": "string", "format": "no-such-format"}, '"12"')
    assert not accepted({"type": "string", "format": "uuid"}, '"12"')


def test_a_format_regex_is_a_regular_expression() -> None:
    schema = {"type": "string", "format": "regex"}
    for text in ("^a+$", "[a-z]", "(ab|c)*d?", r"^\d{3}-[0-9]{2}$"):
        assert accepted(schema, json.dumps(text))
    for text in ("*", "\\", "[", "a**", "(", "[z-a]"):
        assert not accepted(schema, json.dumps(text)), text


def test_bounds_are_exact_where_float64_is_not() -> None:
    schema = {"type": "integer", "minimum": 2**53 - 1, "maximum": 2**53 + 3}
    assert not accepted(schema, str(2**53 + 4))
    assert accepted({"type": "integer", "minimum": -(2**63)}, "-5")


# logic

NUMBERS = [-2, 0, 1, 1.5, 2, 3, 4.5]
TEXTS = ["", "a", "b", "ab", "abc", "x", "\n", "]", "a b"]
EXACT = [
    {"not": {"const": "a"}},
    {"not": {"enum": ["", "a", "abc", "]"]}},
    {"not": {"enum": [1, 2, None, True]}},
    {"type": "integer", "not": {"const": 1}},
    {"not": {"required": ["a", "b"]}},
    {"not": {"properties": {"a": {"const": 1}}, "required": ["a"]}},
    {"not": {"minimum": 2}},
    {"not": {"type": "string", "maxLength": 1}},
    {"not": {"allOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {
        "if": {"properties": {"a": {"const": "x"}}, "required": ["a"]},
        "then": {"required": ["b"]},
        "else": {"type": "object"},
    },
    {"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "number"}},
    {"oneOf": [{"type": "string"}, {"enum": ["a", 1]}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"type": "number"}]},
    {"oneOf": [{"type": "number", "minimum": 1}, {"type": "number", "maximum": 2}]},
    {"oneOf": [{"$ref": "#/$defs/s"}, {"type": "object"}], "$defs": {"s": {"type": "string"}}},
    {
        "oneOf": [
            {"properties": {"a": {"const": 1}}, "required": ["a"]},
            {"properties": {"a": {"const": "x"}}, "required": ["a"]},
        ]
    },
]


@pytest.mark.parametrize("schema", EXACT, ids=json.dumps)
def test_logic_is_exact(schema: Any) -> None:
    adapted = adapt(schema)
    assert not {"not", "if", "oneOf"} & set(adapted)
    before, after = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(adapted)
    for document in [*DOCUMENTS, *NUMBERS, *TEXTS]:
        assert before.is_valid(document) == after.is_valid(document), document
    assert compiled(schema).error is None


def test_an_opposite_or_apart_is_certain() -> None:
    """Of every pair of small schemas."""
    small: list[Any] = [each for schema in EXACT for each in schema.values() if isinstance(each, dict)]
    small += [
        {"type": "integer"},
        {"type": "string", "minLength": 2},
        {"const": 1.0},
        {"enum": [[1], {"a": 1}]},
        True,
    ]
    small = [each for each in small if not isinstance(each, dict) or "s" not in each]
    valid = {json.dumps(s): [jsonschema_rs.is_valid(s, d) for d in (*DOCUMENTS, *NUMBERS)] for s in small}
    for a, b in itertools.product(small, small):
        if apart(a, b, Find(True)):
            assert not any(x and y for x, y in zip(valid[json.dumps(a)], valid[json.dumps(b)])), (a, b)
    assert sum(apart(a, b, Find(True)) for a, b in itertools.combinations(small, 2)) > 20
    for schema in small:
        wrongs = opposite(schema, Find(True))
        if wrongs is not None:
            after = jsonschema_rs.validator_for({"anyOf": wrongs or [False]})
            assert [after.is_valid(d) for d in (*DOCUMENTS, *NUMBERS)] == [
                not v for v in valid[json.dumps(schema)]
            ]


def test_strings_that_are_not_listed() -> None:
    listed = ["", "a", "ab", "]", "x-y", "^"]
    pattern = jsonschema_rs.validator_for({"pattern": unlisted_pattern(listed)})
    for text in [*listed, "b", "abc", "a]", "\n", "x", "x-", "x-yz", "日"]:
        assert pattern.is_valid(text) == (text not in listed), text


def test_sets_of_listed_values() -> None:
    few = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1}
    assert accepted(few, '["c", "a"]')
    assert not accepted(few, '["a", "a"]')
    assert not accepted(few, "[]")
    more = {"type": "array", "items": {"enum": list("abcdefgh")}, "uniqueItems": True}
    assert accepted(more, json.dumps(list("abcdefgh")))
    assert accepted(more, '["h", "a"]')
    assert not accepted(more, '["a", "b", "c", "d", "a"]')


@pytest.mark.parametrize(
    ("items", "least", "fits", "fails"),
    [
        ({"enum": ["a", "a", "b"]}, 0, ["[]", '["b", "a"]'], ['["a", "a"]']),
        ({"enum": [1, 1.0, True, 2]}, 2, ["[1, 2]", "[true, 1]"], ["[1, 1]", "[1]"]),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 3}, 1, ["[2, 0]"], ["[0, 0]", "[3]", "[]"]),
        (
            {"type": "integer", "minimum": -2.5, "maximum": 2, "multipleOf": 2},
            0,
            ["[2, -2, 0]"],
            ["[1]", "[2, 2]"],
        ),
        ({"type": ["boolean", "null"]}, 0, ["[null, true]"], ["[null, null]"]),
        (
            {"anyOf": [{"const": "a", "title": "A"}, {"$ref": "#/$defs/day"}]},
            0,
            ['["a", 2]'],
            ["[2, 2]", "[4]"],
        ),
        (
            {"enum": ["a", "bb", "ab"], "minLength": 2, "allOf": [{"pattern": "^a"}]},
            0,
            ['["ab"]'],
            ['["bb"]'],
        ),
        ({"const": {"a": [1]}}, 0, ['[{"a": [1]}]'], ['[{"a": [1]}, {"a": [1]}]']),
    ],
)
def test_sets_of_few_values(items: Any, least: int, fits: list[str], fails: list[str]) -> None:
    schema = {"type": "array", "items": items, "uniqueItems": True, "minItems": least}
    schema["$defs"] = {"day": {"type": "integer", "minimum": 1, "maximum": 3}}
    valid = jsonschema_rs.validator_for(schema).is_valid
    for text in fits:
        assert valid(json.loads(text)), text
        assert accepted(schema, text), text
    for text in fails:
        assert not valid(json.loads(text)), text
        assert not accepted(schema, text), text


@pytest.mark.parametrize(
    ("items", "most"),
    [
        ({"enum": list("abcdefghijkl")}, None),
        ({"enum": [str(i) for i in range(65)]}, 2),
        ({"type": "integer", "minimum": 0}, 2),
        ({"type": "integer", "minimum": 0, "maximum": 1e300}, 2),
        ({"type": ["integer", "string"], "minimum": 0, "maximum": 3}, 2),
        ({"anyOf": [{"const": 1}, {"type": "string"}]}, 2),
    ],
)
def test_sets_of_too_much_are_refused(items: Any, most: int | None) -> None:
    schema = {"type": "array", "items": items, "uniqueItems": True}
    assert "uniqueItems" in adapt(schema if most is None else schema | {"maxItems": most})


def test_listed_values_are_those_that_fit() -> None:
    listed = {"enum": [1, "ab", "b", [1, 1], {"a": 1}, None], "uniqueItems": True, "not": {"pattern": "b$"}}
    assert adapt(listed) == {"enum": [1, {"a": 1}, None]} or adapt(listed)["enum"] == []
    schema = {
        "allOf": [{"enum": ["x1", "y", 3]}, {"$ref": "#/$defs/d"}],
        "pattern": "^x",
        "$defs": {"d": {"not": {"const": 3}}},
    }
    assert adapt(schema)["enum"] == ["x1"]


COUNTED = {"properties": {"a": {"type": "integer"}, "b": True, "c": True}}


@pytest.mark.parametrize(
    "bounds", [{"minProperties": 2}, {"maxProperties": 1}, {"minProperties": 1, "maxProperties": 2}]
)
@pytest.mark.parametrize("more", [{}, {"additionalProperties": False}, {"required": ["b"]}])
def test_declared_properties_are_counted(bounds: Any, more: Any) -> None:
    schema = {"type": "object"} | COUNTED | bounds | more
    before, after = (jsonschema_rs.validator_for(each) for each in (schema, adapt(schema)))
    documents = [*DOCUMENTS, {"a": 1, "d": 1}, {"d": 1}, {"b": 1, "d": 1, "e": 1}]
    if bounds != {"minProperties": 2}:  # of several names that are not declared, two may be the same
        documents.append({"d": 1, "e": 1})
    assert [before.is_valid(each) for each in documents] == [after.is_valid(each) for each in documents]
    assert accepted(schema, '{"a": 1, "b": 2}', additional=True) == before.is_valid({"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("schema", "valid", "wrong"),
    [
        ({"patternProperties": {"^a": {"minimum": 2}, "b": {"maximum": 3}}}, {"ab": 2, "c": 9}, {"ab": 4}),
        (
            {"patternProperties": {"^a": {"minimum": 2}, ".*": {"type": "integer"}}},
            {"ab": 2, "c": 9},
            {"c": "x"},
        ),
        ({"contains": {"type": "null"}}, [1, None], [1]),
        ({"contains": {"type": "null"}, "minContains": 2}, [1, None, None, 2], [None, 1]),
        (
            {"oneOf": [{"items": {"type": "string"}}, {"items": {"type": "integer"}}], "type": "array"},
            [1, 2],
            [],
        ),
        ({"oneOf": [{"pattern": "^[0-9]+$"}, {"pattern": "^[a-f]+$"}], "type": "string"}, "12", "1a"),
        (
            {"type": "object", "if": {"minProperties": 2}, "then": {"required": ["a"]}},
            {"a": 1, "b": 2},
            {"b": 1, "c": 2},
        ),
        ({"type": "object", "propertyNames": {"not": {"enum": ["a"]}}}, {"b": 1}, {"a": 1}),
        ({"not": {"items": {"type": "integer"}}, "type": "array"}, ["x"], [1]),
        ({"not": {"patternProperties": {"^a": {"type": "integer"}}}, "type": "object"}, {"a": "x"}, {"a": 1}),
    ],
    ids=json.dumps,
)
def test_what_is_narrowed_keeps_what_it_is_for(schema: Any, valid: Any, wrong: Any) -> None:
    assert [jsonschema_rs.is_valid(schema, each) for each in (valid, wrong)] == [True, False]
    assert accepted(schema, json.dumps(valid), additional=True)
    assert not accepted(schema, json.dumps(wrong), additional=True)


def test_what_grows_without_end_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    schema: Any = {"type": "integer"}
    monkeypatch.setattr("sgla.grammar.schema.SCHEMAS", 2000)
    for _ in range(4):
        schema = {"oneOf": [{"properties": {name: schema}} for name in "abcdef"]}
    assert "oneOf" in (compiled(schema).error or "")


# refusals


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"t": {"type": "array", "uniqueItems": True}}}, "'uniqueItems' (at /properties/t)"),
        ({"properties": {"t": {"not": {"pattern": "(?i)xy"}}}}, "'not' (at /properties/t)"),
        (
            {"items": {"type": "number", "oneOf": [{"type": "integer"}, {"minimum": 2}]}},
            "'oneOf' (at /items)",
        ),
        ({"properties": {"t": {"pattern": "b(?!a)"}}}, "'pattern' (at /properties/t)"),
        ({"properties": {"t": {"$ref": "#/$defs/gone"}}}, "/$defs/gone"),
        (
            {"type": "object", "required": True},
            'not a JSON Schema: true is not of type "array" (at /required)',
        ),
        ({"properties": {"a": {"required": 3, "type": "object"}}}, "(at /properties/a/required)"),
    ],
)
def test_a_refusal_names_keyword_and_place(schema: Any, told: str) -> None:
    error = compiled(schema).error
    assert error is not None
    assert told in error


@pytest.mark.parametrize(
    "draft", ["http://127.0.0.1:{}/s", "http://127.0.0.1:{}/://json-schema.org/draft-07/schema"]
)
def test_nothing_is_fetched(draft: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        schema = {"$schema": draft.format(server.getsockname()[1]), "type": "object", "required": 3}
        assert "(at /required)" in flaw(schema)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"type": "array", "uniqueItems": True}, "JSON Schema keyword 'uniqueItems' (at /properties/t)"),
        ({"const": 2**64}, "JSON Schema: an integer of more than 64 bits (at /properties/t/const)"),
        ({"type": "object", "minProperties": 2}, "JSON Schema keyword 'minProperties' (at /properties/t)"),
    ],
)
def test_a_refused_tool_is_named(wrong: dict[str, Any], message: str) -> None:
    tags = [
        {
            "type": "tag",
            "begin": f"<{name}>",
            "end": "</>",
            "content": {"type": "json_schema", "name": name} | schema,
        }
        for name, schema in (
            ("fine", {"json_schema": OBJECT}),
            ("wrong", {"json_schema": {"properties": {"t": wrong}}}),
        )
    ]
    spec = {"type": "structural_tag", "format": {"type": "or", "elements": tags}}
    answer = compile_grammar(TOKENIZER, {}, Grammar(kind="structural_tag", text=json.dumps(spec)))
    assert answer.unsupported
    assert (answer.error or "").startswith(f"wrong: {message}")


# names


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string"}}},
        {"patternProperties": {"^a": {"type": "string"}}},
        {"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}},
        {"allOf": [{"required": ["a"]}, {"properties": {"a": {"type": "string"}}}]},
    ],
)
def test_a_declared_name_has_no_other_spelling(schema: Any) -> None:
    schema = {"type": "object"} | schema
    assert not accepted(schema, '{"a": 5}', additional=True)
    assert not accepted(schema, r'{"\u0061": 5}', additional=True)
    assert accepted(schema, r'{"a": "\n\"\\\t"}', additional=True)
    tag = {"type": "json_schema", "json_schema": schema}
    answer = compile_grammar(
        TOKENIZER,
        {},
        Grammar(kind="structural_tag", text=json.dumps({"format": tag}), additional=True),
    )
    matcher = make_matcher(TOKENIZER, answer.source)
    assert matcher.validate_tokens(list(rb'{"\u0061')) < 8


def test_control_characters_where_names_have_one_spelling() -> None:
    schema = {"properties": {"a": {"enum": ["\x01", "b"]}}}
    assert "control characters" in (compiled(schema, additional=True).error or "")
    assert accepted(schema, r'{"a": "\u0001"}', additional=False)
    assert accepted({"enum": ["\x01", "b"]}, r'"\u0001"', additional=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"minProperties": 2},
        {"minProperties": 2, "patternProperties": {"^a": True}, "additionalProperties": False},
        {"minProperties": 3, "required": ["a"]},
        {"allOf": [{"minProperties": 2}, {"maxProperties": 5}]},
        {"properties": {"x": {"items": {"minProperties": 2}}}},
        {"$ref": "#/$defs/d", "$defs": {"d": {"minProperties": 2}}},
    ],
)
def test_names_that_may_come_twice_are_not_counted(schema: Any) -> None:
    answer = compiled({"type": "object"} | schema, additional=True)
    assert "'minProperties' (at /" in (answer.error or "")
    assert answer.unsupported


@pytest.mark.parametrize(
    ("schema", "fits", "wrong"),
    [
        ({"minProperties": 1}, '{"a": 1}', "{}"),
        ({"minProperties": 2, "required": ["a"]}, '{"a": 1, "b": 1}', '{"a": 1}'),
        (
            {"allOf": [{"required": ["a"]}, {"minProperties": 2}], "required": ["b"]},
            '{"a": 1, "b": 1}',
            '{"b": 1}',
        ),
        ({"minProperties": 2, "properties": {"a": True}}, '{"a": 1, "b": 1}', '{"b": 1, "b": 2}'),
        (
            {"minProperties": 3, "properties": {"a": True, "b": True}},
            '{"a": 1, "b": 1, "c": 1}',
            '{"c": 1, "d": 1, "c": 2}',
        ),
        (
            {"minProperties": 2, "patternProperties": {"^[a-c]$": True}, "additionalProperties": False},
            '{"a": 1, "c": 1}',
            '{"a": 1, "a": 2}',
        ),
    ],
)
def test_different_names_are_counted(schema: Any, fits: str, wrong: str) -> None:
    schema = {"type": "object"} | schema
    assert accepted(schema, fits, additional=True)
    assert not accepted(schema, wrong, additional=True)


def test_no_output_ends_in_a_pattern_whose_names_are_all_there() -> None:
    known = dict.fromkeys("ab", True)
    schema = {"type": "object", "properties": known, "patternProperties": {"^[ab]$": {"type": "null"}}}
    answer = compiled(schema | {"additionalProperties": False})
    matcher = make_matcher(TOKENIZER, answer.source)
    assert matcher.validate_tokens(list(b'{"a": null, "b": null, ')) < len(b'{"a": null, "b": null, ')


@pytest.mark.parametrize("name", ["hostname", "idn-hostname"])
def test_hosts_have_names_that_exist(name: str) -> None:
    schema = {"type": "string", "format": name}
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    hosts = ["a", "ab", "a-b", "www.ex-ample.org", "a--b.c", "1.2", "x" * 63, f"{'b-' * 20}c.d"]
    wrong = ["", "-a", "a-", "a..b", "x" * 64, "ab--c", "xn--X", "XN--aa---o47jg78q", "a.xn--X"]
    assert all(validator.is_valid(each) and accepted(schema, f'"{each}"') for each in hosts)
    assert not any(accepted(schema, f'"{each}"') for each in wrong)
