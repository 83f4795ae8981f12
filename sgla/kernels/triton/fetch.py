# mypy: allow-untyped-defs
"""Few numbers on their way to a GPU: a kernel fetches them from the host's memory. The engine that copies may
be busy with a prefix, and would have them wait for it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.common import cdiv


@triton.jit(do_not_specialize=["count"])
def _fetch(source, target, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)


def fetch(source: Tensor, target: Tensor) -> None:
    """``source`` int32[*], pinned, into ``target``, as long or longer. Both begin at a multiple of 16 bytes;
    ``source`` stays as it is until the kernel has run."""
    count = source.numel()
    _fetch[(cdiv(count, 1024),)](source, target, count, BLOCK=1024)
