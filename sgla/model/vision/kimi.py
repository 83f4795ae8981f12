"""Kimi K2.5 (arXiv 2602.02276): a tower for pictures of any size, of which 2 x 2 patches are a token."""

from __future__ import annotations

from math import prod

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision, values, vision_config

TOKEN = "<|media_pad|>"


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    joined = prod(vision_config(config).get("merge_kernel_size", (2, 2)))
    return Spelled(TOKEN, (prod(values(picture, "image_grid_thw")) // joined,))


KIMI_K25 = Vision(
    processors=("Kimi_K25ImageProcessor",),
    token=("image_token_id", 163605),
    written=TOKEN,
    media=f"<|media_begin|>image<|media_content|>{TOKEN}<|media_end|>",
    spelled=spelled,
    parts=("vision_tower", "mm_projector"),
    sizes=("max_patches",),
)
