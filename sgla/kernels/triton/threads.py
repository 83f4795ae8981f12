# mypy: allow-untyped-defs
"""What Triton lacks where several threads use a kernel for the first time at once."""

from __future__ import annotations

from threading import Lock
from types import ModuleType
from typing import Any

from triton.compiler import CompiledKernel
from triton.runtime import build

_loading, _loaded = Lock(), dict[str, ModuleType]()  # by path
_locks = dict[str, Lock]()  # by the name of a kernel
_load: Any = getattr(build, "_load_module_from_path", None)
_run: Any = getattr(CompiledKernel, "run", None)


def _load_once(name: str, path: str) -> ModuleType:
    """A launcher, a C module, of which Triton 3.6 has one for each signature and all of the same name, and
    loads it for each variant. Where one is loaded again, Python puts its functions into the module that
    ``sys.modules`` has under this name: that of another launcher, maybe in the hands of a thread that is
    about to take its function."""
    with _loading:
        if path not in _loaded:
            _loaded[path] = _load(name, path)
        return _loaded[path]


def _run_of(kernel):
    """The launcher of a kernel that is on the GPU. Triton makes one before the other, and who comes in
    between would launch no function. Variants have the same launcher, which one thread compiles with gcc."""
    if kernel.function is None:
        with _locks.setdefault(kernel.name, Lock()):
            return _run.fget(kernel)
    return _run.fget(kernel)


def mend() -> None:
    """A Triton that has other names for these (3.5 to 3.9 have them) is left as it is."""
    if _load is not None:
        build._load_module_from_path = _load_once
    if isinstance(_run, property):
        CompiledKernel.run = property(_run_of)
