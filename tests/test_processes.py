"""Processes that end with the one that started them, even if that is killed."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from sgla.processes import tied

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl(2)")


def test_a_tied_command_does_what_it_says() -> None:
    done = subprocess.run(tied(["sh", "-c", 'echo "$0" "$1"; exit 3', "a b", "c"]), capture_output=True)
    assert (done.stdout, done.returncode) == (b"a b c\n", 3)


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
