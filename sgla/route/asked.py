"""What a request tells a router: its model, its prompt, its session. Fields of all APIs are looked for by
name; what is no JSON goes on as it is, and the worker refuses it in its own words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sgla.route import prefix


class Fields(msgspec.Struct):
    """Of a body; left as they came. ``model``, ``prompt`` and the others may be of any type."""

    model: msgspec.Raw = msgspec.Raw()
    # Of the prompt, in the order in which templates put them.
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    # Of the session.
    session_id: msgspec.Raw = msgspec.Raw()
    session_params: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    conversation: msgspec.Raw = msgspec.Raw()
    input_file_id: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()


PROMPT = ("tools", "system", "instructions", "messages", "prompt", "text", "input_ids", "input")
STORED = ("previous_response_id", "conversation", "input_file_id", "session_params", "session_id")
SESSION = ("session_id", "session_params", "conversation", "prompt_cache_key", "user")
# Paths of what one worker keeps: a response, a conversation, a file, a batch.
KEPT = re.compile(r"/v1/(?:responses|conversations|files|batches)/([\w-]{1,200})(?:[/?]|$)")
LONGEST = 512  # bytes of a name
MEMBERS = 1 << 18  # of objects, about: reading more would take tens of milliseconds
_decoder = msgspec.json.Decoder(Fields)
_id = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Asked(NamedTuple):
    """``model``: "" if none is named. ``size``: bytes of the prompt. ``path``: its prefixes. ``session``: ""
    if it has none. ``stored``: the id of something that one worker keeps, which the request needs, or "".
    ``everywhere``: it is for all workers, those that rest among them; ``lasting``: and not for a part of
    replicas."""

    model: str = ""
    size: int = 0
    path: Sequence[bytes] = ()
    session: str = ""
    stored: str = ""
    everywhere: bool = False
    lasting: bool = False


def read(target: str, kind: str, body: bytes | bytearray, session: str, prefixes: bool) -> Asked:
    """``kind``: the body's media type. ``session``: what a header says, which comes first. ``prefixes``:
    whether the path is wanted."""
    found = KEPT.match(target)
    stored = found[1] if found and found[1] not in ("compact", "input_tokens") else ""
    if not body or not (kind.startswith("application/json") or body[:1] == b"{"):
        return Asked(session=session, stored=stored)
    if body.count(b":") + body.count(b"{") > MEMBERS:
        return Asked(session=session, stored=stored)
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Asked(session=session, stored=stored)
    model = _text(fields.model)
    parts = [bytes(raw) for name in PROMPT if len(raw := getattr(fields, name))]
    prompt = parts[0] if len(parts) == 1 else b"".join(parts)
    return Asked(
        model,
        len(prompt),
        prefix.path(prompt, model.encode("utf-8", "surrogatepass")) if prefixes and prompt else [],
        session or next(filter(None, (_text(getattr(fields, name)) for name in SESSION)), ""),
        stored or next(filter(None, (_text(getattr(fields, name)) for name in STORED)), ""),
    )


def _text(raw: msgspec.Raw) -> str:
    """A short string, or an object's ``id``; "" for all else."""
    text = bytes(raw)
    if not text or len(text) > LONGEST:
        return ""
    try:
        if text[:1] == b"{":
            text = bytes(_id.decode(text).get("id", b""))
        return msgspec.json.decode(text, type=str) if text else ""
    except msgspec.DecodeError:
        return ""
