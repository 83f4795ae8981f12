"""What a key may send a minute, and whose turn it is: pure, the caller tells the time."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

KEYS = 65536  # that are remembered, those used last
MINUTE = 60.0

T = TypeVar("T")


class Bucket:
    """Token buckets of many keys: each holds a minute's worth, and fills up evenly. What is larger than a
    full bucket is let through when it is full, and paid for afterwards."""

    def __init__(self, per_minute: int) -> None:
        self.size = float(per_minute)
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()  # level, at that time

    def wait(self, key: str, amount: float, now: float) -> float:
        """Seconds until there is enough; 0: now."""
        missing = min(amount, self.size) - self._level(key, now)
        return max(0.0, missing / self.size * MINUTE)

    def take(self, key: str, amount: float, now: float) -> None:
        self._levels[key] = self._level(key, now) - amount, now
        self._levels.move_to_end(key)
        if len(self._levels) > KEYS:
            self._levels.popitem(last=False)

    def _level(self, key: str, now: float) -> float:
        level, then = self._levels.get(key, (self.size, now))
        return min(self.size, level + (now - then) * self.size / MINUTE)


class Turns(Generic[T]):
    """A queue of queues: each key's items in their order, one of each key by turns."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, key: str, item: T) -> None:
        self._queues.setdefault(key, deque()).append(item)
        self._count += 1

    def keys(self) -> list[str]:
        """Those that have items, whose turn it is first."""
        return list(self._queues)

    def sizes(self) -> dict[str, int]:
        """How many items each key has."""
        return {key: len(queue) for key, queue in self._queues.items()}

    def last(self, key: str) -> T | None:
        """The key's newest item."""
        return self._queues[key][-1] if key in self._queues else None

    def first(self) -> str:
        """Whose turn it is. Raises StopIteration if nobody waits."""
        return next(iter(self._queues))

    def pop(self, key: str | None = None) -> T:
        """The next item, or that of ``key``, which has had its turn then.
        Raises KeyError if there is none."""
        key = next(iter(self._queues), "") if key is None else key
        queue = self._queues.pop(key)
        item = queue.popleft()
        if queue:
            self._queues[key] = queue  # behind the others
        self._count -= 1
        return item

    def remove(self, key: str, item: T) -> None:
        """No effect if it is not there."""
        queue = self._queues.get(key)
        if queue is None or item not in queue:
            return
        queue.remove(item)
        self._count -= 1
        if not queue:
            del self._queues[key]
