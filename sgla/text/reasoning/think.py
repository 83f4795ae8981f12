"""Reasoning between two tags at the beginning of an output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgla.text.tools.cursor import Cursor, Emit, Steps, newlines_trimmed, nothing_trimmed, tags


@dataclass(frozen=True)
class Think:
    """``until``: tags that end reasoning without belonging to it. ``dropped``: tags around the answer."""

    open: str
    close: str
    until: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.open, self.close, *self.dropped)

    def opened_by(self, prompt: str) -> bool:
        """Whether the output after ``prompt`` begins inside of reasoning."""
        return prompt.rstrip().endswith(self.open.rstrip())


def think(
    cur: Cursor, spec: Think, opened: bool, separate: bool, report: Callable[[bool], None]
) -> Steps[None]:
    """Read reasoning, if the output begins with it or the prompt has ``opened`` it.

    Newlines at both ends, and between reasoning and answer, are not part of either. If it is not to be
    ``separate``, the text is content as it is. ``report`` is called when reasoning begins (True) and ends.
    """
    cur.mark(cur.position)
    tag = yield from cur.follow(tags(spec.open))
    if not tag and not opened:
        cur.unmark()
        return
    report(True)
    if separate:
        cur.unmark()
        yield from newlines(cur)
    else:
        cur.reject()
    emit: Emit = cur.reasoning if separate else cur.content
    trim = newlines_trimmed if separate else nothing_trimmed
    end = yield from cur.until(tags(spec.close, *spec.until), emit, trim)
    if not end:
        return
    if end != spec.close:
        cur.at -= len(end)
    report(False)
    if separate:
        yield from newlines(cur)
    elif end == spec.close:
        cur.content(end)


def newlines(cur: Cursor) -> Steps[None]:
    while (yield from cur.peek()) == "\n":
        cur.at += 1
