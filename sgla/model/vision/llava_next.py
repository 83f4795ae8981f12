"""LLaVA-NeXT (1.6) and LLaVA-OneVision (arXiv 2408.03326): the whole picture at the tower's size, then the
picture as large as one of some shapes of tiles, without the margin that fills the shape, and with a token
behind each of its rows."""

from __future__ import annotations

from math import ceil, sqrt

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Film, Settings, Spelled, Vision, array, values, vision_config

TOKEN, FRAMES = "<image>", "<video>"
# Heights and widths where config.json has none.
SHAPES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
GRID = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]


def shapes(config: Config) -> list[list[int]]:
    found: list[list[int]] | None = config.get("image_grid_pinpoints")
    return found or (GRID if config.get("model_type") == "llava_onevision" else SHAPES)


def rows_and_columns(config: Config, picture: Prepared) -> tuple[int, int]:
    """Of the picture's patches behind the whole one: see ``unpad_image`` of transformers."""
    height, width = values(picture, "image_sizes")
    tower = vision_config(config)
    size, patch = tower.get("image_size", 336), tower.get("patch_size", 14)
    high, wide = fitting(height, width, shapes(config))
    rows, columns = high // size * (size // patch), wide // size * (size // patch)
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return rows, columns


def fitting(height: int, width: int, shapes: list[list[int]]) -> tuple[int, int]:
    """The shape in which most of the picture's pixels are left, and fewest are added."""

    def left_and_added(shape: list[int]) -> tuple[int, int]:
        scale = min(shape[1] / width, shape[0] / height)
        left = min(int(width * scale) * int(height * scale), width * height)
        return left, left - shape[0] * shape[1]

    high, wide = max(shapes, key=left_and_added)
    return high, wide


def base(config: Config, picture: Prepared) -> int:
    """Tokens of a tile."""
    *_, height, width = array(picture, "pixel_values")
    patch = vision_config(config).get("patch_size", 14)
    return height // patch * (width // patch)


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    rows, columns = rows_and_columns(config, picture)
    whole = config.get("vision_feature_select_strategy", "default") == "full"
    return Spelled(TOKEN, (base(config, picture) + whole + rows * (columns + 1),))


def shrunk(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    """With at most about as many tiles as ``vision_aspect_ratio`` says. One of several pictures is a tile."""
    count = base(config, picture)
    if array(picture, "pixel_values")[1] == 1:
        return Spelled(TOKEN, (count + 1,))
    most = int(config.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_"))
    rows, columns = rows_and_columns(config, picture)
    ratio = sqrt(rows * columns / (most * count))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return Spelled(TOKEN, (count + rows * (columns + 1),))


def filmed(config: Config, settings: Settings, video: Prepared) -> Spelled:
    """Of each frame 2 x 2 patches are a token, and one stands behind all frames."""
    _, frames, _, height, _ = array(video, "pixel_values_videos")
    side = ceil(height // vision_config(config).get("patch_size", 14) / 2)
    return Spelled(FRAMES, (frames * side * side + 1,))


LLAVA_NEXT = Vision(
    processors=("LlavaNextImageProcessor",),
    token=("image_token_index", 32000),
    written=TOKEN,
    media=f"{TOKEN}\n",
    spelled=spelled,
    parts=("vision_tower", "multi_modal_projector", "image_newline"),
)
LLAVA_ONEVISION = Vision(
    processors=("LlavaOnevisionImageProcessor",),
    token=("image_token_index", 151646),
    written=TOKEN,
    media=f"{TOKEN}\n",
    spelled=shrunk,
    alone=True,
    film=Film(
        processor="LlavaOnevisionVideoProcessor",
        token=("video_token_index", 151647),
        written=FRAMES,
        media=f"{FRAMES}\n",
        spelled=filmed,
    ),
    sizes=("fps", "num_frames"),
    parts=("vision_tower", "multi_modal_projector", "image_newline"),
)
