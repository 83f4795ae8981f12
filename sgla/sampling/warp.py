"""When each token of a text was said, from how much it attends to each place of a sound (dynamic time
warping, as in transformers' ``_extract_token_timestamps``)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

WIDTH = 7  # places of the median filter, where config.json does not say


def matrix_of(weights: Tensor, width: int = WIDTH) -> Tensor:
    """``weights`` float32[heads, tokens, places] -> float32[tokens, places]: how much the heads together
    attend to each place more than other tokens do. Head by head, since sorting takes ``3 * width`` times the
    memory of what is sorted."""
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    return torch.cat([median(head, width) for head in ((weights - mean) / std).split(1)]).mean(0)


def places_in(matrix: Tensor) -> NDArray[np.int64]:
    """Of a ``matrix`` on the host: int64[tokens], rising, the place where each begins."""
    text, places = warped(-matrix.double().numpy())
    return places[np.diff(text, prepend=-1) > 0]


def median(x: Tensor, width: int) -> Tensor:
    """Of so many places around each, of the last dimension."""
    half = width // 2
    if x.shape[-1] <= half:
        return x
    return F.pad(x, (half, half, 0, 0), mode="reflect").unfold(-1, width, 1).sort()[0][..., half]


def warped(cost: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The cheapest way from the first token and place to the last ones: both, step by step. Costs of a
    diagonal follow from those of the two before."""
    tokens, places = cost.shape
    total = np.full((tokens + 1, places + 1), np.inf, np.float32)
    came = np.zeros((tokens + 1, places + 1), np.int8)  # 0: both one further, 1: the token, 2: the place
    total[0, 0], came[0, :], came[:, 0] = 0, 2, 1
    for diagonal in range(2, tokens + places + 1):
        i = np.arange(max(1, diagonal - places), min(tokens, diagonal - 1) + 1)
        j = diagonal - i
        both, token, place = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        how = np.where((both < token) & (both < place), 0, np.where((token < both) & (token < place), 1, 2))
        came[i, j] = how
        total[i, j] = cost[i - 1, j - 1] + np.choose(how, [both, token, place])
    i, j, way = tokens, places, []
    while i > 0 or j > 0:
        way.append((i - 1, j - 1))
        how = came[i, j]
        i, j = i - (how != 2), j - (how != 1)
    found = np.array(way[::-1], np.int64)
    return found[:, 0], found[:, 1]
