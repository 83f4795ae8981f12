"""MiniCPM-V 4.6: the whole picture, and, if it is large, the picture again as a grid of slices. A token
stands for 4 x 4 patches, or for 2 x 2 (``downsample_mode``)."""

from __future__ import annotations

import re
from itertools import count
from typing import Any

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Film, Settings, Spelled, Vision, values

TOKEN, BEGIN, END = "<|image_pad|>", "<image>", "</image>"
FRAMES = "<|video_pad|>"
SLICE, SLICED = "<slice>", "</slice>"
NUMBER = "<image_id></image_id>"


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    sizes, (rows, columns) = values(picture, "target_sizes"), values(picture, "grids")
    lines = "\n".join([f"{SLICE}{TOKEN}{SLICED}" * columns] * rows)
    number = NUMBER if settings.images.get("use_image_id", True) else ""
    return Spelled(f"{number}{BEGIN}{TOKEN}{END}{lines}", counts(config, sizes))


def counts(config: Config, sizes: list[int]) -> tuple[int, ...]:
    """Tokens of parts of so many rows and columns of patches."""
    joined = 4 if mode(config) == "4x" else 16
    return tuple(height * width // joined for height, width in zip(sizes[::2], sizes[1::2]))


def numbered(text: str) -> str:
    """Pictures have their numbers in the prompt."""
    numbers = count()
    return re.sub(NUMBER, lambda _: f"<image_id>{next(numbers)}</image_id>", text)


def mode(config: Config) -> str:
    return str(config.get("downsample_mode", "16x"))


def prepares(config: Config, settings: Settings) -> dict[str, Any]:
    return {"downsample_mode": mode(config)}


def filmed(config: Config, settings: Settings, video: Prepared) -> Spelled:
    """All frames are cut alike, and have no numbers."""
    sizes, (rows, columns), (frames,) = (values(video, name) for name in ("cut", "grids", "frames"))
    lines = "\n".join([f"{SLICE}{FRAMES}{SLICED}" * columns] * rows)
    return Spelled(f"{BEGIN}{FRAMES}{END}{lines}" * frames, counts(config, sizes) * frames)


MINICPM_V = Vision(
    processors=("MiniCPMV4_6ImageProcessor",),
    token=("image_token_id", 248056),
    written=TOKEN,
    media=TOKEN,
    spelled=spelled,
    joined=numbered,
    parts=("vision_tower", "merger"),
    sizes=("max_slice_nums", "num_frames"),
    prepares=prepares,
    film=Film(
        processor="MiniCPMV4_6VideoProcessor",
        token=("video_token_id", 248057),
        written=FRAMES,
        media=FRAMES,
        spelled=filmed,
    ),
)
