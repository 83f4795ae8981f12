"""JSON Schemas that elements are made of: the keywords that are read must be as JSON Schema has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgla.errors import InvalidField
from sgla.grammar.schema import TYPES


def check(schema: Any, path: str) -> None:
    """Raise InvalidField if ``schema``, that of the function or argument at ``path``, is none."""
    if not isinstance(schema, (dict, bool)):
        raise wrong(path, "it must be an object or a boolean")
    if isinstance(schema, bool):
        return
    for key, (fits, told) in SHAPES.items():
        if key in schema and not fits(schema[key]):
            raise wrong(path, f"{key!r} must be {told}")
    for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        check(branch, path)


def wrong(path: str, told: str) -> InvalidField:
    return InvalidField(f"tools: the JSON Schema of {path[:200]!r}: {told}", param="tools")


def is_type(value: Any) -> bool:
    named = value if isinstance(value, list) else [value]
    return bool(named) and all(each in TYPES or each == "integer" for each in named)


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def is_length(value: Any) -> bool:
    whole = (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and value.is_integer()
    )
    return whole and value >= 0


SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (is_type, "a JSON type, or a list of them"),
    **dict.fromkeys(("properties", "$defs", "definitions"), (is_object, "an object")),
    "required": (is_texts, "a list of strings"),
    **dict.fromkeys(("enum", "anyOf", "oneOf"), (is_list, "a list with at least one item")),
    **dict.fromkeys(("pattern", "format"), (is_text, "a string")),
    **dict.fromkeys(("minLength", "maxLength"), (is_length, "a whole number that is not negative")),
}
