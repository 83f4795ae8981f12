"""Profiles of the worker on request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from sgla.errors import InvalidField


class Profiler:
    """torch's profiler between two control commands; the trace opens in Perfetto."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profile: torch.profiler.profile | None = None
        self._folder = Path()

    def start(self, folder: str) -> dict[str, Any]:
        if self._profile is not None:
            raise InvalidField("a profile is being taken already; stop it first")
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidField(f"{folder} cannot be written to: {error}", param="folder") from error
        self._profile = torch.profiler.profile()
        self._profile.start()
        return {"folder": str(self._folder)}

    def stop(self) -> dict[str, Any]:
        if self._profile is None:
            raise InvalidField("no profile is being taken")
        self._profile.stop()
        path = self._folder / f"rank{self._rank}-{os.getpid()}.json"
        self._profile.export_chrome_trace(str(path))
        self._profile = None
        return {"file": str(path)}
