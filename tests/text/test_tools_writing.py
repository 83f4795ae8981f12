"""Grammars of calls: they take what the families write, and what they let through is calls."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher
from test_tools import calls_of
from tool_writers import NAMES, TOOLS, WRITERS, Calls

from sgla.errors import InvalidField, UnsupportedField
from sgla.grammar.errors import GrammarError
from sgla.grammar.llg import load_tokenizer, make_matcher
from sgla.grammar.protocol import Vocabulary
from sgla.grammar.source import source_of
from sgla.messages import Grammar
from sgla.text.tools.calls import kinds_of
from sgla.text.tools.families import BY_NAME, FAMILIES, Dialect
from sgla.text.tools.parser import OutputParser
from sgla.text.tools.raw import whole

FORCED = [family.name for family in FAMILIES if Dialect(family).writing is not None]
CALLS: Calls = [("find", {"text": 'a "b" </x> é', "any": [1], "n": None}), ("get.it", {})]
ENDINGS = b'"}]>)' + b"\n"


class Matching:
    """A grammar over single bytes and, if they are ``special``, the family's tags."""

    def __init__(self, family: str, spec: dict[str, Any], special: bool) -> None:
        self.dialect = Dialect(BY_NAME[family]).forced()
        tags = sorted(tag for tag in self.dialect.tags if len(tag) > 4) if special else []
        self.tokens = [bytes([i]) for i in range(256)] + [tag.encode() for tag in tags] + [b"<eos>"]
        self.end = len(self.tokens) - 1
        vocabulary = Vocabulary(self.tokens, list(range(256, len(self.tokens))), [self.end])
        text = json.dumps({"type": "structural_tag", "format": spec})
        source = source_of(Grammar(kind="structural_tag", text=text), vocabulary.named())
        self.matcher: LLMatcher = make_matcher(load_tokenizer(vocabulary), source)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def encode(self, text: str) -> list[int]:
        tags = "|".join(re.escape(token.decode()) for token in self.tokens[256:-1])
        ids: list[int] = []
        for part in re.split(f"({tags})", text) if tags else [text]:
            data = part.encode()
            ids += [self.tokens.index(data, 256)] if data in self.tokens[256:] else list(data)
        return ids

    def takes(self, text: str) -> bool:
        ids = self.encode(text)
        return self.matcher.try_consume_tokens(ids) == len(ids) and self.matcher.is_accepting()

    def write(self, seed: int) -> str:
        """Something that the grammar lets through, rather short."""
        rng, out = random.Random(seed), b""
        words = np.empty((len(self.tokens) + 31) // 32, np.uint32)
        while len(out) < 2000:
            self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            allowed = np.flatnonzero(
                np.unpackbits(words.view(np.uint8), bitorder="little")[: len(self.tokens)]
            )
            ends = [i for i in allowed if i >= 256 or (i in ENDINGS and rng.random() < 0.7)]
            token = int(rng.choice(ends or list(allowed)))
            if token == self.end:
                return out.decode("utf-8", "replace")
            out += self.tokens[token]
            assert self.matcher.try_consume_tokens([token]) == 1
        raise AssertionError(out)


def written(family: str, calls: Calls) -> str:
    """What the model adds to a prompt that ends with its role."""
    return WRITERS[family](calls).removeprefix("<|start|>assistant")


def calls_spec(family: str, tools: list[dict[str, Any]] = TOOLS, once: bool = False) -> dict[str, Any]:
    writing = Dialect(BY_NAME[family]).forced().writing
    assert writing is not None
    return writing.calls(tools, once)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("family", [name for name in FORCED if name in WRITERS and name != "llama3_json"])
def test_grammars_take_what_families_write(family: str, special: bool) -> None:
    several = family not in ("gpt-oss",)
    calls = CALLS if several else CALLS[:1]
    assert Matching(family, calls_spec(family), special).takes(written(family, calls))
    assert Matching(family, calls_spec(family, once=True), special).takes(written(family, CALLS[:1]))
    assert not Matching(family, calls_spec(family), special).takes("Well, " + written(family, calls))
    assert not Matching(family, calls_spec(family, TOOLS[1:]), special).takes(written(family, CALLS[:1]))
    if several:
        assert not Matching(family, calls_spec(family, once=True), special).takes(written(family, CALLS))


STRICT_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "kind": {"enum": ["a", "b c"]},
                    "count": {"$ref": "#/$defs/count"},
                    "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
                },
                "required": ["kind", "count"],
                "additionalProperties": False,
                "$defs": {"count": {"type": "integer"}},
            },
        },
    }
    for name in NAMES
]


