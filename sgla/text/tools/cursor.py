"""Reading a text that is still being written, in straight-line code.

A grammar is a generator: it asks the cursor for what comes next and, where that is not decided yet, yields
until more text has been fed. Decisions depend on positions in the text alone, never on how it was cut into
pieces.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import NamedTuple, TypeVar

CONTENT, REASONING, CALL, ARGUMENTS = "content", "reasoning", "call", "arguments"

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], None]
Trim = Callable[[str], int]

SPACES = 1024  # characters of whitespace that may stand before a tag, and are dropped there
SPACE, ALL_SPACE = re.compile(rf"\s{{0,{SPACES}}}"), re.compile(r"\s*")
LIMIT = 256  # characters of a name or a number
# What stands before a call has begun is read again if it turns out to be none. So it is short, and has few
# further beginnings of calls: no character is read more often than these, however many calls a text seems to
# have.
HEAD = 32768  # characters
AGAIN = 8  # beginnings of calls


class Mismatch(Exception):
    """The text is not what the grammar expects here."""


class Piece(NamedTuple):
    """A part of the output.
    ``call``: a call begins, ``text`` is its name; ``arguments``: a fragment of that call's JSON."""

    kind: str
    text: str
    id: str | None = None  # of a call, where the model writes one


class Tags:
    """A set of literals; none may be the beginning of another, nor contain one."""

    def __init__(self, tags: tuple[str, ...]) -> None:
        self.tags = tags
        self._whole = re.compile("|".join(map(re.escape, tags)) or "(?!)")
        begun = "|".join(re.escape(tag[:end]) for tag in tags for end in range(len(tag) - 1, 0, -1))
        self._partial = re.compile(rf"(?:{begun or '(?!)'})\Z")
        self.longest = max(map(len, tags), default=0)

    def search(self, text: str, at: int, end: int = sys.maxsize) -> re.Match[str] | None:
        return self._whole.search(text, at, end)

    def match(self, text: str, at: int) -> re.Match[str] | None:
        return self._whole.match(text, at)

    def undecided(self, text: str, at: int) -> int:
        """Where the end of ``text`` that may still become a tag begins."""
        partial = self._partial.search(text, at)
        return len(text) if partial is None else partial.start()

    def may_start(self, text: str, at: int) -> bool:
        """Whether ``text[at:]`` may still become a tag."""
        return bool(self.tags) and (at == len(text) or self._partial.match(text, at) is not None)


@lru_cache(maxsize=512)
def tags(*literals: str) -> Tags:
    return Tags(literals)


NO_TAGS = Tags(())


def nothing_trimmed(text: str) -> int:
    return len(text)


def space_trimmed(text: str) -> int:
    return len(text.rstrip())


def newlines_trimmed(text: str) -> int:
    return len(text.rstrip("\n"))


def newline_trimmed(text: str) -> int:
    return len(text.removesuffix("\n"))


def trimmed(text: str, trim: Trim) -> int:
    """``trim`` of ``text``, where no more than ``SPACES`` characters are dropped."""
    end = max(0, len(text) - SPACES)
    return end + trim(text[end:])


