"""Requests of OpenAI's Responses API: items and flat tools, and their translation to a ChatRequest."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from sgla.errors import InvalidField, UnsupportedField
from sgla.http.media.parts import Source, may_be, source_of
from sgla.http.request.chat import (
    allowed_references,
    check_beside,
    check_named,
    check_parts,
    check_tool_name,
    checked_effort,
    unsupported_tool,
)
from sgla.http.request.schema import (
    MAX_TOOLS,
    ChatRequest,
    SamplingFields,
    Schema,
    check_count,
    shown,
    unsupported,
)
from sgla.http.wire import encode
from sgla.text.parts import TEXTS, check_one
from sgla.validation import root

Item = dict[str, Any]
Message = dict[str, Any]
Remote = Mapping[str, list[Item]]  # the functions of MCP servers, by their labels
NONE: Remote = MappingProxyType({})

ROLES = ("user", "assistant", "system", "developer")
KINDS = (
    *("message", "reasoning", "compaction", "function_call", "function_call_output"),
    *("custom_tool_call", "custom_tool_call_output", "item_reference"),
    *("mcp_call", "mcp_approval_request", "mcp_approval_response", "mcp_list_tools"),
)
LOGPROBS = "message.output_text.logprobs"  # in ``include``
INCLUDED = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
CUSTOM_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class TextConfig(msgspec.Struct, kw_only=True):
    """``verbosity`` is a wish that models here cannot be told."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """``summary`` is accepted: reasoning comes as it is, not as a summary."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """``input``: text, or items of the types message, function_call(_output), custom_tool_call(_output),
    mcp_call, mcp_list_tools, mcp_approval_request, mcp_approval_response, reasoning, compaction and
    item_reference; an item without a type is a message."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    top_logprobs: int | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    timeout: float | None = None
    cache_ttl: float | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


RESPONSES = Schema(ResponsesRequest)
PASSED = (
    *SamplingFields.__struct_fields__,
    *(
        "model",
        "stream",
        "parallel_tool_calls",
        "priority",
        "cache_salt",
        "extra_key",
        "cache_ttl",
        "prompt_cache_retention",
        "timeout",
        "chat_template_kwargs",
    ),
)


def check_fields(fields: ResponsesRequest) -> None:
    """Raises InvalidField and UnsupportedField for what needs no look at the items."""
    if fields.n not in (None, 1):
        raise InvalidField("n must be 1: a response has one answer", param="n")
    if fields.prompt is not None:
        raise unsupported("prompt", ": it has no stored prompts")
    if fields.truncation not in (None, "auto", "disabled"):
        raise InvalidField("truncation must be auto or disabled", param="truncation")
    if fields.background and fields.store is False:
        raise InvalidField("background needs store: true", param="background")


def input_items(fields: ResponsesRequest) -> list[Item]:
    """The request's own items; text is a message of the user."""
    if isinstance(fields.input, str):
        return [{"type": "message", "role": "user", "content": fields.input}]
    return fields.input or []


def chat_request(
    fields: ResponsesRequest, items: list[Item], remote: Remote = NONE, place: str = "input"
) -> ChatRequest:
    """The request in terms of chats; ``items`` is the whole conversation, which the client knows as
    ``place``. Raises InvalidField and UnsupportedField."""
    passed = {name: getattr(fields, name) for name in PASSED}
    if unknown := set(fields.include or []) - set(INCLUDED):
        raise InvalidField(
            f"include: {min(unknown)!r:.100} is not one of {', '.join(INCLUDED)}", param="include"
        )
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        passed["reasoning_effort"] = checked_effort(fields.reasoning.effort, "reasoning.effort")
    if fields.text is not None and fields.text.format is not None:
        passed |= response_format(fields.text.format)
    if fields.top_logprobs or LOGPROBS in (fields.include or []):
        passed |= {"logprobs": True, "top_logprobs": fields.top_logprobs}
    messages = chat_messages(fields.instructions, items, place)
    if not messages:
        raise InvalidField("input is required where there is no conversation to go on with", param="input")
    return ChatRequest(
        messages=messages,
        max_completion_tokens=fields.max_output_tokens,
        **passed,
        **chat_tools(fields, remote),
    )


