"""Checks of chat requests before the template sees them.
What templates need otherwise is ``text.template``'s business."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sized
from typing import Any, NamedTuple

from sgla.errors import InvalidField, UnsupportedField
from sgla.http.media.parts import Message, Source, may_be, taken
from sgla.http.request.schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOL_NAME,
    MAX_TOOLS,
    ChatRequest,
    ThinkingSwitch,
    TokenizeRequest,
    check_count,
    shown,
    unsupported,
)
from sgla.text.parts import HOLDERS, TEXTS, check_apart, check_one
from sgla.text.template import REASONING_FIELDS, RESERVED, is_source
from sgla.validation import root

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Of a message, where no model would see them.
BESIDE = (HOLDERS - {"refusal"}) | {"images", "audios", "videos", "files"}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def checked_messages(messages: list[Message]) -> tuple[list[Message], list[Source]]:
    """``messages`` with what stands for their pictures, sounds and videos, and where these come from. Raises
    InvalidField or UnsupportedField that names the wrong one."""
    if not messages:
        raise InvalidField("messages: at least one message is needed", param="messages")
    check_messages(messages)
    for i, message in enumerate(messages):
        _check_message(message, f"messages[{i}]")
    return taken(messages)


def text_messages(messages: list[Message]) -> list[Message]:
    """``checked_messages`` where pictures have no place."""
    checked, sources = checked_messages(messages)
    if sources:
        place = sources[0].place
        raise UnsupportedField(
            f"{place}: pictures, sounds and videos are not supported on this route; leave it out",
            param=place,
        )
    return checked


def check_messages(messages: list[Message]) -> None:
    """Raise InvalidField for too many messages, or too many parts and calls in them."""
    check_count("messages", messages, MAX_MESSAGES)
    check_parts("messages", [part for message in messages for part in _lists(message)])


def _lists(message: Message) -> list[list[Any]]:
    values = (message.get("content"), message.get("tool_calls"))
    return [value for value in values if isinstance(value, list)]


def check_parts(name: str, lists: Iterable[Sized]) -> None:
    """Raise InvalidField if the ``lists`` of all messages together are too long."""
    parts = sum(map(len, lists))
    if parts > MAX_PARTS:
        raise InvalidField(f"{name} has {parts} parts and calls; {MAX_PARTS} is the limit", param=name)


def _check_message(message: Message, path: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise _wrong(f"{path}.role must be one of {', '.join(ROLES)}")
    check_beside(message, path)
    check_apart([name for name in ("content", "refusal") if message.get(name)], path)
    calls = message.get("tool_calls")
    _check_calls(calls, f"{path}.tool_calls")
    if isinstance(content, list):
        for i, part in enumerate(content):
            _check_part(part, f"{path}.content[{i}]")
    elif content is None:
        if role != "assistant" or not (calls or message.get("refusal") or reasons(message)):
            raise _wrong(f"{path}.content is required: a string or a list of text parts")
    elif not isinstance(content, str):
        raise _wrong(f"{path}.content must be a string or a list of text parts")


def check_beside(message: Message, path: str) -> None:
    """Raise UnsupportedField for what is beside the content of a message instead of in it."""
    if strange := sorted(name for name in message.keys() & BESIDE if message[name]):
        raise unsupported(
            f"{path}.{strange[0]}", ": texts, pictures, sounds and videos are parts of a message's content"
        )


def reasons(message: Message) -> bool:
    return any(message.get(name) for name in REASONING_FIELDS)


def _check_part(part: Any, path: str) -> None:
    if may_be(part):
        return  # ``taken`` looks at it
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise _wrong(f"{path} must be an object with a type")
    if kind not in TEXTS:
        raise unsupported(
            "messages",
            f" with content of type {kind[:40]!r} ({path}): the model takes texts, pictures, sounds and "
            "videos",
        )
    if not isinstance(part.get(TEXTS[kind]), str):
        raise _wrong(f"{path}.{TEXTS[kind]} must be a string")
    check_one(part, (TEXTS[kind],), path)


def _check_calls(calls: Any, path: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise _wrong(f"{path} must be a list")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"{path}[{i}].function.name must be a string")


class Chosen(NamedTuple):
    """What ``tool_choice`` makes of the tools. ``forced``: there must be a call; ``once``: a single one.

    ``fewer``: the prompt shows tools that may not be called.
    """

    tools: list[Message]
    forced: bool = False
    once: bool = False
    fewer: bool = False


def chosen_tools(fields: ChatRequest, single: bool = False) -> Chosen:
    """The tools whose calls are wanted; ``single``: one call, even if the request does not say so.
    Raises InvalidField or UnsupportedField."""
    check_tool_list(fields.tools)
    tools, choice = fields.tools or [], fields.tool_choice
    once = single or fields.parallel_tool_calls is False
    if choice == "none":
        return Chosen([])
    if choice in (None, "auto"):
        return Chosen(tools, once=once)
    names, forced = None, True
    if isinstance(choice, dict) and choice.get("type") == "function":
        names, once = [choice], True
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        names, forced = allowed_references(choice)
    elif choice != "required":
        raise unsupported("tool_choice", " other than none, auto, required, a function or allowed_tools")
    called = tools if names is None else with_names(tools, names)
    if not called:
        raise InvalidField("tool_choice asks for a call, but there are no tools", param="tool_choice")
    return Chosen(called, forced, once, fewer=len(called) < len(tools))


def allowed_references(choice: dict[str, Any]) -> tuple[list[Message], bool]:
    """The references of ``allowed_tools``, and whether one of them must be called. Raises InvalidField."""
    inner = choice.get("allowed_tools", choice)
    mode, tools = (inner.get("mode"), inner.get("tools")) if isinstance(inner, dict) else (None, None)
    listed = tools if isinstance(tools, list) else []
    references = [each for each in listed if isinstance(each, dict)]
    if mode not in ("auto", "required") or not references or len(references) < len(listed):
        raise InvalidField(
            "tool_choice: allowed_tools needs a mode (auto or required) and a list of tools",
            param="tool_choice",
        )
    check_count("tool_choice", references, MAX_TOOLS)
    return references, mode == "required"


def with_names(tools: list[Message], references: list[Message]) -> list[Message]:
    """Those of ``tools`` that ``references`` name. Raises InvalidField for a reference to none of them."""
    functions = [reference.get("function") for reference in references]
    names = [function.get("name") if isinstance(function, dict) else None for function in functions]
    check_named(names, {tool["function"]["name"] for tool in tools})
    wanted = set(names)
    return [tool for tool in tools if tool["function"]["name"] in wanted]


def check_named(names: Iterable[Any], known: Container[str]) -> None:
    """Raise InvalidField for the first of the ``names`` in a tool_choice that no tool has."""
    for name in names:
        if not isinstance(name, str):
            raise InvalidField("tool_choice must give each function's name", param="tool_choice")
        if name not in known:
            raise InvalidField(
                f"tool_choice names {name[:200]!r}, which is not among the tools", param="tool_choice"
            )


def check_tool_list(tools: list[dict[str, Any]] | None) -> None:
    check_count("tools", tools or [], MAX_TOOLS)
    for i, tool in enumerate(tools or []):
        function, kind = tool.get("function"), tool.get("type", "function")
        if isinstance(kind, str) and kind != "function":
            raise unsupported_tool(f"tools[{i}]", kind)
        if kind != "function" or not isinstance(function, dict):
            raise InvalidField(
                f'tools[{i}] must be {{"type": "function", "function": {{...}}}}', param="tools"
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidField(f"tools[{i}].function.name must be a string", param="tools")
        check_tool_name(f"tools[{i}].function.name", function["name"])
        if not isinstance(function.get("parameters"), (dict, type(None))):
            raise InvalidField(f"tools[{i}].function.parameters must be a JSON Schema object", param="tools")


def check_tool_name(path: str, *names: str) -> None:
    """Raise InvalidField for ``names`` (of a namespace or MCP server, and of a tool) that are too long
    together: one of them may be written with each of many tools, or of a tool's arguments."""
    if sum(map(len, names)) > MAX_TOOL_NAME:
        told = " with its namespace" if len(names) > 1 else ""
        raise InvalidField(f"{path}{told} may have at most {MAX_TOOL_NAME} characters", param="tools")


