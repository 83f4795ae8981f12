"""``draw`` of several rows at a time, in torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sgla.sampling.draw import LOG2_E, Distribution, row_bits

_MASK = (1 << 32) - 1


def draw_rows(logits: Tensor, distribution: Distribution, seed: int, positions: Sequence[int]) -> Tensor:
    """int64[n]: a token of each row of ``logits`` float32[n, V], all finite, at these positions."""
    factor = float(LOG2_E / np.float32(distribution.temperature))
    scores = logits.double() * factor - noise(bits_of(seed, positions, logits))
    return scores.masked_fill_(logits < thresholds(logits, distribution), -torch.inf).argmax(-1)


def thresholds(logits: Tensor, distribution: Distribution) -> Tensor:
    """float32[n, 1]: see ``draw.threshold``."""
    temperature, top_k, top_p, min_p = distribution
    top = logits.max(-1, keepdim=True).values
    least = torch.full_like(top, -torch.inf)
    if top_k > 0 or top_p < 1:
        values = logits.sort(-1, descending=True).values
        if 0 < top_k < values.shape[-1]:
            least = values[:, top_k - 1 : top_k]
        if top_p < 1:
            weights = ((values.double() - top) / temperature).exp()
            sums = weights.masked_fill(values < least, 0).cumsum(-1)
            held = torch.searchsorted(sums, top_p * sums[:, -1:]).clamp(max=values.shape[-1] - 1)
            least = torch.maximum(least, values.gather(-1, held))
    if min_p > 0:
        least = torch.maximum(least, (top + temperature * np.log(min_p)).float())
    return torch.minimum(least, top)


def bits_of(seed: int, positions: Sequence[int], like: Tensor) -> Tensor:
    """int64[n, V]: see ``draw.bits_of``. Products of two numbers of 32 bits wrap, and lose no bit."""
    rows = torch.tensor([row_bits(seed, position) for position in positions], device=like.device)
    low, high, added = rows.T[:, :, None]
    tokens = torch.arange(like.shape[-1], device=like.device)
    t = (tokens * 0x9E3779B1 + high) & _MASK
    t ^= t >> 16
    h = ((t * low >> 32) + t * high + added) & _MASK
    return ((h << 9) | (h >> 23)) & _MASK


def noise(bits: Tensor) -> Tensor:
    """float64: see ``draw.noise``."""
    v = (bits.float() + 0.5) * 2**-32
    v = v.clamp_(max=1 - 2**-24)
    return torch.log2(-torch.log1p(-v.double()))
