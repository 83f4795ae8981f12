"""The output of a response: items, and the events that build them up at the client."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sgla.http.ids import random_id
from sgla.http.responses.input import ToolName, sealed
from sgla.text.tools.cursor import ARGUMENTS, CALL, CONTENT, REASONING, Piece

Item = dict[str, Any]
EventFields = dict[str, Any]

PARTS: dict[str, Item] = {
    CONTENT: {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    REASONING: {"type": "reasoning_text", "text": ""},
}
# Calls whose arguments are streamed, and what their events are called.
STREAMED = {"function_call": "function_call_arguments", "mcp_call": "mcp_call_arguments"}
# The input of a custom tool up to a quote, or to an escape or a pair of surrogates that is cut.
BEGUN = re.compile(
    r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]|\\["\\/bfnrt]|\\u(?:'
    r"(?![dD][89a-fA-F])[\da-fA-F]{4}|[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}))*+)"
)


class OutputItems:
    """Pieces -> items. At most one item is open; events have no sequence number yet.

    ``tools``: by the names that the model knows them by.
    ``seal``: reasoning comes with ``encrypted_content``, too.
    """

    def __init__(self, tools: Mapping[str, ToolName] | None = None, seal: bool = False) -> None:
        self.items: list[Item] = []
        self._tools = tools or {}
        self._seal = seal
        self.due: list[int] = []  # places of calls that this server is to make
        self.handed = False  # to the client: a call to make or to approve
        self._kind: str | None = None  # of the pieces that the open item takes
        self._texts: list[str] = []
        self._logprobs: list[Any] = []  # of the open item's text

    def take(self, pieces: list[Piece], logprobs: Sequence[Any] = ()) -> list[EventFields]:
        """``logprobs``: those of the first text among ``pieces``."""
        events: list[EventFields] = []
        for kind, text, call_id in pieces:
            if kind == CALL:
                events += [*self.close(), *self._open_call(text, call_id)]
                continue
            if kind != self._kind and kind in PARTS:
                events += [*self.close(), *self._open_text(kind)]
            self._texts.append(text)
            if kind in PARTS:
                shown, logprobs = (logprobs, ()) if kind == CONTENT else ((), logprobs)
                self._logprobs += shown
                form = PARTS[kind]["type"]
                events.append(self._part(f"response.{form}.delta", delta=text) | beside(kind, shown))
            elif kind == ARGUMENTS and self._item["type"] in STREAMED:
                events.append(self._event(f"response.{STREAMED[self._item['type']]}.delta", delta=text))
        return events

    def close(self, status: str = "completed") -> list[EventFields]:
        """End the open item, if there is one.
        ``status``: completed or incomplete; with that, calls that are due are not made."""
        events = self._close(status)
        if status != "completed":
            places, self.due = self.due, []
            for place in places:
                self.items[place]["status"] = status
                events.append(self._whole("response.output_item.done", place))
        return events

    def _close(self, status: str) -> list[EventFields]:
        if self._kind is None:
            return []
        kind, text = self._kind, "".join(self._texts)
        self._kind, self._texts = None, []
        events = self._end_call(text) if kind == ARGUMENTS else self._end_text(kind, text)
        if self._item["type"] == "mcp_call" and status == "completed":
            self.due.append(len(self.items) - 1)
            return events
        if "status" in self._item:
            self._item["status"] = status
        return [*events, self._whole("response.output_item.done")]

    # texts

    def _open_text(self, kind: str) -> list[EventFields]:
        if kind == CONTENT:
            item = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
        else:
            item = {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []}
        added = self._open(kind, item)
        return [added, self._part("response.content_part.added", part=PARTS[kind])]

    def _end_text(self, kind: str, text: str) -> list[EventFields]:
        logprobs, self._logprobs = self._logprobs, []
        part = {**PARTS[kind], "text": text} | beside(kind, logprobs)
        self._item["content"] = [part]
        if kind == REASONING and self._seal:
            self._item["encrypted_content"] = sealed(text)
        done = self._part(f"response.{part['type']}.done", text=text) | beside(kind, logprobs)
        return [done, self._part("response.content_part.done", part=part)]

    # calls

    def _open_call(self, name: str, call_id: str | None) -> list[EventFields]:
        tool = self._tools.get(name, ToolName(name))
        call = {"call_id": call_id or new_id("call"), "name": tool.name}
        if tool.namespace is not None:
            call["namespace"] = tool.namespace
        if tool.server is not None:
            return self._open_server_call(tool)
        self.handed = True
        if tool.custom:
            return [
                self._open(ARGUMENTS, {"id": new_id("ctc"), "type": "custom_tool_call", **call, "input": ""})
            ]
        return [self._open(ARGUMENTS, {"id": new_id("fc"), "type": "function_call", **call, "arguments": ""})]

    def _end_call(self, arguments: str) -> list[EventFields]:
        item = self._item
        if item["type"] == "mcp_approval_request":
            item["arguments"] = arguments
            return []
        if item["type"] in STREAMED:
            item["arguments"] = arguments
            done = f"response.{STREAMED[item['type']]}.done"
            return [self._event(done, arguments=arguments, name=item["name"])]
        item["input"] = text = free_text(arguments)
        kind = "response.custom_tool_call_input"
        return [self._event(f"{kind}.delta", delta=text), self._event(f"{kind}.done", input=text)]

    # calls that this server makes

    def _open_server_call(self, tool: ToolName) -> list[EventFields]:
        if tool.server == "call":
            return self._open_mcp_call({"server_label": tool.namespace, "name": tool.name, "arguments": ""})
        self.handed = True
        request = {"id": new_id("mcpr"), "type": "mcp_approval_request", "server_label": tool.namespace}
        self._kind = ARGUMENTS
        self.items.append({**request, "name": tool.name, "arguments": ""})
        return [self._whole("response.output_item.added")]

    def _open_mcp_call(self, call: Item) -> list[EventFields]:
        item = {"id": new_id("mcp"), "type": "mcp_call", **call, "output": None, "error": None}
        opened = self._open(ARGUMENTS, {"approval_request_id": None, **item})
        return [opened, self._event("response.mcp_call.in_progress")]

    def approved(self, request: Item) -> list[EventFields]:
        """A call that the client has approved is due."""
        call = {name: request.get(name) for name in ("server_label", "name", "arguments")}
        events = self._open_mcp_call({**call, "approval_request_id": request["id"]})
        self._texts = [str(call["arguments"])]
        return [*events, *self.close()]

    def made(self, place: int, output: str | None, error: Item | None) -> list[EventFields]:
        """A call that was due has been made."""
        self.due.remove(place)
        ended = "completed" if error is None else "failed"
        self.items[place].update(output=output, error=error, status=ended)
        return [
            self._event(f"response.mcp_call.{ended}", place),
            self._whole("response.output_item.done", place),
        ]

    def listed(self, item: Item) -> list[EventFields]:
        """The tools of an MCP server."""
        self.items.append({"id": new_id("mcpl"), **item, "tools": []})
        kind = "response.mcp_list_tools"
        events = [self._whole("response.output_item.added"), self._event(f"{kind}.in_progress")]
        self._item["tools"] = item["tools"]
        ended = "failed" if item["error"] and not item["tools"] else "completed"
        return [*events, self._event(f"{kind}.{ended}"), self._whole("response.output_item.done")]

    # events

    @property
    def _item(self) -> Item:
        return self.items[-1]

    def _open(self, kind: str, item: Item) -> EventFields:
        self._kind = kind
        self.items.append({**item, "status": "in_progress"})
        return self._whole("response.output_item.added")

    def _whole(self, kind: str, place: int = -1) -> EventFields:
        place %= len(self.items)
        return {"type": kind, "output_index": place, "item": dict(self.items[place])}

    def _event(self, kind: str, place: int = -1, **fields: Any) -> EventFields:
        place %= len(self.items)
        return {"type": kind, "item_id": self.items[place]["id"], "output_index": place, **fields}

    def _part(self, kind: str, **fields: Any) -> EventFields:
        return self._event(kind, content_index=0, **fields)


def beside(kind: str, logprobs: Sequence[Any]) -> EventFields:
    """What texts, but not reasoning, carry beside them."""
    return {"logprobs": list(logprobs)} if kind == CONTENT else {}


def free_text(arguments: str) -> str:
    """The text that a custom tool was called with, as far as it goes if the call was cut;
    whatever was written, if that is not the object it should be."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return _begun_text(arguments)
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _begun_text(arguments: str) -> str:
    """Of a call that was cut: its text up to the last whole character."""
    begun = BEGUN.match(arguments)
    if begun is not None:
        return str(json.loads(f'"{begun[1]}"', strict=False))
    return "" if '{"input":"'.startswith("".join(arguments.split())) else arguments


def new_id(prefix: str) -> str:
    """One that nobody can guess: without keys an id is all that it takes to find a response."""
    return f"{prefix}_{random_id()}"
