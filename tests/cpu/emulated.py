"""The CPU kernels of levels that this machine lacks, in an emulator of another CPU: a library whose programs
run in a process of QEMU's user mode (tests/cpu/run_program.cpp), static, built by a cross compiler."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sgla.homes import cache_home
from sgla.kernels import build
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu import program
from sgla.kernels.cpu.native import Instr, Step

RUNNER = Path(__file__).with_name("run_program.cpp")
# The architecture of a level -> compiler, emulator with its CPU, and how Debian calls them.
TOOLS = {
    "aarch64": (["aarch64-linux-gnu-g++"], ["qemu-aarch64-static"], "g++-aarch64-linux-gnu qemu-user-static"),
    "x86_64": (["g++"], ["qemu-x86_64-static", "-cpu", "max"], "g++ qemu-user-static"),
}


@cache
def executable(name: str, arch: str) -> Path:
    """A static program with the kernels of a level; skips where it cannot be built or run."""
    compiler, emulator, packages = TOOLS[arch]
    for tool in (compiler[0], emulator[0]):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} (Debian: apt install {packages})")
    level = build.level(name)
    digest = hashlib.sha256(RUNNER.read_bytes() + arch.encode())
    path = (
        cache_home()
        / "sgla"
        / "kernels"
        / build.library_name(level).parent
        / f"{digest.hexdigest()[:8]}-{name}"
    )

    def make(scratch: Path) -> Path:
        folder, made = build.source_folder("cpu"), scratch / "program"
        sources = [*map(str, sorted(folder.glob("*.cpp"))), str(RUNNER)]
        command = [
            *compiler,
            *build.FLAGS,
            *level.machine,
            "-static",
            "-I",
            str(folder),
            *sources,
            "-o",
            str(made),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert not done.returncode, done.stderr[-2000:]
        return made

    if not path.exists():
        build.make_once(path, make)
    return path


class Emulated:
    """As ``native.Library``, and its ``dll``. ``tensors``: what programs read and write."""

    def __init__(self, name: str, arch: str) -> None:
        self.isa, self.dll = name, self
        self.command = [*TOOLS[arch][1], str(executable(name, arch))]
        self.tensors: list[Tensor] = []
        self.sgla_pack: Any = None
        self._threads = 1

    def sgla_team(self, threads: int) -> int:
        self._threads = threads
        return 1

    def sgla_team_free(self, team: int) -> None:
        pass

    def sgla_run(self, team: int, code: ctypes.Array[Instr], length: int, step: Step, base: int) -> None:
        regions = {ctypes.addressof(code): ctypes.sizeof(code), ctypes.addressof(step): ctypes.sizeof(step)}
        for tensor in self.tensors:
            regions[tensor.data_ptr()] = max(tensor.nbytes, regions.get(tensor.data_ptr(), 0))
        head = (self._threads, len(regions), length, ctypes.addressof(code), ctypes.addressof(step), base)
        given = struct.pack("<6Q", *head)
        for address, size in regions.items():
            given += struct.pack("<2Q", address, size) + ctypes.string_at(address, size)
        done = subprocess.run(self.command, input=given, capture_output=True, timeout=120)
        assert not done.returncode, (done.returncode, done.stderr[-500:])
        at = 0
        for address, size in regions.items():
            ctypes.memmove(address, done.stdout[at : at + size], size)
            at += size


@contextmanager
def emulated(name: str, arch: str) -> Iterator[Emulated]:
    """Programs that are recorded meanwhile run in the emulator."""
    lib = Emulated(name, arch)
    run = program.Program.run

    def run_there(self: program.Program, batch: ForwardBatch) -> Tensor:
        held = [tensor for node in self.nodes for tensor in node.tensors if tensor is not None]
        held += [tensor for node in self.nodes for tensor in getattr(node.keep, "tensors", ())]
        lib.tensors = [self.arena, self.scratch, *held, *(getattr(batch, name) for name in program.INPUTS)]
        if batch.draws is not None:
            lib.tensors.append(torch.from_numpy(batch.draws.view("u1")))
        return run(self, batch)

    with (
        patch.object(program, "library", lambda isa=None: lib),
        patch.object(program.Program, "run", run_there),
    ):
        yield lib
