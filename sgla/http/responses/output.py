"""The output of a response: items, and the events that build them up at the client."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sgla.http.responses.input import ToolName, sealed
from sgla.text.tools.cursor import ARGUMENTS, CALL, CONTENT, REASONING, Piece

Item = dict[str, Any]
EventFields = dict[str, Any]

PARTS: dict[str, Item] = {
    CONTENT: {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    REASONING: {"type": "reasoning_text", "text": ""},
}


class OutputItems:
    """Pieces -> items. At most one item is open; events have no sequence number yet.

    ``tools``: by the names that the model knows them by. ``seal``: reasoning comes with ``encrypted_content``, too.
    """

    def __init__(self, tools: Mapping[str, ToolName] | None = None, seal: bool = False) -> None:
        self.items: list[Item] = []
        self._tools = tools or {}
        self._seal = seal
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
            elif kind == ARGUMENTS and self._item["type"] == "function_call":
                events.append(self._event("response.function_call_arguments.delta", delta=text))
        return events

    def close(self, status: str = "completed") -> list[EventFields]:
        """End the open item, if there is one. ``status``: completed or incomplete."""
        if self._kind is None:
            return []
        kind, text = self._kind, "".join(self._texts)
        self._kind, self._texts = None, []
        events = self._end_call(text) if kind == ARGUMENTS else self._end_text(kind, text)
        self._item["status"] = status
        return [*events, self._whole("response.output_item.done")]

    # texts -----------------------------------------------------------------------------------------------------------

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

    # calls -----------------------------------------------------------------------------------------------------------

    def _open_call(self, name: str, call_id: str | None) -> list[EventFields]:
        tool = self._tools.get(name, ToolName(name))
        call = {"call_id": call_id or new_id("call"), "name": tool.name}
        if tool.namespace is not None:
            call["namespace"] = tool.namespace
        if tool.custom:
            return [
                self._open(ARGUMENTS, {"id": new_id("ctc"), "type": "custom_tool_call", **call, "input": ""})
            ]
        return [self._open(ARGUMENTS, {"id": new_id("fc"), "type": "function_call", **call, "arguments": ""})]

    def _end_call(self, arguments: str) -> list[EventFields]:
        item = self._item
        if item["type"] == "function_call":
            item["arguments"] = arguments
            done = "response.function_call_arguments.done"
            return [self._event(done, arguments=arguments, name=item["name"])]
        item["input"] = text = free_text(arguments)
        kind = "response.custom_tool_call_input"
        return [self._event(f"{kind}.delta", delta=text), self._event(f"{kind}.done", input=text)]

    # events ----------------------------------------------------------------------------------------------------------

    @property
    def _item(self) -> Item:
        return self.items[-1]

    def _open(self, kind: str, item: Item) -> EventFields:
        self._kind = kind
        self.items.append({**item, "status": "in_progress"})
        return self._whole("response.output_item.added")

    def _whole(self, kind: str) -> EventFields:
        return {"type": kind, "output_index": len(self.items) - 1, "item": dict(self._item)}

    def _event(self, kind: str, **fields: Any) -> EventFields:
        return {"type": kind, "item_id": self._item["id"], "output_index": len(self.items) - 1, **fields}

    def _part(self, kind: str, **fields: Any) -> EventFields:
        return self._event(kind, content_index=0, **fields)


def beside(kind: str, logprobs: Sequence[Any]) -> EventFields:
    """What texts, but not reasoning, carry beside them."""
    return {"logprobs": list(logprobs)} if kind == CONTENT else {}


def free_text(arguments: str) -> str:
    """The text that a custom tool was called with; whatever was written, if that is not the object it should be."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def new_id(prefix: str) -> str:
    """One that nobody can guess: without keys an id is all that it takes to find a response."""
    return f"{prefix}_{secrets.token_hex(16)}"
