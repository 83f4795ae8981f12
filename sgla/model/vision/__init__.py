"""Families that take pictures: what stands for one in their prompts. Their towers are modules of transformers
(``loading/tower.py``), their language models families like others."""

from __future__ import annotations

from sgla.model.vision.gemma3 import GEMMA3
from sgla.model.vision.idefics3 import IDEFICS3
from sgla.model.vision.internvl import INTERNVL
from sgla.model.vision.llava import LLAVA
from sgla.model.vision.mistral3 import MISTRAL3
from sgla.model.vision.qwen2_vl import QWEN2_VL, QWEN3_5, QWEN3_VL
from sgla.model.vision.spec import Vision

VISIONS: dict[str, Vision] = {
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Idefics3ForConditionalGeneration": IDEFICS3,
    "InternVLForConditionalGeneration": INTERNVL,
    "LlavaForConditionalGeneration": LLAVA,
    "Mistral3ForConditionalGeneration": MISTRAL3,
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_VL,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "SmolVLMForConditionalGeneration": IDEFICS3,
}
