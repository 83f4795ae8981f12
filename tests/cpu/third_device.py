"""A device that a package brings: its runner has no kernels, and computes every op by its torch body."""

from __future__ import annotations

from sgla.device import Device, Platform
from sgla.kernels.cpu.program import ProgramLimits
from sgla.worker.cpu import CpuRunner, Forward


class ThirdRunner(CpuRunner):
    def _make_forward(self, limits: ProgramLimits, native: bool) -> tuple[Forward, str]:
        return super()._make_forward(limits, False)


PLATFORM = Platform("third_device:ThirdRunner", lambda: (Device("third", "Third 1", memory=1 << 30),))
