"""What Qwen's towers read of a video: which frames, how large, and cut into patches. As transformers'
processors for videos, which need torchvision; Pillow resizes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from PIL import Image

from sgla.errors import InvalidField
from sgla.media.video import Video
from sgla.media.watch import frames

FACTOR = 200  # most that a side may be longer than the other one
# Where the model's files do not say; ``size``: pixels of a frame for the first, of all frames for the second.
SETTINGS: dict[str, dict[str, Any]] = {
    "Qwen2VLVideoProcessor": {
        "patch_size": 14,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "max_video_tokens": 128000,
    },
    "Qwen3VLVideoProcessor": {
        "patch_size": 16,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_video_tokens": 768,
    },
}
COMMON = {"temporal_patch_size": 2, "merge_size": 2, "fps": 2.0, "min_frames": 4, "max_frames": 768}


class Film:
    """``processor``: a key of ``SETTINGS``. ``given``: those of the model's files, and of the request."""

    def __init__(self, processor: str, given: dict[str, Any]) -> None:
        known = COMMON | SETTINGS[processor]
        self._said = said = known | {name: value for name, value in given.items() if value is not None}
        self._whole = processor == "Qwen3VLVideoProcessor"  # the budget is of all frames
        self.patch, self.merge, self.depth = (
            said["patch_size"],
            said["merge_size"],
            said["temporal_patch_size"],
        )
        least, most = (said["size"].get(edge) for edge in ("shortest_edge", "longest_edge"))
        self.least, self.most = said.get("min_pixels") or least, said.get("max_pixels") or most
        if not self.least or not self.most:
            raise InvalidField("size must have shortest_edge and longest_edge", param="mm_processor_kwargs")
        self.mean, self.std = (np.asarray(said[name], np.float32) for name in ("image_mean", "image_std"))

    def numbers(self, video: Video) -> list[int]:
        """Of the frames that are seen. See ``sample_frames`` of the processors."""
        total, said = video.frames, self._said
        depth = 1 if self._whole else self.depth  # what their number is a multiple of
        if fixed := said.get("num_frames"):
            count = min(round(fixed / depth), total // depth) * depth
        else:
            asked = max(total / video.rate * said["fps"], said["min_frames"])
            count = int(min(asked, said["max_frames"], total) // depth * depth)
        if self._whole:
            return [int(n) for n in np.linspace(0, total - 1, count).round()]
        step = total / count if count else total
        return (np.arange(math.ceil(total / step)) * step).astype(np.float32).astype(int).tolist()

    def fitted(self, count: int, height: int, width: int) -> tuple[int, int]:
        """The size that ``count`` frames get: multiples of a token's side, with the same shape, about. See
        ``smart_resize`` of the processors."""
        side = self.patch * self.merge
        if self._whole and min(height, width) < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > FACTOR * min(height, width):
            raise InvalidField(f"a side of a video may be {FACTOR} times as long as the other one")
        share, rounded = (count, round(count / self.depth) * self.depth) if self._whole else (1, 1)
        most = self._most(count, side)
        high, wide = (round(length / side) * side for length in (height, width))
        if rounded * high * wide > most:
            scale = math.sqrt(share * height * width / most)
            high, wide = (max(side, math.floor(x / scale / side) * side) for x in (height, width))
        elif rounded * high * wide < self.least:
            scale = math.sqrt(self.least / (share * height * width))
            high, wide = (math.ceil(x * scale / side) * side for x in (height, width))
        return high, wide

    def _most(self, count: int, side: int) -> int:
        if not self._said.get("cap_pixels_per_frame"):
            return int(self.most)
        tokens, least = self._said["max_video_tokens"] * side * side, int(self.least * 1.05)
        if self._whole:
            return int(max(min(tokens, self.most // count), least) * count)
        return int(max(min(self.most, int(tokens * 0.9) * self.depth // count), least))

    def patches(self, images: Iterable[Any], count: int, high: int, wide: int) -> Any:
        """float32[patches, 3 * depth * patch * patch] of ``count`` frames; the last one is there again if
        their number does not go up."""
        depth, merge, side = self.depth, self.merge, self.patch
        times, rows, columns = -(-count // depth), high // side, wide // side
        made = np.empty((times * rows * columns, 3 * depth * side * side), np.float32)
        blocks = made.reshape(times, rows // merge, columns // merge, merge, merge, 3, depth, side, side)
        for i, image in enumerate(images):
            resized = Image.fromarray(image).resize((wide, high), Image.Resampling.BICUBIC)
            values = (np.asarray(resized, np.float32) / 255 - self.mean) / self.std
            cut = values.reshape(rows // merge, merge, side, columns // merge, merge, side, 3)
            blocks[i // depth, ..., i % depth, :, :] = cut.transpose(0, 3, 1, 4, 6, 2, 5)
        for i in range(count, times * depth):
            blocks[-1, ..., i % depth, :, :] = blocks[-1, ..., (count - 1) % depth, :, :]
        return made


# Of processors for which a frame is a picture.
PLAIN: dict[str, dict[str, Any]] = {
    "InternVLVideoProcessor": {
        "size": {"height": 384, "width": 384},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "num_frames": 8,
    },
}


def framed(video: Video, processor: str, settings: str, most: int) -> dict[str, Any]:
    """As ``filmed``: ``pixel_values`` float32[frames, 3, height, width], of frames at equal distances, each
    in the middle of its part of the video."""
    given = {name: value for name, value in json.loads(settings).items() if value is not None}
    said = PLAIN[processor] | given
    count = said["num_frames"]
    if "fps" in given and "num_frames" not in given:
        count = int(video.frames / video.rate * said["fps"])
    count = min(max(count, 1), video.frames)
    high, wide = (said["size"].get(edge) for edge in ("height", "width"))
    if not high or not wide:
        raise InvalidField("size must have height and width", param="mm_processor_kwargs")
    if 12 * high * wide * count > most:
        raise InvalidField(
            f"{count} frames of {wide} x {high} pixels take more than {most >> 20} MiB; ask for fewer "
            "(mm_processor_kwargs: fps, num_frames)",
            param="messages",
        )
    step = video.frames / count
    numbers = np.arange(step / 2, video.frames, step).astype(np.float32).astype(int).tolist()
    mean, std = (np.asarray(said[name], np.float32) for name in ("image_mean", "image_std"))
    made = np.empty((count, 3, high, wide), np.float32)
    for i, image in enumerate(frames(video, numbers)):
        resized = Image.fromarray(image).resize((wide, high), Image.Resampling.BICUBIC)
        made[i] = ((np.asarray(resized, np.float32) / 255 - mean) / std).transpose(2, 0, 1)
    return {"pixel_values": made}


def filmed(video: Video, processor: str, settings: str, asked: dict[str, Any], most: int) -> dict[str, Any]:
    """Arrays by name, in numpy. ``settings``: JSON; ``asked``: ``tokens_per_second`` that positions go by, if
    not by numbers; ``most``: bytes. Besides what transformers has, ``tenths`` int64[t]: of seconds, when each
    pair of frames is, and ``steps`` int64[t]: its position in time. Raises InvalidField."""
    if processor in PLAIN:
        return framed(video, processor, settings, most)
    film = Film(processor, json.loads(settings))
    numbers = film.numbers(video)
    high, wide = film.fitted(len(numbers), video.height, video.width)
    if 12 * high * wide * len(numbers) > most:
        raise InvalidField(
            f"{len(numbers)} frames of {wide} x {high} pixels take more than {most >> 20} MiB; ask for fewer "
            "or smaller ones (mm_processor_kwargs: fps, num_frames, max_pixels)",
            param="messages",
        )
    patches = film.patches(frames(video, numbers), len(numbers), high, wide)
    times = -(-len(numbers) // film.depth)
    padded = [*numbers, *numbers[-1:] * (times * film.depth - len(numbers))]
    pairs = zip(padded[:: film.depth], padded[film.depth - 1 :: film.depth], strict=True)
    middles = [(first / video.rate + last / video.rate) / 2 for first, last in pairs]
    seen = len(numbers) / video.frames * video.rate  # frames a second
    pace = asked["tokens_per_second"] * film.depth / seen if "tokens_per_second" in asked else 1
    return {
        "pixel_values": patches,
        "image_grid_thw": np.array([[times, high // film.patch, wide // film.patch]]),
        "tenths": np.array([round(float(f"{middle:.1f}") * 10) for middle in middles]),
        "steps": (np.arange(times, dtype=np.float32) * np.float32(pace)).astype(np.int64),
    }
