"""Gemma 3 (arXiv 2503.19786): a SigLIP tower whose patches are pooled to the same number of tokens for every
picture. They see each other."""

from __future__ import annotations

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision

BEGIN, TOKEN, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    return Spelled(f"\n\n{BEGIN}{TOKEN}{END}\n\n", (config.get("mm_tokens_per_image", 256),))


GEMMA3 = Vision(
    processors=("Gemma3ImageProcessor",),
    token=("image_token_index", 262144),
    written=BEGIN,
    media=BEGIN,
    spelled=spelled,
    together=True,
)
