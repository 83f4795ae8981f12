"""For all tests: GPU tests are skipped without CUDA, and Triton kernels run in its interpreter then. Tests of
the compiled CPU kernels, and of equal bits in any batch, which torch's operations do not give, are skipped
where these cannot be built."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import interpreter
import psutil
import pytest
import pytest_timeout
import torch
from hypothesis import HealthCheck, settings
from scheduling import OneWaits

from sgla.kernels import build
from sgla.kernels.cpu import native


def be_silent() -> None:
    """What libraries say when the interpreter ends (nanobind lists what leaked) would follow the summary."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(be_silent)  # first, so it is called last
untimed = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # the machine may be busy
settings.register_profile("usual", max_examples=25, **untimed)
settings.load_profile("usual")
settings.register_profile("full", max_examples=1000)  # .ci/full

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # no process needs plug-ins of torch
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each would compile all of its modules again
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton


SLOW = "server", "cpu", "http", "grammar"  # folders whose tests take long, the slowest first
LONG = "slow", "gpu", "real"  # marks of tests that may take four times the limit
BEGUN = pytest.StashKey[float]()
LIMIT = pytest.StashKey[Any]()
WATCHED = pytest.StashKey[float]()

if "PYTEST_XDIST_WORKER" in os.environ:  # they share the cores
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start
    torch.set_num_threads(1)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Of a plain ``pytest``: three for two cores, since tests wait for servers, if there are 4 GiB of memory
    for each. None for single files, nor beside a GPU, which they would share."""
    if torch.cuda.is_available() or not all(os.path.isdir(path.partition("::")[0]) for path in config.args):
        return 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return min(cores + cores // 2, memory >> 32) if cores > 1 else 0


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneWaits | None:
    return OneWaits(config, log) if config.getvalue("dist") == "loadfile" else None


def _turn(tests: Counter[Path]) -> Callable[[pytest.Item], tuple[int, int, Path]]:
    """Files that take long begin first, so that none of them is the last that runs: those of SLOW, and those
    of many tests."""

    def turn(item: pytest.Item) -> tuple[int, int, Path]:
        folder = item.path.parent.name
        return SLOW.index(folder) if folder in SLOW else len(SLOW), -tests[item.path], item.path

    return turn


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
    """A test whose time is up may wait for a process, and wait again when it is told to end. So the processes
    that it started are killed first."""
    watch(item.config, settings.timeout)
    item.stash[LIMIT], begun = settings, item.stash.setdefault(BEGUN, time.time())
    armed = yield
    if callable(fail := signal.getsignal(signal.SIGALRM)):

        def end(number: int, frame: Any) -> None:
            if not pytest_timeout.is_debugging():
                kill_children(begun)
            fail(number, frame)

        signal.signal(signal.SIGALRM, end)
    return armed


def watch(config: pytest.Config, seconds: float) -> None:
    """A C call that does not return ends the process one or two minutes later than the limit, with its stack;
    pytest names the test. The watch is set once a minute, since that takes a thread and some milliseconds."""
    now = time.monotonic()
    if config.stash.get(WATCHED, 0.0) < now + seconds + 60:
        stderr: Any = config.pluginmanager.get_plugin("faulthandler")  # what it was before it was captured
        file = config.stash[stderr.fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(seconds + 120, exit=True, file=file)
        config.stash[WATCHED] = now + seconds + 120


def pytest_exception_interact(node: pytest.Item) -> None:
    node.config.stash[WATCHED] = 0.0  # pytest ends the watch then, for debuggers


def pytest_sessionfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


def kill_children(begun: float) -> None:
    """Those that started after ``begun``, and their children. The kernel tells it to the second."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.create_time() > begun - 1:
                child.kill()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """pytest-timeout sets no limit to what follows a failure."""
    if LIMIT in item.stash:
        item.config.hook.pytest_timeout_cancel_timer(item=item)
        item.config.hook.pytest_timeout_set_timer(item=item, settings=item.stash[LIMIT])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Imports make no garbage, and looking for it takes a quarter of their time; what they made is never
    looked at again. That of tests is looked for seldom, which takes them a tenth less time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(10_000, 50, 50)


def pytest_collection_finish() -> None:
    if "TRITON_INTERPRET" in os.environ and "triton" in sys.modules:
        interpreter.patch_once()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_turn(Counter(item.path for item in items)))
    long = pytest.mark.timeout(4 * float(config.getvalue("timeout") or config.getini("timeout")))
    for item in items:
        if any(map(item.get_closest_marker, LONG)) and not item.get_closest_marker("timeout"):
            item.add_marker(long)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("native") and isinstance(native.prepare(), build.BuildError):
            item.add_marker(pytest.mark.skip(reason=native.note()))
