"""Start-up progress: bars by rich on a terminal, a line for each quarter elsewhere."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, TextIO

from sgla import clock
from sgla.messages import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

WIDTH = 24


class ProgressPrinter:
    """Call it with each Progress, from any thread;
    ``close`` leaves the last state of each phase on the screen."""

    def __init__(self, out: TextIO = sys.stderr) -> None:
        self.out = out
        self._lock = threading.Lock()
        self._last: Progress | None = None
        self._began = 0.0
        self._quarter = -1
        self._bars: Bars | None = None
        self._bar: TaskID | None = None

    def __call__(self, progress: Progress) -> None:
        with self._lock:
            last, self._last = self._last, progress
            fresh = last is None or (last.phase, last.message) != (progress.phase, progress.message)
            if fresh:
                self._began, self._quarter = clock.now(), -1
            if self.out.isatty():
                self._draw(progress, fresh)
            else:
                self._line(progress, fresh)

    def close(self) -> None:
        """No more is drawn."""
        with self._lock:
            self._last = None
            if self._bars is not None:
                self._finish()
                self._bars.stop()
                self._bars = None

    def _draw(self, progress: Progress, fresh: bool) -> None:
        if self._bars is None:
            self._bars = _make_bars(self.out)
            self._bars.start()
        if fresh:
            self._finish()
            self._bar = self._bars.add_task(
                "", phase=progress.phase, message=progress.message, detail="", total=None
            )
        assert self._bar is not None
        self._bars.update(
            self._bar, completed=progress.done, total=progress.total or None, detail=self._detail(progress)
        )

    def _finish(self) -> None:
        """The bar of a phase that has ended stands still."""
        if self._bars is not None and self._bar is not None:
            task = self._bars.tasks[-1]
            self._bars.update(self._bar, total=task.total or 1, completed=task.completed if task.total else 1)
            self._bars.stop_task(self._bar)
            self._bar = None

    def _line(self, progress: Progress, fresh: bool) -> None:
        quarter = 4 * progress.done // progress.total if progress.total else 0
        if fresh or quarter > self._quarter:
            self._quarter = quarter
            text = f"{progress.phase:<8} {progress.message}".rstrip()
            share = f" {min(1.0, progress.done / progress.total):.0%} " if progress.total > 0 else ""
            print(f"{text}{share}{self._detail(progress)}", file=self.out, flush=True)

    def _detail(self, progress: Progress) -> str:
        """How much of how much, and how fast."""
        if progress.total <= 0:
            return ""
        if progress.total < 1 << 20:
            return f"{progress.done}/{progress.total}"
        seconds = clock.now() - self._began
        unit = "million" if progress.phase == "load" else "MB"
        rate = f", {progress.done / seconds / 1e6:.0f} {unit}/s" if seconds > 0.5 else ""
        return f"{progress.done / 1e6:.0f} of {progress.total / 1e6:.0f} {unit}{rate}"


def _make_bars(out: TextIO) -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    return Bars(
        TextColumn("{task.fields[phase]:<8}", style="bold", markup=False),
        TextColumn("{task.fields[message]}", markup=False),
        BarColumn(WIDTH),
        TextColumn("{task.fields[detail]}", markup=False),
        TimeElapsedColumn(),
        console=Console(file=out),
        # What is printed meanwhile goes above the bars, but a file gets it as ever.
        redirect_stdout=sys.stdout.isatty(),
    )
