"""How a KV cache keeps what it has in 4 bits, which sizes and kernels both know. Loads no torch."""

from __future__ import annotations

FEWEST = 16  # dims of a v, of which heads have a multiple: with fewer, constants take more than numbers
DIMS = 32  # in 16 bytes, of which a CUDA kernel makes fragments at a time


def int4_dims(width: int) -> int:
    """How many values of a v have constants of their own: with more, the largest and the smallest of them lie
    further apart, with fewer, the constants take more room."""
    return min(DIMS, width & -width)
