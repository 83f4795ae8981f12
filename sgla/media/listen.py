"""Files of sounds -> samples, in a process of the pool, by FFmpeg's decoders (PyAV)."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from sgla.errors import BadRequest, InvalidField
from sgla.media.decode import source_bytes
from sgla.media.sound import RATE, SHORTEST, Hearable, Sound

FORMATS = ("wav", "mp3", "flac", "ogg", "mp4", "webm", "aac")
TYPES = (b"audio/", b"video/", b"application/ogg")  # of data URLs
RATES = (1000, 768_000)  # samples a second; filters that turn others into RATE would take seconds to make
CHANNELS = 64
LOUDEST = float(1 << 16)  # floats of files that took whole numbers for them are below
UNKNOWN = (0, 0xFFFFFFFF)  # sizes that who writes a WAV to a pipe leaves in its head


def sound(source: bytes, form: str, limits: Hearable) -> Sound:
    """``form``: as of ``decode.picture``. Raises BadRequest."""
    data = source_bytes(source, form, limits.bytes, limits.folder, TYPES, "sound")
    samples = decoded(data, limits.seconds)
    check(samples)
    return Sound.of(samples.tobytes())


def check(samples: Any) -> None:
    """Raise InvalidField for what no model can hear. ``samples``: float32[n]."""
    if len(samples) < SHORTEST * RATE:
        raise InvalidField(f"the sound has {len(samples) / RATE:.3f} s; at least {SHORTEST} s must be")
    if not np.isfinite(samples).all() or np.abs(samples).max() > LOUDEST:
        raise InvalidField("the sound has samples that are no numbers, or beyond any scale")


def format_of(data: bytes) -> str:
    """By its first bytes, "" for another one. No name and no probing chooses a demuxer: some read what other
    files and servers hold."""
    head = data[:12]
    if head[:4] in (b"RIFF", b"RF64") and head[8:] == b"WAVE":
        return "wav"
    if head[4:8] == b"ftyp":
        return "mp4"
    for begin, name in ((b"fLaC", "flac"), (b"OggS", "ogg"), (b"\x1aE\xdf\xa3", "webm"), (b"ID3", "mp3")):
        if head.startswith(begin):
            return name
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:
        return "aac"
    return "mp3" if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 else ""


def decoded(data: bytes, most: float) -> Any:
    """float32[n] of the first sound track, mono, RATE a second; ``most`` seconds. Raises InvalidField."""
    import av

    av.logging.set_level(None)
    kind = format_of(data)
    if not kind:
        raise InvalidField(f"it is no sound of a kind that is read: {', '.join(FORMATS)}")
    if kind == "wav":
        check_whole(data)
    parts, count = [np.zeros(0, np.float32)], 0
    try:
        with av.open(io.BytesIO(data), format=kind, options={"protocol_whitelist": ""}) as file:
            if not file.streams.audio:
                raise InvalidField("the file has no sound")
            for part in _resampled(file):
                parts.append(part)
                count += len(part)
                if count > most * RATE:
                    raise InvalidField(f"the sound has more than {most:g} s (--max-audio-seconds)")
    except (BadRequest, MemoryError):
        raise
    except Exception as error:  # what FFmpeg says of a broken file depends on its kind
        raise InvalidField(f"the sound cannot be decoded: {type(error).__name__}: {error}"[:300]) from error
    return np.concatenate(parts)


def _resampled(file: Any) -> Iterator[Any]:
    """float32[n], the mean of all channels, piece by piece."""
    import av

    stream = file.streams.audio[0]
    if not RATES[0] <= stream.rate <= RATES[1] or not 0 < stream.channels <= CHANNELS:
        raise InvalidField(f"the sound has {stream.channels} channels of {stream.rate} samples a second")
    resampler = av.AudioResampler(format="fltp", rate=RATE)
    for frame in file.decode(stream):
        frame.pts = None  # as if all that was decoded came one behind the other
        for made in resampler.resample(frame):
            yield made.to_ndarray().mean(0)
    for made in resampler.resample(None):
        yield made.to_ndarray().mean(0)


def check_whole(data: bytes) -> None:
    """Raise InvalidField for a WAV whose head tells of more than there is."""
    at = 12
    while at + 8 <= len(data):
        name, size = data[at : at + 4], struct.unpack_from("<I", data, at + 4)[0]
        if name == b"data":
            if size not in UNKNOWN and at + 8 + size > len(data):
                raise InvalidField(
                    f"the sound's file is cut: its head tells of {size} bytes, and {len(data) - at - 8} come"
                )
            return
        at += 8 + size + size % 2
    raise InvalidField("the sound's file has no samples")
