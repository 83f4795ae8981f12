"""A device that a package brings, with memory of its own: its runner has no kernels, and computes every op by
its torch body."""

from __future__ import annotations

from typing import Any

from sgla.config import Config
from sgla.device import Device, Platform
from sgla.kernels.cpu.program import ProgramLimits
from sgla.worker.cpu import CpuRunner
from sgla.worker.forward import Forward
from sgla.worker.place import Cpu

THIRD = Device("third", "Third 1", memory=1 << 30)


class ThirdPlace(Cpu):
    def __init__(self, config: Config, rank: int, size: int, store: str) -> None:
        super().__init__(config, rank, size, store)
        self.device = THIRD

    def free(self) -> int:
        return self.device.memory


class ThirdRunner(CpuRunner):
    def _make_forward(self, limits: ProgramLimits, native: bool, tell: Any) -> tuple[Forward, str]:
        return super()._make_forward(limits, False, tell)


PLATFORM = Platform("third_device:ThirdRunner", lambda: (THIRD,), place="third_device:ThirdPlace")
