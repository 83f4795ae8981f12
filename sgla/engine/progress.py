"""Progress bars of ``Engine`` and ``LLM``: by tqdm, on a terminal or in a notebook, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from sgla.messages import Progress, Usage


class Counted(Protocol):
    @property
    def usage(self) -> Usage: ...


def shown(wanted: bool | None) -> bool:
    """Whether there are bars: as the caller says, and without a word where somebody can see them."""
    return (sys.stderr.isatty() or "ipykernel" in sys.modules) if wanted is None else wanted


class Bar:
    """Of a batch: requests that are done, and tokens a second."""

    def __init__(self, total: int, unit: str, show: bool | None) -> None:
        self._bar: Any = None
        self._read = self._written = 0
        if total > 1 and shown(show):
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, unit=unit, dynamic_ncols=True, desc="sgla")

    def add(self, choices: Sequence[Counted]) -> None:
        """Of a request that is done."""
        if self._bar is None:
            return
        self._read += choices[0].usage.prompt_tokens
        self._written += sum(choice.usage.completion_tokens for choice in choices)
        seconds = self._bar.format_dict["elapsed"] or 1e-9
        speed = f"{self._read / seconds:.0f} tok/s in, {self._written / seconds:.0f} out"
        self._bar.set_postfix_str(speed, refresh=False)
        self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class LoadBar:
    """Of a start: called with each Progress, from any thread."""

    def __init__(self) -> None:
        from tqdm.auto import tqdm

        self._tqdm = tqdm
        self._bar: Any = None
        self._what = ("", "")

    def __call__(self, progress: Progress) -> None:
        if progress.total <= 0:
            return
        what = progress.phase, progress.message
        if what != self._what:
            self.close()
            self._what = what
            text = f"{progress.phase} {progress.message}".strip()
            self._bar = self._tqdm(
                total=progress.total, desc=text, unit_scale=True, dynamic_ncols=True, leave=False
            )
        self._bar.n = min(progress.done, self._bar.total)
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
