"""The GPU of this process, as torch describes it."""

from __future__ import annotations

import torch

from sgla.device import Device


def capability(device: int | None = None) -> tuple[int, int]:
    """See ``Device``. ROCm numbers its GPUs too, and calls one (9, 4)."""
    if torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability() if device is None else torch.cuda.get_device_capability(device)


def this_device() -> Device:
    return Device(torch.cuda.get_device_name(), capability())


def hopper() -> bool:
    return capability() == (9, 0)


def shared_memory() -> int:
    """Bytes that a block may have."""
    return Device("", capability()).shared
