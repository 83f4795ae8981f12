"""Families that take pictures, and how: by architecture."""

from __future__ import annotations

from sgla.model.vision.dual import CLIP, SIGLIP
from sgla.model.vision.gemma3 import GEMMA3
from sgla.model.vision.gemma4 import GEMMA4, GEMMA4_TOGETHER, GEMMA4_WITH_SOUNDS, sees_ahead
from sgla.model.vision.glm4v import GLM4V, GLM4V_MOE
from sgla.model.vision.idefics2 import IDEFICS2
from sgla.model.vision.idefics3 import IDEFICS3, SMOLVLM
from sgla.model.vision.internvl import INTERNVL
from sgla.model.vision.kimi import KIMI_K25
from sgla.model.vision.llama4 import LLAMA4
from sgla.model.vision.llava import LLAVA
from sgla.model.vision.llava_next import LLAVA_NEXT, LLAVA_ONEVISION
from sgla.model.vision.minicpm import MINICPM_V
from sgla.model.vision.mistral3 import MISTRAL3, PIXTRAL
from sgla.model.vision.omni import QWEN2_5_OMNI
from sgla.model.vision.paligemma import PALIGEMMA
from sgla.model.vision.qwen2_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_5, QWEN3_VL
from sgla.model.vision.spec import Config, Vision, vision_config

VISIONS: dict[str, Vision] = {
    "CLIPModel": CLIP,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Glm4vForConditionalGeneration": GLM4V,
    "Glm4vMoeForConditionalGeneration": GLM4V_MOE,
    "Idefics2ForConditionalGeneration": IDEFICS2,
    "Idefics3ForConditionalGeneration": IDEFICS3,
    "InternVLForConditionalGeneration": INTERNVL,
    "Kimi_K25ForConditionalGeneration": KIMI_K25,
    "KimiK25ForConditionalGeneration": KIMI_K25,
    "Llama4ForConditionalGeneration": LLAMA4,
    "LlavaForConditionalGeneration": LLAVA,
    "LlavaNextForConditionalGeneration": LLAVA_NEXT,
    "LlavaOnevisionForConditionalGeneration": LLAVA_ONEVISION,
    "MiniCPMV4_6ForConditionalGeneration": MINICPM_V,
    "Mistral3ForConditionalGeneration": MISTRAL3,
    "PaliGemmaForConditionalGeneration": PALIGEMMA,
    "PaliGemma2ForConditionalGeneration": PALIGEMMA,
    "Qwen2_5OmniThinkerForConditionalGeneration": QWEN2_5_OMNI,
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_5_VL,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5,
    "SiglipModel": SIGLIP,
    "SmolVLMForConditionalGeneration": SMOLVLM,
}


def vision_for(architecture: str, config: Config) -> Vision | None:
    """How a model takes pictures; None if it does not."""
    if architecture.startswith("LlavaFor") and vision_config(config).get("model_type") == "pixtral":
        return PIXTRAL
    if architecture.startswith("Gemma4For") and sees_ahead(config):
        return GEMMA4_TOGETHER
    if architecture.startswith("Gemma4For") and config.get("audio_config"):
        return GEMMA4_WITH_SOUNDS
    return VISIONS.get(architecture)
