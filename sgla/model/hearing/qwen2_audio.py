"""Qwen2-Audio (arXiv 2407.10759): Whisper's encoder over 30 s of sound, of whose outputs two neighbours are
averaged to a token of 40 ms."""

from __future__ import annotations

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision, values

BEGIN, TOKEN, END = "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"


def spelled(config: Config, settings: Settings, sound: Prepared) -> Spelled:
    (frames,) = values(sound, "frames")
    return Spelled(TOKEN, (((frames - 1) // 2 + 1 - 2) // 2 + 1,))


QWEN2_AUDIO = Vision(
    kind="audio",
    processors=("WhisperFeatureExtractor",),
    token=("audio_token_index", 151646),
    written=TOKEN,
    media=f"{BEGIN}{TOKEN}{END}",
    spelled=spelled,
    parts=("audio_tower", "multi_modal_projector"),
)
