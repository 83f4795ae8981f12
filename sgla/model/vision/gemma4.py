"""Gemma 4: a tower for pictures of any shape, in patches of 16 pixels, of which 3 x 3 are a token. In the
large models tokens of a picture see each other, in layers with windows."""

from __future__ import annotations

from dataclasses import replace

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision, values

BEGIN, TOKEN, END = "<|image>", "<|image|>", "<image|>"


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    return Spelled(f"{BEGIN}{TOKEN}{END}", tuple(values(picture, "num_soft_tokens_per_image")))


GEMMA4 = Vision(
    processors=("Gemma4ImageProcessor",),
    token=("image_token_id", 258880),
    written=TOKEN,
    media=TOKEN,
    spelled=spelled,
    parts=("vision_tower", "embed_vision"),
    sizes=("max_soft_tokens",),
)
GEMMA4_TOGETHER = replace(GEMMA4, together=True, windowed=True)


def sees_ahead(config: Config) -> bool:
    """Whether tokens of a picture see each other."""
    return (config.get("text_config") or {}).get("use_bidirectional_attention") == "vision"
