"""Structural tags: text with constrained parts in it, as Lark.

Two forms are understood: SGLang's and vLLM's first one (``structures`` and ``triggers``), and xgrammar's
``format``, whose types are ``const_string``, ``json_schema``, ``regex``, ``grammar``, ``any_text``,
``sequence``, ``or``, ``tag``, ``triggered_tags`` and ``tags_with_separator``. A schema or a grammar may have
a name for errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llguidance import regex_to_lark

from sgla.grammar.errors import GrammarError
from sgla.grammar.notations import as_in_python, ebnf_lark
from sgla.grammar.schema import escapes, object_schema

Json = Any


def tags_source(
    spec: Json, special: dict[str, int], json_options: dict[str, Any], adapt: Callable[[Json], Json]
) -> str:
    """Source of a structural tag. ``special`` as in ``source_of``; ``adapt`` makes JSON Schemas ones of the
    matcher's dialect. Raises GrammarError."""
    if not isinstance(spec, dict):
        raise GrammarError("a structural tag is an object")
    writer = _Writer(special, json_options, adapt)
    if "format" in spec:
        start = writer.format(spec["format"])
    else:
        start = writer.triggered(_first_form(spec), _texts(spec, "triggers"))
    return writer.source(start)


def _first_form(spec: dict[str, Json]) -> list[dict[str, Json]]:
    structures = _items(spec, "structures")
    for structure in structures:
        if not isinstance(structure, dict) or not isinstance(structure.get("schema", {}), (dict, bool)):
            raise GrammarError("structural tag: each of 'structures' has a begin, a schema and an end")
    return [
        {
            "begin": _text(s, "begin"),
            "content": {"type": "json_schema", "json_schema": s.get("schema", {})},
            "end": _text(s, "end"),
        }
        for s in structures
    ]


ANY_TEXT = r"/(.|\n)*/"


