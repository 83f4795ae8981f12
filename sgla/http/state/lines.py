"""Works that wait for one thread: a line of them for each client, which take turns."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable

Step = Callable[[], bool]  # a step of a work; whether there are more


class Lines:
    """Each turn is a step of the first work of a line. A work stays the first of its line until its last
    step, and a line goes behind the others after each. So a work that is the first of its line comes before
    all that is put into other lines later."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Step]] = OrderedDict()
        self._changed = threading.Condition()
        self._ended = False

    def put(self, line: str, step: Step) -> None:
        with self._changed:
            self._lines.setdefault(line, deque()).append(step)
            self._changed.notify()

    def end(self) -> None:
        """Nothing more is put."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def serve(self) -> None:
        """Take one step after the other, which may not raise, until the end."""
        while (turn := self._next()) is not None:
            line, step = turn
            if step():
                with self._changed:
                    self._lines.setdefault(line, deque()).appendleft(step)

    def _next(self) -> tuple[str, Step] | None:
        """Wait for it. None: there is none, and comes none."""
        with self._changed:
            while not self._lines:
                if self._ended:
                    return None
                self._changed.wait()
            line, steps = self._lines.popitem(last=False)
            step = steps.popleft()
            if steps:
                self._lines[line] = steps
            return line, step
