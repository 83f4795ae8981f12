"""How a family writes calls, said as a structural tag, so that a grammar can make it write them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from sgla.errors import InvalidField
from sgla.grammar.references import REFERENCES
from sgla.messages import MAX_GRAMMAR
from sgla.text.tools.calls import RAW, kinds_of
from sgla.text.tools.raw import KEYWORDS, expression, refused
from sgla.text.tools.shapes import check, wrong
from sgla.text.tools.xml import STRING, Markup

Tag = dict[str, Any]
Tool = dict[str, Any]
NAME = "NAME"  # where a call's beginning has the function's name


class Room:
    """How many characters a grammar that is made of tools has left."""

    def __init__(self) -> None:
        self._left = MAX_GRAMMAR

    def take(self, value: Any) -> None:
        """Raises InvalidField if the JSON of ``value`` does not fit."""
        self._left -= len(msgspec.json.encode(value).decode())
        if self._left < 0:
            raise InvalidField(
                f"tools: the grammar of their calls would have more than {MAX_GRAMMAR} characters, which is "
                "the limit; offer fewer tools, or tools with smaller schemas",
                param="tools",
            )


@dataclass(frozen=True)
class Writing:
    """``before`` calls, ``begin`` and ``end`` of each, ``between`` them, ``after``;
    as the family's template has them.

    ``numbered``: a number stands between ``begin`` and this text. ``markup``: arguments are elements, else
    one JSON object. ``reasoning``: before and after reasoning that may come first, and what follows it.
    """

    begin: str
    end: str
    before: str = ""
    between: str = ""
    after: str = ""
    numbered: str = ""
    markup: Markup | None = None
    reasoning: tuple[str, str, str] | None = None

    def calls(self, tools: list[Tool], once: bool) -> Tag:
        """At least one call of ``tools``, not more with ``once``, and nothing else.

        Raises InvalidField for tools that take too long a grammar, and UnsupportedField.
        """
        several = {
            "type": "tags_with_separator",
            "tags": self._tags(tools),
            "separator": self.between,
            "at_least_one": True,
            "stop_after_first": once,
        }
        return sequence([*self._thoughts(), constant(self.before), several, constant(self.after)])

    def triggered(self, opener: str, tools: list[Tool], once: bool) -> Tag | None:
        """Free text in which what ``opener`` begins is a call of ``tools``; None if that cannot be said."""
        if self.before or self.after or not self.begin.startswith(opener):
            return None
        tags = self._tags(tools)
        return {"type": "triggered_tags", "triggers": [opener], "tags": tags, "stop_after_first": once}

    def _tags(self, tools: list[Tool]) -> list[Tag]:
        """A tag for each of ``tools``. All schemas are measured before any is read."""
        functions, given, made = [tool["function"] for tool in tools], Room(), Room()
        for function in functions:
            given.take([function["name"], function.get("parameters")])
        return [self._call(function, made) for function in functions]

    def _thoughts(self) -> list[Tag]:
        if self.reasoning is None:
            return []
        begin, end, then = self.reasoning
        thought = sequence([tag(begin, {"type": "any_text"}, end), constant(then)])
        return [{"type": "or", "elements": [thought, constant("")]}]

    def _call(self, function: dict[str, Any], room: Room) -> Tag:
        name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
        schema = arguments_schema(function.get("parameters"))
        if self.markup is not None:
            content = elements(self.markup, schema, function["name"], room)
        elif (lark := lark_of(text_input(schema))) is not None:
            content = tag(RAW[0], {"type": "grammar", "name": function["name"], "grammar": lark}, RAW[1])
        else:
            content = arguments(schema, function["name"])
        if self.numbered:
            content = sequence([{"type": "regex", "pattern": "[0-9]{1,3}"}, constant(self.numbered), content])
        return tag(self.begin.replace(NAME, name), content, self.end)


def arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Of a tool's arguments, which are an object whatever its ``parameters`` say."""
    return {"type": "object"} | (parameters or {"properties": {}})


