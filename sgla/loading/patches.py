"""Patches of pictures, as transformers' processors of Qwen2-VL and GLM-4.1V cut them, out of what
``media/pixels.py`` makes."""

from __future__ import annotations

import torch
from torch import Tensor


def patches_of(pixels: Tensor, levels: Tensor, grid: list[int], block: list[int]) -> Tensor:
    """``[patches, 3 * depth * side * side]`` in the type of ``levels`` [256, 3], of ``pixels``
    uint8[frames, height, width, 3]. ``grid``: how many patches there are in time, in rows and in columns;
    ``block``: how many a side belong together, and the frames of a patch. The last frame fills up the last
    patches."""
    (times, rows, columns), (merge, depth) = grid, block
    frames, height, width, _ = pixels.shape
    channels = torch.arange(3, dtype=torch.int32, device=pixels.device)
    # levels[byte, channel], as numbers of the flat table
    values = levels.reshape(-1)[pixels.int() * 3 + channels]
    if times * depth != frames:
        values = values[torch.arange(times * depth, device=pixels.device).clamp(max=frames - 1)]
    blocks = values.view(
        *(times, depth, rows // merge, merge, height // rows, columns // merge, merge, width // columns, 3)
    )
    return blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(times * rows * columns, -1)
