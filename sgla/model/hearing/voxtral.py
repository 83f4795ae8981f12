"""Voxtral (arXiv 2507.13264): Whisper's encoder over windows of 30 s, of whose outputs four neighbours are a
token of 80 ms. Silence fills the last window."""

from __future__ import annotations

from sgla.messages import Dictation, Prepared
from sgla.model.vision.spec import Config, Settings, Spelled, Vision, array

BEGIN, TOKEN = "[BEGIN_AUDIO]", "[AUDIO]"


def spelled(config: Config, settings: Settings, sound: Prepared) -> Spelled:
    windows, _, _ = array(sound, "input_features")
    encoder = config.get("audio_config") or {}
    width, inner = encoder.get("hidden_size", 1280), encoder.get("intermediate_size", 5120)
    return Spelled(TOKEN, (windows * encoder.get("max_source_positions", 1500) * width // inner,))


VOXTRAL = Vision(
    kind="audio",
    processors=("WhisperFeatureExtractor",),
    token=("audio_token_id", 24),
    written=TOKEN,
    media=f"{BEGIN}{TOKEN}",
    spelled=spelled,
    parts=("audio_tower", "multi_modal_projector"),
    heard="windows",
    dictation=Dictation(text=f"<s>[INST]{BEGIN}{TOKEN}[/INST]{{language}}[TRANSCRIBE]", named="lang:{code}"),
)
