"""``draw`` in C++ (csrc/cpu/sample.cpp): the same tokens in a tenth of the time."""

from __future__ import annotations

from sgla.kernels.build import BuildError
from sgla.kernels.native import library
from sgla.sampling.draw import Draw, Floats, Shape, draw


def find_draw() -> Draw:
    """The native one where there are native kernels."""
    try:
        native = library().dll.sgla_draw
    except BuildError:
        return draw

    def drawn(logits: Floats, shape: Shape, u: float) -> int:
        assert logits.flags.c_contiguous
        token: int = native(logits.ctypes.data, len(logits), *shape, u)
        return token

    return drawn
