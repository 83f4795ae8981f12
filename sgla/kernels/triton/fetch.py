# mypy: allow-untyped-defs
"""Few numbers on their way to a GPU, or back: a kernel fetches them from the host's memory, or stores them
there. The engines that copy may be busy with a prefix, and would have them wait for all of it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.common import cdiv

FEW = 1 << 14  # numbers


@triton.jit(do_not_specialize=["count"])
def _fetch(source, target, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)


def are_few(x: Tensor) -> bool:
    """Whether ``fetch`` may bring these."""
    there = x.is_contiguous() and x.element_size() == 4 and not x.data_ptr() % 16
    return there and 0 < x.numel() <= FEW


def fetch(source: Tensor, target: Tensor) -> None:
    """``source`` int32[*] into ``target``, as long or longer; one of them is pinned. Both begin at a multiple
    of 16 bytes; ``source`` stays as it is until the kernel has run."""
    count = source.numel()
    _fetch[(cdiv(count, 1024),)](source, target, count, BLOCK=1024)