class Cursor:
    """The text that has come and is not read, and the pieces made of what is.

    What stands before a possible call is marked: ``reject`` gives it back as content, ``begin`` forgets the
    mark. ``openers``: what further calls may begin with.
    """

    def __init__(self, openers: Tags = NO_TAGS) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut = False  # the output ended where there was no more room
        self.calls = 0
        self._openers = openers
        self._pieces: list[tuple[str, list[str], str | None]] = []  # kind, fragments of the text, id
        self._base = 0  # characters of the output before text[0]
        self._mark: tuple[int, int] | None = None  # what ``reject`` gives back; in characters of the output
        self._head = (0, 0)  # behind the mark: up to where openers are counted, and how many there are
        self._edge = (0, 0)  # the tag found by ``until``, with what was trimmed before it

    # feeding and emitting

    def feed(self, text: str) -> None:
        keep = self.at if self._mark is None else self._mark[0] - self._base
        self.text = self.text[keep:] + text
        self._base += keep
        self.at -= keep

    @property
    def position(self) -> int:
        """Characters of the output that are read."""
        return self._base + self.at

    def emit(self, kind: str, text: str) -> None:
        if not text:
            return
        if self._pieces and self._pieces[-1][0] == kind:
            self._pieces[-1][1].append(text)
        else:
            self._pieces.append((kind, [text], None))

    def take(self) -> list[Piece]:
        """The pieces since the last call; no two neighbours are of one kind, but calls."""
        pieces, self._pieces = self._pieces, []
        return [Piece(kind, "".join(texts), call_id) for kind, texts, call_id in pieces]

    def content(self, text: str) -> None:
        self.emit(CONTENT, text)

    def reasoning(self, text: str) -> None:
        self.emit(REASONING, text)

    def begin(self, name: str, call_id: str | None) -> None:
        """A call: what has been read since the mark was its head.
        Raises Mismatch for a head that is too long."""
        self.check_head()
        self._mark = None
        self.calls += 1
        self._pieces.append((CALL, [name], call_id))

    # marks

    def mark(self, start: int) -> None:
        """Mark from position ``start``; after ``reject``, reading resumes where the cursor is now."""
        self._mark, self._head = (start, self.position), (self.position, 0)

    def mark_tag(self) -> None:
        """Mark the tag that ``until`` has just found."""
        self._mark, self._head = self._edge, (self.position, 0)

    def check_head(self) -> None:
        """Raise Mismatch where more has been read since the mark than may be read again."""
        if self._mark is None:
            return
        counted, openers = self._head
        while opener := self._openers.search(self.text, counted - self._base, self.at):
            counted, openers = self._base + opener.end(), openers + 1
        self._head = max(counted, self.position + 1 - self._openers.longest), openers
        if openers > AGAIN or self.position - self._mark[1] > HEAD:
            raise Mismatch

    def reject(self) -> None:
        """Give the marked text back as content and resume after it; nothing if a call has begun since."""
        if self._mark is not None:
            start, resume = (position - self._base for position in self._mark)
            self._mark = None
            self.content(self.text[start:resume])
            self.at = resume

    def give_up(self) -> None:
        """``reject``; but at the end of an output that was cut,
        the marked text is a call that was begun, and no content."""
        if self.ended and self.cut and self._mark is not None:
            self._mark = None
            self.at = len(self.text)
        else:
            self.reject()

    def unmark(self) -> None:
        self._mark = None

    # reading

    def until(
        self, found: Tags, emit: Emit, trim: Trim = nothing_trimmed, trim_end: bool = False
    ) -> Steps[str]:
        """Emit what comes before the first tag and step over it; "" at the end of the text.

        ``trim`` gives the length of a text without the end that is dropped before a tag, ``SPACES``
        characters at most, and with ``trim_end`` also at the end of the output.
        """
        while True:
            tag = found.search(self.text, self.at)
            stop = (
                tag.start() if tag else len(self.text) if self.ended else found.undecided(self.text, self.at)
            )
            body = self.text[self.at : stop]
            kept = len(body) if self.ended and not tag and not trim_end else trimmed(body, trim)
            if kept:
                emit(body[:kept])
                self.at += kept
            if tag:
                self._edge = (self.position, self._base + tag.end())
                self.at = tag.end()
                return tag[0]
            if self.ended:
                self.at = len(self.text)
                return ""
            yield

    def follow(self, found: Tags) -> Steps[str]:
        """Step over whitespace and a tag; "" and not a step if something else comes.
        Raises Mismatch in a head too long."""
        self.check_head()
        while True:
            start = SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if tag := found.match(self.text, start):
                self.at = tag.end()
                return tag[0]
            if self.ended or not found.may_start(self.text, start):
                return ""
            yield

    def drop_begun(self, found: Tags) -> None:
        """At the end of an output that was cut, step over a tag that was begun."""
        start = ALL_SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        if self.ended and self.cut and start < len(self.text) and found.may_start(self.text, start):
            self.at = len(self.text)

    def expect(self, literal: str) -> Steps[None]:
        """Step over whitespace and ``literal``. Raises Mismatch if something else comes."""
        if not (yield from self.follow(tags(literal))):
            raise Mismatch

    def space(self) -> Steps[None]:
        """Step over whitespace. Raises Mismatch in a head too long."""
        while True:
            self.at = ALL_SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            self.check_head()
            if self.ended or self.at < len(self.text):
                return
            yield

    def peek(self) -> Steps[str]:
        """The next character, "" at the end."""
        while self.at == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def run(self, characters: re.Pattern[str]) -> Steps[str]:
        """The longest match of a repeated character class, not stepped over.
        Raises Mismatch if it is over ``LIMIT``."""
        while True:
            match = characters.match(self.text, self.at)
            assert match is not None
            if len(match[0]) > LIMIT:
                raise Mismatch
            if self.ended or match.end() < len(self.text):
                return match[0]
            yield

    def ahead(self, count: int) -> Steps[str]:
        """The next ``count`` characters, fewer only at the end; not stepped over."""
        while len(self.text) - self.at < count and not self.ended:
            yield
        return self.text[self.at : self.at + count]