def unsupported_tool(path: str, kind: Any) -> UnsupportedField:
    """For a tool that a provider's own server would run, or whose schema it knows."""
    return UnsupportedField(
        f"{path}: this server has no tool of type {shown(kind)}; leave it out: models call only "
        "functions that the client runs and describes",
        param="tools",
    )


def _wrong(message: str) -> InvalidField:
    return InvalidField(message, param="messages")


def template_kwargs(request: ChatRequest | TokenizeRequest, trusted: bool) -> dict[str, Any]:
    """Extra variables of the template: ``chat_template_kwargs``, then what other fields mean to templates.

    ``trusted``: the request may bring a template of its own, whose loops nothing bounds.
    """
    kwargs = dict(request.chat_template_kwargs or {})
    if wrong := kwargs.keys() & (RESERVED - {"documents"} | {"self", "chat_template"}):
        names = ", ".join(sorted(wrong))
        raise InvalidField(f"chat_template_kwargs may not set {names}", param="chat_template_kwargs")
    if request.chat_template is not None:
        if is_source(request.chat_template) and not trusted:
            raise UnsupportedField(
                "chat_template: this server takes the names of its own templates only; "
                "--trust-request-chat-template lets requests bring theirs",
                param="chat_template",
            )
        kwargs["chat_template"] = request.chat_template
    if isinstance(request, ChatRequest):
        if request.documents:
            kwargs.setdefault("documents", request.documents)
        thinking = wants_thinking(request)
        if thinking is not None:
            kwargs = {"enable_thinking": thinking, "thinking": thinking, **kwargs}
        if request.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", checked_effort(request.reasoning_effort))
            kwargs.setdefault("enable_thinking", request.reasoning_effort != "none")
    return kwargs


def checked_effort(effort: str, name: str = "reasoning_effort") -> str:
    """Raises InvalidField for an effort that does not exist; ``name``: what the client calls the field."""
    if effort not in EFFORTS:
        raise InvalidField(f"{name} must be one of {', '.join(EFFORTS)}", param=root(name))
    return effort


def wants_thinking(request: ChatRequest) -> bool | None:
    """None: as the model does by itself."""
    asked = request.thinking if request.enable_thinking is None else request.enable_thinking
    return asked.type != "disabled" if isinstance(asked, ThinkingSwitch) else asked


def prompt_flags(request: ChatRequest | TokenizeRequest) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message); the second turns the first off.
    Raises InvalidField."""
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
