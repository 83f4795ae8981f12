"""Kimi K2.5 (arXiv 2602.02276): a tower for pictures of any size, of which 2 x 2 patches are a token."""

from __future__ import annotations

from math import prod

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Film, Settings, Spelled, Vision, values, vision_config

TOKEN, FRAMES = "<|media_pad|>", "<|kimi_k25_video_placeholder|>"


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    joined = prod(vision_config(config).get("merge_kernel_size", (2, 2)))
    return Spelled(TOKEN, (prod(values(picture, "image_grid_thw")) // joined,))


def filmed(config: Config, settings: Settings, video: Prepared) -> Spelled:
    """Four frames are as many tokens as one, and have the time of the first before them."""
    joined = prod(vision_config(config).get("merge_kernel_size", (2, 2)))
    grids, times = values(video, "image_grid_thw"), values(video, "thousandths")
    text = "".join(f"{clock(at)}<|media_begin|>video<|media_content|>{FRAMES}<|media_end|>" for at in times)
    counts = (rows * columns // joined for rows, columns in zip(grids[1::3], grids[2::3]))
    return Spelled(text, tuple(counts))


def clock(thousandths: int) -> str:
    seconds, rest = divmod(thousandths, 1000)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{rest:03}"


KIMI_K25 = Vision(
    processors=("Kimi_K25ImageProcessor",),
    token=("image_token_id", 163605),
    written=TOKEN,
    media=f"<|media_begin|>image<|media_content|>{TOKEN}<|media_end|>",
    spelled=spelled,
    parts=("vision_tower", "mm_projector"),
    sizes=("max_patches", "fps", "num_frames"),
    film=Film(
        processor="Kimi_K25VideoProcessor",
        token=("video_token_id", 163840),
        written=FRAMES,
        media=FRAMES,
        spelled=filmed,
    ),
)
