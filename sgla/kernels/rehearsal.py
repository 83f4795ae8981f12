"""Compile kernels side by side, before they are needed: who walks through a computation in ``rehearsing``
launches nothing, but asks for every kernel on the way, of CUDA and of Triton."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol


class Loads(Protocol):
    def load(self) -> Any:
        """Wait until it is compiled, and bring it to the GPU."""


_asked: ContextVar[list[Loads] | None] = ContextVar("asked", default=None)


@cache
def compilers() -> ThreadPoolExecutor:
    """Threads for NVRTC, which runs without Python's lock.
    A container may have far fewer cores than it sees."""
    return ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0))), "compile")


def under_way() -> bool:
    """Whether this thread rehearses: then no kernel writes what it is given to write."""
    return _asked.get() is not None


def rehearsed(kernel: Loads) -> bool:
    """Whether this is a rehearsal, in which ``kernel`` is asked for and not launched."""
    asked = _asked.get()
    if asked is None:
        return False
    asked.append(kernel)
    return True


@contextmanager
def rehearsing() -> Iterator[None]:
    """In this thread kernels are not launched but asked for. At the end all of them can be. Torch's own
    operations do run, so they must not meet indices that a kernel was to write."""
    from sgla.kernels.triton.asking import asking  # where there is no Triton, there is no rehearsal

    asked: list[Loads] = []
    token = _asked.set(asked)
    try:
        with asking(under_way):
            yield
        for kernel in dict.fromkeys(asked):
            kernel.load()
    finally:
        _asked.reset(token)
