"""What a model's tower reads of a picture, a sound or a video: transformers' processor of the checkpoint, or
what stands for it, in a process of its own."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from sgla.errors import BadRequest, InvalidField
from sgla.media.arrays import size_as_patches
from sgla.media.by_name import processor_of
from sgla.media.picture import Picture
from sgla.media.sound import RATE, Sound
from sgla.media.video import Video

FRAMES = 3000  # of a spectrogram that are made at a time
LONGEST = 30.0  # seconds that Gemma's extractors make something of
FEW = 1024  # values of an array that are told
DTYPES = {np.dtype(name) for name in ("float32", "int64", "int32", "bool", "uint8")}


def wake(name: str, settings: str) -> None:
    """What the first picture would wait for."""
    processor_of(name, settings)


def arrays_of(
    picture: Picture, processor: str, settings: str, asked: dict[str, Any], several: bool = False
) -> dict[str, Any]:
    """By name, in numpy. ``settings``: JSON. ``several``: as one of several pictures of a prompt. Raises
    InvalidField for what the processor refuses."""
    pixels = np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)
    try:
        images = [[pixels, pixels]] if several else [pixels]
        # Said, since of few rows it would be guessed.
        how = {"return_tensors": "np", "input_data_format": "channels_last"} | asked
        made = processor_of(processor, settings)(images=images, **how)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise unprepared(error) from error
    return {
        name: np.ascontiguousarray(values[:1] if several and len(values) == 2 else values)
        for name, values in made.items()
    }


def carried(
    picture: Picture, processor: str, settings: str, asked: dict[str, Any], several: bool = False
) -> dict[str, Any]:
    """``arrays_of``, or as few bytes as the tower can do with."""
    from sgla.media.pixels import PATCHING, pixels_of

    if processor not in PATCHING or asked or several:
        return arrays_of(picture, processor, settings, asked, several)
    try:
        return pixels_of(picture, processor, processor_of(processor, settings))
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise unprepared(error) from error


def unprepared(error: Exception) -> InvalidField:
    return InvalidField(f"a picture cannot be prepared: {error}"[:500], param="messages")


def prepare(
    picture: Picture,
    processor: str,
    settings: str,
    asked: dict[str, Any],
    several: bool,
    file: str,
    most: int,
) -> list[tuple[str, str, list[int], int, list[int]]]:
    """Write all arrays to ``file``, and say where they are: fields of ``messages.Array``. ``most``: bytes
    that transformers' arrays may have. Raises InvalidField."""
    return written(carried(picture, processor, settings, asked, several), "picture", file, most)


def prepare_sound(
    sound: Sound, processor: str, settings: str, file: str, most: int
) -> list[tuple[str, str, list[int], int, list[int]]]:
    """As ``prepare``."""
    return written(heard_of(sound, processor, settings), "sound", file, most)


def prepare_windows(
    sound: Sound, processor: str, settings: str, file: str, most: int
) -> list[tuple[str, str, list[int], int, list[int]]]:
    """As ``prepare``, of a sound that is heard in several windows at once."""
    return written({"input_features": windows_of(sound, processor, settings)}, "sound", file, most)


