"""Runners with a tier, for the tests of copies in worker processes."""

from __future__ import annotations

from typing import Any

from sgla.config import Config
from sgla.executor.fake import FakeRunner
from sgla.hub.source import ModelSource
from sgla.messages import Tier


class CopyingFake(FakeRunner):
    tiers = (Tier("host", [64]),)


class FailingFake(CopyingFake):
    """The copies of rank 1 fail."""

    def __init__(self, config: Config, source: ModelSource, rank: int, *rest: Any) -> None:
        super().__init__(config, source, rank, *rest)
        self._rank = rank

    def _copied(self) -> bool:
        return self._rank != 1
