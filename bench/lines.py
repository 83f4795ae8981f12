"""Result lines: one JSON object a line, each with the machine, the versions, the commit and the command it
comes from, and where there are GPUs which ones."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

PACKAGES = "sgla", "torch", "triton", "flashinfer-python", "transformers"


def line(fields: Mapping[str, Any]) -> str:
    """``fields``, and behind them ``gpu_ids`` where there are GPUs, ``command``, ``commit`` and ``versions``,
    and ``machine`` if it is missing."""
    which = {"gpu_ids": gpu_ids()} if gpu_ids() else {}
    more = {**which, "command": command(), "commit": commit(), "versions": versions()}
    return json.dumps({**fields, **more} if "machine" in fields else {**fields, "machine": machine(), **more})


def emit(fields: Mapping[str, Any]) -> None:
    """Print the line behind a mark, since what is measured prints, too."""
    print("JSON " + line(fields), flush=True)


@cache
def machine() -> str:
    from sgla.observe.machine import detect  # here, so that a peer's interpreter needs no sgla

    return detect().label()


@cache
def gpu_ids() -> list[str]:
    """The first eight digits of the UUID of each GPU that this process sees, which tell cards of a kind
    apart. The driver is asked, since torch would make a context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, found = ctypes.c_int(), list[str]()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    for index in range(count.value):
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        if not (
            driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDeviceGetUuid(ctypes.byref(uuid), device)
        ):
            found.append(bytes(uuid)[:4].hex())
    return found


def gpus(count: int = 1) -> str:
    import torch

    return torch.cuda.get_device_name() + (f" x{count}" if count > 1 else "")


def command() -> str:
    """With the settings of sgla that the environment has, but for those that are nobody's business."""
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("SGLA_")}
    told = [
        f"{name}={shlex.quote(value)}"
        for name, value in settings.items()
        if not re.search("KEY|TOKEN|SECRET|STORE", name)
    ]
    return " ".join([*told, shlex.join(["python", *sys.argv])])


@cache
def commit() -> str | None:
    """What ``BENCH_COMMIT`` says, for a copy of the sources; else of this working tree, ``-dirty`` where it
    differs."""
    return os.environ.get("BENCH_COMMIT") or commit_of(Path(__file__).parent)


def commit_of(folder: Path) -> str | None:
    """Of the working tree that it is in."""
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude", "*"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(describe, text=True, stderr=subprocess.DEVNULL).strip()
    return None


@cache
def versions() -> dict[str, str]:
    """Of what is installed here; a peer in another interpreter has its own."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    with suppress(OSError):
        driver = re.search(r"\s(\d+\.[\d.]+)\s", Path("/proc/driver/nvidia/version").read_text())
        found |= {"nvidia driver": driver[1]} if driver else {}
    return found
