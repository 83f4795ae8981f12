"""Events that wait for a client that reads more slowly than they come, gathered by choice."""

from __future__ import annotations

from collections import deque

from sgla.http.answer.collect import Choice
from sgla.http.answer.unread import Unread
from sgla.messages import Event

TOGETHER = 64  # tokens with logprobs that are encoded in one go: a few milliseconds with many alternatives


class Held:
    """What one stream of ``client`` holds, in the order in which it goes out; ``size``: bytes, which count in
    ``unread``, too. With ``whole`` a choice is one piece, else ``TOGETHER`` tokens with logprobs are."""

    def __init__(self, client: str, unread: Unread, whole: bool = False) -> None:
        self.size = 0
        self._client, self._unread, self._whole = client, unread, whole
        self._waiting: deque[Choice] = deque()
        self._latest: dict[int, Choice] = {}  # of those, the last one of each choice

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, event: Event) -> bool:
        """Whether so much may be held, beside what is held for other streams."""
        choice = self._latest.get(event.index)
        if choice is None or (len(choice.logprobs or ()) >= TOGETHER and not self._whole):
            choice = self._latest[event.index] = Choice(event.index)
            self._waiting.append(choice)
        choice.add(event)
        size = len(event.text) + 8 * len(event.tokens)
        if event.logprobs:
            size += sum(64 * (1 + len(entry.top) + len(entry.asked)) for entry in event.logprobs)
        choice.size += size
        self.size += size
        return self._count()

    def take(self) -> Event:
        """All that has been gathered of the first choice."""
        choice = self._waiting.popleft()
        self.size -= choice.size
        self._count()
        if self._latest[choice.index] is choice:
            del self._latest[choice.index]
        return choice.event()

    def finished(self, index: int) -> bool:
        """Whether the end of a choice is among what is held."""
        return index in self._latest and self._latest[index].finish is not None

    def clear(self) -> None:
        self._waiting.clear()
        self._latest.clear()
        self.size = 0
        self._count()

    def _count(self) -> bool:
        return self._unread.hold(self._client, self, self.size)
