"""One random token from one row of logits.

The distribution: softmax of ``logits / temperature``, cut to the ``top_k`` largest, renormalised, cut to the smallest
set of most probable tokens that holds ``top_p``, cut to tokens with at least ``min_p`` times the largest probability.
(This order is that of Hugging Face's logits processors.) The token is the inverse CDF at a uniform number that depends
on the request's seed and the position alone, so neither batch nor history of the process can change it.

Without top_k and top_p the CDF runs in vocabulary order and nothing is sorted; else in order of falling logit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.integer]

CANDIDATES = 256  # largest logits that are looked at first; the whole row is sorted only if they do not suffice
BLOCK = 64  # tokens whose probabilities are added before the cumulative sum
U_BITS = 40  # so that u * total < total in float64


class Shape(NamedTuple):
    """How to cut the distribution; ``top_k <= 0``, ``top_p >= 1`` and ``min_p <= 0`` are off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


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
    """Token at ``u`` of the CDF of ``logits`` float32[V]. Logits that are not finite at the top: the argmax."""
    top = float(logits.max())
    if not np.isfinite(top):
        return int(logits.argmax())
    if shape.top_k > 0 or shape.top_p < 1:
        return _draw_sorted(logits, top, shape, u)
    weights = _weights(logits, top, shape)
    sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)).cumsum(dtype=np.float64)
    block = _search(sums, u * sums[-1])
    rest = u * sums[-1] - (sums[block - 1] if block else 0.0)
    inside = weights[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    return block * BLOCK + _search(inside, rest)


def _weights(logits: Floats, top: float, shape: Shape) -> Floats:
    """Unnormalised probabilities float32[V]; the largest is 1."""
    scaled = (logits - np.float32(top)) * np.float32(1 / shape.temperature)
    if shape.min_p > 0:
        scaled[scaled < np.log(shape.min_p)] = -np.inf
    return np.exp(scaled, out=scaled)


def _draw_sorted(logits: Floats, top: float, shape: Shape, u: float) -> int:
    ids = largest(logits, CANDIDATES)
    sums = _kept(logits, top, ids, shape)
    if sums is None:
        ids = largest(logits, len(logits))
        sums = _kept(logits, top, ids, shape)
        assert sums is not None
    return int(ids[_search(sums, u * sums[-1])])


def largest(logits: Floats, k: int) -> Ints:
    """Ids of the ``k`` largest logits, falling; of equal ones the lower id first."""
    if k >= len(logits):
        return np.argsort(-logits, kind="stable")
    ids = np.argpartition(logits, len(logits) - k)[len(logits) - k :]
    return ids[np.lexsort((ids, -logits[ids]))]


def _kept(logits: Floats, top: float, ids: Ints, shape: Shape) -> NDArray[np.float64] | None:
    """Cumulative weights of the tokens that stay, a prefix of ``ids``; None if ``ids`` do not reach their end."""
    whole = len(ids) == len(logits) or 0 < shape.top_k <= len(ids)
    if shape.top_k > 0:
        if not whole:
            return None
        ids = ids[: shape.top_k]
    weights = np.exp((logits[ids].astype(np.float64) - top) / shape.temperature)
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
