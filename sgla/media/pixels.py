"""Pixels in place of patches, which the worker cuts itself (``loading/patches.py``): a processor of
transformers makes a float32 of each byte, twice where patches have two frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from transformers.models.glm4v import image_processing_pil_glm4v as glm4v
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2_vl

from sgla.media.arrays import BLOCK, LEVELS, PIXELS
from sgla.media.picture import Picture

Size = tuple[int, int]  # height, width


def qwen2_vl_size(processor: Any, shown: Size) -> Size:
    return qwen2_vl.smart_resize(*shown, _token(processor), *_bounds(processor))


def glm4v_size(processor: Any, shown: Size) -> Size:
    depth = processor.temporal_patch_size
    return glm4v.smart_resize(depth, *shown, depth, _token(processor), *_bounds(processor))


# Processors of transformers that resize a picture and cut it into patches, block by block: what size it gets.
PATCHING: dict[str, Callable[[Any, Size], Size]] = {
    "Qwen2VLImageProcessor": qwen2_vl_size,
    "Glm4vImageProcessor": glm4v_size,
}


def _token(processor: Any) -> int:
    found: int = processor.patch_size * processor.merge_size
    return found


def _bounds(processor: Any) -> tuple[int, int]:
    """Fewest and most pixels. Raises ValueError."""
    least, most = (dict(processor.size).get(name) for name in ("shortest_edge", "longest_edge"))
    if not least or not most:
        raise ValueError(f"size must have shortest_edge and longest_edge, got {processor.size}")
    return least, most


def pixels_of(picture: Picture, name: str, processor: Any) -> dict[str, Any]:
    """Arrays by name: PIXELS uint8[1, height, width, 3], resized; LEVELS float32[256, 3], what a byte stands
    for; BLOCK int64[2], how many patches a side belong together and how many frames a patch has; and the grid
    of patches as the ``processor`` has it. ``name``: of PATCHING. Raises ValueError where that does."""
    pixels = np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)
    token, patch = _token(processor), processor.patch_size
    height, width = size = pixels.shape[:2]
    if processor.do_resize:
        height, width = PATCHING[name](processor, size)
    if height % token or width % token:
        raise ValueError(f"{width} x {height} pixels are no whole tokens of {token} pixels a side")
    if (height, width) != size:
        pixels = np.asarray(Image.fromarray(pixels).resize((width, height), processor.resample))
    return {
        PIXELS: pixels[None],
        LEVELS: levels_of(processor),
        BLOCK: np.array([processor.merge_size, processor.temporal_patch_size]),
        "image_grid_thw": np.array([[1, height // patch, width // patch]]),
    }


def levels_of(processor: Any) -> Any:
    """float32[256, 3]: what the ``processor`` makes of each byte of each channel."""
    levels = np.repeat(np.arange(256, dtype=np.uint8)[None, None], 3, 0)
    if processor.do_rescale:
        levels = processor.rescale(levels, processor.rescale_factor)
    if processor.do_normalize:
        levels = processor.normalize(levels, processor.image_mean, processor.image_std)
    return np.ascontiguousarray(levels[:, 0].T, np.float32)
