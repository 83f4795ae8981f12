"""Workers as ``ProcsExecutor`` starts them, but as forks of a process that has imported torch, which is most of what a start takes.
That they start without it is shown by ``test_executor.py`` and ``test_worker.py``."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sgla.executor import child, procs

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["sgla.worker.cpu"])


class Forked:
    """What ``Rank`` needs of ``subprocess.Popen``."""

    def __init__(self, argv: list[str], *, stderr: int, **settings: Any) -> None:
        *_, pipe, _, _, rank, runner = argv
        ends = (Connection(os.dup(fd)) for fd in (int(pipe), stderr))
        self._process = CONTEXT.Process(target=work, args=(*ends, int(rank), runner), daemon=True)
        self._process.start()
        self.pid = self._process.pid
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode


def work(pipe: Connection, stderr: Connection, rank: int, runner: str) -> None:
    for fd in (1, 2):
        os.dup2(stderr.fileno(), fd)
    with contextlib.suppress(EOFError, OSError):
        child.run(pipe, rank, runner, {})
    os._exit(0)


class ForkedExecutor(procs.ProcsExecutor):
    def spawn(self) -> None:
        with mock.patch.object(procs, "subprocess", SimpleNamespace(Popen=Forked, DEVNULL=None)):
            super().spawn()
