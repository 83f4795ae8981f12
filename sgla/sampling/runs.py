"""The tokens of a step's rows, any number each, as its result carries them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sgla.sampling.sampler import Samples

Int32s = NDArray[np.int32]


def ragged(samples: Samples, first: Int32s, counts: Int32s) -> tuple[bytes, bytes]:
    """``StepResult.tokens`` and ``counts``:
    of each row ``counts[i]`` samples from ``first[i]`` on, and what is forced behind them."""
    if len(samples.tokens) == len(first) == counts.sum() and not samples.forced and not samples.known:
        return samples.tokens.tobytes(), b""
    runs = [
        samples.tokens[start : start + (0 if i in samples.known else count)]
        for i, (start, count) in enumerate(zip(first, counts))
    ]
    for i, run in samples.forced.items():
        runs[i] = np.concatenate([runs[i], run])
    return np.concatenate(runs).tobytes(), np.array([len(run) for run in runs], np.int32).tobytes()