@pytest.mark.parametrize("family", [*FORCED, "pythonic", "functiongemma"])
def test_what_grammars_let_through_is_calls(family: str) -> None:
    matching = Matching(family, calls_spec(family, STRICT_TOOLS), special=True)
    parser = OutputParser(matching.dialect, STRICT_TOOLS)
    calls = calls_of(
        [piece for piece in parser.feed(matching.write(7)) + parser.close() if piece.kind != "reasoning"]
    )
    assert calls
    for name, text in calls:
        arguments = json.loads(text)
        assert name in NAMES
        assert arguments["kind"] in ("a", "b c")
        assert isinstance(arguments["count"], int)
        assert arguments.keys() <= {"kind", "count", "flags"}


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "glm45", "mistral_v11"])
def test_calls_in_free_text(family: str) -> None:
    form = BY_NAME[family].tools
    assert form is not None
    assert form.writing is not None
    spec = form.writing.triggered(form.opens[0], TOOLS, False)
    assert spec is not None
    text = WRITERS[family](CALLS)
    for free in ("Just text.", f"See:\n{text}", f"{text}\nDone.", "<tool"):
        assert Matching(family, spec, False).takes(free)
    assert not Matching(family, spec, False).takes(f"See: {form.opens[0]} no call")
    assert not Matching(family, spec, False).takes(text.replace("find", "other"))


def test_harmony_may_think_before_it_calls() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    text = thought + WRITERS["gpt-oss"](CALLS[:1])
    assert Matching("gpt-oss", calls_spec("gpt-oss"), True).takes(text)
    assert not Matching("gpt-oss", calls_spec("gpt-oss"), True).takes(thought)


XML = ["qwen3_coder", "glm45", "minimax_m2", "deepseek_v32", "seed_oss", "step3"]


def tool_with(schema: Any, **more: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize("family", XML)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^[a-c]{2,3}$"},
        {"type": "string", "pattern": "^(x|yy)$"},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "uuid"},
        {"type": "string", "const": "it is"},
        {"type": ["string", "null"], "enum": ["x y", "z"]},
    ],
)
def test_strings_without_quotes_fit_their_schema(family: str, schema: dict[str, Any]) -> None:
    tools = tool_with(schema)
    matching = Matching(family, calls_spec(family, tools, once=True), special=False)
    valid = jsonschema_rs.validator_for(schema, validate_formats=True).is_valid
    for seed in range(4):
        matching.matcher.reset()
        parser = OutputParser(matching.dialect, tools)
        text = matching.write(seed)
        ((name, arguments),) = calls_of(parser.feed(text) + parser.close())
        assert name == "f"
        assert valid(json.loads(arguments)["a"]), text


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "format": "hostname"}, "format"),
        ({"type": "string", "pattern": "^a|b$"}, "pattern"),
        ({"type": "string", "pattern": "a", "minLength": 3}, "minLength"),
        ({"type": "string", "not": {"const": "x"}}, "not"),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}, "anyOf"),
    ],
)
def test_what_a_string_without_quotes_cannot_honour_is_refused(schema: Any, keyword: str) -> None:
    with pytest.raises(UnsupportedField, match=f"'{keyword}'.* argument 'a'"):
        calls_spec("qwen3_coder", tool_with(schema))
    calls_spec("hermes", tool_with(schema))


def test_a_format_that_nobody_knows_is_an_annotation() -> None:
    with_format, without = (
        calls_spec("glm45", tool_with({"type": "string"} | more)) for more in ({"format": "cron"}, {})
    )
    assert with_format == without


@pytest.mark.parametrize("more", [{"anyOf": [{"required": ["a"]}]}, {"minProperties": 1}])
def test_what_elements_cannot_honour_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedField, match=next(iter(more))):
        calls_spec("glm45", tool_with({"type": "string"}, **more))


REFERENCE = {"$ref": "#/$defs/d"}
LARGE: dict[str, dict[str, Any]] = {  # fields of a tool's function and its parameters
    "definitions for each argument": {
        "properties": {f"p{i}": REFERENCE for i in range(50)},
        "$defs": {"d": {"const": "x" * 20_000}},
    },
    "its name for each argument": {"name": "n" * 20_000, "properties": {f"p{i}": {} for i in range(50)}},
    "an element for each argument": {"properties": {f"p{i}": {} for i in range(10_000)}},
    "a choice for each value": {"properties": {"a": {"enum": [*map(str, range(20_000))]}}},
    "what is not read": {"properties": {"a": {"type": "string", "description": "x" * 300_000}}},
}


