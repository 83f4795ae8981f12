"""What is held for clients that read their streams too slowly, counted for all of them together."""

from __future__ import annotations


class Unread:
    """Bytes by client and stream. Beyond ``limit`` no stream may have more than an equal part: of the limit
    among clients, and of that among its client's streams. So there are never more than twice as many."""

    def __init__(self, limit: int) -> None:
        self._limit, self.total = limit, 0
        self._of: dict[str, dict[object, int]] = {}

    def hold(self, client: str, stream: object, size: int) -> bool:
        """``size`` bytes are held for the stream now. Returns whether they may be; if not, none are counted,
        and the stream has to end."""
        streams = self._of.setdefault(client, {})
        self.total -= streams.pop(stream, 0)
        beyond = self.total + size > self._limit
        if size and not (beyond and size * len(self._of) * (len(streams) + 1) > self._limit):
            streams[stream] = size
            self.total += size
            return True
        if not streams:
            del self._of[client]
        return not size
