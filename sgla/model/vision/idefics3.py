"""Idefics 3 (arXiv 2408.12637) and SmolVLM (2504.05299): large pictures are cut into tiles, which come row by
row, with the whole picture behind them. Each takes the same number of tokens, since neighbouring patches are
joined."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Film, Settings, Spelled, Vision, values, vision_config

SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
AROUND, WHOLE, TOKEN = "<fake_token_around_image>", "<global-img>", "<image>"


def tokens(config: Config) -> int:
    """Of a tile."""
    tower = vision_config(config)
    side: int = tower.get("image_size", 224) // tower.get("patch_size", 32)
    joined: int = config.get("scale_factor", 2)
    return side**2 // joined**2


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    rows, columns = (sum(values(picture, name)) for name in ("rows", "cols"))
    count = tokens(config)
    lines = [
        "".join(f"{AROUND}<row_{row}_col_{column}>{TOKEN}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    ]
    text = "".join(lines) + ("\n" if lines else "") + f"{AROUND}{WHOLE}{TOKEN}{AROUND}"
    return Spelled(text, (count,) * (rows * columns + 1))


def filmed(config: Config, settings: Settings, video: Prepared) -> Spelled:
    """Frames are whole pictures, behind the times that they have."""
    seconds, (lasts,) = values(video, "seconds"), values(video, "lasts")
    told = "".join(
        f"\nFrame from {at // 60:02d}:{at % 60:02d}:{AROUND}{WHOLE}{TOKEN}{AROUND}" for at in seconds
    )
    text = (
        f"You are provided the following series of {in_words(len(seconds))} frames from a "
        f"{timedelta(seconds=lasts)} [H:MM:SS] video.\n{told}\n\n"
    )
    return Spelled(text, (tokens(config),) * len(seconds))


def in_words(number: int) -> str:
    """English, below a thousand."""
    if number < 20:
        return SMALL[number]
    if number < 100:
        return TENS[number // 10] + (f"-{SMALL[number % 10]}" if number % 10 else "")
    rest = number % 100
    return f"{SMALL[number // 100]} hundred" + (f" and {in_words(rest)}" if rest else "")


IDEFICS3 = Vision(
    processors=("Idefics3ImageProcessor", "SmolVLMImageProcessor"),
    token=("image_token_id", 128257),
    written=TOKEN,
    media=TOKEN,
    spelled=spelled,
    parts=("vision_model", "connector"),
    sizes=("size",),
    prepares=lambda config, settings: {"return_row_col_info": True},
)
SMOLVLM = replace(
    IDEFICS3,
    film=Film(
        processor="SmolVLMVideoProcessor",
        token=("image_token_id", 128257),
        written="<video>",
        media="<video>",
        spelled=filmed,
    ),
    sizes=("size", "fps", "num_frames"),
)
