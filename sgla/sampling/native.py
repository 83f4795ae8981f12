"""``draw`` in C++ (csrc/cpu/sample.cpp): the same tokens in a fraction of the time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sgla.kernels.build import BuildError
from sgla.kernels.cpu.native import library
from sgla.sampling.draw import Distribution, Draw, Floats, draw


def find_draw(isa: str | None = None) -> Draw:
    """The native one where there are native kernels; of the level ``isa``, or the best for this CPU."""
    try:
        native = library(isa).dll.sgla_draw
    except BuildError:
        return draw

    def drawn(
        logits: Floats,
        distribution: Distribution,
        seed: int,
        position: int,
        ids: NDArray[np.intp] | None = None,
    ) -> int:
        assert all(x is None or x.flags.c_contiguous for x in (logits, ids))
        tokens = None if ids is None else ids.ctypes.data
        token: int = native(logits.ctypes.data, tokens, len(logits), *distribution, seed, position)
        return token

    return drawn
