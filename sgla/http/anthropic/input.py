"""Requests of Anthropic's Messages API, and their translation to a ChatRequest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from sgla.errors import InvalidField, UnsupportedField
from sgla.http.media.parts import Source
from sgla.http.request.chat import check_parts, check_tool_name, checked_effort, unsupported_tool
from sgla.http.request.sampling import stop_list
from sgla.http.request.schema import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CacheControl,
    ChatRequest,
    SamplingFields,
    Schema,
    check_count,
    unsupported,
)
from sgla.http.wire import encode
from sgla.text.parts import check_apart, is_empty

Message = dict[str, Any]

MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")  # of pictures

# Claude Code puts a line with a nonce in front of its system prompt;
# left there, no turn would find its prefix cached.
_BILLING = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)


class Holder(msgspec.Struct, kw_only=True):
    """A block holds what it is in one field of these at most (``check_blocks``): what stands in another would
    be dropped without a word."""

    text: Any = None
    source: Any = None
    content: Any = None


class TextBlock(Holder, tag="text"):
    text: str
    cache_control: CacheControl | None = None


class ImageSource(msgspec.Struct, kw_only=True):
    type: str
    media_type: str = "image/png"
    data: str | None = None
    url: str | None = None


class ImageBlock(Holder, tag="image"):
    source: ImageSource
    cache_control: CacheControl | None = None


class DocumentSource(msgspec.Struct, kw_only=True):
    type: str
    data: str | None = None
    content: str | list[TextBlock | ImageBlock] | None = None
    url: str | None = None


class DocumentBlock(Holder, tag="document", kw_only=True):
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(Holder, tag="thinking"):
    thinking: str


class RedactedThinkingBlock(Holder, tag="redacted_thinking"):
    pass


class ToolUseBlock(Holder, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Holder, tag="tool_result", kw_only=True):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    cache_control: CacheControl | None = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)

HOLDS = {TextBlock: "text", ImageBlock: "source", DocumentBlock: "source", ToolResultBlock: "content"}


class MessageParam(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, kw_only=True):
    """``type`` other than ``custom``: one of Anthropic's own tools, which this server does not have."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """``budget_tokens`` ends reasoning where its tags are tokens of the model;
    others cannot be told of it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class Container(msgspec.Struct, kw_only=True):
    """Where code of Anthropic's own tools runs."""

    id: str | None = None
    skills: list[dict[str, Any]] | None = None


class CountTokensRequest(SamplingFields, kw_only=True):
    """The body of ``count_tokens``, which may be that of a message,
    and all of ``MessagesRequest`` but one field."""

    messages: list[MessageParam]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    container: str | Container | None = None
    output_format: OutputFormat | None = None  # where output_config.format was in the beta
    stop_sequences: list[str] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    timeout: float | None = None
    cache_ttl: float | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int


MESSAGES = Schema(MessagesRequest)
COUNT_TOKENS = Schema(CountTokensRequest)
PASSED = (
    *SamplingFields.__struct_fields__,
    *("model", "max_tokens", "stream", "priority", "cache_salt", "extra_key", "timeout", "cache_ttl"),
)


def chat_request(fields: CountTokensRequest) -> ChatRequest:
    """The same request in OpenAI's terms. Raises InvalidField and UnsupportedField."""
    if fields.n not in (None, 1):
        raise InvalidField("n must be 1: a message has one answer", param="n")
    if fields.stop_sequences is not None and fields.stop is not None:
        raise InvalidField("give either stop_sequences or stop", param="stop_sequences")
    check_sizes(fields)
    check_blocks(fields.system, "system")
    for i, message in enumerate(fields.messages):
        check_blocks(message.content, f"messages[{i}].content")
    if isinstance(fields.container, Container) and fields.container.skills:
        raise unsupported("container.skills", ": they are for tools that a provider's own server runs")
    passed = {name: getattr(fields, name) for name in PASSED}
    passed["cache_control"] = longest(fields)
    passed["stop"] = stop_list("stop_sequences", fields.stop_sequences) or fields.stop
    if fields.output_config is not None and fields.output_config.effort is not None:
        passed["reasoning_effort"] = checked_effort(fields.output_config.effort, "output_config.effort")
    form = (fields.output_config and fields.output_config.format) or fields.output_format
    if form is not None:
        passed |= response_format(form)
    return ChatRequest(
        messages=chat_messages(fields),
        chat_template_kwargs=template_kwargs(fields),
        continue_final_message=is_prefill(fields.messages),
        **passed,
        **chat_tools(fields),
    )


