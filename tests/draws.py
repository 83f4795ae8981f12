"""What other devices may draw, by the rule of ``sgla/sampling/draw.py``."""

from __future__ import annotations

import numpy as np

from sgla.sampling.draw import LOG2_E, Distribution, bits_of, noise, threshold

DISTRIBUTIONS = [
    Distribution(1.0),
    Distribution(0.6),
    Distribution(2.5),
    Distribution(1.0, top_k=20),
    Distribution(0.8, top_p=0.9),
    Distribution(1.2, min_p=0.05),
    Distribution(1.1, 50, 0.95, 0.01),
]


def possible(logits: np.ndarray, distribution: Distribution, seed: int, position: int) -> set[int]:
    """Tokens of ``logits`` float32[V] that a GPU may draw: mostly one; more where two scores, or a logit and
    the threshold, are too close for its arithmetic."""
    ids, tokens = np.arange(len(logits)), set()
    factor = LOG2_E / np.float32(distribution.temperature)
    scores = logits.astype(np.float64) * factor - noise(bits_of(seed, position, ids))
    for slack in (-1, 0, 1):
        top_p = distribution.top_p
        if top_p < 1:
            top_p = min(max(top_p + 2e-5 * slack, 0), 1 - 1e-9)
        least = threshold(logits, distribution._replace(top_p=top_p))
        left = np.where(logits >= least - 1e-5 * max(0, slack) * distribution.temperature, scores, -np.inf)
        best = left.max()
        tokens |= set(np.flatnonzero(left >= best - (3e-5 + 1e-6 * abs(best))).tolist())
    return tokens
