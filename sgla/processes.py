"""Processes that end with the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
OF_GROUPS = (signal.SIGINT, signal.SIGTERM)  # that terminals and service managers send to a whole group

# What ``die_with`` does, in few imports, before it becomes the command; the kernel remembers over an exec.
SHIM = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) or os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"{sys.argv[2]}: {error.strerror}", file=sys.stderr)
    sys.exit(127)
"""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (prctl(2)); Linux only."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the call
        os._exit(1)


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """A process that is started here has what its group is sent wait until it calls ``leave_to_parent``, so
    that none of it ends its imports with a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_GROUPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """When this process is to end is the decision of who started it: what its group is sent does nothing."""
    for number in OF_GROUPS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_GROUPS)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill it. A thread waits for its end: the kernel may take 0.3 s to free a GiB that it had."""
    process.kill()
    if process.poll() is None:
        threading.Thread(target=process.wait, name="reap", daemon=True).start()


def cpu_seconds(pid: int) -> float:
    """That the process has used. Raises OSError if there is none."""
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) makes of a pid


def python_path() -> str:
    """PYTHONPATH for a child that imports what this process does, and nothing from the current folder."""
    return os.pathsep.join(folder for folder in sys.path if folder)


def tied(command: list[str]) -> list[str]:
    """The command of a program that is not ours and dies with the thread that starts it;
    elsewhere than on Linux, the command itself."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", "-c", SHIM, str(os.getpid()), *command]


def limit_memory(more: int) -> None:
    """Let this process map so many bytes beyond what it has, and leave no core file. Linux only."""
    size = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
