"""Gemma 4: a tower for pictures of any shape, in patches of 16 pixels, of which 3 x 3 are a token. In the
large models tokens of a picture see each other, in layers with windows; small ones hear sounds of up to 30 s,
besides."""

from __future__ import annotations

from dataclasses import replace

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Film, Settings, Spelled, Vision, values

BEGIN, TOKEN, END = "<|image>", "<|image|>", "<image|>"
FRAMES = "<|video|>"
HEARD, SOUND, HEARD_ALL = "<|audio>", "<|audio|>", "<audio|>"


def spelled(config: Config, settings: Settings, picture: Prepared) -> Spelled:
    return Spelled(f"{BEGIN}{TOKEN}{END}", tuple(values(picture, "num_soft_tokens_per_image")))


def filmed(config: Config, settings: Settings, video: Prepared) -> Spelled:
    """Each frame has its time before it."""
    seconds, counts = values(video, "seconds"), tuple(values(video, "tokens"))
    text = " ".join(f"{at // 60:02d}:{at % 60:02d} {BEGIN}{FRAMES}{END}" for at in seconds)
    return Spelled(text, counts * len(seconds))


def heard(config: Config, settings: Settings, sound: Prepared) -> Spelled:
    """Four frames, of 10 ms each, are a token."""
    _, frames = values(sound, "frames")
    return Spelled(f"{HEARD}{SOUND}{HEARD_ALL}", (-(-frames // 4),))


GEMMA4 = Vision(
    processors=("Gemma4ImageProcessor",),
    token=("image_token_id", 258880),
    written=TOKEN,
    media=TOKEN,
    spelled=spelled,
    parts=("vision_tower", "embed_vision"),
    sizes=("max_soft_tokens", "fps", "num_frames"),
    film=Film(
        processor="Gemma4VideoProcessor",
        token=("video_token_id", 258884),
        written=FRAMES,
        media=FRAMES,
        spelled=filmed,
    ),
)
GEMMA4_TOGETHER = replace(GEMMA4, together=True, windowed=True)
GEMMA4_WITH_SOUNDS = replace(
    GEMMA4,
    sounds=Vision(
        kind="audio",
        processors=("Gemma4AudioFeatureExtractor",),
        token=("audio_token_id", 258881),
        written=SOUND,
        media=SOUND,
        spelled=heard,
        parts=("audio_tower", "embed_audio"),
        heard="masked",
    ),
)


def sees_ahead(config: Config) -> bool:
    """Whether tokens of a picture see each other."""
    return (config.get("text_config") or {}).get("use_bidirectional_attention") == "vision"
