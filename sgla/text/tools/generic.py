"""Tools for models whose chat template knows none: messages that show them as text.

The tools stand in the system message, a call is JSON between ``<tool_call>`` tags, and results come from the
user. Source of the format: the Hermes function-calling prompts of Nous Research, which Qwen's templates have,
too.
"""

from __future__ import annotations

import json
import re
from typing import Any

Message = dict[str, Any]

PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def shows_tools(source: str) -> bool:
    """Whether a chat template has anything of tools."""
    return re.search(r"\btools\b|\btool_calls\b", source) is not None


def with_tools(
    messages: list[Message], tools: list[dict[str, Any]] | None, takes_system: bool
) -> list[Message]:
    """``messages``, whose contents are texts and whose calls are parsed, as ones of system, user and
    assistant. Without ``takes_system`` the tools stand before the first other message."""
    told = [_told(message) for message in messages]
    if tools:
        text = PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if told and told[0]["role"] in ("system", "developer"):
            told[0]["content"] = f"{told[0]['content']}\n\n{text}"
        else:
            told.insert(0, {"role": "system" if takes_system else "user", "content": text})
    return joined(told)


def _told(message: Message) -> Message:
    role, content = message.get("role"), message.get("content") or ""
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [f"<tool_call>\n{_call(call)}\n</tool_call>" for call in calls]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return kept | {"content": "\n".join(filter(None, [content, *texts]))}


def _call(call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    shown = {"name": function.get("name"), "arguments": function.get("arguments") or {}}
    return json.dumps(shown, ensure_ascii=False)


def joined(messages: list[Message]) -> list[Message]:
    """What the user says, results included, without an answer between as one message:
    templates may want user and assistant to take turns."""
    found: list[Message] = []
    for message in messages:
        if found and message["role"] == "user" == found[-1]["role"]:
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{message['content']}"}
        else:
            found.append(message)
    return found
