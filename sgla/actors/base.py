"""What every actor is: a mailbox whose messages are handled, without awaiting, in one turn of the loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

M = TypeVar("M")
T = TypeVar("T")


def in_thread(function: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """Run a blocking call in a thread of its own that does not hold up the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = function(*args)
        except BaseException as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=function.__name__, daemon=True).start()
    return future


class Actor(Generic[M]):
    """Subclasses implement ``handle``. Never blocks, never awaits: a turn is a plain function call. Mailboxes
    hold what the ingress has admitted, which bounds them: no actor refuses what another has accepted.

    ``on_crash`` is told of an exception that ``handle`` let out: a bug, since user errors travel as messages.
    """

    def __init__(self, on_crash: Callable[[str, BaseException], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._mailbox: deque[M] = deque()
        self._scheduled = False
        self._on_crash = on_crash

    def post(self, message: M) -> None:
        """Put a message into the mailbox; it is handled in the loop's next turn."""
        self._mailbox.append(message)
        self.wake()

    def wake(self) -> None:
        """Have ``handle`` called in the loop's next turn, messages or not."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def put_back(self, messages: deque[M]) -> None:
        """Leave these, the first of the mailbox, to the loop's next turn."""
        self._mailbox.extendleft(reversed(messages))
        self.wake()

    def _turn(self) -> None:
        self._scheduled = False
        messages, self._mailbox = self._mailbox, deque()
        self.guard(self.handle, messages)

    def handle(self, messages: deque[M]) -> None:
        raise NotImplementedError

    def guard(self, function: Callable[..., None], *args: object) -> None:
        """Run one callback of this actor; an exception, or a panic of a library, goes to the supervisor
        instead of the loop's logger."""
        try:
            function(*args)
        except BaseException as error:
            self._on_crash(type(self).__name__, error)
