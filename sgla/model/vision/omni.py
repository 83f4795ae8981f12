"""Qwen2.5-Omni (arXiv 2503.20215), of which what thinks is served and what speaks is not: Qwen2.5-VL's tower
for pictures and videos, and one for sounds of up to five minutes, of which 40 ms are a token. Videos go by
time."""

from __future__ import annotations

from dataclasses import replace

from sgla.messages import Prepared
from sgla.model.hearing.qwen2_audio import BEGIN as HEARD
from sgla.model.hearing.qwen2_audio import END as HEARD_ALL
from sgla.model.hearing.qwen2_audio import QWEN2_AUDIO
from sgla.model.hearing.qwen2_audio import TOKEN as SOUND
from sgla.model.vision.qwen2_vl import QWEN2_VL, tokens_of
from sgla.model.vision.spec import Config, Film, Settings, Spelled

BEGIN, TOKEN, END = "<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"
FRAMES = "<|VIDEO|>"


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    return Spelled(TOKEN, (tokens_of(config, picture),))


def filmed(config: Config, settings: Settings, video: Prepared) -> Spelled:
    return Spelled(FRAMES, (tokens_of(config, video),))


def tokens_per_second(config: Config) -> float:
    found: float = config.get("position_id_per_seconds", 25)
    return found


QWEN2_5_OMNI = replace(
    QWEN2_VL,
    token=("image_token_index", 151655),
    written=TOKEN,
    media=f"{BEGIN}{TOKEN}{END}",
    spelled=spelled,
    unread=("talker.", "token2wav."),
    film=Film(
        processor="Qwen2VLVideoProcessor",
        token=("video_token_index", 151656),
        written=FRAMES,
        media=f"{BEGIN}{FRAMES}{END}",
        spelled=filmed,
        paced=tokens_per_second,
    ),
    sounds=replace(QWEN2_AUDIO, media=f"{HEARD}{SOUND}{HEARD_ALL}", parts=("audio_tower",), heard="trimmed"),
)
