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
from sgla.media.frames import FRAMED
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
    "Glm4vVideoProcessor": {
        "patch_size": 14,
        "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "max_duration": 300,
    },
}
COMMON = {"temporal_patch_size": 2, "merge_size": 2, "fps": 2.0, "min_frames": 4, "max_frames": 768}


class Film:
    """``processor``: a key of ``SETTINGS``. ``given``: those of the model's files, and of the request."""

    def __init__(self, processor: str, given: dict[str, Any]) -> None:
        known = COMMON | SETTINGS[processor]
        self._said = said = known | {name: value for name, value in given.items() if value is not None}
        self._whole = processor != "Qwen2VLVideoProcessor"  # the budget is of all frames
        self._paced = "fps" in given
        self._timed = processor == "Glm4vVideoProcessor"  # frames are chosen by the clock
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
        if self._timed:
            return self._by_the_clock(video)
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

    def _by_the_clock(self, video: Video) -> list[int]:
        """See ``sample_frames`` of GLM's processor."""
        last, fps = video.frames - 1, self._said["fps"]
        seconds = video.frames / video.rate
        if (count := self._said.get("num_frames")) and not self._paced:
            times = (np.arange(count) * seconds / count).tolist()
        elif seconds <= self._said["max_duration"]:
            times = [i / fps for i in range(max(math.floor(seconds * fps), 1))]
        else:
            times = np.linspace(0, seconds, min(int(self._said["max_duration"] * fps), video.frames)).tolist()
        return list(dict.fromkeys(min(last, math.ceil(at * video.rate)) for at in times))

    def fitted(self, count: int, height: int, width: int) -> tuple[int, int]:
        """The size that ``count`` frames get: multiples of a token's side, with the same shape, about. See
        ``smart_resize`` of the processors."""
        side = self.patch * self.merge
        count += count % self.depth if self._timed else 0
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


def filmed(video: Video, processor: str, settings: str, asked: dict[str, Any], most: int) -> dict[str, Any]:
    """Arrays by name, in numpy. ``settings``: JSON; ``asked``: what the model's configuration adds, with the
    ``tokens_per_second`` that positions go by, if not by numbers; ``most``: bytes. Besides what transformers
    has, ``tenths`` int64[t]: of seconds, when each pair of frames is, ``seconds`` int64[t]: when it begins,
    and ``steps`` int64[t]: its position in time.
    Raises InvalidField."""
    if processor in FRAMED:
        return FRAMED[processor](video, json.loads(settings) | asked, most)
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
    begins, ends = padded[:: film.depth], padded[film.depth - 1 :: film.depth]
    middles = [(first / video.rate + last / video.rate) / 2 for first, last in zip(begins, ends, strict=True)]
    seen = len(numbers) / video.frames * video.rate  # frames a second
    pace = asked["tokens_per_second"] * film.depth / seen if "tokens_per_second" in asked else 1
    return {
        "pixel_values": patches,
        "image_grid_thw": np.array([[times, high // film.patch, wide // film.patch]]),
        "tenths": np.array([round(float(f"{middle:.1f}") * 10) for middle in middles]),
        "seconds": np.array([int(first / video.rate) for first in begins]),
        "steps": (np.arange(times, dtype=np.float32) * np.float32(pace)).astype(np.int64),
    }
