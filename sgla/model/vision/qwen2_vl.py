"""Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL and Qwen3-VL: towers for pictures of any size, of which 2 x 2
patches are a token. Positions have a time, a row and a column."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Film, Settings, Spelled, Vision, values, vision_config

BEGIN, TOKEN, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
FRAMES = "<|video_pad|>"


def merged(config: Config) -> int:
    found: int = vision_config(config).get("spatial_merge_size", 2)
    return found


def rope_of(config: Config) -> Config:
    text = config.get("text_config") or config
    found: Config = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return found


def sections(config: Config) -> tuple[list[int], bool]:
    return rope_of(config).get("mrope_section", [16, 24, 24]), False


def woven(config: Config) -> tuple[list[int], bool]:
    return rope_of(config).get("mrope_section", [24, 20, 20]), True


def turned(config: Config) -> tuple[list[int], bool]:
    return rope_of(config).get("mrope_section", [11, 11, 10]), True


def tokens_of(config: Config, shown: Prepared) -> int:
    return prod(values(shown, "image_grid_thw")) // merged(config) ** 2


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    return Spelled(TOKEN, (tokens_of(config, picture),))


def filmed(config: Config, settings: Settings, video: Prepared) -> Spelled:
    return Spelled(FRAMES, (tokens_of(config, video),))


def told_the_time(config: Config, settings: Settings, video: Prepared) -> Spelled:
    """Two frames that are a step in time have it before them, in seconds."""
    times, rows, columns = values(video, "image_grid_thw")
    text = "".join(f"<{tenth / 10:.1f} seconds>{BEGIN}{FRAMES}{END}" for tenth in values(video, "tenths"))
    return Spelled(text, (rows * columns // merged(config) ** 2,) * times)


def tokens_per_second(config: Config) -> float:
    found: float = vision_config(config).get("tokens_per_second", 4)
    return found


FILM = Film(
    processor="Qwen2VLVideoProcessor",
    token=("video_token_id", 151656),
    written=FRAMES,
    media=f"{BEGIN}{FRAMES}{END}",
    spelled=filmed,
)
QWEN2_VL = Vision(
    processors=("Qwen2VLImageProcessor",),
    token=("image_token_id", 151655),
    written=TOKEN,
    media=f"{BEGIN}{TOKEN}{END}",
    spelled=spelled,
    parts=("visual",),
    sizes=("min_pixels", "max_pixels", "size", "fps", "num_frames"),
    merged=merged,
    sections=sections,
    film=FILM,
)
QWEN2_5_VL = replace(QWEN2_VL, film=replace(FILM, paced=tokens_per_second))
TIMED = replace(
    FILM, processor="Qwen3VLVideoProcessor", written=f"{BEGIN}{FRAMES}{END}", spelled=told_the_time
)
QWEN3_VL = replace(QWEN2_VL, sections=woven, film=TIMED)
QWEN3_5 = replace(
    QWEN2_VL,
    token=("image_token_id", 248056),
    sections=turned,
    film=replace(TIMED, token=("video_token_id", 248057)),
)
