"""How ``sgla serve`` ends in time whatever runs: a thread, and behind it the kernel, end what does not end by itself."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

from sgla import clock

log = logging.getLogger(__name__)

LONGEST = 1e9  # seconds that timers take
SPARE = 0.4  # seconds between the thread's end of the process and the kernel's


class LastResort:
    """Ends the process at a time limit. ``tidy`` is called before: in a thread, and maybe while the loop hangs.

    Where not even a thread runs, because a C call holds the interpreter, SIGALRM ends the process: without ``tidy``, and with
    that signal as its exit code. Make it in the main thread.
    """

    def __init__(self, tidy: Callable[[], None]) -> None:
        self._tidy = tidy
        self._end = math.inf
        self._code = 0
        self._told, self._tell = os.pipe2(os.O_CLOEXEC)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        threading.Thread(target=self._watch, name="last resort", daemon=True).start()

    def within(self, seconds: float, code: int) -> None:
        """Have the process end with ``code`` in ``seconds`` at the latest; a later call replaces this one. For the main thread, where
        signal handlers may call it too."""
        seconds = min(seconds, LONGEST)
        self._end, self._code = clock.now() + seconds, code
        signal.setitimer(signal.ITIMER_REAL, seconds + SPARE)
        os.write(self._tell, b"!")

    def stand_down(self) -> None:
        """The process ends by itself: its imports and exit handlers may take the time they need on a busy machine."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._end = math.inf
        os.write(self._tell, b"!")

    def _watch(self) -> None:
        while (left := self._end - clock.now()) > 0:
            if select.select([self._told], [], [], min(left, LONGEST))[0]:
                os.read(self._told, 64)
        log.error("the server does not end by itself, so it is ended; this is where its threads are")
        faulthandler.dump_traceback()
        try:
            self._tidy()
        finally:
            leave(self._code)


def leave(code: int) -> None:
    """End the process now: without waiting for threads, which Python would join although some may never end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more
            pass
    os._exit(code)
