"""Chat templates: messages -> prompt text, as transformers' ``apply_chat_template`` renders them.

The rules of the environment (sandbox, block trimming, ``tojson`` without HTML escapes, ``raise_exception``,
``strftime_now``, the ``generation`` tag) are those of transformers ``utils/chat_template_utils.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sgla import census
from sgla.census import TooComplex
from sgla.errors import BadRequest, ConfigError, InvalidField, UnsupportedField
from sgla.text.parts import TEXTS
from sgla.text.tools.generic import joined, shows_tools, with_tools

Message = dict[str, Any]
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
SYSTEM = ("system", "developer")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Variables with a field of their own in a request, so that ``chat_template_kwargs`` should not set them.
RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("tool_prompt", "placeholders"),
    }
)
PROBE = "Kq7wZ"
MAX_SOURCE = 1 << 16  # characters of a template that comes with a request
# Parts that stand for a picture, a sound, a video.
PICTURE, SOUND, VIDEO = {"type": "image"}, {"type": "audio"}, {"type": "video"}
SHOWN = (PICTURE, SOUND, VIDEO)


class _Generation(Extension):
    """``{% generation %}``: marks what the assistant wrote, for training; renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = (
        ImmutableSandboxedEnvironment(  # in ``sandbox.py``'s process, since no rule bounds time and memory
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """The compiled chat template(s) of a model. Thread-safe.

    ``source``: Jinja source, or sources by name (``default``, ``tool_use``). ``special_tokens``:
    ``bos_token`` and so on, variables of the template. Raises ConfigError if a source does not compile.
    """

    def __init__(self, source: str | dict[str, str], special_tokens: dict[str, str] | None = None) -> None:
        sources = {"default": source} if isinstance(source, str) else source
        self.source = "\n".join(sources.values())  # what the model's output looks like can be told from it
        environment = _environment()
        tokens = special_tokens or {}
        self._variants = {name: _Variant(environment, text, tokens) for name, text in sources.items()}
        self._sent = lru_cache(maxsize=16)(lambda text: _Variant(environment, text, tokens))
        if not self._variants:
            raise ConfigError("the chat template is empty", param="chat_template")

    def render(
        self,
        messages: list[Message],
        /,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        placeholders: Mapping[str, str] = MappingProxyType({}),
        **kwargs: Any,
    ) -> str:
        """The prompt. ``placeholders``: what stands for an "image", an "audio" or a "video" where the
        template does not show parts that are PICTURE, SOUND or VIDEO: as in vLLM, in front of the message's
        text. ``kwargs`` are further variables (``enable_thinking``, ``documents``); ``chat_template`` picks
        one by name, or is the source of another. A template that knows no tools shows them as text, unless
        ``tool_prompt`` is False.

        Raises BadRequest with the template's own message, and InvalidField for messages it cannot show.
        """
        variant = self._pick(kwargs.pop("chat_template", None), tools)
        if kwargs.pop("tool_prompt", True) and not variant.shows_tools:
            messages, tools = variant.told(messages, tools, placeholders), None
        messages = variant.with_system_first(messages, placeholders)
        if continue_final_message and (not messages or messages[-1].get("content") in (None, [])):
            raise InvalidField(
                "continue_final_message needs a last message with text to continue",
                param="continue_final_message",
            )
        chat = [variant.fit(message, placeholders) for message in messages]
        final = _tag_final(chat) if continue_final_message else None
        variables = {
            "documents": None,
            **kwargs,
            "messages": chat,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = variant.render(variables)
        return text if final is None else _cut_at_tag(text, final)

    def _pick(self, name: str | None, tools: list[dict[str, Any]] | None) -> _Variant:
        if name is None:
            name = "tool_use" if tools and "tool_use" in self._variants else "default"
        if name in self._variants:
            return self._variants[name]
        if name == "default" and len(self._variants) == 1:
            return next(iter(self._variants.values()))
        if is_source(name):
            return self._compiled(name)
        raise UnsupportedField(
            "chat_template must be one of the model's templates "
            f"({', '.join(sorted(self._variants))}) or a template's text",
            param="chat_template",
        )

    def _compiled(self, source: str) -> _Variant:
        if len(source) > MAX_SOURCE:
            raise InvalidField(f"chat_template may have {MAX_SOURCE} characters", param="chat_template")
        try:
            return self._sent(source)
        except ConfigError as error:
            raise InvalidField(error.message, param="chat_template") from error


def is_source(template: str) -> bool:
    """Whether it is a template's text and not a name."""
    return "{" in template


class _Variant:
    """One template, and which shapes of messages it understands, found out by rendering small chats."""

    def __init__(
        self, environment: ImmutableSandboxedEnvironment, source: str, special_tokens: dict[str, str]
    ) -> None:
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template does not compile: {error.message} (line {error.lineno})",
                param="chat_template",
            ) from error
        self.shows_tools = shows_tools(source)
        self._shown: dict[str, frozenset[str]] = {}  # by kind of part
        self._knows_developer = "developer" in source
        self._takes_parts = self._shows([{"type": "text", "text": PROBE}])
        self._takes_text = not self._takes_parts or self._shows(PROBE)
        self._takes_objects = not any(self._shows_call("{}", content) for content in ("", None)) or any(
            self._shows_call({PROBE: 1}, content) for content in ("", None)
        )
        self._takes_none = self._shows_call({} if self._takes_objects else "{}", None)

    def render(self, variables: dict[str, Any]) -> str:
        try:
            return self._template.render(self._special_tokens | variables)
        except jinja2.TemplateError as error:
            raise BadRequest(
                f"the chat template refuses the messages: {error.message}", param="messages"
            ) from error
        except Exception as error:  # whatever operation of the template does not fit the messages
            raise BadRequest(
                f"the chat template cannot show the messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error

    def told(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, placeholders: Mapping[str, str]
    ) -> list[Message]:
        """``messages`` with tools, calls and results as text, if there are any."""
        if not tools and not any(m.get("tool_calls") or m.get("role") == "tool" for m in messages):
            return messages
        plain = [_plain(message, placeholders) for message in messages]
        return with_tools(plain, tools, self._takes_system)

    def with_system_first(self, messages: list[Message], placeholders: Mapping[str, str]) -> list[Message]:
        """``messages``; where the template refuses system messages behind the first message, as agents send
        them, these are the user's."""
        if all(m.get("role") not in SYSTEM for m in messages[1:]) or self._takes_later_system:
            return messages
        plain = [_plain(message, placeholders) for message in messages]
        later = [m | {"role": "user"} if m.get("role") in SYSTEM else m for m in plain[1:]]
        return joined([plain[0], *later])

    @cached_property
    def _takes_later_system(self) -> bool:
        told = {"role": "system", "content": PROBE}
        return PROBE in self._attempt(
            [{"role": "user", "content": "x"}, told, {"role": "assistant", "content": "y"}]
        )

    @cached_property
    def _takes_system(self) -> bool:
        return PROBE in self._attempt(
            [{"role": "system", "content": PROBE}, {"role": "user", "content": "x"}]
        )

    def _showing(self, kind: str) -> frozenset[str]:
        """Roles in whose messages a part of this kind comes out as something."""
        if kind not in self._shown:
            self._shown[kind] = self._shows_part({"type": kind})
        return self._shown[kind]

    def _shows_part(self, part: Message) -> frozenset[str]:
        call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {}}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        before: dict[str, list[Message]] = {"user": [], "tool": [{"role": "user", "content": "x"}, called]}
        text = {"type": "text", "text": PROBE}
        found = set()
        for role, chat in before.items():
            without, shown = (
                self._attempt([*chat, {"role": role, "content": parts}]) for parts in ([text], [part, text])
            )
            if PROBE in without and PROBE in shown and shown != without and "'type'" not in shown:
                found.add(role)
        return frozenset(found)

    def _shows(self, content: Any) -> bool:
        """Whether a user message with this content comes out as its text."""
        shown = self._attempt([{"role": "user", "content": content}])
        return PROBE in shown and "'text'" not in shown and '"text"' not in shown

    def _shows_call(self, arguments: Any, content: str | None) -> bool:
        """Whether an assistant message may have tool calls with such arguments, and this content."""
        call = {"type": "function", "id": "call00001", "function": {"name": PROBE, "arguments": arguments}}
        shown = self._attempt(
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": content, "tool_calls": [call]},
            ]
        )
        return PROBE in shown and "None" not in shown

    def _attempt(self, chat: list[Message]) -> str:
        try:
            return self.render(
                {"messages": chat, "tools": None, "documents": None, "add_generation_prompt": False}
            )
        except BadRequest:
            return ""

    def fit(self, message: Message, placeholders: Mapping[str, str]) -> Message:
        """A copy of an OpenAI message in the shape that this template understands."""
        fitted = dict(message)
        if fitted.get("role") == "developer" and not self._knows_developer:
            fitted["role"] = "system"
        fitted["content"] = self._fit_content(message, placeholders)
        if calls := message.get("tool_calls"):
            fitted["tool_calls"] = [
                _parsed_call(call) if self._takes_objects else _written_call(call) for call in calls
            ]
        reasoning = next((message[key] for key in REASONING_FIELDS if message.get(key) is not None), None)
        if reasoning is not None:
            fitted = {"thinking": reasoning, **fitted, "reasoning_content": reasoning}
        return fitted

    def _fit_content(self, message: Message, placeholders: Mapping[str, str]) -> Any:
        content = _content(message)
        if isinstance(content, list) and any(part in SHOWN for part in content):
            role, kinds = message.get("role"), {part["type"] for part in content if part in SHOWN}
            if self._takes_parts and all(role in self._showing(kind) for kind in kinds):
                return [part if part in SHOWN else _text_part(part) for part in content]
            content = _flat(content, placeholders)
        if content is None:
            return None if message.get("tool_calls") and self._takes_none else ""
        if isinstance(content, list):
            return list(map(_text_part, content)) if self._takes_parts else _flat(content, placeholders)
        return content if self._takes_text else [{"type": "text", "text": content}]


def _plain(message: Message, placeholders: Mapping[str, str]) -> Message:
    """With content as one text and parsed calls."""
    content, calls = _content(message), message.get("tool_calls")
    text = _flat(content, placeholders) if isinstance(content, list) else content
    return {**message, "content": text} | ({"tool_calls": list(map(_parsed_call, calls))} if calls else {})


def _content(message: Message) -> Any:
    """What a message says; a model that refused said that."""
    content, refusal = message.get("content"), message.get("refusal")
    return refusal if not content and isinstance(refusal, str) else content


def _flat(content: list[Any], placeholders: Mapping[str, str]) -> str:
    """Parts as one text. Pictures and sounds whose placeholder is not in it come first."""
    text = "\n".join(_part_text(part) for part in content if part not in SHOWN)
    left = {kind: text.count(name) for kind, name in placeholders.items() if name}
    missing = []
    for part in content:
        if part in SHOWN:
            left[part["type"]] = left.get(part["type"], 0) - 1
            if left[part["type"]] < 0:
                missing.append(placeholders.get(part["type"], ""))
    return "\n".join([*missing, text] if text or not missing else missing)


def _text_part(part: Any) -> dict[str, str]:
    return {"type": "text", "text": _part_text(part)}


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(TEXTS[kind]) if kind in TEXTS else None
    if not isinstance(text, str):
        raise InvalidField(
            f"messages: content parts of type {str(kind)[:40]!r} are not supported",
            param="messages",
        )
    return text


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    """Most templates want a call's arguments as an object; OpenAI's clients send them as a JSON string."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = census.loads(function["arguments"] or "{}")
    except (ValueError, TooComplex):  # the model's own malformed output, sent back as history
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _written_call(call: dict[str, Any]) -> dict[str, Any]:
    """For templates that add the arguments to their text as they are."""
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    arguments = _to_json(function.get("arguments") or {})
    return {**call, "function": {**function, "arguments": arguments}}


def _tag_final(chat: list[Message]) -> str:
    """Mark the end of the last message; returns its text."""
    content = chat[-1]["content"]
    if isinstance(content, str):
        chat[-1]["content"] = content + CONTINUE_TAG
        return content
    text = content[-1]["text"]
    content[-1]["text"] = text + CONTINUE_TAG
    return text


def _cut_at_tag(text: str, final: str) -> str:
    """The rendered chat up to the end of its last message's text."""
    tag = CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise BadRequest(
            "continue_final_message: the chat template does not show the last message as it is",
            param="continue_final_message",
        )
    at = text.rindex(tag)
    if text.startswith(CONTINUE_TAG, at):
        return text[:at]
    return text[:at].rstrip()  # the template strips the message, so what it ended with is gone too
