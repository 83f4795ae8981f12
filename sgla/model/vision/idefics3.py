"""Idefics 3 (arXiv 2408.12637) and SmolVLM (2504.05299): large pictures are cut into tiles, which come row by
row, with the whole picture behind them. Each takes the same number of tokens, since neighbouring patches are
joined."""

from __future__ import annotations

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision, values, vision_config

AROUND, WHOLE, TOKEN = "<fake_token_around_image>", "<global-img>", "<image>"


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    rows, columns = (sum(values(picture, name)) for name in ("rows", "cols"))
    tower = vision_config(config)
    side = tower.get("image_size", 224) // tower.get("patch_size", 32)
    count = side**2 // config.get("scale_factor", 2) ** 2
    lines = [
        "".join(f"{AROUND}<row_{row}_col_{column}>{TOKEN}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    ]
    text = "".join(lines) + ("\n" if lines else "") + f"{AROUND}{WHOLE}{TOKEN}{AROUND}"
    return Spelled(text, (count,) * (rows * columns + 1))


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
