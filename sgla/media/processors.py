"""Image processors that transformers has for torchvision alone, with Pillow, whose pixels are the same but
for rounding: each is made of a model's settings, and gives the arrays that the one of that name gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]  # [height, width, 3]
Floats = NDArray[np.float32]
Size = tuple[int, int]  # height, width


class Processor:
    """``given``: those of the model's files, and of the request; others are ``defaults``."""

    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, given: dict[str, Any]) -> None:
        common = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
        self.said = common | self.defaults | {k: value for k, value in given.items() if value is not None}
        if not all(self.said[name] for name in common):
            raise ValueError("pictures of this model are always resized, rescaled and normalized")
        self.mean, self.std = (
            np.asarray(self.said[name], np.float32) for name in ("image_mean", "image_std")
        )

    def resized(self, pixels: Pixels, size: Size) -> Pixels:
        how = Image.Resampling(self.said["resample"])
        return np.asarray(Image.fromarray(pixels).resize(size[::-1], how))


def side_of(size: Any, *names: str) -> int:
    """The one length of a square. Raises ValueError."""
    found = {size.get(name) for name in names} if isinstance(size, dict) else {size}
    side = found.pop()
    if found or not isinstance(side, int) or side < 1:
        raise ValueError(f"size must have {' and '.join(names)}, which are the same")
    return side


def padded(pixels: Pixels, size: Size) -> Pixels:
    """With black on the right and below."""
    height, width, _ = pixels.shape
    return np.pad(pixels, ((0, size[0] - height), (0, size[1] - width), (0, 0)))


class Llama4(Processor):
    """``Llama4ImageProcessor``: a picture is fitted into a shape of at most ``max_patches`` square tiles,
    with the whole picture as one more tile, if they are several."""

    defaults: ClassVar[dict[str, Any]] = {
        "resample": Image.Resampling.BILINEAR,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"height": 336, "width": 336},
        "max_patches": 16,
        "resize_to_max_canvas": False,
    }

    def __call__(self, images: Sequence[Pixels], **asked: Any) -> dict[str, Any]:
        (pixels,) = images
        side = side_of(self.said["size"], "height", "width")
        shapes = [(high * side, wide * side) for high, wide in shapes_of(self.said["max_patches"])]
        shape = best_shape(pixels.shape[:2], shapes, self.said["resize_to_max_canvas"])
        canvas = padded(self.resized(pixels, self.size_in(pixels.shape[:2], shape, side)), shape)
        rows, columns = shape[0] // side, shape[1] // side
        tiles = canvas.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        if rows * columns > 1:
            tiles = np.concatenate([tiles, self.resized(pixels, (side, side))[None]])
        values = self.normalized(tiles.transpose(0, 3, 1, 2))
        return {"pixel_values": values, "aspect_ratios": np.array([[rows, columns]])}

    def size_in(self, picture: Size, shape: Size, side: int) -> Size:
        """Of a picture in a shape: it keeps its own shape, and is not enlarged beyond a tile."""
        high, wide = shape
        if not self.said["resize_to_max_canvas"]:
            high, wide = min(max(picture[0], side), high), min(max(picture[1], side), wide)
        tall, broad = high / picture[0], wide / picture[1]
        if broad < tall:
            high = min(math.floor(picture[0] * broad), high)
        else:
            wide = min(math.floor(picture[1] * tall), wide)
        return max(high, 1), max(wide, 1)

    def normalized(self, tiles: Pixels) -> Floats:
        """In bfloat16, as the model was trained."""
        scaled = bfloat16(tiles.astype(np.float32) * np.float32(self.said["rescale_factor"]))
        mean, std = (bfloat16(x)[:, None, None] for x in (self.mean, self.std))
        return bfloat16(bfloat16(scaled - mean) / std)


def shapes_of(most: int) -> list[Size]:
    """Rows and columns of all rectangles of at most so many tiles, by ratio, those of most tiles first."""
    by_ratio: dict[float, list[Size]] = {}
    for count in range(most, 0, -1):
        for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
            by_ratio.setdefault(rows / (count // rows), []).append((rows, count // rows))
    return [shape for shapes in by_ratio.values() for shape in shapes]


def best_shape(picture: Size, shapes: Sequence[Size], largest: bool) -> Size:
    """In which the picture has to be enlarged least, or with ``largest`` most; else shrunk least. Of several
    the one with the smallest area."""
    scales = [
        min(np.float32(high) / np.float32(picture[0]), np.float32(wide) / np.float32(picture[1]))
        for high, wide in shapes
    ]
    larger = [scale for scale in scales if scale >= 1]
    chosen = (max(larger) if largest else min(larger)) if larger else max(scales)
    fitting = [shape for shape, scale in zip(shapes, scales) if scale == chosen]
    return min(fitting, key=math.prod)


def bfloat16(values: Floats) -> Floats:
    """Rounded to the nearest one, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


class KimiK25(Processor):
    """``Kimi_K25ImageProcessor``: a picture keeps its size, if it has at most ``max_patches`` patches and no
    more than ``size`` says on a side; black fills it up to whole tokens."""

    defaults: ClassVar[dict[str, Any]] = {
        "resample": Image.Resampling.BICUBIC,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"max_height": 512, "max_width": 512},
        "max_patches": 16384,
        "patch_size": 14,
        "merge_size": 2,
    }

    def __call__(self, images: Sequence[Pixels], **asked: Any) -> dict[str, Any]:
        (pixels,) = images
        patch = self.said["patch_size"]
        size = self.size_of(pixels.shape[:2], patch)
        token = patch * self.said["merge_size"]
        whole = (-(-size[0] // token) * token, -(-size[1] // token) * token)
        canvas = padded(self.resized(pixels, size), whole)
        values = (canvas.astype(np.float32) / 255 - self.mean) / self.std
        rows, columns = whole[0] // patch, whole[1] // patch
        cut = values.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        grid = np.array([[1, rows, columns]])
        return {"pixel_values": cut.reshape(-1, 3, patch, patch), "image_grid_thw": grid}

    def size_of(self, picture: Size, patch: int) -> Size:
        longest = side_of(self.said["size"], "max_height", "max_width") * patch
        count = max(1.0, picture[0] // patch) * max(1.0, picture[1] // patch)
        scale = min(1.0, math.sqrt(self.said["max_patches"] / count), *(longest / x for x in picture))
        high, wide = (min(max(1, int(length * scale)), longest) for length in picture)
        return high, wide


OWN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "Kimi_K25ImageProcessor": KimiK25,
    "Llama4ImageProcessor": Llama4,
}
