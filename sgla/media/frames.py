"""Videos whose frames a tower sees as pictures, each by itself or a few together: which, and how large. As
transformers' processors for videos, which need torchvision; Pillow resizes. ``FRAMED`` has them by name:
functions of a video, of the settings of the model's files with those of the request, and of how many bytes
may be made. They give arrays by name, and raise InvalidField."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from sgla.errors import InvalidField
from sgla.media.by_name import processor_of
from sgla.media.processors import KimiK25, padded
from sgla.media.video import Video
from sgla.media.watch import frames

Given = Mapping[str, Any]
Arrays = dict[str, Any]
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
MINICPM = (  # what its processors of pictures and of videos have in common
    *("max_slice_nums", "scale_resolution", "patch_size", "slice_mode", "downsample_mode", "resample"),
    *("image_mean", "image_std"),
)
SQUARE = {"size": {"height": 384, "width": 384}, **CLIP}


def known(usual: Given, given: Given) -> dict[str, Any]:
    return {**usual, **{name: value for name, value in given.items() if value is not None}}


def count_of(video: Video, said: Given, given: Given) -> int:
    """How many frames are seen: as many as are asked for, or so many a second."""
    count = said.get("num_frames")
    fps = said.get("fps")
    if fps and (count is None or ("fps" in given and "num_frames" not in given)):
        count = int(video.frames / video.rate * fps)
    return min(max(count or 1, 1), video.frames)


def evenly(video: Video, count: int) -> list[int]:
    """Numbers of frames, each at the beginning of its part of the video."""
    return [i * video.frames // count for i in range(count)]


def check_room(count: int, high: int, wide: int, most: int) -> None:
    if 12 * high * wide * count > most:
        raise too_many(count, most, f" of {wide} x {high} pixels")


def too_many(count: int, most: int, size: str = "") -> InvalidField:
    return InvalidField(
        f"{count} frames{size} take more than {most >> 20} MiB; ask for fewer (mm_processor_kwargs: fps, "
        "num_frames)",
        param="messages",
    )


def side(size: Any, *names: str) -> list[int]:
    """Raises InvalidField."""
    given = [(size if isinstance(size, Mapping) else {}).get(name) for name in names]
    found = [length for length in given if isinstance(length, int) and length > 0]
    if len(found) < len(names):
        raise InvalidField(f"size must have {' and '.join(names)}", param="mm_processor_kwargs")
    return found


def resized(image: Any, high: int, wide: int, how: int = Image.Resampling.BICUBIC) -> Any:
    return np.asarray(Image.fromarray(image).resize((wide, high), Image.Resampling(how)))


def normalized(image: Any, said: Given) -> Any:
    """float32[height, width, 3]"""
    mean, std = (np.asarray(said[name], np.float32) for name in ("image_mean", "image_std"))
    return (image.astype(np.float32) / 255 - mean) / std


def squares(video: Video, numbers: list[int], said: Given, most: int) -> Any:
    """float32[frames, 3, height, width]"""
    high, wide = side(said["size"], "height", "width")
    check_room(len(numbers), high, wide, most)
    made = np.empty((len(numbers), 3, high, wide), np.float32)
    for i, image in enumerate(frames(video, numbers)):
        made[i] = normalized(resized(image, high, wide), said).transpose(2, 0, 1)
    return made


def internvl(video: Video, given: Given, most: int) -> Arrays:
    """Frames in the middle of their parts of the video, as tiles of a picture."""
    said = known({**SQUARE, "num_frames": 8}, given)
    step = video.frames / count_of(video, said, given)
    numbers = np.arange(step / 2, video.frames, step).astype(np.float32).astype(int).tolist()
    return {"pixel_values": squares(video, numbers, said, most)}


def llava_onevision(video: Video, given: Given, most: int) -> Arrays:
    said = known({**SQUARE, "num_frames": 32}, given)
    numbers = evenly(video, count_of(video, said, given))
    return {"pixel_values_videos": squares(video, numbers, said, most)[None]}


def gemma4(video: Video, given: Given, most: int) -> Arrays:
    """Patches of frames in their shape, with the places of these; ``tokens`` of a frame."""
    usual = {"num_frames": 32, "patch_size": 16, "max_soft_tokens": 70, "pooling_kernel_size": 3}
    said = known(usual, given)
    patch, pooled = said["patch_size"], said["pooling_kernel_size"]
    patches, token = said["max_soft_tokens"] * pooled**2, pooled * patch
    scale = math.sqrt(patches * patch**2 / (video.height * video.width))
    longest = patches // pooled**2 * token
    high, wide = (math.floor(scale * length / token) * token for length in (video.height, video.width))
    if not high:
        high, wide = token, min(video.width // video.height * token, longest)
    elif not wide:
        high, wide = min(video.height // video.width * token, longest), token
    numbers = evenly(video, count_of(video, said, given))
    check_room(len(numbers), high, wide, most)
    rows, columns = high // patch, wide // patch
    made = np.zeros((len(numbers), patches, 3 * patch * patch), np.float32)
    for i, image in enumerate(frames(video, numbers)):
        values = resized(image, high, wide).astype(np.float32) / 255
        cut = values.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 1, 3, 4)
        made[i, : rows * columns] = cut.reshape(rows * columns, -1)
    places = np.full((len(numbers), patches, 2), -1, np.int64)
    places[:, : rows * columns] = np.indices((rows, columns)).reshape(2, -1).T[:, ::-1]
    return {
        "pixel_values": made,
        "image_position_ids": places,
        "tokens": np.array([rows * columns // pooled**2]),
        "seconds": seconds_of(video, numbers),
    }


def smolvlm(video: Video, given: Given, most: int) -> Arrays:
    """Frames as whole pictures; ``lasts``: seconds of the video."""
    usual = {"size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}, **HALF}
    sampling = given.get("video_sampling") or {}
    own = {"fps": sampling.get("fps", 1), "num_frames": sampling.get("max_frames", 64)}
    if "video_size" in sampling:
        own["size"] = sampling["video_size"]
    said = known({**usual, "resample": Image.Resampling.LANCZOS, **own}, given)
    (edge,), (square,) = (side(said[name], "longest_edge") for name in ("size", "max_image_size"))
    lasts = video.frames / video.rate
    count = max(1, min(round(said["fps"] * lasts), said["num_frames"]))
    first, last = 0, video.frames - 1
    if lasts - 2 > said["num_frames"] * said["fps"]:  # without its first and its last second
        first, last = int(video.rate), min(int(video.frames - video.rate), last)
    first, last = (first, last) if first < last else (0, video.frames - 1)
    numbers = np.unique(np.linspace(first, last, count, dtype=int)).tolist()
    check_room(len(numbers), square, square, most)
    high, wide = within(video.height, video.width, min(edge, 4096))
    made = np.empty((1, len(numbers), 3, square, square), np.float32)
    for i, image in enumerate(frames(video, numbers)):
        once = resized(image, high, wide, said["resample"])
        made[0, i] = normalized(resized(once, square, square, said["resample"]), said).transpose(2, 0, 1)
    return {
        "pixel_values": made,
        "pixel_attention_mask": np.ones((1, len(numbers), square, square), np.int64),
        "seconds": seconds_of(video, numbers),
        "lasts": np.array([int(lasts)]),
    }


def within(height: int, width: int, edge: int) -> tuple[int, int]:
    """The size whose longer side is the ``edge``, and the other one even."""
    if width >= height:
        high = int(edge / (width / height))
        return max(high + high % 2, 1), edge
    wide = int(edge * (width / height))
    return edge, max(wide + wide % 2, 1)


def kimi_k25(video: Video, given: Given, most: int) -> Arrays:
    """Four frames at a time; ``thousandths`` of seconds, when each of these begins."""
    usual = {"fps": 2.0, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 4, "max_patches": 4096}
    said = known({**usual, "size": {"max_height": 512, "max_width": 512}, **HALF}, given)
    said.pop("resample", None)
    picture = KimiK25(said)
    numbers = evenly(video, count_of(video, said, given))
    high, wide = picture.size_of((video.height, video.width), said["patch_size"])
    check_room(len(numbers), high, wide, most)
    patch, token = said["patch_size"], said["patch_size"] * said["merge_size"]
    whole = -(-high // token) * token, -(-wide // token) * token
    rows, columns = whole[0] // patch, whole[1] // patch
    made = np.empty((len(numbers), rows * columns, 3, patch, patch), np.float32)
    for i, image in enumerate(frames(video, numbers)):
        values = normalized(padded(resized(image, high, wide), whole), said)
        cut = values.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        made[i] = cut.reshape(-1, 3, patch, patch)
    depth = said["temporal_patch_size"]
    parts = range(0, len(numbers), depth)
    return {
        "pixel_values": made.reshape(-1, 3, patch, patch),
        "image_grid_thw": np.array([[min(depth, len(numbers) - at), rows, columns] for at in parts]),
        "thousandths": np.array([int(numbers[at] / video.rate * 1000) for at in parts]),
    }


def minicpm(video: Video, given: Given, most: int) -> Arrays:
    """A frame a second, or as many as may be at equal distances, each cut as a picture; ``cut``: the sizes of
    a frame's parts, in patches."""
    said = known({"max_num_frames": 128, "num_frames": None, "stack_frames": 1}, given)
    if said["stack_frames"] > 1:
        raise InvalidField("frames that are stacked (stack_frames) are not supported", param="messages")
    limit, lasts = said["num_frames"] or said["max_num_frames"], video.frames / video.rate
    numbers = [int(second * video.rate) for second in range(math.ceil(lasts))]
    if lasts > limit:
        numbers = [int(round(i * 0.1, 1) * video.rate) for i in range(int(lasts / 0.1))]
        numbers = [min(number, video.frames - 1) for number in numbers]
    if len(numbers) > limit:
        numbers = [numbers[i] for i in np.linspace(0, len(numbers) - 1, limit, dtype=int)]
    own = {name: given[name] for name in MINICPM if name in given}
    processor = processor_of("MiniCPMV4_6ImageProcessor", json.dumps(own))
    how = {"return_tensors": "np", "input_data_format": "channels_last"}
    made: list[Arrays] = []
    # One that is asked for twice, of a video with few frames a second, is decoded once.
    for number, image in zip(dict.fromkeys(numbers), frames(video, list(dict.fromkeys(numbers)))):
        one = processor(images=[image], **how)
        if one["pixel_values"].nbytes * len(numbers) > most:
            raise too_many(len(numbers), most)
        made += [one] * numbers.count(number)
    return {
        "pixel_values": np.concatenate([one["pixel_values"] for one in made], -1),
        "target_sizes": np.concatenate([one["target_sizes"] for one in made]).astype(np.int64),
        "cut": np.asarray(made[0]["target_sizes"], np.int64),
        "grids": np.asarray(made[0]["grids"], np.int64),
        "frames": np.array([len(made)]),
    }


def seconds_of(video: Video, numbers: list[int]) -> Any:
    """int64[frames], of their beginnings."""
    return np.array([int(number / video.rate) for number in numbers])


FRAMED: dict[str, Callable[[Video, Given, int], Arrays]] = {
    "Gemma4VideoProcessor": gemma4,
    "InternVLVideoProcessor": internvl,
    "Kimi_K25VideoProcessor": kimi_k25,
    "LlavaOnevisionVideoProcessor": llava_onevision,
    "MiniCPMV4_6VideoProcessor": minicpm,
    "SmolVLMVideoProcessor": smolvlm,
}
