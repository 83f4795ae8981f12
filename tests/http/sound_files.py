"""Files of sounds."""

from __future__ import annotations

import io
import struct
import wave
from typing import Any

import numpy as np

RATE = 16_000
TONE = (np.sin(np.arange(RATE // 2) * 0.05) * 0.4).astype(np.float32)  # half a second


def wav(samples: Any = TONE, rate: int = RATE, channels: int = 1) -> bytes:
    """Of 16 bits. ``samples``: float[n * channels]."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.asarray(samples) * 32768).astype("<i2").tobytes())
    return out.getvalue()


def floats(samples: Any, rate: int = RATE, channels: int = 1) -> bytes:
    """A WAV of float32."""
    return raw_wav(3, channels, rate, 32, np.asarray(samples, "<f4").tobytes())


def raw_wav(code: int, channels: int, rate: int, bits: int, data: bytes, told: int | None = None) -> bytes:
    """``told``: bytes of data that its head tells of."""
    align = channels * bits // 8
    head = struct.pack("<HHIIHH", code, channels, rate, rate * align & 0xFFFFFFFF, align & 0xFFFF, bits)
    size = len(data) if told is None else told
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def encoded(kind: str, codec: str, rate: int, samples: Any = TONE) -> bytes:
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=kind) as file:
        stream: Any = file.add_stream(codec, rate=rate)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray((samples * 32767).astype("<i2")[None], format="s16", layout="mono")
        frame.sample_rate = RATE
        resampler = av.AudioResampler(
            format=stream.format.name,
            layout="mono",
            rate=rate,
            frame_size=stream.codec_context.frame_size or 1024,
        )
        for made in [*resampler.resample(frame), *resampler.resample(None)]:
            file.mux(stream.encode(made))
        file.mux(stream.encode(None))
    return out.getvalue()


CODECS = {
    "mp3": ("mp3", "libmp3lame", 44100),
    "flac": ("flac", "flac", 44100),
    "ogg": ("ogg", "libopus", 48000),
    "webm": ("webm", "libopus", 48000),
    "m4a": ("mp4", "aac", 44100),
    "aac": ("adts", "aac", 44100),
}
