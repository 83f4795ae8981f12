"""Families that take sounds: what stands for one in their prompts. As with pictures (``model/vision``), their
towers are modules of transformers, their language models families like others."""

from __future__ import annotations

from sgla.model.hearing.qwen2_audio import QWEN2_AUDIO
from sgla.model.hearing.qwen3_asr import QWEN3_ASR
from sgla.model.hearing.voxtral import VOXTRAL
from sgla.model.hearing.whisper import WHISPER
from sgla.model.vision.spec import Vision

HEARINGS: dict[str, Vision] = {
    "Qwen2AudioForConditionalGeneration": QWEN2_AUDIO,
    "Qwen3ASRForConditionalGeneration": QWEN3_ASR,
    "VoxtralForConditionalGeneration": VOXTRAL,
    "WhisperForConditionalGeneration": WHISPER,
}
"""By architecture."""
