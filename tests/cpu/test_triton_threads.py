"""Threads that use kernels of Triton for the first time at once."""

from __future__ import annotations

import runpy
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import build

from sgla.kernels.triton import integers, threads  # of the package that has them mended

LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) {
  PyObject *module = PyModule_Create(&def);
  if (module != NULL) PyModule_AddFunctions(module, methods);
  return module;
}
"""


def test_launchers_of_one_name_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are loaded again, as for further variants, the second by another thread before this one has taken
    the first's function."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))

    def loaded(number: int) -> Any:
        return build.compile_module_from_src(LAUNCHER % number, "launcher")

    for number in (1, 2):
        assert loaded(number).launch() == number
    one = loaded(1)
    other = Thread(target=loaded, args=(2,))
    other.start()
    other.join()
    assert one.launch() == 1


def test_a_launcher_is_seen_with_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    made, goes_on = Event(), Event()
    seen = []

    def begin(kernel: Any) -> None:
        if kernel.function is not None:
            return
        kernel._run = "launcher"
        made.set()
        goes_on.wait(10)
        kernel.function = 7

    def launch() -> None:
        seen.append((kernel.run, kernel.function))

    monkeypatch.setattr(CompiledKernel, "_init_handles", begin)
    kernel: Any = CompiledKernel.__new__(CompiledKernel)
    kernel.name, kernel.module, kernel.function, kernel._run = "kernel", None, None, None
    threads = [Thread(target=launch) for _ in range(2)]
    threads[0].start()
    assert made.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    goes_on.set()
    for thread in threads:
        thread.join(10)
    assert seen == [("launcher", 7)] * 2


def test_a_triton_with_other_names_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or no server would start with it."""
    monkeypatch.delattr(build, "_load_module_from_path")
    monkeypatch.setattr(CompiledKernel, "run", "a launcher")
    runpy.run_path(str(threads.__file__))["mend"]()
    assert not hasattr(build, "_load_module_from_path")
    assert vars(CompiledKernel)["run"] == "a launcher"


def test_threads_that_load_launch_their_kernel_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each would compile it, and a kernel that another one replaces may be unloaded while it runs."""
    inside, most = [], []

    def launch(*_: Any, **__: Any) -> None:
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()

    monkeypatch.setattr(integers, "_pack", {(16,): launch})
    monkeypatch.setattr(integers, "_pdl", dict)
    dense = torch.zeros(64, 128)
    threads = [Thread(target=integers.pack, args=(dense, 4, 128, False)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert most == [1] * 4