@pytest.mark.parametrize("family", XML)
@pytest.mark.parametrize("what", LARGE)
def test_a_schema_of_a_tool_is_not_multiplied(family: str, what: str) -> None:
    """A text of the limit's size would become one of the square of it."""
    fields = LARGE[what]
    parameters = {"type": "object", **{key: value for key, value in fields.items() if key != "name"}}
    function = {"name": fields.get("name", "f"), "parameters": parameters}
    with pytest.raises(InvalidField, match="tools: the grammar of their calls would have more than"):
        calls_spec(family, [{"type": "function", "function": function}])


@pytest.mark.parametrize("family", XML)
def test_definitions_stand_where_they_are_referred_to(family: str) -> None:
    more = {"$defs": {"d": {"type": "integer"}}}
    for schema, expected in (({"items": REFERENCE}, 1), ({"type": "integer"}, 0), ({"type": "string"}, 0)):
        assert json.dumps(calls_spec(family, tool_with(schema, **more))).count('"$defs"') == expected


ABSURD = [None, 5, -1, 1.5, True, False, "x", [], [1], [[1]], [None], [{}], {}, {"a": 1}]
OF_ARGUMENTS = ("type", "enum", "const", "pattern", "format", "minLength", "maxLength", "anyOf", "oneOf")
OF_OBJECTS = ("type", "properties", "required")


def absurd_tools() -> list[list[dict[str, Any]]]:
    tools = [tool_with(value) for value in ABSURD]
    tools += [tool_with({"type": "string", key: value}) for key in OF_ARGUMENTS for value in ABSURD]
    return tools + [tool_with({"type": "integer"}, **{key: value}) for key in OF_OBJECTS for value in ABSURD]


@pytest.mark.parametrize("family", XML)
def test_what_is_no_schema_is_refused_as_where_arguments_are_json(family: str) -> None:
    """There the compiler refuses it; an UnsupportedField is for what only elements cannot honour."""
    refused: list[str] = []
    for tools in absurd_tools():
        try:
            spec = calls_spec(family, tools)
        except UnsupportedField:
            continue
        except InvalidField as error:
            refused.append(str(error))
            continue
        assert not compiles(family, spec) or compiles("hermes", calls_spec("hermes", tools)), tools
    assert len(refused) > 100
    assert all(told.startswith("tools: the JSON Schema of 'f") for told in refused)


def compiles(family: str, spec: dict[str, Any]) -> bool:
    try:
        Matching(family, spec, special=False)
    except (AssertionError, GrammarError):
        return False
    return True


@pytest.mark.parametrize("family", XML)
def test_an_argument_that_may_be_nothing_is_left_out(family: str) -> None:
    with_it = tool_with({"type": "integer"}, properties={"a": {"type": "integer"}, "b": False})
    assert calls_spec(family, with_it) == calls_spec(family, tool_with({"type": "integer"}))


def test_lengths_may_be_written_as_floats() -> None:
    floats, integers = (
        calls_spec("glm45", tool_with({"type": "string", "minLength": least, "maxLength": most}))
        for least, most in ((2.0, 4.0), (2, 4))
    )
    assert floats == integers


def test_of_a_string_only_strings_can_be_chosen() -> None:
    mixed, strings = (
        calls_spec("glm45", tool_with({"type": "string", "enum": values})) for values in (["a", 1], ["a"])
    )
    assert mixed == strings


def test_types_of_values() -> None:
    values = ["a", 1, 1.5, True, None, [], {}]
    names = {"string", "integer", "number", "boolean", "null", "array", "object"}
    assert kinds_of({"enum": values}) == names
    assert kinds_of({"const": True}) == {"boolean"}


@pytest.mark.parametrize("pattern", ["b+", "^ab?", "a$", "^(a|b)+$", "a|bb", r"[$^|]\^?\$", "", "^$"])
def test_a_pattern_for_the_whole_text_is_found_where_the_pattern_is(pattern: str) -> None:
    found = whole(pattern)
    assert found is not None
    for text in ("", "a", "b", "ab", "ba", "bba", "abab", "$", "|^$", "x\na", "a\nx"):
        assert bool(re.fullmatch(found, text)) == bool(re.search(pattern, text)), (pattern, text)


@pytest.mark.parametrize("pattern", ["^a|b", "a|b$", "a^b", "(^a|b)", "a$b", "^[(]|b", r"a|[\])]$"])
def test_anchors_inside_of_a_pattern_are_not_understood(pattern: str) -> None:
    assert whole(pattern) is None