def response_format(form: dict[str, Any]) -> dict[str, Any]:
    kind = form.get("type")
    if kind == "json_schema":
        names = ("name", "description", "schema", "strict")
        inner = {name: form[name] for name in names if form.get(name) is not None}
        return {"response_format": {"type": kind, "json_schema": inner}}
    if kind not in ("text", "json_object"):
        raise InvalidField("text.format.type must be text, json_object or json_schema", param="text")
    return {"response_format": {"type": kind}}


# tools


def chat_tools(fields: ResponsesRequest, remote: Remote = NONE) -> dict[str, Any]:
    """The tools, and which of them the model may or must call.
    Raises UnsupportedField for those that a provider's server would run."""
    choice = fields.tool_choice
    allowed: set[str | None] | None = None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        references, required = allowed_references(choice)
        references = [from_server(each) for each in references]
        allowed = {flat_name(each) if isinstance(each.get("name"), str) else None for each in references}
        choice = "required" if required else "auto"
    elif isinstance(choice, dict) and choice.get("type") == "mcp":
        choice = from_server(choice)
        if choice["type"] == "namespace":  # any tool of the MCP server
            allowed, choice = {choice["name"]}, "required"
    named = named_tools(fields, remote)
    tools = [function for _, function in named.values()]
    if allowed is not None:
        check_named(allowed, {*named, *(of.namespace for of, _ in named.values() if of.namespace)})
        tools = [tool for flat, (of, tool) in named.items() if allowed & {flat, of.namespace}]
    if choice is None:
        return {"tools": tools or None}
    if isinstance(choice, dict):
        if choice.get("type") not in CLIENT_TOOLS or not isinstance(choice.get("name"), str):
            raise InvalidField(
                "tool_choice must be none, auto, required, or name a function: {type: function, name}",
                param="tool_choice",
            )
        choice = {"type": "function", "function": {"name": flat_name(choice)}}
    return {"tools": tools or None, "tool_choice": choice}


CLIENT_TOOLS = ("function", "custom")


class ToolName(NamedTuple):
    """What a call of a tool tells the client. ``server``: of a tool of the MCP server ``namespace`` what
    becomes of its calls here: call, or approve (ask the client first)."""

    name: str
    namespace: str | None = None
    custom: bool = False
    server: str | None = None


def from_server(named: Item) -> Item:
    """A choice that refers to an MCP server, or to one of its tools, in the terms of namespaces."""
    if named.get("type") != "mcp":
        return named
    label = text_of(named, "server_label") or None
    if not isinstance(named.get("name"), str):
        return {"type": "namespace", "name": label}
    return {"type": "function", "name": named["name"], "namespace": label}


def flat_name(named: Mapping[str, Any]) -> str:
    """The name that the model knows a tool by;
    ``named`` is the tool, or an item or a choice that refers to it."""
    name, namespace = str(named.get("name")), named.get("namespace")
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def named_tools(
    fields: ResponsesRequest, remote: Remote = NONE
) -> dict[str, tuple[ToolName, dict[str, Any]]]:
    """The tools, and those inside of namespaces and of MCP servers, in the shape of chats, by their flat
    names. Raises InvalidField and UnsupportedField."""
    found: dict[str, tuple[ToolName, dict[str, Any]]] = {}
    flat = [
        each for i, tool in enumerate(fields.tools or []) for each in ungrouped(tool, f"tools[{i}]", remote)
    ]
    check_count("tools", flat, MAX_TOOLS)
    for path, tool in flat:
        function = chat_tool(tool, path)
        name = function["function"]["name"]
        if name in found:
            raise InvalidField(f"{path}: another tool is called {name[:200]!r}, too", param="tools")
        of = ToolName(tool["name"], tool.get("namespace"), tool["type"] == "custom", tool.get("server"))
        found[name] = (of, function)
    return found


