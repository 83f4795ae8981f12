"""Rotary position embedding as a table of cosines and sines,
computed as HF computes it (float32 frequencies)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sgla.layers.spec import RopeSpec


def rope_table(theta: float, dim: int, kind: str, scaling: dict[str, Any], positions: int) -> Tensor:
    """float32 ``[positions, dim]``: cosines | sines of each position's angles, times the attention factor.

    ``kind``: default | linear | dynamic | llama3 | yarn | factors | longrope | proportional. Up to the
    trained length dynamic is the default one, and the context ends there. ``factors`` divides each frequency
    by its own number (GGUF's ``rope_freqs``); ``longrope`` has two lists of such numbers, of which the long
    one is for more ``positions`` than were trained. ``proportional`` stops all but the first ``share`` of
    them.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    magnitude = 1.0
    if kind == "linear":
        frequencies /= scaling["factor"]
    elif kind == "factors":
        frequencies /= torch.tensor(scaling["factors"])
    elif kind == "longrope":
        long = RopeSpec(theta, dim, kind, scaling).long(positions)
        frequencies /= torch.tensor(scaling["long" if long else "short"])
        magnitude = scaling["magnitude"]
    elif kind == "proportional":
        frequencies /= scaling.get("factor", 1.0)
        frequencies[int(scaling["share"] * dim // 2) :] = 0.0
    elif kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif kind == "yarn":
        frequencies, magnitude = _yarn(frequencies, theta, scaling), _yarn_magnitude(scaling)
    angles = torch.arange(positions).float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * magnitude


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: slow waves are stretched by ``factor``, fast ones kept, those between interpolated."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def _yarn(frequencies: Tensor, theta: float, scaling: dict[str, Any]) -> Tensor:
    """YaRN (arXiv 2309.00071): a ramp over the dims from kept to stretched frequencies."""
    dim = 2 * len(frequencies)
    length = scaling["original_max_position_embeddings"]

    def turning(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning(scaling.get("beta_fast", 32)), turning(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # below 0 where the trained length is short: then all frequencies are kept
    ramp = (torch.arange(dim // 2).float() - low) / width
    stretched = ramp.clamp(0, 1)
    return frequencies / scaling["factor"] * stretched + frequencies * (1 - stretched)


def _yarn_magnitude(scaling: dict[str, Any]) -> float:
    """YaRN's temperature on the attention scores, as a factor on cos and sin."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