def windows_of(sound: Sound, processor: str, settings: str) -> Any:
    """float32[windows, mels, frames]; silence fills the last one."""
    extractor = processor_of(processor, settings)
    samples, size = np.frombuffer(sound.samples, np.float32), extractor.n_samples
    how = {"padding": True, "truncation": False, "pad_to_multiple_of": size, "return_tensors": "np"}
    (made,) = extractor(samples, sampling_rate=RATE, **how)["input_features"]
    parts = made.reshape(len(made), -1, size // extractor.hop_length)
    return np.ascontiguousarray(parts.transpose(1, 0, 2))


def prepare_chunks(
    sound: Sound, processor: str, settings: str, file: str, most: int
) -> list[tuple[str, str, list[int], int, list[int]]]:
    """As ``prepare``, of a sound that is heard as it is."""
    return written(chunks_of(sound, processor, settings), "sound", file, most)


def chunks_of(sound: Sound, processor: str, settings: str) -> dict[str, Any]:
    """As ``Qwen3ASRFeatureExtractor`` has it, which needs torch: half a second at least, and frames of
    nothing up to a whole chunk, of ``2 * n_window`` frames, that the mask leaves out."""
    extractor = processor_of(processor, settings)
    samples = np.frombuffer(sound.samples, np.float32)
    samples = np.pad(samples, (0, max(0, getattr(extractor, "min_length", 8000) - len(samples))))
    how = {"padding": False, "truncation": False, "return_tensors": "np"}
    (made,) = extractor(samples, sampling_rate=RATE, **how)["input_features"]
    frames, chunk = made.shape[1], 2 * getattr(extractor, "n_window", 50)
    more = -frames % chunk
    mask = np.pad(np.ones((1, frames), np.int64), ((0, 0), (0, more)))
    return {
        "input_features": np.pad(made, ((0, 0), (0, more)))[None].astype(np.float32),
        "input_features_mask": mask,
        "frames": np.array([frames]),
    }


def prepare_trimmed(
    sound: Sound, processor: str, settings: str, file: str, most: int
) -> list[tuple[str, str, list[int], int, list[int]]]:
    """As ``prepare_sound``, without the silence behind the sound."""
    return written(trimmed_of(sound, processor, settings), "sound", file, most)


def trimmed_of(sound: Sound, processor: str, settings: str) -> dict[str, Any]:
    """By name, in numpy. Raises InvalidField for what the model cannot hear at once."""
    extractor = processor_of(processor, settings)
    check_length(sound, extractor.n_samples / RATE)
    samples = np.frombuffer(sound.samples, np.float32)
    frames = -(-len(samples) // extractor.hop_length)
    silence = min(extractor.n_fft, extractor.n_samples - len(samples))  # what the last frames see of it
    samples = np.pad(samples, (0, silence))
    how = {"padding": False, "truncation": False, "return_tensors": "np"}
    (made,) = extractor(samples, sampling_rate=RATE, **how)["input_features"]
    return {
        "input_features": np.ascontiguousarray(made[None, :, :frames], np.float32),
        "feature_attention_mask": np.ones((1, frames), np.int64),
        "frames": np.array([frames]),
    }


def prepare_masked(
    sound: Sound, processor: str, settings: str, file: str, most: int
) -> list[tuple[str, str, list[int], int, list[int]]]:
    """As ``prepare_sound``, by an extractor that says which frames are of the sound."""
    return written(masked_of(sound, processor, settings), "sound", file, most)


def masked_of(sound: Sound, processor: str, settings: str) -> dict[str, Any]:
    """By name, in numpy. Raises InvalidField for what the model cannot hear at once."""
    check_length(sound, LONGEST)
    extractor = processor_of(processor, settings)
    made = extractor([np.frombuffer(sound.samples, np.float32)], return_tensors="np")
    mask = made["input_features_mask"].astype(bool)
    return {
        "input_features": np.ascontiguousarray(made["input_features"], np.float32),
        "input_features_mask": mask,
        "frames": np.array([mask.shape[1], mask.sum()]),
    }


def check_length(sound: Sound, longest: float) -> None:
    """Raises InvalidField for one of more seconds."""
    if sound.seconds > longest:
        raise InvalidField(
            f"a sound has {sound.seconds:.1f} s, and this model hears {longest:g} s; send it in pieces",
            param="messages",
        )


def prepare_video(
    video: Video, processor: str, settings: str, asked: dict[str, Any], file: str, most: int
) -> list[tuple[str, str, list[int], int, list[int]]]:
    """As ``prepare``."""
    from sgla.media.film import filmed

    return written(filmed(video, processor, settings, asked, most), "video", file, most)


def prepare_log_mel(
    sound: Sound, processor: str, settings: str, file: str, most: int
) -> list[tuple[str, str, list[int], int, list[int]]]:
    """As ``prepare``, of a sound that a model hears window by window."""
    return written({"log_mel": log_mel_of(sound, processor, settings)}, "sound", file, most)


def log_mel_of(sound: Sound, processor: str, settings: str) -> Any:
    """float32[frames, mels]: as transformers has it, a short sound is filled up with silence to a window, and
    a longer one is not."""
    extractor = processor_of(processor, settings)
    samples = np.frombuffer(sound.samples, np.float32)
    if len(samples) > extractor.n_samples:
        return _long(extractor, samples)
    made = extractor(samples, sampling_rate=RATE, return_tensors="np")
    return np.ascontiguousarray(made["input_features"][0].T)


def _long(extractor: Any, samples: Any) -> Any:
    """What the ``extractor`` makes of them, in pieces: of an hour at once it takes 2.5 GB."""
    from transformers.audio_utils import spectrogram, window_function

    width, hop, frames = extractor.n_fft, extractor.hop_length, len(samples) // extractor.hop_length
    how = {"frame_length": width, "hop_length": hop, "power": 2.0, "dither": extractor.dither}
    how |= {"mel_filters": extractor.mel_filters, "log_mel": "log10", "center": False}
    made = np.empty((frames, extractor.feature_size), np.float32)
    for first in range(0, frames, FRAMES):
        end = min(first + FRAMES, frames)
        begin, stop = first * hop - width // 2, (end - 1) * hop + width // 2
        around = max(0, -begin), max(0, stop - len(samples))
        part = np.pad(samples[max(0, begin) : stop], around, mode="reflect")
        made[first:end] = spectrogram(part, window_function(width, "hann"), **how).T
    np.maximum(made, made.max() - 8, out=made)
    return (made + 4) / 4


def heard_of(sound: Sound, processor: str, settings: str) -> dict[str, Any]:
    """By name, in numpy. Raises InvalidField for what the model cannot hear at once."""
    extractor = processor_of(processor, settings)
    check_length(sound, extractor.n_samples / RATE)
    samples = np.frombuffer(sound.samples, np.float32)
    made = extractor(samples, sampling_rate=RATE, return_attention_mask=True, return_tensors="np")
    mask = made["attention_mask"]
    return {
        "input_features": np.ascontiguousarray(made["input_features"]),
        "attention_mask": np.ascontiguousarray(mask),
        "frames": mask.sum(-1).astype(np.int64),
    }


def written(
    arrays: dict[str, Any], thing: str, file: str, most: int
) -> list[tuple[str, str, list[int], int, list[int]]]:
    """See ``prepare``."""
    found, at, size = [], 0, 0
    with open(file, "wb") as out:
        for name, values in arrays.items():
            if values.dtype not in DTYPES:
                raise BadRequest(f"a {thing} became an array of {values.dtype}")
            at += out.write(bytes(-at % 64))
            size += size_as_patches(name, values.shape, str(values.dtype))
            if size > most:
                raise InvalidField(
                    f"a {thing} takes more than {most >> 20} MiB once it is prepared; send a smaller one",
                    param="messages",
                )
            whole = values.dtype.kind == "i" and prod(values.shape) <= FEW
            shape, few = list(values.shape), values.flatten().tolist() if whole else []
            found.append((name, str(values.dtype), shape, at, few))
            at += out.write(values.data.cast("B") if values.nbytes else b"")
    return found
