"""MiniCPM-V 4.6: the whole picture, and, if it is large, the picture again as a grid of slices. A token
stands for 4 x 4 patches, or for 2 x 2 (``downsample_mode``)."""

from __future__ import annotations

import re
from itertools import count
from typing import Any

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision, values

TOKEN, BEGIN, END = "<|image_pad|>", "<image>", "</image>"
SLICE, SLICED = "<slice>", "</slice>"
NUMBER = "<image_id></image_id>"


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    sizes, (rows, columns) = values(picture, "target_sizes"), values(picture, "grids")
    joined = 4 if mode(config) == "4x" else 16
    counts = [height * width // joined for height, width in zip(sizes[::2], sizes[1::2])]
    lines = "\n".join([f"{SLICE}{TOKEN}{SLICED}" * columns] * rows)
    number = NUMBER if settings.images.get("use_image_id", True) else ""
    return Spelled(f"{number}{BEGIN}{TOKEN}{END}{lines}", tuple(counts))


def numbered(text: str) -> str:
    """Pictures have their numbers in the prompt."""
    numbers = count()
    return re.sub(NUMBER, lambda _: f"<image_id>{next(numbers)}</image_id>", text)


def mode(config: Config) -> str:
    return str(config.get("downsample_mode", "16x"))


def prepares(config: Config, settings: Settings) -> dict[str, Any]:
    return {"downsample_mode": mode(config)}


MINICPM_V = Vision(
    processors=("MiniCPMV4_6ImageProcessor",),
    token=("image_token_id", 248056),
    written=TOKEN,
    media=TOKEN,
    spelled=spelled,
    joined=numbered,
    parts=("vision_tower", "merger"),
    sizes=("max_slice_nums",),
    prepares=prepares,
)