class _Writer:
    """Rules named as they come. Methods return a Lark expression."""

    def __init__(
        self, special: dict[str, int], json_options: dict[str, Any], adapt: Callable[[Json], Json]
    ) -> None:
        self._special = special
        self._json_options = json_options
        self._adapt = adapt
        self._rules = [f"TEXT: {ANY_TEXT}"]
        self._grammars: list[dict[str, Json]] = []
        self._pieces = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def source(self, start: str) -> str:
        lark = "\n".join([f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"name": "start", "lark_grammar": lark}, *self._grammars]})

    def rule(self, expression: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def terminal(self, expression: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def text(self, text: str) -> str:
        """``text``, with special tokens where it names them."""
        parts, at = [], 0
        for found in self._pieces.finditer(text):
            parts += [_quoted(text[at : found.start()]), f"<[{self._special[found[0]]}]>"]
            at = found.end()
        return " ".join(filter(None, [*parts, _quoted(text[at:])])) or '""'

    def upto(self, end: str) -> str:
        """Any text, then ``end``: the first one."""
        found = self._pieces.search(end)
        if found is None:
            return self.rule(f"TEXT {_quoted(end)}", "[lazy]")
        if not found.start():
            return f"TEXT {self.text(end)}"
        name = f"TEXT{len(self._rules)}"
        self._rules.append(f"{name}: TEXT {_quoted(end[: found.start()])}")
        return f"{name} {self.text(end[found.start() :])}"

    def format(self, spec: Json) -> str:
        kind = spec.get("type") if isinstance(spec, dict) else None
        if not isinstance(kind, str) or kind not in TYPES:
            raise GrammarError(
                f"structural tag: format {kind!r} is not supported; there are {', '.join(TYPES)}"
            )
        for key in spec:
            if key not in TYPES[kind] and key != "type":
                raise GrammarError(f"structural tag: {key!r} of format {kind!r} is not supported")
        write: Callable[[dict[str, Json]], str] = getattr(self, f"_{kind}")
        return write(spec)

    def _const_string(self, spec: dict[str, Json]) -> str:
        return self.text(_text(spec, "value"))

    def _json_schema(self, spec: dict[str, Json]) -> str:
        if spec.get("style", "json") != "json":
            raise GrammarError(f"structural tag: 'style' {spec['style']!r} is not supported")
        schema = object_schema(self._adapt(spec.get("json_schema", {})))
        return self.rule("%json " + json.dumps(schema | {"x-guidance": self._json_options | escapes(schema)}))

    def _regex(self, spec: dict[str, Json]) -> str:
        name = f"REGEX{len(self._rules)}"
        self._rules.append(f"{name}: /{regex_to_lark(as_in_python(_text(spec, 'pattern')), '')}/")
        return name

    def _grammar(self, spec: dict[str, Json]) -> str:
        text = _text(spec, "grammar")
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": ebnf_lark(text)})
        return f"@{name}"

    def _any_text(self, spec: dict[str, Json]) -> str:
        return "TEXT"

    def _sequence(self, spec: dict[str, Json]) -> str:
        return " ".join(map(self.format, _items(spec, "elements")))

    def _or(self, spec: dict[str, Json]) -> str:
        return "(" + " | ".join(map(self.format, _items(spec, "elements"))) + ")"

    def _tag(self, spec: dict[str, Json], begin: str | None = None) -> str:
        """``begin``: what of it is still to come."""
        content, end = spec.get("content", {"type": "any_text"}), _text(spec, "end")
        head = self.text(_text(spec, "begin") if begin is None else begin)
        kind = content.get("type") if isinstance(content, dict) else None
        if kind == "any_text" and end:
            return f"{head} {self.upto(end)}"
        if kind == "regex" and end and not self._pieces.search(end):
            # Lazy, because ``end`` may be what the expression would go on with;
            # and without an ``end`` inside.
            inside = self.terminal(f"{ANY_TEXT} {_quoted(end)} {ANY_TEXT}")
            both = self.terminal(f"{self.format(content)} & ~{inside}")
            return f"{head} {self.rule(f'{both} {_quoted(end)}', '[lazy]')}"
        return f"{head} {self.format(content)} {self.text(end)}"

    def _triggered_tags(self, spec: dict[str, Json]) -> str:
        tags = _items(spec, "tags")
        return self.triggered(
            tags, _texts(spec, "triggers"), bool(spec.get("at_least_one")), bool(spec.get("stop_after_first"))
        )

    def triggered(
        self, tags: Sequence[Json], triggers: Sequence[str], at_least_one: bool = False, once: bool = False
    ) -> str:
        """Free text in which each trigger begins a tag; a first tag that must come comes at once."""
        for tag in tags:
            if not any(_text(tag, "begin").startswith(trigger) for trigger in triggers):
                raise GrammarError(f"structural tag: no trigger begins {_text(tag, 'begin')!r}")
        later = [self._begun(trigger, tags) for trigger in triggers]
        any_tag = "(" + " | ".join(later) + ")"
        if at_least_one:
            first = "(" + " | ".join(map(self._tag, tags)) + ")"
            return first if once else f"{first} {any_tag}* TEXT"
        return f"({any_tag} | TEXT)" if once else f"{any_tag}* TEXT"

    def _begun(self, trigger: str, tags: Sequence[Json]) -> str:
        own = [tag for tag in tags if _text(tag, "begin").startswith(trigger)]
        rests = [self._tag(tag, _text(tag, "begin")[len(trigger) :]) for tag in own]
        if not rests:
            raise GrammarError(f"structural tag: the trigger {trigger!r} begins no tag")
        return f"{self.upto(trigger)} (" + " | ".join(rests) + ")"

    def _tags_with_separator(self, spec: dict[str, Json]) -> str:
        any_tag = "(" + " | ".join(map(self._tag, _items(spec, "tags"))) + ")"
        more = "" if spec.get("stop_after_first") else f" ({self.text(_text(spec, 'separator'))} {any_tag})*"
        return any_tag + more if spec.get("at_least_one") else f"({any_tag}{more})?"


# Format -> what it may say.
TYPES: dict[str, tuple[str, ...]] = {
    "any_text": (),
    "const_string": ("value",),
    "grammar": ("grammar", "name"),
    "json_schema": ("json_schema", "name", "style"),
    "or": ("elements",),
    "regex": ("pattern",),
    "sequence": ("elements",),
    "tag": ("begin", "content", "end"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
}


def grammars_of(spec: Json) -> Iterator[tuple[str, str, str]]:
    """Of the schemas and grammars in a structural tag the names ("" for none), kinds and texts."""
    if isinstance(spec, list):
        for each in spec:
            yield from grammars_of(each)
    elif isinstance(spec, dict):
        for key, value in spec.items():
            if key in ("schema", "json_schema"):
                yield str(spec.get("name", "")), "json_schema", json.dumps(value)
            elif key == "grammar":
                yield str(spec.get("name", "")), "ebnf", str(value)
            else:
                yield from grammars_of(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _text(spec: Json, key: str) -> str:
    value = spec.get(key) if isinstance(spec, dict) else None
    if not isinstance(value, str):
        raise GrammarError(f"structural tag: {key!r} must be a string")
    return value


def _items(spec: dict[str, Json], key: str) -> list[Json]:
    value = spec.get(key)
    if not isinstance(value, list) or not value:
        raise GrammarError(f"structural tag: {key!r} must be a list of at least one item")
    return value


def _texts(spec: dict[str, Json], key: str) -> list[str]:
    values = _items(spec, key)
    if not all(isinstance(value, str) and value for value in values):
        raise GrammarError(f"structural tag: {key!r} must be a list of strings that are not empty")
    return values