def ungrouped(tool: dict[str, Any], path: str, remote: Remote = NONE) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tool, or those of a namespace or an MCP server, with their paths.
    The first one's description tells what the namespace is for."""
    if tool.get("type") == "mcp" and text_of(tool, "server_label") in remote:
        yield from ((path, function) for function in remote[tool["server_label"]])
        return
    if tool.get("type") != "namespace":
        yield path, {**tool, "namespace": None, "server": None}
        return
    namespace, inner = wanted(tool, "name", path), tool.get("tools")
    check_tool_name(f"{path}.name", namespace)
    if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
        raise InvalidField(f"{path}.tools must be a list of tools", param="tools")
    about = tool.get("description")
    for i, each in enumerate(inner):
        texts = [
            text for text in (about if i == 0 else None, each.get("description")) if isinstance(text, str)
        ]
        described = {"description": "\n\n".join(texts)} if texts else {}
        yield f"{path}.tools[{i}]", {**each, **described, "namespace": namespace, "server": None}


def chat_tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    """A flat tool in the nested shape.
    A custom tool, which takes free text, has that text as its only argument."""
    if tool.get("type") == "mcp":
        raise UnsupportedField(
            f"{path}: this server calls no tools of MCP servers; its operator names some by --tool-server",
            param="tools",
        )
    if tool.get("type") not in CLIENT_TOOLS:
        raise unsupported_tool(path, tool.get("type"))
    if not isinstance(tool.get("name"), str):
        raise InvalidField(f"{path}.name is required", param="tools")
    check_tool_name(f"{path}.name", *filter(None, (tool.get("namespace"), tool["name"])))
    names = ("description", "parameters", "strict")
    function = {"name": flat_name(tool)} | {name: tool[name] for name in names if tool.get(name) is not None}
    if tool["type"] == "custom":
        function |= custom_input(tool.get("format"), f"{path}.format")
    return {"type": "function", "function": function}


def custom_input(form: Any, path: str) -> dict[str, Any]:
    """What the function of a custom tool has besides its name. Its text may have to fit a grammar."""
    given = form if isinstance(form, dict) else {"type": None if form is None else "?"}
    kind, syntax, definition = given.get("type", "text"), given.get("syntax"), given.get("definition")
    if kind in (None, "text"):
        return {"parameters": CUSTOM_INPUT}
    if kind != "grammar" or syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise InvalidField(
            f"{path} must be {{type: text}} or {{type: grammar, syntax: lark or regex, definition}}",
            param="tools",
        )
    text = {"type": "string", "x-grammar": {"syntax": syntax, "definition": definition}}
    if syntax == "regex":
        text["pattern"] = f"^({definition})$"
    return {"parameters": {**CUSTOM_INPUT, "properties": {"input": text}}, "strict": True}


def tool_names(fields: ResponsesRequest, remote: Remote = NONE) -> dict[str, ToolName]:
    return {flat: of for flat, (of, _) in named_tools(fields, remote).items()}


# items


def is_reference(item: Item) -> bool:
    return item.get("type") == "item_reference" or (
        "type" not in item and "role" not in item and "id" in item
    )


def referred(items: list[Item]) -> Iterator[str]:
    """The ids of the stored items that ``items`` refer to."""
    return (text_of(item, "id") for item in items if is_reference(item))


def resolved(items: list[Item], find: Callable[[str], Item | None]) -> list[Item]:
    """``items`` with the stored ones in place of references to them."""
    result = []
    for i, item in enumerate(items):
        if is_reference(item):
            found = find(text_of(item, "id"))
            if found is None:
                raise InvalidField(
                    f"input[{i}]: there is no stored item {shown(item.get('id'), 200)}", param="input"
                )
            item = found
        result.append(item)
    return result


def chat_messages(instructions: str | None, items: list[Item], place: str = "input") -> list[Message]:
    """Items as messages; ``place``: what the client calls their list. The items of one turn of the assistant
    (reasoning, text, calls) become one message, and the instructions and system texts at the beginning
    another: few templates take more than one."""
    check_contents(place, items)
    turns = Turns()
    for i, item in enumerate(items):
        turns.add(item, f"{place}[{i}]")
    turns.end()
    texts = [instructions] if instructions else []
    leading = list(takewhile(lambda message: message["role"] in ("system", "developer"), turns.messages))
    texts += [plain_text(message["content"]) for message in leading]
    messages = turns.messages[len(leading) :]
    return [{"role": "system", "content": "\n".join(texts)}, *messages] if texts else messages


