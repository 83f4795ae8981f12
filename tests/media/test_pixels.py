"""Pixels that become patches in the worker, against transformers' processors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from sgla.errors import InvalidField
from sgla.loading.patches import patches_of
from sgla.media.arrays import BLOCK, LEVELS, PIXELS, size_as_patches
from sgla.media.picture import Picture
from sgla.media.prepare import arrays_of, carried

QWEN, GLM = "Qwen2VLImageProcessor", "Glm4vImageProcessor"


def noise(height: int, width: int) -> Picture:
    values = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
    return Picture.of(height, width, values.tobytes())


def patches(arrays: dict[str, Any]) -> torch.Tensor:
    pixels, levels = (torch.tensor(arrays[name]) for name in (PIXELS, LEVELS))
    return patches_of(pixels, levels, arrays["image_grid_thw"][0].tolist(), arrays[BLOCK].tolist())


@pytest.mark.parametrize("size", [(56, 84), (61, 200), (9, 300), (500, 40)])
@pytest.mark.parametrize(
    ("processor", "given"),
    [
        (QWEN, {}),
        (QWEN, {"min_pixels": 64, "max_pixels": 9000, "patch_size": 4, "image_std": [0.5, 0.25, 1.0]}),
        (QWEN, {"patch_size": 16, "resample": 2, "do_normalize": False}),
        (QWEN, {"do_rescale": False, "temporal_patch_size": 3}),
        (GLM, {"size": {"shortest_edge": 112 * 112, "longest_edge": 40000}}),
    ],
)
def test_patches_are_those_of_transformers(
    processor: str, given: dict[str, Any], size: tuple[int, int]
) -> None:
    settings, shown = json.dumps(given), noise(*size)
    expected, made = arrays_of(shown, processor, settings, {}), carried(shown, processor, settings, {})
    assert made[PIXELS].dtype == np.uint8
    assert np.array_equal(made["image_grid_thw"], expected["image_grid_thw"])
    assert torch.equal(patches(made), torch.from_numpy(expected["pixel_values"]))
    if made[BLOCK][1] == 2:
        size_of = size_as_patches(PIXELS, made[PIXELS].shape, "uint8")
        assert size_of == expected["pixel_values"].nbytes


@pytest.mark.parametrize(
    ("shown", "given"),
    [
        (noise(3, 900), {}),
        (noise(30, 28), {"do_resize": False}),
        (noise(30, 30), {"size": {"shortest_edge": 4}}),
    ],
)
def test_what_transformers_refuses_is_refused(shown: Picture, given: dict[str, Any]) -> None:
    for make in (arrays_of, carried):
        with pytest.raises(InvalidField, match="a picture cannot be prepared"):
            make(shown, QWEN, json.dumps(given), {})


def test_frames_become_patches_and_the_last_fills_them_up() -> None:
    """By the definition, one number at a time."""
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 8, 4, 3), np.uint8))
    levels = torch.randn(256, 3)
    made = patches_of(pixels, levels, [2, 4, 2], [2, 2]).view(2, 2, 1, 2, 2, 3, 2, 2, 2)
    for time, high, wide, down, right, channel, step, y, x in np.ndindex(*made.shape):
        frame = min(2 * time + step, 2)
        byte = pixels[frame, 4 * high + 2 * down + y, 4 * wide + 2 * right + x, channel]
        assert made[time, high, wide, down, right, channel, step, y, x] == levels[byte.item(), channel]
