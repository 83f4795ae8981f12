"""``Grammar`` -> source: the text in llguidance's own format that workers make matchers of.
Pure; may take long."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

from llguidance import LLMatcher

from sgla.grammar.closing import close
from sgla.grammar.errors import GrammarError
from sgla.grammar.implied import imply
from sgla.grammar.notations import as_in_python, choice_lark, ebnf_lark
from sgla.grammar.patterns import PatternError, portable
from sgla.grammar.references import all_of, bare, endless, mapped, settle, unroll
from sgla.grammar.schema import adapt, escapes, object_schema, uncounted, where
from sgla.grammar.tags import tags_source
from sgla.messages import MAX_GRAMMAR, Grammar

# Where it is free: room for indentation, but an end for a model that has lost its way.
SPACE = r"[ \n\r\t]{1,32}"

_UNKNOWN = re.compile(r"Unimplemented keys: (\[.*\])")
_TARGET = re.compile(r"Resource '(.*)' is not present|Pointer '(.*)' does not exist")


def source_of(grammar: Grammar, special: dict[str, int]) -> str:
    """``special``: text -> id of the tokens that no text contains. Raises GrammarError.

    Whether the source compiles is not checked for all kinds:
    ``explain`` tells the user what the compiler says.
    """
    if len(grammar.text) > MAX_GRAMMAR:
        raise GrammarError(f"the grammar has {len(grammar.text)} characters, the limit is {MAX_GRAMMAR}")
    try:
        source = _make(grammar, special)
    except RecursionError as error:
        raise GrammarError("the grammar is nested too deeply") from error
    if len(source) > MAX_GRAMMAR:
        raise GrammarError(
            f"the grammar has {len(source)} characters when compiled, the limit is {MAX_GRAMMAR}"
        )
    return source


def _make(grammar: Grammar, special: dict[str, int]) -> str:
    match grammar.kind:
        case "json_schema":
            schema = object_schema(json_schema(parse(grammar.text), bool(grammar.additional)))
            options = json_options(grammar.whitespace) | escapes(schema)
            return LLMatcher.grammar_from_json_schema(schema, overrides=options)
        case "json_object":
            return LLMatcher.grammar_from_json_schema(
                {"type": "object"}, overrides=json_options(grammar.whitespace)
            )
        case "regex":
            return LLMatcher.grammar_from_regex(as_in_python(grammar.text))
        case "choice":
            return LLMatcher.grammar_from_lark(choice_lark(parse(grammar.text)))
        case "ebnf":
            return LLMatcher.grammar_from_lark(ebnf_lark(grammar.text))
        case "structural_tag":
            write = partial(json_schema, additional=bool(grammar.additional))
            return tags_source(parse(grammar.text), special, json_options(grammar.whitespace), write)
    raise AssertionError(f"grammar kind {grammar.kind}")


def wide(value: Any, path: str = "") -> str | None:
    """Where an integer stands that the compiler cannot read."""
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**64 else path or "/"
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return next(filter(None, (wide(item, f"{path}/{name}") for name, item in items)), None)


def parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise GrammarError(f"it is not valid JSON: {error}") from error


def json_schema(schema: Any, additional: bool) -> Any:
    """In the matcher's dialect; see ``Grammar.additional``.
    Raises GrammarError, also for what is no schema."""
    try:
        settled = settle(schema)
        if endless(settled):
            why = "leads back to itself, so that the schema says nothing; name a schema, or leave it out"
            raise GrammarError(f"JSON Schema keyword '$ref' (at {where(settled, '$ref')}) {why}")
        if endless(settled, inside=True):
            why = "wants another such value inside of each, without an end; let a value go without one"
            raise GrammarError(f"JSON Schema keyword '$ref' (at {where(settled, '$ref')}) {why}")
        adapted = adapt(settled if additional else imply(settled))
        found = ported(bare(unroll(adapted if additional else close(adapted))), adapted)
        place = uncounted(found)
    except (AttributeError, KeyError, TypeError) as error:
        raise GrammarError(flaw(schema) or "it is not a JSON Schema of a draft that is supported") from error
    if place is not None:
        why = "cannot be more than 1 where properties are not declared, since a name may come twice"
        raise GrammarError(f"JSON Schema keyword 'minProperties' (at {place}) {why}", unsupported=True)
    if place := wide(found):
        raise GrammarError(
            f"JSON Schema: an integer of more than 64 bits (at {place}) is not supported", unsupported=True
        )
    return found


def ported(schema: Any, whole: Any) -> Any:
    """With patterns as the matcher reads them. ``whole``: where errors say that they stand."""
    if not isinstance(schema, dict):
        return schema
    out = mapped(schema, lambda item: ported(item, whole))
    if isinstance(out.get("pattern"), str):
        out["pattern"] = read(out["pattern"], whole, "pattern")
    if isinstance(out.get("patternProperties"), dict):
        found: dict[str, list[Any]] = {}
        for pattern, each in out["patternProperties"].items():
            found.setdefault(read(pattern, whole, "patternProperties"), []).append(each)
        out["patternProperties"] = {pattern: all_of(each) for pattern, each in found.items()}
    return out


def read(pattern: str, whole: Any, keyword: str) -> str:
    """For the matcher. Raises GrammarError."""
    try:
        return portable(pattern, quoted=True)
    except PatternError as error:
        place = where(whole, keyword, value=pattern) or where(whole, keyword)
        told = f"JSON Schema keyword '{keyword}'" + (f" (at {place})" if place else "")
        raise GrammarError(f"{told}: {pattern[:80]}: {error}", unsupported=True) from error


DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20(19-09|20-12))/schema#?")


def flaw(schema: Any) -> str:
    """Why it is no JSON Schema; "" if it is one.
    Another ``$schema`` than those of JSON Schema itself would be fetched."""
    import jsonschema_rs

    if isinstance(schema, dict) and not DRAFT.fullmatch(str(schema.get("$schema", ""))):
        schema = {key: value for key, value in schema.items() if key != "$schema"}
    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as error:
        place = "/".join(["", *map(str, error.instance_path)]) or "/"
        return f"it is not a JSON Schema: {error.message} (at {place})"
    return ""


def json_options(whitespace: str | None) -> Any:
    """The matcher's ``JsonCompileOptions``; see ``Grammar.whitespace``."""
    match whitespace:
        case None | "compact":
            return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        case "":
            return {"whitespace_flexible": False}
        case "free":
            return {"whitespace_pattern": SPACE}
    return {"whitespace_pattern": whitespace}