def check_contents(place: str, items: list[Item]) -> None:
    """Raise InvalidField for too many parts in all of them together."""
    contents = (item.get(name) for item in items for name in ("content", "output", "summary"))
    check_parts(place, [content for content in contents if isinstance(content, list)])


def check_item(item: Item, path: str) -> None:
    """Raises InvalidField and UnsupportedField for an item that has no place in a conversation."""
    check_contents(path, [item])
    Turns().add(item, path)


def plain_text(content: str | list[Any]) -> str:
    """Raises InvalidField for pictures, sounds and videos."""
    if isinstance(content, list):
        for part in content:
            if isinstance(part, Source):
                raise InvalidField(
                    f"{part.place}: only messages of users and outputs of functions have pictures, sounds "
                    "and videos",
                    param=part.place,
                )
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


class Turns:
    """Builds messages from items, one after the other."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._assistant: Message | None = None  # the turn that takes what the assistant says next
        self._results: list[Message] = []  # of calls to MCP servers; they follow the last one of a turn

    def end(self) -> None:
        """What the last items leave to say."""
        if self._results:
            self._assistant = None
            self.messages += self._results
            self._results = []

    def add(self, item: Item, path: str) -> None:
        kind = item.get("type", "message")
        if kind != "mcp_call":
            self.end()
        if kind == "message":
            self._message(item, path)
        elif kind == "reasoning":
            self._turn(fresh=True)["reasoning_content"] = reasoning_text(item, path)
        elif kind in COMPACTIONS:
            self._assistant = None
            self.messages.append({"role": "user", "content": SUMMARY + unsealed(item, path)})
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, path, custom=kind == "custom_tool_call")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._assistant = None
            content = call_output(item, path)
            self.messages.append(
                {"role": "tool", "tool_call_id": wanted(item, "call_id", path), "content": content}
            )
        elif kind in ("mcp_call", "mcp_approval_request", "mcp_approval_response"):
            self._server_call(item, kind, path)
        elif kind == "mcp_list_tools":
            pass  # of those, what the request's own tools bring is shown to the model
        else:
            raise unsupported(path, f" with the type {shown(kind)}, but with {', '.join(KINDS)}")

    def _message(self, item: Item, path: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise InvalidField(f"{path}.role must be one of {', '.join(ROLES)}", param=root(path))
        check_beside(item, path)
        content = message_content(item.get("content"), path)
        if role == "assistant":
            turn = self._turn(fresh=False)
            if turn["content"] is not None or "tool_calls" in turn:
                turn = self._turn(fresh=True)
            turn["content"] = plain_text(content)
            return
        self._assistant = None
        self.messages.append({"role": role, "content": content})

    def _server_call(self, item: Item, kind: str, path: str) -> None:
        """A call to an MCP server. One that was approved stands in the item that asked for that."""
        request = item.get("approval_request_id")
        if kind == "mcp_approval_request" or (kind == "mcp_call" and not isinstance(request, str)):
            call = {"call_id": wanted(item, "id", path), "namespace": wanted(item, "server_label", path)}
            self._call({**item, **call}, path, custom=False)
        if kind == "mcp_approval_request" or (
            kind == "mcp_approval_response" and item.get("approve") is True
        ):
            return
        if kind == "mcp_call":
            uid, content = request if isinstance(request, str) else item["id"], told(item)
        else:
            reason = item.get("reason")
            uid = wanted(item, "approval_request_id", path)
            content = (
                f"The user did not approve this call. {reason if isinstance(reason, str) else ''}".rstrip()
            )
        self._results.append({"role": "tool", "tool_call_id": uid, "content": content})

    def _call(self, item: Item, path: str, custom: bool) -> None:
        argument = wanted(item, "input" if custom else "arguments", path)
        function = {
            "name": flat_name({**item, "name": wanted(item, "name", path)}),
            "arguments": encode({"input": argument}).decode() if custom else argument,
        }
        calls = self._turn(fresh=False).setdefault("tool_calls", [])
        calls.append({"id": wanted(item, "call_id", path), "type": "function", "function": function})

    def _turn(self, fresh: bool) -> Message:
        """The assistant's current turn. ``fresh``: another one, unless the current one is."""
        if self._assistant is None or fresh:
            self._assistant = {"role": "assistant", "content": None}
            self.messages.append(self._assistant)
        return self._assistant


