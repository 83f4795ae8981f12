# mypy: allow-untyped-defs
"""Triton's part of a rehearsal: see ``kernels/rehearsal.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton

THREADS = 8  # much of the work needs Python's lock, which who rehearses needs, too


@contextmanager
def asking(rehearses: Callable[[], bool]) -> Iterator[None]:
    """In threads that rehearse, functions are compiled without a launch,
    on threads of their own and to the end."""
    run = triton.JITFunction.run

    def run_or_ask(self, *args, grid, warmup, **options):
        return run(self, *args, grid=grid, warmup=warmup or rehearses(), **options)

    triton.JITFunction.run = run_or_ask
    try:
        with ThreadPoolExecutor(THREADS, "triton") as pool, _ToTheGpu(pool, torch.cuda.current_device()):
            yield
    finally:
        triton.JITFunction.run = run


class _ToTheGpu(triton.AsyncCompileMode):
    """Brings what is compiled to the GPU, too, and has it known at once and not only at the end."""

    def __init__(self, pool: ThreadPoolExecutor, device: int) -> None:
        super().__init__(pool)
        self._device = device

    def submit(self, key, compile_fn, finalize_fn):
        def compile_() -> Any:
            kernel = compile_fn()
            torch.cuda.set_device(self._device)
            assert kernel.run is not None  # made when it is looked at
            finalize_fn(kernel)
            return kernel

        return super().submit(key, compile_, finalize_fn)
