"""Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL and Qwen3-VL: towers for pictures of any size, of which 2 x 2
patches are a token. Positions have a time, a row and a column."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision, values, vision_config

BEGIN, TOKEN, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


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


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    return Spelled(TOKEN, (prod(values(picture, "image_grid_thw")) // merged(config) ** 2,))


QWEN2_VL = Vision(
    processors=("Qwen2VLImageProcessor",),
    token=("image_token_id", 151655),
    written=TOKEN,
    media=f"{BEGIN}{TOKEN}{END}",
    spelled=spelled,
    parts=("visual",),
    sizes=("min_pixels", "max_pixels", "size"),
    merged=merged,
    sections=sections,
)
QWEN3_VL = replace(QWEN2_VL, sections=woven)
QWEN3_5 = replace(QWEN2_VL, token=("image_token_id", 248056), sections=turned)
