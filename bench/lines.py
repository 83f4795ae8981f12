"""Result lines: one JSON object a line, each with the machine, the versions, the commit and the command it
comes from."""

from __future__ import annotations

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
    """``fields``, and behind them ``command``, ``commit`` and ``versions``, and ``machine`` if it is
    missing."""
    more = {"command": command(), "commit": commit(), "versions": versions()}
    return json.dumps({**fields, **more} if "machine" in fields else {**fields, "machine": machine(), **more})


def emit(fields: Mapping[str, Any]) -> None:
    """Print the line behind a mark, since what is measured prints, too."""
    print("JSON " + line(fields), flush=True)


@cache
def machine() -> str:
    from sgla.observe.machine import detect  # here, so that a peer's interpreter needs no sgla

    return detect().label()


def gpus(count: int = 1) -> str:
    import torch

    return torch.cuda.get_device_name() + (f" x{count}" if count > 1 else "")


def command() -> str:
    return shlex.join(["python", *sys.argv])


@cache
def commit() -> str | None:
    """What ``BENCH_COMMIT`` says, for a copy of the sources; else of this working tree, ``-dirty`` where it
    differs."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
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
