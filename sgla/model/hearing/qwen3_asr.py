"""Qwen3-ASR (arXiv 2601.21337): an encoder over sounds of any length, in chunks of a second, of which each is
13 tokens. It sees eight of them at a time."""

from __future__ import annotations

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision, values

BEGIN, TOKEN, END = "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"


def halved(frames: int) -> int:
    """What three convolutions leave of them, each of which takes every second one."""
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


def spelled(config: Config, settings: Settings, sound: Prepared) -> Spelled:
    (frames,) = values(sound, "frames")
    chunk = 2 * (config.get("audio_config") or {}).get("n_window", 50)
    return Spelled(TOKEN, (frames // chunk * halved(chunk) + halved(frames % chunk),))


QWEN3_ASR = Vision(
    kind="audio",
    processors=("WhisperFeatureExtractor",),  # whose spectrogram is that of its own one
    token=("audio_token_id", 151676),
    written=TOKEN,
    media=f"{BEGIN}{TOKEN}{END}",
    spelled=spelled,
    parts=("audio_tower", "multi_modal_projector"),
    heard="chunks",
)
