"""One random token from one row of logits: the definition, and its oracle. Every device draws this token.

The distribution: softmax of ``logits / temperature`` over the tokens whose logit is at least a threshold. The
threshold leaves the ``top_k`` most probable tokens, of these, renormalised, the fewest that hold ``top_p``,
and of these the tokens with at least ``min_p`` times the largest probability. Tokens as probable as the last
one that stays, stay too. (Hugging Face's logits processors have the same order, and the same ties in top-k.)

The draw: Gumbel-max. The token with the largest ``logit / temperature - log(E)`` is taken, the lowest id
among equals. E is exponential noise that depends on the request's seed, the position and the token's id
alone, so the batch, the history of the process, the number of ranks and the device cannot change a draw.

A score is counted in bits: ``logit * (log2(e) / temperature) - log2(E)``. The factor of the logit and the
uniform number that makes E are rounded to float32, as ``bits_of`` and ``noise`` say; a CPU computes the rest
in float64. A GPU computes it in float32, with logarithms good to about 1e-5, finds the threshold up to 1e-5
of the temperature too low, and adds weights for top-p to about 2e-5 of their sum. So devices may differ where
the two best scores are closer than 3e-5 bits and 1e-6 of their size, or where the winner is that close to the
threshold. The native draw (csrc/cpu/sample.cpp) adds weights to about 1e-6.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

LOG2_E = np.float32(1.442695041)
MOST_NOISE = 33  # bits: ``-log2(E)`` is at most that, and at least LEAST_NOISE
LEAST_NOISE = -5
_MASK = (1 << 64) - 1


class Distribution(NamedTuple):
    """What to draw from; ``top_k <= 0``, ``top_p >= 1`` and ``min_p <= 0`` are off."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Draw(Protocol):
    """``draw``, in any implementation."""

    def __call__(
        self,
        logits: Floats,
        distribution: Distribution,
        seed: int,
        position: int,
        ids: NDArray[np.intp] | None = None,
    ) -> int: ...


def draw(
    logits: Floats, distribution: Distribution, seed: int, position: int, ids: NDArray[np.intp] | None = None
) -> int:
    """Index in ``logits`` float32[n] of the token at ``position``; -1 if the largest logit is not finite, or
    one is NaN. ``ids`` int[n], rising: the tokens, where they are not the whole vocabulary."""
    top = float(logits.max())
    if not np.isfinite(top):
        return -1
    factor = LOG2_E / np.float32(distribution.temperature)
    # No noise lets a token win that is further below the top.
    reach = (MOST_NOISE - LEAST_NOISE) / float(factor)
    kept = np.flatnonzero(logits >= max(threshold(logits, distribution), top - reach))
    bits = bits_of(seed, position, kept if ids is None else ids[kept])
    return int(kept[(logits[kept].astype(np.float64) * factor - noise(bits)).argmax()])


def threshold(logits: Floats, distribution: Distribution) -> float:
    """The smallest logit that may be drawn, from ``logits`` float32[n] without NaN."""
    temperature, top_k, top_p, min_p = distribution
    top, least = float(logits.max()), -np.inf
    if top_k > 0 or top_p < 1:
        values = np.sort(logits)[::-1].astype(np.float64)
        if 0 < top_k < len(values):
            least = values[top_k - 1]
            values = values[values >= least]
        if top_p < 1:
            sums = np.exp((values - top) / temperature).cumsum()
            least = values[min(len(values) - 1, int(np.searchsorted(sums, top_p * sums[-1])))]
    if min_p > 0:
        least = max(least, float(np.float32(top + temperature * np.log(min_p))))
    return min(least, top)


def bits_of(seed: int, position: int, tokens: NDArray[np.integer]) -> NDArray[np.uint32]:
    """The 32 bits of a uniform number for each of ``tokens`` int[n]: uint32[n].

    Two rounds of the finaliser of splitmix64 (Steele et al., 2014) make 64 bits of seed and position. The
    upper half of ``position`` is free for the number of an attempt, for those who draw a position again;
    everybody else's is 0. Of a token these bits make the upper half of a multiple, as in multiply-shift
    hashing (Dietzfelbinger et al., 1997).
    """
    first, second, added = row_bits(seed, position)
    low, high = np.uint64(first), np.uint32(second)
    t = tokens.astype(np.uint32) * np.uint32(0x9E3779B1) + high
    t ^= t >> np.uint32(16)
    h = (t * low >> np.uint64(32)).astype(np.uint32) + t * high + np.uint32(added)
    return h << np.uint32(9) | h >> np.uint32(23)


def row_bits(seed: int, position: int) -> tuple[int, int, int]:
    """Of 32 bits each: the halves of those that seed and position make, and what is added to a token's."""
    row = _mix(_mix(seed) ^ position)
    low = row & 0xFFFFFFFF
    return low, row >> 32, low * 0x85EBCA6B & 0xFFFFFFFF


def uniform(seed: int, position: int, vocab: int) -> int:
    """A token of so many that is as probable as any other: 64 bits of seed and position, mixed once more, so
    that it tells nothing of what ``draw`` draws there."""
    return _mix(_mix(_mix(seed) ^ position)) % vocab


def noise(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    """``log2(E)`` of ``bits``, with E = -log(1 - v) and v uniform in (0, 1), a float32."""
    v = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    v = np.minimum(v, np.float32(1 - 2**-24))  # so that E is finite
    return np.log2(-np.log1p(-v.astype(np.float64)))


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
