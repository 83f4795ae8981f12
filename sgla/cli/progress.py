"""Start-up progress: a bar on a terminal, a line for each quarter elsewhere."""

from __future__ import annotations

import sys
import threading
from typing import TextIO

from sgla import clock
from sgla.messages import Progress

BAR = 24
REDRAW_SECONDS = 0.1


class ProgressPrinter:
    """Call it with each Progress, from any thread; ``close`` ends the line."""

    def __init__(self, out: TextIO = sys.stderr) -> None:
        self.out = out
        self.terminal = out.isatty()
        self._lock = threading.Lock()
        self._last: Progress | None = None
        self._began = self._drawn = 0.0
        self._quarter = -1

    def __call__(self, progress: Progress) -> None:
        with self._lock:
            fresh = self._last is None or (self._last.phase, self._last.message) != (
                progress.phase,
                progress.message,
            )
            if fresh:
                self._end()
                self._began, self._drawn, self._quarter = clock.now(), 0.0, -1
            self._last = progress
            if self.terminal:
                self._redraw(progress)
            else:
                self._line(progress, fresh)

    def close(self) -> None:
        """Leave the last state on the screen and end its line."""
        with self._lock:
            self._end()
            self._last = None

    def _end(self) -> None:
        if self._last is not None and self.terminal:
            self.out.write(f"\r\x1b[K{self._describe(self._last)}\n")
            self.out.flush()

    def _redraw(self, progress: Progress) -> None:
        now = clock.now()
        if now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            self.out.write(f"\r\x1b[K{self._describe(progress)}")
            self.out.flush()

    def _line(self, progress: Progress, fresh: bool) -> None:
        quarter = 4 * progress.done // progress.total if progress.total else 0
        if fresh or quarter > self._quarter:
            self._quarter = quarter
            print(self._describe(progress), file=self.out, flush=True)

    def _describe(self, progress: Progress) -> str:
        text = f"{progress.phase:<8} {progress.message}".rstrip()
        if progress.total <= 0:
            return text
        share = min(1.0, progress.done / progress.total)
        bar = f"[{'#' * int(BAR * share):<{BAR}}] {share:4.0%}" if self.terminal else f"{share:.0%}"
        seconds = clock.now() - self._began
        if progress.total < 1 << 20:
            return f"{text} {bar} {progress.done}/{progress.total}"
        unit = "million" if progress.phase == "load" else "MB"
        rate = f", {progress.done / seconds / 1e6:.0f} {unit}/s" if seconds > 0.5 else ""
        return f"{text} {bar} {progress.done / 1e6:.0f} of {progress.total / 1e6:.0f} {unit}{rate}"
