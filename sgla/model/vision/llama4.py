"""Llama 4: a picture is fitted into a shape of square tiles, which come row by row, with the whole picture
behind them."""

from __future__ import annotations

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision, array, values, vision_config

BEGIN, WHOLE, TOKEN, END = "<|image_start|>", "<|image|>", "<|patch|>", "<|image_end|>"
BESIDE, BELOW = "<|tile_x_separator|>", "<|tile_y_separator|>"


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    rows, columns = values(picture, "aspect_ratios")
    *_, height, width = array(picture, "pixel_values")
    tower = vision_config(config)
    patch = tower.get("patch_size", 14)
    count = int((height // patch) * (width // patch) * tower.get("pixel_shuffle_ratio", 0.5) ** 2)
    tiles = rows if rows * columns > 1 else 0
    text = (BESIDE.join([TOKEN] * columns) + BELOW) * tiles
    return Spelled(f"{BEGIN}{text}{WHOLE}{TOKEN}{END}", (count,) * (tiles * columns + 1))


LLAMA4 = Vision(
    processors=("Llama4ImageProcessor",),
    token=("image_token_index", 200092),
    written=WHOLE,
    media=WHOLE,
    spelled=spelled,
    parts=("vision_model", "multi_modal_projector"),
    sizes=("max_patches",),
)
