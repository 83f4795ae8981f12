"""``Grammar`` -> source: the text in llguidance's own format that workers make matchers of. Pure; may take long."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher

from sgla.grammar.errors import GrammarError
from sgla.grammar.notations import as_in_python, choice_lark, ebnf_lark
from sgla.grammar.schema import adapt, object_schema, where
from sgla.grammar.tags import tags_source
from sgla.messages import MAX_GRAMMAR, Grammar

SPACE = r"[ \n\r\t]{1,32}"  # between JSON tokens: room for indentation, but no end of it for a model that has lost its way

_UNKNOWN = re.compile(r"Unimplemented keys: (\[.*\])")


def source_of(grammar: Grammar, special: dict[str, int]) -> str:
    """``special``: text -> id of the tokens that no text contains. Raises GrammarError.

    Whether the source compiles is not checked for all kinds: ``explain`` tells the user what the compiler says.
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
            schema = object_schema(adapt(parse(grammar.text)))
            return LLMatcher.grammar_from_json_schema(schema, overrides=json_options(grammar.whitespace))
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
            return tags_source(parse(grammar.text), special, json_options(grammar.whitespace))
    raise AssertionError(f"grammar kind {grammar.kind}")


def parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise GrammarError(f"it is not valid JSON: {error}") from error


def json_options(whitespace: str | None) -> Any:
    """The matcher's ``JsonCompileOptions``; see ``Grammar.whitespace``."""
    if whitespace == "":
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": SPACE if whitespace is None else whitespace}


# What the compiler's message begins with -> the keyword that it is about.
KEYWORDS = (("Unknown format", "format"), ("patternProperty", "patternProperties"), ("Resource", "$ref"))


def explain(grammar: Grammar, message: str) -> GrammarError:
    """The compiler's error for the user: a keyword that is not supported is named, with its place."""
    if grammar.kind == "regex":
        return GrammarError(f"the regular expression is not supported or wrong: {message}")
    found = _UNKNOWN.search(message)
    if found and grammar.kind == "json_schema":
        schema = adapt(parse(grammar.text))
        places = [f"'{key}' (at {where(schema, key) or '/'})" for key in json.loads(found[1])]
        return GrammarError(f"JSON Schema keyword {', '.join(places)} is not supported", unsupported=True)
    if "coerce_one_of" in message:
        told = "JSON Schema keyword 'oneOf' is not supported where its branches may overlap; use anyOf"
        return GrammarError(told, unsupported=True)
    for beginning, keyword in KEYWORDS:
        if message.startswith(beginning):
            return GrammarError(f"JSON Schema keyword '{keyword}': {message}", unsupported=True)
    return GrammarError(message)
