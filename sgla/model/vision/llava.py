"""LLaVA 1.5 (arXiv 2310.03744): patches of a CLIP tower go through an MLP and are a token each."""

from __future__ import annotations

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision, array, vision_config


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    _, _, height, width = array(picture, "pixel_values")
    patch = vision_config(config).get("patch_size", 14)
    whole = config.get("vision_feature_select_strategy", "default") == "full"  # with the token of the class
    return Spelled("<image>", (height // patch * (width // patch) + whole,))


LLAVA = Vision(
    processors=("LlavaImageProcessor", "CLIPImageProcessor"),
    token=("image_token_index", 32000),
    written="<image>",
    media="<image>\n",
    spelled=spelled,
)