def text_of(item: Item, name: str) -> str:
    """ "" for what is no string."""
    value = item.get(name)
    return value if isinstance(value, str) else ""


def wanted(item: Item, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidField(f"{path}.{name} must be a string", param=root(path))
    return value


def message_content(content: Any, path: str) -> str | list[Any]:
    """A string, or parts in the shape of chats; a single text is a string."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidField(f"{path}.content must be a string or a list of parts", param=root(path))
    parts = [content_part(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
    return parts[0]["text"] if len(parts) == 1 and isinstance(parts[0], dict) else parts


def content_part(part: Any, path: str) -> dict[str, Any] | Source:
    if may_be(part) and (source := source_of(part, path)) is not None:
        return source
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in TEXTS:
        text = part.get(TEXTS[kind])
        if not isinstance(text, str):
            raise InvalidField(f"{path}.{TEXTS[kind]} must be a string", param=root(path))
        check_one(part, (TEXTS[kind],), path)
        return {"type": "text", "text": text}
    raise unsupported(path, f" with the type {shown(kind)}, but with {', '.join((*TEXTS, 'input_image'))}")


def call_output(item: Item, path: str) -> str | list[Any]:
    output = item.get("output")
    if isinstance(output, list):
        return message_content(output, path)
    return output if isinstance(output, str) else encode(output).decode()


def told(item: Item) -> str:
    """What the model reads of a call that was made."""
    error = item.get("error")
    if not error:
        return str(item.get("output") or "")
    if isinstance(error, dict):
        content = error.get("content")
        texts = (
            [part.get("text") for part in content if isinstance(part, dict)]
            if isinstance(content, list)
            else []
        )
        error = "\n".join(text for text in texts if isinstance(text, str)) or error.get("message")
    return f"Error: {error}"


# what clients keep without reading it

COMPACTIONS = ("compaction", "compaction_summary")
SUMMARY = "This is a summary of the conversation so far:\n\n"

SEAL = "sgla1:"  # says whose reasoning it is


def sealed(text: str) -> str:
    """Reasoning or a summary as ``encrypted_content``, for clients that send back nothing else of it.
    Opaque, not secret."""
    return SEAL + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def opened(item: Item) -> str | None:
    """What ``sealed`` made the item's ``encrypted_content`` of; None if it is of another make."""
    secret = item.get("encrypted_content")
    if not isinstance(secret, str) or not secret.startswith(SEAL):
        return None
    try:
        return base64.b64decode(secret[len(SEAL) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def unsealed(item: Item, path: str) -> str:
    """The summary in place of a conversation's earlier part. Raises InvalidField."""
    summary = opened(item)
    if summary is None:
        raise InvalidField(
            f"{path}.encrypted_content was not made by /v1/responses/compact of this server", param=root(path)
        )
    return summary


def reasoning_text(item: Item, path: str) -> str:
    """The reasoning of an item: its content, else what ``sealed`` made, else its summary. Raises
    InvalidField."""
    content, summary = (listed(item, name, path) for name in ("content", "summary"))
    reasoning = None if content else opened(item)
    if reasoning is not None:
        return reasoning
    texts = [part.get("text") for part in content or summary if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def listed(item: Item, name: str, path: str) -> list[Any]:
    """A field that is a list, or left out. Raises InvalidField."""
    value = item.get(name)
    if value is None or isinstance(value, list):
        return value or []
    raise InvalidField(f"{path}.{name} must be a list", param=root(path))
