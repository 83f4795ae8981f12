"""Processes for tests that begin as forks of one that has imported torch, which is most of what a start
takes: workers as ``ProcsExecutor`` starts them, and scripts. ``test_executor.py`` and ``test_worker.py``
start workers as for users."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sgla.executor import child, procs

CONTEXT = multiprocessing.get_context("forkserver")
PATIENCE = 1800.0  # seconds: what compiles all there is takes long on a busy machine
CONTEXT.set_forkserver_preload(["sgla.worker.cpu"])


class Forked:
    """What ``Rank`` needs of ``subprocess.Popen``."""

    def __init__(self, argv: list[str], *, stderr: int, **settings: Any) -> None:
        *_, pipe, _, _, rank, runner, answers = argv
        ends = _sent(int(pipe)), _sent(stderr)
        self._process = CONTEXT.Process(
            target=_work, args=(*ends, int(rank), runner, answers == "1"), daemon=True
        )
        self._process.start()
        self.pid = self._process.pid
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode


class ForkedExecutor(procs.ProcsExecutor):
    def spawn(self) -> None:
        with mock.patch.object(procs, "subprocess", SimpleNamespace(Popen=Forked, DEVNULL=None)):
            super().spawn()


def run_script(name: str, *args: str) -> list[str]:
    """The lines that a script of this folder prints within ``PATIENCE``. Triton is not interpreted there, but
    if the script wants it to be."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        ends = _sent(out.fileno()), _sent(err.fileno())
        process = CONTEXT.Process(target=_script, args=(*ends, name, *args), daemon=True)
        process.start()
        try:
            process.join(PATIENCE)
            printed, errors = (os.pread(file.fileno(), 1 << 24, 0).decode() for file in (out, err))
            assert process.exitcode == 0, errors[-3000:]
        finally:
            process.kill()
    return printed.splitlines()


def _sent(fd: int) -> Connection:
    """Any descriptor, as what multiprocessing can send."""
    return Connection(os.dup(fd))


def _print_to(out: Connection, err: Connection) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)


def _work(pipe: Connection, stderr: Connection, rank: int, runner: str, answers: bool) -> None:
    _print_to(stderr, stderr)
    with contextlib.suppress(EOFError, OSError):
        child.run(pipe, rank, runner, answers, {})
    os._exit(0)


def _script(out: Connection, err: Connection, name: str, *args: str) -> None:
    _print_to(out, err)
    os.environ.pop("TRITON_INTERPRET", None)
    sys.argv = [name, *args]
    runpy.run_path(str(Path(__file__).parent / name), run_name="__main__")