def longest(fields: CountTokensRequest) -> CacheControl | None:
    """Of all places that say how long a prefix is to be kept, the one that says longest. Raises
    InvalidField."""
    lists = [content for content in (fields.system, *(m.content for m in fields.messages)) if content]
    parts: list[Any] = [block for content in lists if not isinstance(content, str) for block in content]
    parts += fields.tools or []
    found = [fields.cache_control, *(getattr(part, "cache_control", None) for part in parts)]
    return max(filter(None, found), key=lambda control: control.seconds, default=None)


def check_sizes(fields: CountTokensRequest) -> None:
    """Raises InvalidField for what has too many parts to be looked at in one go."""
    check_count("messages", fields.messages, MAX_MESSAGES)
    check_count("tools", fields.tools or [], MAX_TOOLS)
    contents: list[Any] = [fields.system, *(message.content for message in fields.messages)]
    lists = [content for content in contents if isinstance(content, list)]
    check_parts("messages", lists)
    blocks = [block for content in lists for block in content]
    contents = [block.content for block in blocks if isinstance(block, ToolResultBlock)]
    contents += [block.source.content for block in blocks if isinstance(block, DocumentBlock)]
    check_parts("messages", [blocks, *(content for content in contents if isinstance(content, list))])


def check_blocks(content: str | Sequence[Holder] | None, path: str) -> None:
    """Raises InvalidField for a block that holds what one of another type does."""
    if content is None or isinstance(content, str):
        return
    for i, block in enumerate(content):
        where, own = f"{path}[{i}]", HOLDS.get(type(block), "")
        given = [name for name in Holder.__struct_fields__ if not is_empty(getattr(block, name))]
        if strange := [name for name in given if name != own]:
            kind = block.__struct_config__.tag
            raise InvalidField(
                f"{where}: a block of type {kind!r} has no {strange[0]}; send that as a block of its own",
                param=f"{where}.{strange[0]}",
            )
        if isinstance(block, ToolResultBlock):
            check_blocks(block.content, f"{where}.content")
        elif isinstance(block, DocumentBlock):
            check_blocks(block.source.content, f"{where}.source.content")


def response_format(form: OutputFormat) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema}}
    }


def template_kwargs(fields: CountTokensRequest) -> dict[str, Any]:
    """``thinking`` is ``enable_thinking`` or ``thinking`` in templates;
    without it the model's own default holds."""
    if fields.thinking is None:
        return fields.chat_template_kwargs or {}
    wanted = fields.thinking.type != "disabled"
    return {"enable_thinking": wanted, "thinking": wanted, **(fields.chat_template_kwargs or {})}


def chat_tools(fields: CountTokensRequest) -> dict[str, Any]:
    """The tools, and which of them the model may or must call.
    Raises UnsupportedField for Anthropic's own."""
    tools = [chat_tool(tool, i) for i, tool in enumerate(fields.tools or [])]
    choice = fields.tool_choice
    if choice is None:
        return {"tools": tools or None}
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidField("tool_choice.name is required", param="tool_choice")
        wanted: Any = {"type": "function", "function": {"name": choice.name}}
    else:
        wanted = "required" if choice.type == "any" else choice.type
    parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    return {"tools": tools or None, "tool_choice": wanted, "parallel_tool_calls": parallel}


