"""Compile kernels side by side, before they are needed: who walks through a computation in ``rehearsing`` launches nothing, but asks for
every kernel on the way, of CUDA and of Triton."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from threading import Lock
from typing import Any, Protocol

import torch


class Loads(Protocol):
    def load(self) -> Any:
        """Wait until it is compiled, and bring it to the GPU."""


_asked: ContextVar[list[Loads] | None] = ContextVar("asked", default=None)


PYTHONS = 8  # threads with Triton: much of its work needs Python's lock, which who rehearses needs, too


@cache
def compilers() -> ThreadPoolExecutor:
    """Threads for NVRTC, which runs without Python's lock."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compile")


def rehearsed(kernel: Loads) -> bool:
    """Whether this is a rehearsal, in which ``kernel`` is asked for and not launched."""
    asked = _asked.get()
    if asked is None:
        return False
    asked.append(kernel)
    return True


@contextmanager
def rehearsing() -> Iterator[None]:
    """In this thread kernels are not launched but asked for. At the end all of them can be. Torch's own operations do run, so
    they must not meet indices that a kernel was to write."""
    import triton

    asked: list[Loads] = []
    token = _asked.set(asked)
    try:
        with (
            ThreadPoolExecutor(PYTHONS, "triton") as pool,
            _asking(triton.JITFunction),
            triton.AsyncCompileMode(_ToTheGpu(pool, torch.cuda.current_device())),
        ):
            yield
        for kernel in dict.fromkeys(asked):
            kernel.load()
    finally:
        _asked.reset(token)


@contextmanager
def _asking(function: Any) -> Iterator[None]:
    """Triton's functions compile without a launch in a thread that rehearses."""
    run = function.run

    def run_or_ask(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or _asked.get() is not None, **options)

    function.run = run_or_ask
    try:
        yield
    finally:
        function.run = run


class _ToTheGpu(Executor):
    """Of what compiles Triton's kernels: brings them to the GPU, too."""

    def __init__(self, pool: ThreadPoolExecutor, device: int) -> None:
        self._pool, self._device = pool, device
        self._locks: dict[str, Lock] = {}

    def submit(self, compile_: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        return self._pool.submit(self._loaded, compile_)

    def _loaded(self, compile_: Callable[[], Any]) -> Any:
        kernel = compile_()
        torch.cuda.set_device(self._device)
        # Variants of a function have the same launcher, which some versions of Triton compile with gcc, too.
        with self._locks.setdefault(kernel.name, Lock()):
            assert kernel.run is not None  # made when it is looked at
        return kernel
