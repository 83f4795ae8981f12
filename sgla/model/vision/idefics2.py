"""Idefics 2 (arXiv 2405.02246): pictures keep their shape, and may be cut into four with the whole behind
them. A resampler makes the same number of tokens of each."""

from __future__ import annotations

import re

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision, array

AROUND, TOKEN = "<fake_token_around_image>", "<image>"


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    count = (config.get("perceiver_config") or {}).get("resampler_n_latents", 64)
    parts = array(picture, "pixel_values")[1]
    return Spelled(f"{AROUND}{TOKEN}" * parts + AROUND, (count,) * parts)


def joined(text: str) -> str:
    """One token between pictures that follow each other, and a space before a word."""
    return re.sub(rf"{AROUND}(?=[^\s<])", f"{AROUND} ", text.replace(AROUND * 2, AROUND))


IDEFICS2 = Vision(
    processors=("Idefics2ImageProcessor",),
    token=("image_token_id", 32001),
    written=TOKEN,
    media=TOKEN,
    spelled=spelled,
    joined=joined,
    parts=("vision_model", "connector"),
    sizes=("size",),
)
