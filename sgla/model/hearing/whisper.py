"""Whisper, whose decoder attends to what the encoder hears of a window of a sound: no token of a prompt
stands for any of it."""

from __future__ import annotations

from sgla.messages import Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision


def spelled(config: Config, settings: Settings, sound: Prepared) -> Spelled:
    return Spelled("", ())


WHISPER = Vision(
    kind="audio",
    processors=("WhisperFeatureExtractor",),
    token=("decoder_start_token_id", 50258),
    written="",
    media="",
    spelled=spelled,
    parts=("encoder",),
    crossed=True,
)