def chat_tool(tool: Tool, i: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise unsupported_tool(f"tools[{i}]", tool.type)
    if tool.name is None:
        raise InvalidField(f"tools[{i}].name is required", param="tools")
    check_tool_name(f"tools[{i}].name", tool.name)
    if tool.input_schema is None:
        raise InvalidField(f"tools[{i}].input_schema is required", param="tools")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def is_prefill(messages: list[MessageParam]) -> bool:
    """Whether the last message is the beginning of the answer."""
    if not messages or messages[-1].role != "assistant":
        return False
    content = messages[-1].content
    if isinstance(content, str):
        return content != ""
    return any(isinstance(block, TextBlock) and block.text for block in content) and not any(
        isinstance(block, ToolUseBlock) for block in content
    )


def chat_messages(fields: CountTokensRequest) -> list[Message]:
    """Messages in OpenAI's shape.
    System texts at the beginning become one message: few templates take more."""
    leading = 0
    while leading < len(fields.messages) and fields.messages[leading].role == "system":
        leading += 1
    systems = [fields.system or "", *(message.content for message in fields.messages[:leading])]
    texts = [text for content in systems for text in system_texts(content)]
    result: list[Message] = [{"role": "system", "content": "\n".join(texts)}] if texts else []
    names: dict[str, str] = {}  # of the tools, by the ids of their calls
    for i, message in enumerate(fields.messages[leading:], leading):
        if message.role == "system":
            result.append({"role": "system", "content": "\n".join(system_texts(message.content))})
        elif message.role == "assistant":
            result.append(assistant_message(message, f"messages[{i}]", names))
        else:
            result += user_messages(message, f"messages[{i}]", names)
    return result


def system_texts(content: str | list[Any]) -> list[str]:
    """The texts of a system prompt, without billing lines and what is then empty."""
    if isinstance(content, str):
        content = [TextBlock(content)]
    texts = (_BILLING.sub("", block.text) for block in content if isinstance(block, TextBlock))
    return [text for text in texts if text]


def assistant_message(message: MessageParam, path: str, names: dict[str, str]) -> Message:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            names[block.id] = block.name
            function = {"name": block.name, "arguments": encode(block.input).decode()}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif not isinstance(block, RedactedThinkingBlock):
            raise InvalidField(
                f"{path}.content[{i}]: an assistant does not send this block", param="messages"
            )
    result: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        result["reasoning_content"] = "".join(thoughts)
    if calls:
        result |= {"tool_calls": calls, "content": result["content"] or None}
    return result


def user_messages(message: MessageParam, path: str, names: dict[str, str]) -> list[Message]:
    """A user's turn: its tool results are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    result: list[Message] = []
    for i, block in enumerate(message.content):
        where = f"{path}.content[{i}]"
        if isinstance(block, ToolResultBlock):
            found = {"tool_call_id": block.tool_use_id, "content": result_content(block, where)}
            name = names.get(block.tool_use_id)
            result.append({"role": "tool", **found, **({} if name is None else {"name": name})})
            continue
        if not isinstance(block, TextBlock | ImageBlock | DocumentBlock):
            raise InvalidField(f"{where}: a user does not send this block", param="messages")
        if not result or result[-1]["role"] != "user":
            result.append({"role": "user", "content": []})
        result[-1]["content"] += content_parts(block, where)
    for sent in result:
        if sent["role"] == "user" and len(sent["content"]) == 1 and isinstance(sent["content"][0], dict):
            sent["content"] = sent["content"][0]["text"]
    return result or [{"role": "user", "content": ""}]


def result_content(block: ToolResultBlock, path: str) -> str | list[Any]:
    """What a tool returned: a string unless it has more than text."""
    if not isinstance(block.content, list):
        return block.content or ""
    parts = [
        part for i, inner in enumerate(block.content) for part in content_parts(inner, f"{path}.content[{i}]")
    ]
    if all(isinstance(part, dict) for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def content_parts(block: TextBlock | ImageBlock | DocumentBlock, path: str) -> list[Any]:
    """OpenAI's content parts of a block; of a picture, where it comes from."""
    if isinstance(block, TextBlock):
        return [{"type": "text", "text": block.text}]
    if isinstance(block, ImageBlock):
        return [Source(picture_text(block.source, path), path)]
    source = block.source
    check_apart([name for name in ("data", "content", "url") if getattr(source, name)], f"{path}.source")
    inner: list[Any]
    if source.type == "text" and source.data is not None:
        inner = [TextBlock(source.data)]
    elif source.type == "content" and source.content is not None:
        inner = [TextBlock(source.content)] if isinstance(source.content, str) else source.content
    else:
        raise unsupported(
            "messages", f" with a document of type {source.type[:40]!r} ({path}): only its text is"
        )
    heads = [TextBlock(text) for text in (block.title, block.context) if text]
    return [part for one in (*heads, *inner) for part in content_parts(one, path)]


def picture_text(source: ImageSource, path: str) -> str:
    """The URL, or what is its base64. Raises InvalidField and UnsupportedField."""
    if source.type not in ("base64", "url"):
        raise UnsupportedField(
            f"{path}.source of type {source.type[:40]!r} is not supported by this server; send base64 or url",
            param=path,
        )
    check_apart([name for name in ("data", "url") if getattr(source, name)], f"{path}.source")
    text = source.data if source.type == "base64" else source.url
    if not text:
        raise InvalidField(
            f"{path}.source.{'data' if source.type == 'base64' else 'url'} is required", param=path
        )
    if source.type == "base64" and source.media_type not in MEDIA_TYPES:
        raise InvalidField(f"{path}.source.media_type must be one of {', '.join(MEDIA_TYPES)}", param=path)
    return text
