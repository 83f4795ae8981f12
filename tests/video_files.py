"""Small videos."""

from __future__ import annotations

import io

import numpy as np

WATCH = "sgla.media.watch:video"


def clip(
    frames: int = 8,
    height: int = 48,
    width: int = 64,
    rate: int = 4,
    codec: str = "mpeg4",
    format: str = "mp4",
    seed: int = 0,
    gap: int = 1,
    **options: str,
) -> bytes:
    """A pattern that moves, in colours. ``gap``: from a frame to the next, in times of one."""
    import av  # few who import this file write videos

    small = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    shown = np.kron(small, np.ones((8, 8, 1), np.uint8))
    out = io.BytesIO()
    with av.open(out, "w", format=format, options=options) as file:
        stream = file.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(np.roll(shown, 3 * i, 1), format="rgb24")
            frame.pts = i * gap
            for packet in stream.encode(frame):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
    return out.getvalue()
