"""The device of this process, as torch describes it."""

from __future__ import annotations

import platform

import torch

from sgla.device import Device, nvidia

_this: list[Device] = []  # once it is known


def this_device() -> Device:
    """What kernels are chosen by and launched on: torch's current GPU, or the CPU if torch has none.
    Asked of torch once."""
    if not _this:
        _this.append(describe())
    return _this[0]


def use(device: Device) -> None:
    """``device`` is that of this process from now on."""
    _this[:] = [device]


def describe(index: int | None = None) -> Device:
    """Torch's GPU of this number, or its current one; the CPU if torch has none.
    ROCm numbers its GPUs too, and calls one (9, 4)."""
    if not torch.cuda.is_available():
        return Device("cpu", platform.processor() or platform.machine())
    found = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    if torch.version.hip is not None:
        return Device("rocm", found.name, memory=found.total_memory)
    arch = found.major, found.minor
    return nvidia(found.name, arch, found.multi_processor_count, found.total_memory)
