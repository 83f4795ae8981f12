"""Tool calls in prose: where they stand."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from sgla.text.tools.calls import CallReader, Toolbox
from sgla.text.tools.cursor import Cursor, Mismatch, Steps, nothing_trimmed, space_trimmed, tags
from sgla.text.tools.writing import Writing


@dataclass(frozen=True)
class Format:
    """Where calls stand in a model's output.

    One of ``opens``, any of ``lead``, a call, any of ``closes``; and further calls after one of
    ``separators``. Where ``bare`` is given, calls may also begin the output without a tag: with one of these
    characters, and a known name. ``writing``: how a grammar makes the model write such calls.
    """

    call: CallReader
    opens: tuple[str, ...] = ()
    lead: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    writing: Writing | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.opens, *self.lead, *self.closes)


def prose(cur: Cursor, form: Format | None, toolbox: Toolbox, dropped: tuple[str, ...] = ()) -> Steps[None]:
    """Read to the end of the output: content, and calls in the format ``form``.
    ``dropped``: tags without a meaning.

    Whitespace before a tag, and after the last call, is not content.
    """
    if form is not None and form.bare:
        yield from bare_calls(cur, form, toolbox)
    found = tags(*(form.opens if form else ()), *dropped)
    trim = space_trimmed if found.tags else nothing_trimmed
    while tag := (yield from cur.until(found, cur.content, trim, trim_end=cur.calls > 0)):
        if form is not None and tag in form.opens:
            cur.mark_tag()
            yield from calls(cur, form, toolbox, None)


def bare_calls(cur: Cursor, form: Format, toolbox: Toolbox) -> Steps[None]:
    cur.mark(cur.position)
    try:
        yield from cur.space()
        begun = (yield from cur.peek()) in form.bare
    except Mismatch:  # so much space is content
        begun = False
    if begun:
        yield from calls(cur, form, toolbox, toolbox.names)
    else:
        cur.reject()


def calls(cur: Cursor, form: Format, toolbox: Toolbox, known: Container[str] | None) -> Steps[None]:
    """Read the calls behind a mark, or give the marked text back."""
    after = tags(*form.closes, *form.separators)
    try:
        while (yield from cur.follow(tags(*form.lead))):
            pass
        yield from form.call(cur, toolbox, known)
        start = cur.position
        while tag := (yield from cur.follow(after)):
            if tag in form.separators:
                cur.mark(start)
                yield from form.call(cur, toolbox, known)
            start = cur.position
        cur.drop_begun(after)
    except Mismatch:
        cur.give_up() if known is None else cur.reject()
