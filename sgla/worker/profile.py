"""Profiles of the worker on request."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from sgla.errors import InvalidField
from sgla.messages import MOST_PROFILED


class Profiler:
    """torch's profiler between two control commands, or for so many steps; the trace opens in Perfetto."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profile: torch.profiler.profile | None = None
        self._file: Path | None = None  # of the profile that is being taken, or has been and nobody asked for
        self._left = 0

    def start(self, args: dict[str, Any]) -> dict[str, Any]:
        """``folder``: where the trace goes; ``steps``: after how many steps it is written.
        Raises InvalidField."""
        if self._profile is not None:
            raise InvalidField("a profile is being taken already; stop it first")
        folder = Path(args.get("folder", "profile"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidField(f"{folder} cannot be written to: {error}", param="folder") from error
        self._file = folder / f"{datetime.now():%Y%m%d-%H%M%S-%f}-rank{self._rank}.json"
        self._left = args.get("steps", MOST_PROFILED)
        self._profile = torch.profiler.profile()
        self._profile.start()
        return {"folder": str(folder)}

    def step(self) -> None:
        """A step is done: the profile ends with the last one that it is to have,
        or memory would fill with it."""
        if self._profile is not None:
            self._left -= 1
            if not self._left:
                self._write()

    def stop(self) -> dict[str, Any]:
        """Raises InvalidField."""
        if self._file is None:
            raise InvalidField("no profile is being taken")
        if self._profile is not None:
            self._write()
        file, self._file = self._file, None
        return {"file": str(file)}

    def _write(self) -> None:
        assert self._profile is not None
        profile, self._profile = self._profile, None
        profile.stop()
        profile.export_chrome_trace(str(self._file))