# What the compiler says -> the keyword that it is about.
KEYWORDS = (
    ("Unimplemented keys", ""),
    ("coerce_one_of", "oneOf"),
    ("patternProperty", "patternProperties"),
    ("Resource", "$ref"),
    ("Pointer", "$ref"),
    ("circular references with sibling keys", "$ref"),
    ("Anchor", "$ref"),
    ("URI reference", "$ref"),
    ("look-around", "pattern"),
    ("regex parse error", "pattern"),
    ("maxProperties only", "minProperties"),
    ("integer range", "minimum"),
    ("float range", "minimum"),
)
_PATTERN = re.compile(r"regex parse error:\s+(\S.*?)\s+\^")


def explain(grammar: Grammar, message: str) -> GrammarError:
    """The compiler's error for the user: a keyword that is not supported is named, with its place."""
    if grammar.kind == "regex":
        return GrammarError(f"the regular expression is not supported or wrong: {message}")
    keyword = next((keyword for sign, keyword in KEYWORDS if sign in message), None)
    if grammar.kind != "json_schema":
        return GrammarError(message)
    schema = parse(grammar.text)
    if keyword is None:
        return GrammarError(flaw(schema) or message)
    schema = adapt(schema)
    if found := _UNKNOWN.search(message):
        places = [f"'{key}' (at {where(schema, key) or '/'})" for key in json.loads(found[1])]
        return GrammarError(f"JSON Schema keyword {', '.join(places)} is not supported", unsupported=True)
    found = _PATTERN.search(message) or _TARGET.search(message)
    value = None if found is None else found[1] if keyword == "pattern" else found[1] or f"#{found[2]}"
    place = where(schema, keyword, value=value) or where(schema, keyword)
    told = f"JSON Schema keyword '{keyword}'" + (f" (at {place})" if place else "")
    if keyword == "oneOf":
        why = "is not supported where its branches may overlap; use anyOf"
        return GrammarError(f"{told} {why}", unsupported=True)
    if keyword == "$ref" and value is not None:
        why = f"leads to {value[:80]}, which is not in the schema, and nothing is fetched"
        return GrammarError(f"{told} {why}", unsupported=not value.startswith("#"))
    return GrammarError(f"{told}: {message}", unsupported=True)
