"""Runners with host pages, for the tests of copies in worker processes."""

from __future__ import annotations

from typing import Any

from sgla.config import Config
from sgla.executor.fake import FakeRunner
from sgla.hub.source import ModelSource
from sgla.worker.cpu import CpuRunner


class CopyingFake(FakeRunner):
    host_pages = 64


class FailingFake(CopyingFake):
    """The copies of rank 1 fail."""

    def __init__(self, config: Config, source: ModelSource, rank: int, *rest: Any) -> None:
        super().__init__(config, source, rank, *rest)
        self._rank = rank

    def _copied(self) -> bool:
        return self._rank != 1


class CopyingCpu(CpuRunner):
    host_pages = 64
