"""The process that looks at transformers' modules (``python -m sgla.model.generic``), forked from one that
has imported them, which takes most of its time else."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from subprocess import CompletedProcess, TimeoutExpired
from types import SimpleNamespace
from typing import Any

import pytest

from sgla.model import generic, generic_spec

CONTEXT = multiprocessing.get_context("fork")


def forked(act: Callable[[], Any], given: bytes = b"") -> CompletedProcess[bytes]:
    """What ``act`` returns as the exit code, and what it prints, with ``given`` on its standard input."""
    with tempfile.TemporaryFile() as into, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        into.write(given)
        into.seek(0)
        process = CONTEXT.Process(target=_act, args=(act, into.fileno(), out.fileno(), err.fileno()))
        process.start()
        process.join(60)
        assert process.exitcode is not None
        printed = (os.pread(file.fileno(), 1 << 20, 0) for file in (out, err))
        return CompletedProcess([], process.exitcode, *printed)


def _act(act: Callable[[], Any], *ends: int) -> None:
    for number, end in enumerate(ends):
        os.dup2(end, number)
    sys.stdin, sys.stdout, sys.stderr = (open(n, mode) for n, mode in enumerate("rww"))  # noqa: SIM115
    sys.exit(act())


def fork_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on in this test."""

    def run(command: list[str], *, input: bytes, **_: Any) -> CompletedProcess[bytes]:
        assert command[-2:] == ["-m", "sgla.model.generic"]
        return forked(generic.main, input)

    monkeypatch.setattr(generic_spec, "subprocess", SimpleNamespace(run=run, TimeoutExpired=TimeoutExpired))
