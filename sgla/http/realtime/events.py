"""What clients of /v1/realtime send: typed events. Audio is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from sgla.errors import InvalidField, SglaError, UnsupportedField
from sgla.http.request.schema import Schema, unsupported
from sgla.validation import root

Item = dict[str, Any]
Most = int | Literal["inf"] | None  # tokens

KINDS = (
    *("session.update", "response.create", "response.cancel"),
    *("conversation.item.create", "conversation.item.retrieve", "conversation.item.delete"),
)
AUDIO = (
    "input_audio_buffer.",
    "output_audio_buffer.",
    "conversation.item.truncate",
    "transcription_session.",
)


class Wishes(msgspec.Struct, kw_only=True):
    """What a session and a single response may set."""

    instructions: str | None = None
    output_modalities: list[str] | None = None
    modalities: list[str] | None = None  # its name in the beta
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: Most = None
    max_response_output_tokens: Most = None  # its name in the beta
    temperature: float | None = None
    parallel_tool_calls: bool | None = None


class SessionWishes(Wishes, kw_only=True):
    type: Literal["realtime"] | None = None
    model: str | None = None


class ResponseWishes(Wishes, kw_only=True):
    """``conversation`` none: the answer is not added to it. ``input``: items in place of the conversation."""

    conversation: Literal["auto", "none"] | None = None
    input: list[Item] | None = None
    metadata: dict[str, str] | None = None


class ClientEvent(msgspec.Struct, kw_only=True):
    type: str
    event_id: str | None = None
    session: SessionWishes | None = None
    response: ResponseWishes | None = None
    item: Item | None = None
    item_id: str | None = None
    previous_item_id: str | None = None
    response_id: str | None = None


NESTED: dict[str, type[msgspec.Struct]] = {"session": SessionWishes, "response": ResponseWishes}
EVENTS = Schema(ClientEvent, NESTED)
NULL = msgspec.Raw(b"null")
_PLACED = re.compile(r"(?:session|response)\.[\w.\[\]]+")
_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def check_known(data: bytes) -> None:
    """Raise UnsupportedField for a setting that has a value and no meaning here;
    there is no header to tell it in."""
    event = _raw(data)
    for place, kind in NESTED.items():
        given = event.get(place, NULL)
        for name, value in _raw(given).items() if given != NULL else ():
            if name not in kind.__struct_fields__ and value != NULL:
                raise unsupported(f"{place}.{name[:100]}")


def check_event(event: ClientEvent) -> None:
    if event.type.startswith(AUDIO):
        raise UnsupportedField(
            f"{event.type[:100]} is not supported by this server: conversations are in text", param="type"
        )


def check_text(wishes: Wishes) -> None:
    for name in ("output_modalities", "modalities"):
        if getattr(wishes, name) not in (None, ["text"]):
            raise UnsupportedField(f'{name} must be ["text"]: this server makes no audio', param=name)


def most_tokens(wishes: Iterable[Wishes]) -> int | None:
    """The limit of an answer that the first of ``wishes`` with one has. Raises InvalidField."""
    names = ("max_output_tokens", "max_response_output_tokens")
    given = ((name, getattr(one, name)) for one in wishes for name in names)
    name, most = next((pair for pair in given if pair[1] is not None), ("", "inf"))
    if most == "inf":
        return None
    assert isinstance(most, int)
    if not 1 <= most < 2**31:
        raise InvalidField(f"{name} must be at least 1, or inf", param=name)
    return most


def name_setting(error: SglaError, event: ClientEvent | None) -> None:
    """Let ``error`` name a setting as the client wrote it, such as ``session.tools[0]``, if it is about
    one."""
    field = root(error.param or "")
    if event is not None and field in SessionWishes.__struct_fields__ and field != "type":
        of_response = getattr(event.response, field, None) is not None
        place = "response" if of_response else "session"
        error.param = f"{place}.{error.param}"
        if error.message.startswith(field):
            error.message = f"{place}.{error.message}"
    if placed := _PLACED.match(error.message):
        error.param = placed[0]
