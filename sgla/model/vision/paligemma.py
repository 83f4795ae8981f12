"""PaliGemma (arXiv 2407.07726) and PaliGemma 2 (2412.03555): all of a prompt's tokens, behind those of its
pictures, see each other."""

from __future__ import annotations

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision, vision_config

TOKEN, BEGIN = "<image>", "<bos>"


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    tower = vision_config(config)
    return Spelled(TOKEN, ((tower.get("image_size", 224) // tower.get("patch_size", 14)) ** 2,))


def framed(text: str) -> str:
    """With what the models were trained to find behind the pictures and the text."""
    end = text.rfind(TOKEN) + len(TOKEN)
    return f"{text[:end]}{BEGIN}{text[end:]}\n"


PALIGEMMA = Vision(
    processors=("SiglipImageProcessor",),
    token=("image_token_index", 256000),
    written=TOKEN,
    media=TOKEN,
    spelled=spelled,
    prefix=True,
    framed=framed,
)
