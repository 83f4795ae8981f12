"""Files of sounds."""

from __future__ import annotations

import io
import struct
import wave
from collections.abc import Iterator
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


def hostile() -> Iterator[tuple[str, bytes]]:
    """Files that are no sounds, or too long or too large: 20 s and 1 MiB may be."""
    whole = wav()
    for cut in (0, 4, 11, 20, 30, 40, 43, 44, 46, 1000):
        yield f"wav cut at {cut}", whole[:cut]
    for name in ("flac", "m4a", "webm", "ogg", "mp3"):
        yield f"{name} cut", encoded(*CODECS[name])[:60]
        yield f"{name} overwritten", encoded(*CODECS[name])[:8] + b"\0" * 4000
    yield "no samples", wav([])
    yield "one sample", wav([0.5])
    yield "too short", wav(np.zeros(RATE // 11))
    yield "too long", wav(np.zeros(RATE * 21))
    yield "minutes of silence in a small file", encoded("flac", "flac", 16000, np.zeros(RATE * 600, "f4"))
    yield "too large a file", whole + bytes(1 << 20)
    yield "NaN", floats([float("nan")] * RATE)
    yield "one NaN", floats([*TONE, float("nan")])
    yield "infinite", floats([*TONE, float("inf")])
    yield "beyond any scale", floats(TONE * 1e30)
    yield "a head that tells of more", raw_wav(1, 1, RATE, 16, whole[44:], 1 << 30)
    yield "no channels", raw_wav(1, 0, RATE, 16, whole[44:])
    yield "many channels", raw_wav(1, 60000, RATE, 16, whole[44:])
    yield "no rate", raw_wav(1, 1, 0, 16, whole[44:])
    yield "a rate of a billion", raw_wav(1, 1, 1 << 30, 16, whole[44:])
    yield "a rate of one", raw_wav(1, 1, 1, 16, bytes(2 * 100))
    yield "no bits", raw_wav(1, 1, RATE, 0, whole[44:])
    yield "an unknown codec", raw_wav(0x7777, 1, RATE, 16, whole[44:])
    yield "a chunk without an end", b"RIFF\xff\xff\xff\x7fWAVEjunk" + struct.pack("<I", 1 << 31)
    yield "a playlist", b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/x.ts\n"
    yield "a list of files", b"ffconcat version 1.0\nfile /etc/passwd\n"
    yield "a description", b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nm=audio 9 RTP/AVP 0\r\n"
    yield "a picture", b"\x89PNG\r\n\x1a\n" + bytes(60)
    yield "a text", b"the sound of a dog"
    yield "html", b"<!doctype html>"
    yield "zeros", bytes(5000)
    yield "ones", b"\xff" * 5000
    yield "an mp4 without sound", struct.pack(">I", 16) + b"ftypisom" + bytes(4)
