"""What an output must look like, under the names of OpenAI, vLLM and SGLang."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sgla import census
from sgla.errors import InvalidField
from sgla.grammar.schema import FORMATS
from sgla.http.request.schema import SamplingFields, shown, unsupported
from sgla.messages import MAX_GRAMMAR, STRUCTURED_OUTPUTS, Grammar, whitespace_of

# Fields that name one grammar each -> kind.
PLAIN = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "guided_json_object": "json_object",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
JSON_KINDS = ("json_schema", "choice", "structural_tag")
OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
NOTHING: tuple[Any, ...] = (None, "", False, [])  # values that ask for nothing


def grammar_of(fields: SamplingFields) -> Grammar | None:
    """The one grammar that the request asks for. Raises InvalidField, also for two of them."""
    found = [
        grammar
        for name, read in READERS.items()
        if (value := getattr(fields, name)) not in NOTHING and (grammar := read(name, value)) is not None
    ]
    if len(found) > 1:
        names = " and ".join(grammar.param for grammar in found)
        raise InvalidField(f"{names} exclude each other; send one of them", param=found[1].param)
    if not found:
        return None
    if fields.guided_whitespace_pattern is not None and found[0].whitespace is None:
        return msgspec.structs.replace(found[0], whitespace=fields.guided_whitespace_pattern)
    return found[0]


def make(kind: str, value: Any, param: str, whitespace: str | None = None) -> Grammar:
    """A schema, tag or list may be given as a JSON value or as its text."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if len(text) > MAX_GRAMMAR:
        raise InvalidField(f"{param} has {len(text)} characters; {MAX_GRAMMAR} is the limit", param=param)
    if kind in JSON_KINDS:
        census.check(text)
    return Grammar(kind=kind, text="" if kind == "json_object" else text, whitespace=whitespace, param=param)


_FORMAT = re.compile(r'"format"\s*:\s*"([^"\\]*)"')
DATA = ("const", "default", "enum", "example", "examples")


def ignored_formats(grammar: Grammar) -> list[str]:
    """The ``format``s of its schemas that nobody knows: they are annotations, as JSON Schema has it."""
    if grammar.kind not in ("json_schema", "structural_tag") or FORMATS.issuperset(
        _FORMAT.findall(grammar.text)
    ):
        return []
    try:
        waiting = [msgspec.json.decode(grammar.text)]
    except msgspec.DecodeError:  # refused when it is compiled
        return []
    found: set[str] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            name = value.get("format")
            if isinstance(name, str) and name not in FORMATS:
                found.add(name)
            waiting += [each for key, each in value.items() if key not in DATA]
        elif isinstance(value, list):
            waiting += value
    return [f"format.{name}" for name in sorted(found)]


def plain(name: str, value: Any) -> Grammar:
    return make(PLAIN[name], value, name)


def response_format(name: str, form: Any) -> Grammar | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "structural_tag":
        return make(kind, form, name)
    if kind == "json_object" and form.get("schema") is None:
        return make(kind, None, name)
    if kind not in ("json_object", "json_schema"):
        raise InvalidField(
            f"{name}.type must be text, json_object, json_schema or structural_tag, got {shown(kind)}",
            param=name,
        )
    holder = form.get("json_schema", form)
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, (dict, bool)):
        raise InvalidField(f"{name}.json_schema.schema must be a JSON Schema", param=name)
    return make("json_schema", schema, name)


def structured_outputs(name: str, asked: Any) -> Grammar | None:
    kinds = [key for key in STRUCTURED_OUTPUTS if asked.get(key) not in NOTHING]
    for key, value in asked.items():
        if (
            key not in STRUCTURED_OUTPUTS
            and key not in OPTIONS
            and not key.startswith("_")
            and value not in NOTHING
        ):
            raise unsupported(name, f" with {key[:40]!r}")
    if len(kinds) > 1:
        raise InvalidField(f"{name}: {' and '.join(kinds)} exclude each other", param=name)
    if not kinds:
        return None
    closed = asked.get("disable_additional_properties")
    space = whitespace_of(asked.get("disable_any_whitespace"), asked.get("whitespace_pattern"))
    if not isinstance(space, (str, type(None))):
        raise InvalidField(f"{name}.whitespace_pattern must be a string", param=name)
    grammar = make(STRUCTURED_OUTPUTS[kinds[0]], asked[kinds[0]], name, space)
    return msgspec.structs.replace(grammar, additional=None if closed is None else not closed)


READERS: Mapping[str, Callable[[str, Any], Grammar | None]] = {
    "response_format": response_format,
    "structured_outputs": structured_outputs,
} | dict.fromkeys(PLAIN, plain)
