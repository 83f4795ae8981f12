# mypy: allow-untyped-defs
"""What kernels share: how they begin, activations, and options of their launches."""

from __future__ import annotations

import triton
import triton.language as tl

from sgla.kernels.device import this_device


@triton.jit
def _begin(PDL: tl.constexpr):
    """Let the next kernel's programs start, and wait until the kernel before is done:
    hides the time of a launch."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _begin_early(PDL: tl.constexpr):
    """As ``_begin``, for a kernel whose successor may start before this one can:
    it reads nothing but weights first."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _saturate(x):
    """To the range of e4m3."""
    return tl.minimum(tl.maximum(x, -448.0), 448.0)


@triton.jit
def _activate(gate, GELU: tl.constexpr):
    if GELU:
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2 * u)
    return gate * tl.sigmoid(gate)


# Of numbers on the host: Triton's functions of these names take 5 us there, which launches would wait for.
def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()


def _pdl() -> dict[str, bool]:
    """Launch options for programmatic dependent launch, where the GPU has it."""
    return {"PDL": True, "launch_pdl": True} if this_device().pdl else {"PDL": False}


def _warps(width: int) -> int:
    return 1 if width <= 512 else 4 if width <= 4096 else 8
