"""Chat messages of the OpenAI API -> what chat templates take: plain dicts whose content is a string."""

from __future__ import annotations

from typing import Any

import msgspec

from sgla.errors import InvalidField
from sgla.http.schema import ChatRequest, TokenizeRequest, unsupported

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})


def normalize(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for the template. Raises InvalidField or UnsupportedField that names the message."""
    if not messages:
        raise InvalidField("messages: at least one message is needed", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], path: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidField(f"{path}.role must be one of {', '.join(sorted(ROLES))}", param="messages")
    result = {key: value for key, value in message.items() if value is not None}
    result["role"] = "system" if role == "developer" else role
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], path)
    content = message.get("content")
    if content is None and not (
        role == "assistant" and (message.get("tool_calls") or message.get("refusal"))
    ):
        raise InvalidField(f"{path}.content is required: a string or a list of text parts", param="messages")
    result["content"] = _content(content, f"{path}.content")
    return result


def _content(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidField(f"{path} must be a string or a list of text parts", param="messages")
    return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise InvalidField(f"{path} must be an object with a type", param="messages")
    if kind not in TEXT_PARTS:
        raise unsupported(
            "messages", f" with content of type {kind[:40]!r} ({path}): the model takes text only"
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidField(f"{path}.{TEXT_PARTS[kind]} must be a string", param="messages")
    return text


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Calls of the history; templates want ``arguments`` as an object, the API sends it as a JSON string."""
    if not isinstance(calls, list):
        raise InvalidField(f"{path}.tool_calls must be a list", param="messages")
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidField(f"{path}.tool_calls[{i}].function.name must be a string", param="messages")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments or "{}")
            except (msgspec.DecodeError, RecursionError) as error:
                where = f"{path}.tool_calls[{i}].function.arguments"
                raise InvalidField(f"{where} is not valid JSON", param="messages") from error
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def template_kwargs(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Extra variables of the template: ``chat_template_kwargs``, then what other fields mean to templates."""
    kwargs = dict(request.chat_template_kwargs or {})
    if isinstance(request, ChatRequest):
        if request.documents:
            kwargs.setdefault("documents", request.documents)
        if request.reasoning_effort is not None:
            if request.reasoning_effort not in EFFORTS:
                raise InvalidField(
                    f"reasoning_effort must be one of {', '.join(sorted(EFFORTS))}", param="reasoning_effort"
                )
            kwargs.setdefault("reasoning_effort", request.reasoning_effort)
            kwargs.setdefault("enable_thinking", request.reasoning_effort != "none")
    return kwargs


def prompt_flags(request: ChatRequest | TokenizeRequest) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message); the second turns the first off. Raises InvalidField."""
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidField(
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    if continues and request.messages and request.messages[-1].get("role") != "assistant":
        raise InvalidField(
            "continue_final_message needs a last message of the assistant", param="continue_final_message"
        )
    return request.add_generation_prompt is not False and not continues, continues
