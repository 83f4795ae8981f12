"""gpt-oss's outputs: messages in channels, each with a header that may name a tool.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>``
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sgla.text.tools.calls import Call, Toolbox, json_arguments, word
from sgla.text.tools.cursor import Cursor, Mismatch, Steps, space_trimmed, tags

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
TAGS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
# What the answer comes after; the second and third are for models that announce JSON.
FINAL = tuple(f"{CHANNEL}final{form}{MESSAGE}" for form in ("", f" {CONSTRAIN}json", f" {CONSTRAIN}JSON"))
CHANNELS = tags("analysis", "commentary", "final")
RECIPIENT = re.compile(r"[^\s<]*")


def harmony(
    cur: Cursor, toolbox: Toolbox | None, separate: bool, report: Callable[[bool], None]
) -> Steps[None]:
    """Read to the end. Without a ``toolbox`` calls are content;
    so is analysis unless it is to be ``separate``."""
    cur.mark(cur.position)
    tag = ""
    while True:
        try:
            yield from message(cur, tag, toolbox, separate, report)
        except Mismatch:
            cur.give_up()
        tag = yield from cur.until(tags(START, CHANNEL), cur.content, space_trimmed)
        if not tag:
            return
        cur.mark_tag()


def message(
    cur: Cursor, tag: str, toolbox: Toolbox | None, separate: bool, report: Callable[[bool], None]
) -> Steps[None]:
    """One message whose first tag, if it is ``tag``, has been stepped over."""
    channel, recipient = yield from header(cur, tag)
    if recipient and toolbox is not None:
        yield from json_arguments(cur, Call(cur, recipient.removeprefix("functions.")))
        yield from cur.follow(tags(CALL, END))
        return
    cur.unmark()
    thinking = channel == "analysis"
    if thinking:
        report(True)
    emit = cur.reasoning if thinking and separate else cur.content
    end = yield from cur.until(tags(START, CHANNEL, END, CALL, RETURN), emit)
    if end in (START, CHANNEL):
        cur.at -= len(end)
    if thinking and end:
        report(False)


def header(cur: Cursor, tag: str) -> Steps[tuple[str, str]]:
    """(channel, recipient). Raises Mismatch."""
    recipient = ""
    if tag != CHANNEL:
        if not tag:
            yield from cur.follow(tags(START))
        yield from cur.follow(tags("assistant"))
        recipient = yield from addressee(cur)
        yield from cur.expect(CHANNEL)
    channel = yield from cur.follow(CHANNELS)
    if not channel:
        raise Mismatch
    recipient = (yield from addressee(cur)) or recipient
    yield from cur.follow(tags(CONSTRAIN))
    yield from cur.follow(tags("json"))
    yield from cur.expect(MESSAGE)
    return channel, recipient


def addressee(cur: Cursor) -> Steps[str]:
    if not (yield from cur.follow(tags("to="))):
        return ""
    return (yield from word(cur, RECIPIENT))
