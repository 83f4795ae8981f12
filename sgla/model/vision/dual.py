"""CLIP and SigLIP, which make a vector of a picture that is a prompt by itself."""

from __future__ import annotations

from dataclasses import replace

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    return Spelled("", ())


CLIP = Vision(
    processors=("CLIPImageProcessor",),
    token=("image_token_id", 0),
    written="",
    media="",
    spelled=spelled,
    parts=("vision_model", "visual_projection"),
    apart=True,
)
SIGLIP = replace(CLIP, processors=("SiglipImageProcessor",), parts=("vision_model",))
