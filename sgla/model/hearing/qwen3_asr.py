"""Qwen3-ASR (arXiv 2601.21337): an encoder over sounds of any length, in chunks of a second, of which each is
13 tokens. It sees eight of them at a time."""

from __future__ import annotations

from sgla.messages import Dictation, Prepared
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


NAMES = """
    ar:Arabic yue:Cantonese zh:Chinese cs:Czech da:Danish nl:Dutch en:English fil:Filipino fi:Finnish
    fr:French de:German el:Greek hi:Hindi hu:Hungarian id:Indonesian it:Italian ja:Japanese ko:Korean
    mk:Macedonian ms:Malay fa:Persian pl:Polish pt:Portuguese ro:Romanian ru:Russian es:Spanish sv:Swedish
    th:Thai tr:Turkish vi:Vietnamese
"""
DICTATION = Dictation(
    text=(
        "<|im_start|>system\n{said}<|im_end|>\n"
        f"<|im_start|>user\n{BEGIN}{TOKEN}{END}<|im_end|>\n<|im_start|>assistant\n{{language}}"
    ),
    named="language {name}<asr_text>",
    mark="<asr_text>",
    languages=dict(pair.split(":") for pair in NAMES.split()),
)
QWEN3_ASR = Vision(
    kind="audio",
    processors=("WhisperFeatureExtractor",),  # whose spectrogram is that of its own one
    token=("audio_token_id", 151676),
    written=TOKEN,
    media=f"{BEGIN}{TOKEN}{END}",
    spelled=spelled,
    parts=("audio_tower", "multi_modal_projector"),
    heard="chunks",
    dictation=DICTATION,
)
