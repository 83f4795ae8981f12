"""One output, taken apart as it comes: content, reasoning, tool calls."""

from __future__ import annotations

from typing import Any

from sgla.text.process import Parse
from sgla.text.reasoning.harmony import harmony
from sgla.text.reasoning.think import think
from sgla.text.tools.calls import Toolbox
from sgla.text.tools.cursor import NO_TAGS, Cursor, Piece, Steps, tags
from sgla.text.tools.families import BY_NAME, Dialect
from sgla.text.tools.prose import prose


class OutputParser:
    """Any split of the text into ``feed`` calls gives the same pieces,
    once neighbours of one kind are joined.

    ``tools``: those of the request; None: calls are content. ``opened``: the prompt ends inside of reasoning.
    ``separate``: reasoning is not content. ``thinking``: reasoning is being written. ``thought``: characters
    of the output up to the end of the latest reasoning, its tags included.
    """

    def __init__(
        self,
        dialect: Dialect,
        tools: list[dict[str, Any]] | None = None,
        opened: bool = False,
        separate: bool = True,
    ) -> None:
        self.thinking = False
        self.thought = 0
        form = dialect.tools.tools if dialect.tools and tools is not None else None
        self._cur = Cursor(tags(*form.opens) if form else NO_TAGS)
        self._steps = self._read(dialect, None if tools is None else Toolbox(tools), opened, separate)
        next(self._steps, None)

    def feed(self, text: str) -> list[Piece]:
        self._cur.feed(text)
        return self._advance()

    def close(self, cut: bool = False) -> list[Piece]:
        """What was held back; the output is over, or ``cut`` for want of room."""
        self._cur.ended, self._cur.cut = True, cut
        return self._advance()

    def _advance(self) -> list[Piece]:
        next(self._steps, None)
        return self._cur.take()

    def _read(self, dialect: Dialect, toolbox: Toolbox | None, opened: bool, separate: bool) -> Steps[None]:
        cur = self._cur
        yield
        if dialect.harmony:
            yield from harmony(cur, toolbox if dialect.tools else None, separate, self._report)
            return
        spec = dialect.think
        if spec is not None:
            yield from think(cur, spec, opened, separate, self._report)
        form = dialect.tools.tools if dialect.tools and toolbox is not None else None
        dropped = spec.dropped if spec is not None and separate else ()
        yield from prose(cur, form, toolbox or Toolbox(), dropped)

    def _report(self, thinking: bool) -> None:
        self.thinking = thinking
        self.thought = self._cur.position


def parser_of(task: Parse) -> OutputParser:
    dialect = Dialect(BY_NAME.get(task.tools), BY_NAME.get(task.reasoning))
    return OutputParser(dialect, task.functions, task.opened)
