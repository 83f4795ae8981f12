"""Streamed answers as clients read them."""

from __future__ import annotations

from typing import Any

import msgspec


def decode_event(data: bytes) -> dict[str, Any] | None:
    """The object of an event; None if it is none."""
    try:
        message = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    fits = isinstance(message, dict) and isinstance(message.get("choices"), (list, type(None)))
    return message if fits else None
