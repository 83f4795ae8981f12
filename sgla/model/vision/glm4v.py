"""GLM-4.1V and GLM-4.5V (arXiv 2507.01006): a tower for pictures of any size, of which 2 x 2 patches are a
token. Positions have a time, a row and a column, as those of Qwen2-VL."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from sgla.messages import Prepared
from sgla.model.vision.qwen2_vl import merged, rope_of
from sgla.model.vision.spec import Config, Film, Settings, Spelled, Vision, values

BEGIN, TOKEN, END = "<|begin_of_image|>", "<|image|>", "<|end_of_image|>"


def sections(config: Config) -> tuple[list[int], bool]:
    return rope_of(config).get("mrope_section", [8, 12, 12]), False


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    return Spelled(TOKEN, (prod(values(picture, "image_grid_thw")) // merged(config) ** 2,))


def filmed(config: Config, settings: Settings, video: Prepared) -> Spelled:
    """Two frames that are a step in time have their second behind them."""
    times, rows, columns = values(video, "image_grid_thw")
    text = "".join(f"{BEGIN}{TOKEN}{END}{second}" for second in values(video, "seconds"))
    return Spelled(text, (rows * columns // merged(config) ** 2,) * times)


FILM = Film(
    processor="Glm4vVideoProcessor",
    token=("image_token_id", 151343),
    written="<|video|>",
    media="<|begin_of_video|><|video|><|end_of_video|>",
    spelled=filmed,
    apart=True,
)
GLM4V = Vision(
    processors=("Glm4vImageProcessor",),
    token=("image_token_id", 151343),
    written=TOKEN,
    media=f"{BEGIN}{TOKEN}{END}",
    spelled=spelled,
    parts=("visual",),
    sizes=("size", "fps", "num_frames"),
    film=FILM,
    merged=merged,
    sections=sections,
)
GLM4V_MOE = replace(
    GLM4V, token=("image_token_id", 151363), film=replace(FILM, token=("image_token_id", 151363))
)
