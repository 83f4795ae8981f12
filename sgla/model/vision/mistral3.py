"""Pixtral (arXiv 2410.07073), whose tower takes pictures of any size: tokens come row by row, with one behind
each row. Those of Mistral Small 3.1 and others stand for several patches."""

from __future__ import annotations

from dataclasses import replace

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision, values, vision_config

TOKEN, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"


def side(config: Config) -> int:
    """Pixels of a token's side."""
    size: int = vision_config(config).get("patch_size", 16) * config.get(
        "spatial_merge_size", 2 if config.get("model_type") == "mistral3" else 1
    )
    return size


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    height, width = values(picture, "image_sizes")
    rows, columns = height // side(config), width // side(config)
    return Spelled(BREAK.join([TOKEN] * rows) + END, (columns,) * rows)


MISTRAL3 = Vision(
    processors=("PixtralImageProcessor",),
    token=("image_token_index", 10),
    written=TOKEN,
    media=TOKEN,
    spelled=spelled,
    sizes=("size",),
    prepares=lambda config, settings: {"patch_size": side(config)},
)
# In transformers' format a LLaVA.
PIXTRAL = replace(MISTRAL3, token=("image_token_index", 32000))
