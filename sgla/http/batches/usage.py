"""What the lines of a batch have cost together, as OpenAI's Batch object tells it."""

from __future__ import annotations

import re
from typing import Any

import msgspec


class Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """Of one answer, in the words of chats or of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: Details | None = None
    completion_tokens_details: Details | None = None
    input_tokens_details: Details | None = None
    output_tokens_details: Details | None = None


class WithUsage(msgspec.Struct):
    usage: Usage | None = None


_ANSWER, _USAGE = msgspec.json.Decoder(WithUsage), msgspec.json.Decoder(Usage)
NOTHING = Details()
LONG = 1 << 20  # bytes of an answer that is not decoded: it would hold the loop
# In a string of JSON its quotes would be escaped; our answers have it behind all that a request can name so.
KEY = b'"usage":'
WHOLE = re.compile(rb"\{[^{}]*(?:\{[^{}]*\}[^{}]*){,8}\}")


def no_usage() -> dict[str, Any]:
    """Of a batch without lines that are done."""
    return {
        "input_tokens": 0,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 0,
    }


def usage_of(body: bytes) -> Usage | None:
    """What an answer (JSON) says of its usage."""
    try:
        if len(body) <= LONG:
            return _ANSWER.decode(body).usage
        at = body.rfind(KEY)
        found = WHOLE.match(body, at + len(KEY)) if at >= 0 else None
        return None if found is None else _USAGE.decode(found[0])
    except msgspec.MsgspecError:
        return None


def add(total: dict[str, Any], body: bytes) -> None:
    """To the usage of a batch that of the answer ``body``."""
    usage = usage_of(body)
    if usage is None:
        return
    given = usage.input_tokens_details or usage.prompt_tokens_details or NOTHING
    made = usage.output_tokens_details or usage.completion_tokens_details or NOTHING
    read, written = usage.input_tokens + usage.prompt_tokens, usage.output_tokens + usage.completion_tokens
    total["input_tokens"] += read
    total["input_tokens_details"]["cached_tokens"] += given.cached_tokens or 0
    total["output_tokens"] += written
    total["output_tokens_details"]["reasoning_tokens"] += made.reasoning_tokens or 0
    total["total_tokens"] += read + written
