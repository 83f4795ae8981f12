"""``functions`` and ``function_call``:
OpenAI's names for tools before there were tools, in terms of those that followed."""

from __future__ import annotations

from typing import Any

from sgla.errors import InvalidField
from sgla.http.request.schema import ChatRequest

Message = dict[str, Any]


def as_tools(fields: ChatRequest) -> bool:
    """Rewrite ``fields``, old messages included; returns whether the answer is to have a ``function_call``.

    Raises InvalidField where both kinds are used at once.
    """
    fields.messages = modern_messages(fields.messages)
    if not fields.functions:
        return False
    if fields.tools:
        raise InvalidField("functions and tools exclude each other; send tools", param="functions")
    fields.tools = [{"type": "function", "function": function} for function in fields.functions]
    choice = fields.function_call
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    elif choice not in (None, "none", "auto"):
        raise InvalidField("function_call must be none, auto or {name}", param="function_call")
    fields.tool_choice, fields.parallel_tool_calls = choice, False
    return True


def modern_messages(messages: list[Message]) -> list[Message]:
    """Calls of functions and their results as those of tools. A result belongs to the call before it."""
    result: list[Message] = []
    latest = ""  # call
    for i, message in enumerate(messages):
        call = message.get("function_call")
        if message.get("role") == "assistant" and isinstance(call, dict) and not message.get("tool_calls"):
            calls = [{"id": f"call_{i}", "type": "function", "function": call}]
            message = {**message, "tool_calls": calls}
            del message["function_call"]
        elif message.get("role") == "function":
            message = {**message, "role": "tool", "tool_call_id": latest}
        result.append(message)
        latest = call_id(message) or latest
    return result


def call_id(message: Message) -> str:
    """The id of the last call of a message, or nothing."""
    calls = message.get("tool_calls")
    last = calls[-1] if isinstance(calls, list) and calls else None
    uid = last.get("id") if isinstance(last, dict) else None
    return uid if isinstance(uid, str) else ""


def old_message(message: Message) -> Message:
    """The assistant's message with its call under the old name."""
    calls = message.pop("tool_calls", None)
    return message | ({"function_call": calls[0]["function"]} if calls else {})


def old_delta(delta: dict[str, Any]) -> dict[str, Any]:
    calls = delta.get("tool_calls")
    return {"function_call": calls[0]["function"]} if calls else delta
