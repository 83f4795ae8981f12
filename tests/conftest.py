"""For all tests: GPU tests are skipped without CUDA, and Triton kernels run in its interpreter then. Tests of
the compiled CPU kernels, and of equal bits in any batch, which torch's operations do not give, are skipped
where these cannot be built."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

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
WAITING = "tests/server/"  # files that wait for processes more than they compute

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


class OneWaits(LoadFileScheduling):
    """The first process runs the files that wait, so that the others have the cores then. One whose own files
    have all begun helps with the rest."""

    def _assign_work_unit(self, node: Any) -> None:
        waits = node is self.nodes[0]
        own = (file for file in self.workqueue if file.startswith(WAITING) == waits)
        if first := next(own, None):
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return OneWaits(config, log) if config.getvalue("dist") == "loadfile" else None


def _turn(tests: Counter[Path]) -> Callable[[pytest.Item], tuple[int, int, Path]]:
    """Files that take long begin first, so that none of them is the last that runs: those of SLOW, and those
    of many tests."""

    def turn(item: pytest.Item) -> tuple[int, int, Path]:
        folder = item.path.parent.name
        return SLOW.index(folder) if folder in SLOW else len(SLOW), -tests[item.path], item.path

    return turn


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_turn(Counter(item.path for item in items)))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("native") and isinstance(native.prepare(), build.BuildError):
            item.add_marker(pytest.mark.skip(reason=native.note()))
