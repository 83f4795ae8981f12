"""What callers of ``Engine`` and ``LLM`` give: one prompt or conversation, or several."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from sgla.errors import InvalidField

Prompt = str | Sequence[int]
Messages = list[dict[str, Any]]
CONVERSATION = "a list of messages such as {'role': 'user', 'content': 'Hi'}"


def is_one(prompts: Any) -> bool:
    """Whether it is a prompt, a text or token ids, and not several. Raises InvalidField for neither."""
    if isinstance(prompts, str):
        return True
    check_list(prompts)
    return len(prompts) > 0 and (isinstance(prompts[0], Integral) or getattr(prompts[0], "shape", None) == ())


def is_conversation(messages: Any) -> bool:
    """Whether it is one, and not several. Raises InvalidField for neither."""
    if not isinstance(messages, (list, tuple)):
        raise InvalidField(f"messages must be {CONVERSATION}, got {kind(messages)}", param="messages")
    return not messages or isinstance(messages[0], Mapping)


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Those of a job. Raises InvalidField."""
    if isinstance(prompt, str):
        return {"text": prompt}
    check_list(prompt)
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # of arrays
    try:
        return {"token_ids": [*map(operator.index, ids)]}
    except TypeError as error:
        raise InvalidField(
            "a prompt is a text or a list of token ids, which are integers", param="prompt"
        ) from error


def conversation_fields(messages: Messages) -> dict[str, Any]:
    """Those of a job. Raises InvalidField."""
    is_conversation(messages)
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidField(
                f"messages[{i}] must be a message with a role, got {kind(message)}", param="messages"
            )
        if message.get("content") is None and message["role"] != "assistant":
            raise InvalidField(f"messages[{i}].content is required", param="messages")
    return {"messages": messages}


def check_tools(tools: Any) -> None:
    """Raise InvalidField for what is no list of objects, or what JSON cannot say."""
    if tools is not None and not (
        isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise InvalidField(
            f"tools must be a list of objects such as {{'type': 'function', ...}}, got {kind(tools)}",
            param="tools",
        )
    try:
        json.dumps(tools)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidField(f"tools must be what JSON can say: {error}", param="tools") from error


def check_list(prompt: Any) -> None:
    """Raise InvalidField for what has no items in order, as lists and arrays do, or has bytes."""
    if isinstance(prompt, (bytes, Mapping)) or not hasattr(prompt, "__getitem__"):
        raise InvalidField(f"a prompt is a text or a list of token ids, got {kind(prompt)}", param="prompt")


def kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
