"""InternVL 3 (arXiv 2504.10479) in transformers' format: a picture is cut into tiles of one size, with the
whole picture behind them, and four neighbouring patches are a token."""

from __future__ import annotations

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Film, Settings, Spelled, Vision, array

BEGIN, TOKEN, END = "<img>", "<IMG_CONTEXT>", "</img>"


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    tiles = array(picture, "pixel_values")[0]
    return Spelled(f"{BEGIN}{TOKEN}{END}", (config.get("image_seq_length", 256) * tiles,))


def filmed(config: Config, settings: Settings, video: Prepared) -> Spelled:
    frames = array(video, "pixel_values")[0]
    text = "\n".join(f"Frame{i + 1}: {BEGIN}{TOKEN}{END}" for i in range(frames))
    return Spelled(text, (config.get("image_seq_length", 256),) * frames)


INTERNVL = Vision(
    processors=("GotOcr2ImageProcessor",),
    token=("image_token_id", 151667),
    written=TOKEN,
    media=f"{TOKEN}\n",
    spelled=spelled,
    sizes=("min_patches", "max_patches", "fps", "num_frames"),
    film=Film(
        processor="InternVLVideoProcessor",
        token=("image_token_id", 151667),
        written="<video>",
        media="<video>\n",
        spelled=filmed,
    ),
    prepares=lambda config, settings: {"crop_to_patches": True},
)
