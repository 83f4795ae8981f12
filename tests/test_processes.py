"""Processes that end with the one that started them, even if that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import sgla.executor.procs as executor_procs
import sgla.grammar.processes as grammar_processes
import sgla.text.process as text_process
from sgla.processes import deaf, tied

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl(2)")


def test_a_tied_command_does_what_it_says() -> None:
    done = subprocess.run(tied(["sh", "-c", 'echo "$0" "$1"; exit 3', "a b", "c"]), capture_output=True)
    assert (done.stdout, done.returncode) == (b"a b c\n", 3)


def test_a_tied_command_that_is_not_there_is_named() -> None:
    done = subprocess.run(tied(["no-such-command", "x"]), capture_output=True)
    said = b"no-such-command: No such file or directory\n"
    assert (done.stdout, done.stderr, done.returncode) == (b"", said, 127)


def test_a_tied_command_ends_with_who_started_it() -> None:
    script = (
        "import subprocess, sys; from sgla.processes import tied\n"
        "child = subprocess.Popen(tied(['sh', '-c', 'echo running; exec sleep 60']))\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"running\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) == 1
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_a_tied_command_whose_parent_is_gone_does_not_begin() -> None:
    command = tied(["echo", "here"])
    command[command.index("-c") + 2] = "1"  # another parent than the one it has
    done = subprocess.run(command, capture_output=True)
    assert (done.stdout, done.returncode) == (b"", 1)


LISTENS = """
import os, signal, sys
from sgla.processes import leave_to_parent
for number in (signal.SIGINT, signal.SIGTERM):
    os.kill(os.getpid(), number)
if sys.argv[1] == "to the parent":
    leave_to_parent()
print("imported", signal.pthread_sigmask(signal.SIG_BLOCK, []) - {signal.SIGALRM} == set())
"""


def test_what_a_group_is_sent_ends_no_process_that_begins() -> None:
    with deaf():
        begun = subprocess.run([sys.executable, "-c", LISTENS, "to the parent"], capture_output=True)
    assert (begun.stdout, begun.stderr, begun.returncode) == (b"imported True\n", b"", 0)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGINT, signal.SIGTERM}
    alone = subprocess.run([sys.executable, "-c", LISTENS, "alone"], capture_output=True)
    assert alone.returncode != 0


@pytest.mark.parametrize(
    "start",
    [
        lambda: text_process.Process(),
        lambda: grammar_processes.Sandbox(Path("none")),
        lambda: executor_procs.Rank(0, "none:none", True),
    ],
    ids=["text", "grammar", "worker"],
)
def test_processes_of_a_server_begin_so(start: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    blocked: list[set[signal.Signals]] = []

    def popen(*_: object, **__: object) -> object:
        blocked.append({*signal.pthread_sigmask(signal.SIG_BLOCK, [])})
        raise InterruptedError

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(InterruptedError):
        start()
    assert blocked[0] >= {signal.SIGINT, signal.SIGTERM}
