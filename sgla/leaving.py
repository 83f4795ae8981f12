"""How ``sgla serve`` ends in time whatever runs: a thread, and behind it the kernel or another process, end
what does not end by itself."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable

from sgla import clock

log = logging.getLogger(__name__)

LONGEST = 1e9  # seconds that timers take
SPARE = 0.3  # seconds between the thread's end of the process and the kernel's

# Sends SIGALRM to a process (argv[1]) so many seconds (argv[2]) after the first byte from it;
# ends when it does, which closes the pipe.
GUARD = """
import os, select, signal, sys, time
end = time.monotonic() + float(sys.argv[2]) if os.read(0, 65536) else 0
while (left := end - time.monotonic()) > 0:
    if select.select([0], [], [], left)[0] and not os.read(0, 65536):
        sys.exit()
if end:
    os.kill(int(sys.argv[1]), signal.SIGALRM)
"""


class LastResort:
    """Ends the process at a time limit.
    ``tidy`` is called before: in a thread, and maybe while the loop hangs.

    Where not even a thread runs, because a C call holds the interpreter, SIGALRM ends the process: without
    ``tidy``, and with that signal as its exit code. Make it in the main thread.
    """

    def __init__(self, tidy: Callable[[], None]) -> None:
        self._tidy = tidy
        self._end = math.inf
        self._code = 0
        self._told, self._tell = os.pipe2(os.O_CLOEXEC)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        threading.Thread(target=self._watch, name="last resort", daemon=True).start()

    def guard(self, numbers: Iterable[int], seconds: float) -> None:
        """Have SIGALRM end the process ``seconds`` after one of these signals at the latest, also where no
        handler of Python's runs, because a call into C holds the interpreter. Call it when the handlers are
        in their places.

        faulthandler's own handler is C: it writes to the pipe at once and then passes the signal on.
        """
        told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(told, True)
        arguments = [str(os.getpid()), str(min(seconds, LONGEST) + SPARE)]
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, *arguments],
            stdin=told,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it gets none of the signals
        )
        os.close(told)
        for number in numbers:
            faulthandler.register(number, tell, all_threads=False, chain=True)

    def within(self, seconds: float, code: int) -> None:
        """Have the process end with ``code`` in ``seconds`` at the latest; a later call replaces this one.
        For the main thread, where signal handlers may call it too."""
        seconds = min(seconds, LONGEST)
        self._end, self._code = clock.now() + seconds, code
        signal.setitimer(signal.ITIMER_REAL, seconds + SPARE)
        os.write(self._tell, b"!")

    def stand_down(self) -> None:
        """The process ends by itself:
        its imports and exit handlers may take the time they need on a busy machine."""
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
    """End the process now:
    without waiting for threads, which Python would join although some may never end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more
            pass
    os._exit(code)
