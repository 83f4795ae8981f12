"""One random token from one row of logits.

The distribution: softmax of ``logits / temperature``, cut to the ``top_k`` largest, renormalised, cut to the smallest
set of most probable tokens that holds ``top_p``, cut to tokens with at least ``min_p`` times the largest probability.
(This order is that of Hugging Face's logits processors.) The token is the inverse CDF at a uniform number that depends
on the request's seed and the position alone, so neither batch nor history of the process can change it.

Without top_k and top_p the CDF runs in vocabulary order and nothing is sorted; else in order of falling logit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

CANDIDATES = (
    1024  # largest logits that are looked at first; the whole row is sorted only if they do not suffice
)
BLOCK = 64  # tokens whose probabilities are added before the cumulative sum
U_BITS = 40  # so that u * total < total in float64


class Shape(NamedTuple):
    """How to cut the distribution; ``top_k <= 0``, ``top_p >= 1`` and ``min_p <= 0`` are off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


Draw = Callable[[Floats, Shape, float], int]  # ``draw``, in any implementation


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a counter hash: two rounds of the splitmix64 finaliser (Steele et al., 2014)."""
    return (_mix(_mix(seed) ^ position) >> (64 - U_BITS)) / (1 << U_BITS)


def _mix(z: int) -> int:
    mask = (1 << 64) - 1
    z = (z + 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def draw(logits: Floats, shape: Shape, u: float) -> int:
    """Token at ``u`` of the CDF of ``logits`` float32[V]; -1 if the largest is not finite, or one is NaN."""
    top = float(logits.max())
    if not np.isfinite(top):
        return -1
    if shape.top_k > 0 or shape.top_p < 1:
        return _draw_sorted(logits, top, shape, u)
    weights = _weights(logits, top, shape)
    sums = _block_sums(weights).cumsum(dtype=np.float64)
    block = _search(sums, u * sums[-1])
    rest = u * sums[-1] - (sums[block - 1] if block else 0.0)
    inside = weights[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    return block * BLOCK + _search(inside, rest)


def _block_sums(weights: Floats) -> Floats:
    """Sum of each BLOCK values; the last block may be shorter."""
    whole = len(weights) // BLOCK * BLOCK
    sums = np.einsum("ij->i", weights[:whole].reshape(-1, BLOCK))  # thrice as fast as add.reduceat
    return sums if whole == len(weights) else np.append(sums, weights[whole:].sum())


def _weights(logits: Floats, top: float, shape: Shape) -> Floats:
    """Unnormalised probabilities float32[V]; the largest is 1."""
    scaled = logits - np.float32(top)
    if shape.temperature != 1:
        scaled *= np.float32(1 / shape.temperature)
    if shape.min_p > 0:
        scaled[scaled < np.log(shape.min_p)] = -np.inf
    return np.exp(scaled, out=scaled)


def _draw_sorted(logits: Floats, top: float, shape: Shape, u: float) -> int:
    """Only values are sorted; the id of the one that is hit is looked up. Of equal logits the lower id comes first."""
    values = largest(logits, CANDIDATES)
    sums = _kept(logits, top, values, shape)
    if sums is None:
        values = largest(logits, len(logits))
        sums = _kept(logits, top, values, shape)
        assert sums is not None
    index = _search(sums, u * sums[-1])
    equal = np.flatnonzero(logits == values[index])
    return int(equal[index - np.flatnonzero(values == values[index])[0]])


def largest(logits: Floats, k: int) -> Floats:
    """The ``k`` largest logits, falling."""
    if k < len(logits):
        logits = np.partition(logits, len(logits) - k)[len(logits) - k :]
    return np.sort(logits)[::-1]


def _kept(logits: Floats, top: float, values: Floats, shape: Shape) -> NDArray[np.float64] | None:
    """Cumulative weights of the tokens that stay, a prefix of ``values``; None if these do not reach their end."""
    whole = len(values) == len(logits) or 0 < shape.top_k <= len(values)
    if shape.top_k > 0:
        if not whole:
            return None
        values = values[: shape.top_k]
    weights = np.exp((values.astype(np.float64) - top) / shape.temperature)
    sums = weights.cumsum()
    count = len(sums)
    if shape.top_p < 1:
        total = sums[-1] if whole else _weights(logits, top, shape._replace(min_p=0.0)).sum(dtype=np.float64)
        count = int(np.searchsorted(sums, shape.top_p * total)) + 1
        if count > len(sums) and not whole:
            return None
    if shape.min_p > 0:
        count = min(count, int(np.count_nonzero(weights >= shape.min_p)))
    return sums[: max(1, count)]


def _search(sums: NDArray[np.float64], target: float) -> int:
    """First index whose cumulative weight exceeds ``target``, but never one of zero weight."""
    index = int(np.searchsorted(sums, target, side="right"))
    return index if index < len(sums) else int(np.searchsorted(sums, sums[-1]))
