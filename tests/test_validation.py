"""What errors say of values that a type does not have: where, and what would be valid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import pytest
from msgspec import inspect

from sgla import Engine
from sgla.config import Config
from sgla.errors import ConfigError, InvalidField
from sgla.http.anthropic.input import MessagesRequest
from sgla.http.app import ROUTES
from sgla.http.operation import JSON, OPERATIONS
from sgla.http.pooling.cohere import CohereEmbedRequest
from sgla.http.request.schema import Schema
from sgla.validation import fault, valid


class Item(msgspec.Struct, tag="item"):
    names: dict[str, Literal["x"]]


class Other(msgspec.Struct, tag="other"):
    pass


class Whole(msgspec.Struct):
    parts: list[Item | Other] | None = None
    many: int | Literal["inf"] | None = None


@pytest.mark.parametrize(
    ("kind", "value", "where", "text"),
    [
        (Whole, {"parts": [{"type": "it"}]}, "parts[0].type", "must be item or other, got 'it'"),
        (Whole, {"parts": [{"type": "other"}, {}]}, "parts[1].type", "is required: item or other"),
        (Whole, {"parts": [{"type": "item"}]}, "parts[0].names", "is required"),
        (
            Whole,
            {"parts": [{"type": "item", "names": {"a": "y"}}]},
            "parts[0].names[...]",
            "must be x, got 'y'",
        ),
        (Whole, {"many": "all"}, "many", "must be an integer or inf, got 'all'"),
        (Whole, {"many": []}, "many", "must be an integer or inf, got array"),
        (Whole, {"parts": 5}, "parts", ": expected array, got int"),
        (
            CohereEmbedRequest,
            {"embedding_types": ["float", "int8"]},
            "embedding_types[1]",
            "ubinary, got 'int8'",
        ),
        (
            MessagesRequest,
            {"max_tokens": 1, "messages": [{"role": "king", "content": ""}]},
            "messages[0].role",
            "system or user, got 'king'",
        ),
        (Config, {"dtype": "half"}, "dtype", "must be auto, bfloat16 or float32, got 'half'"),
    ],
)
def test_the_place_and_what_it_may_be(kind: Any, value: Any, where: str, text: str) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.json.decode(json.dumps(value), type=kind)
    path, message = fault(raised.value, kind)
    assert path == where
    assert message.startswith(where)
    assert message.endswith(text)


def enumerations(node: inspect.Type, path: str = "") -> Iterator[str]:
    """The paths of all enumerations within a type, the first items of lists."""
    match node:
        case inspect.UnionType():
            for each in node.types:
                yield from enumerations(each, path)
        case inspect.ListType():
            yield from enumerations(node.item_type, f"{path}[0]")
        case inspect.StructType():
            for field in node.fields:
                yield from enumerations(field.type, f"{path}.{field.encode_name}".lstrip("."))
        case inspect.Metadata():
            yield from enumerations(node.type, path)
        case inspect.LiteralType():
            yield path


def test_every_enumeration_of_a_body_lists_its_values() -> None:
    operations = [OPERATIONS[handler] for methods in ROUTES.values() for handler in methods.values()]
    kinds = {each.body for each in operations if each.body and each.accepts == JSON}
    found = {(kind.__name__, path) for kind in kinds for path in enumerations(inspect.type_info(kind))}
    assert len(found) > 20
    assert not [
        (kind, path)
        for kind in kinds
        for path in enumerations(inspect.type_info(kind))
        if not valid(kind, path)
    ]


def test_the_engine_names_a_wrong_setting() -> None:
    for settings, text in [
        ({"dtype": "half"}, "dtype must be"),
        ({"tp": "2"}, "tp: expected int, got str"),
        ({"dtyp": "float32"}, r"Engine has no setting dtyp; did you mean dtype\?"),
    ]:
        with pytest.raises(ConfigError, match=text) as raised:
            Engine(**settings)
        assert raised.value.param in settings


def test_a_long_value_is_cut() -> None:
    with pytest.raises(InvalidField) as raised:
        Schema(MessagesRequest).typed(
            json.dumps({"max_tokens": 1, "thinking": {"type": "x" * 9999}}).encode()
        )
    assert len(raised.value.message) < 200