def text_input(schema: Any) -> Any:
    """The schema of a custom tool's only argument."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties.get("input") if isinstance(properties, dict) and len(properties) == 1 else None


def grammar_of(schema: Any) -> dict[str, Any] | None:
    """The ``x-grammar`` of a text: its ``syntax``, lark or regex, and ``definition``."""
    found = schema.get("x-grammar") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) and isinstance(found.get("definition"), str) else None


def lark_of(schema: Any) -> str | None:
    found = grammar_of(schema)
    return found["definition"] if found and found.get("syntax") == "lark" else None


def tag(begin: str, content: Tag, end: str) -> Tag:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def constant(text: str) -> Tag:
    return {"type": "const_string", "value": text}


def sequence(parts: list[Tag]) -> Tag:
    """``parts`` without those that are nothing; at least one must be left."""
    return {"type": "sequence", "elements": [part for part in parts if part.get("value") != ""]}


def arguments(schema: dict[str, Any] | bool, name: str = "") -> Tag:
    """``name``: whose they are, for errors."""
    named = {"name": name} if name else {}
    return {"type": "json_schema", **named, "json_schema": schema}


WHOLE = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas"),
    *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
)  # keywords of an object that elements say nothing of


def elements(markup: Markup, schema: dict[str, Any], function: str, room: Room) -> Tag:
    """An element for each property, in the schema's order; those that are not required may be left out.

    Each takes ``room``, since it repeats the definitions that it may refer to. Raises InvalidField where
    there is none left and for what is no schema, and UnsupportedField for a keyword that cannot be honoured.
    """
    check(schema, function)
    for key in WHOLE:
        if key in schema:
            raise refused("all of them", key)
    properties, required = schema.get("properties", {}), frozenset(schema.get("required", ()))
    definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts = []
    for name, each in properties.items():
        path = f"{function}.{name}"
        check(each, path)
        if each is False and name not in required:
            continue
        part = element(markup, name, each, definitions, path, room)
        parts.append(part if name in required else {"type": "or", "elements": [part, constant("")]})
    return sequence(parts) if parts else constant("")


def element(
    markup: Markup, name: str, schema: Any, definitions: dict[str, Any], path: str, room: Room
) -> Tag:
    kinds = kinds_of(schema)
    line = "\n" if markup.lines else ""
    key_end = next(
        (end for end, kind in markup.key_ends.items() if (kind == STRING) == (kinds == STRING)), markup.key[1]
    )
    gap = "\n" if markup.value[0] else ""
    begin = f"{markup.key[0]}{name}{key_end}{gap}{markup.value[0]}{line}"
    around = tag(begin, {}, f"{line}{markup.value[1]}\n")
    room.take(around)
    if (lark := lark_of(schema)) is not None:
        content: Tag = {"type": "grammar", "name": path, "grammar": lark}
        room.take(content)
    elif kinds == STRING or ("string" in kinds and not markup.key_ends):
        content = raw_text(name, schema, path, room)
    else:
        whole = {**schema, **definitions} if definitions and refers(schema) else schema
        content = arguments(whole, path)
        room.take(content)
    return {**around, "content": content}


def refers(schema: Any) -> bool:
    """Whether there may be a reference in ``schema``."""
    text = msgspec.json.encode(schema).decode()
    return any(f'"{key}":' in text for key in REFERENCES)


def raw_text(name: str, schema: dict[str, Any], path: str, room: Room) -> Tag:
    """A string without quotes; of several types, whatever their text is."""
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    if values is not None:
        if kinds_of({"type": schema.get("type")}) == STRING:
            values = [value for value in values if isinstance(value, str)]
        if not values:
            raise wrong(path, "no string is among its 'enum' or 'const'")
        texts = []
        for value in values:
            texts.append(constant(value if isinstance(value, str) else json.dumps(value)))
            room.take(texts[-1])
        return {"type": "or", "elements": texts}
    found = expression(schema, name) if constrained(schema) else None
    return {"type": "any_text"} if found is None else {"type": "regex", "pattern": found}


def constrained(schema: Any) -> bool:
    """Whether it says more of a string than that it is one."""
    if not isinstance(schema, dict):
        return False
    branches = [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]
    rest = (*KEYWORDS, "allOf", "not", "if", "$ref", "$dynamicRef", "enum", "const")
    return any(key in schema for key in rest) or any(map(constrained, branches))
