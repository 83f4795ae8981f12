"""Language models of families that take pictures (``model/vision``): those of other families, in files that
have towers beside them."""

from __future__ import annotations

from dataclasses import replace

from sgla.model.families.dense import FAMILIES as DENSE
from sgla.model.families.gemma import FAMILIES as GEMMA
from sgla.model.families.hybrids import FAMILIES as HYBRIDS
from sgla.model.families.keys import KV_HEADS, WITHOUT_HEAD_DIM, sizes
from sgla.model.families.latent import FAMILIES as LATENT
from sgla.model.families.mixtures import FAMILIES as MIXTURES
from sgla.model.family import Family

_LLAMA = replace(DENSE["LlamaForCausalLM"], pooled=False, gguf=())
_TOWER = {"tie_word_embeddings": False, "text_config": None, "vision_config": None}
# What the language models of these files are said to have besides, and transformers does not read.
_PERCEIVER = {
    "is_llama_config": True,
    "perceiver_config": None,
    "pixel_shuffle_factor": None,
    "qk_layer_norms": False,
    "use_resampler": False,
}
_BESIDE_TILES = replace(_LLAMA, defaults={**_LLAMA.defaults, **_PERCEIVER})
_LLAVA = {
    "ignore_index": -100,
    "image_token_index": 32000,
    "image_seq_length": 576,
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -2,
    "multimodal_projector_bias": True,
}
_TILES = {"projector_hidden_act": "gelu", "multimodal_projector_bias": True, "image_grid_pinpoints": None}
_LLAVA_NEXT = {
    "ignore_index": -100,
    "image_token_index": 32000,
    "image_seq_length": 576,
    "use_image_newline_parameter": True,
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -2,
}
_ONEVISION = {
    "image_token_index": 151646,
    "video_token_index": 151647,
    "use_image_newline_parameter": True,
    "vision_aspect_ratio": "anyres_max_9",
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
}
_PALIGEMMA = Family(
    ("paligemma",),
    {
        "tie_word_embeddings": True,
        "text_config": None,
        "vision_config": None,
        "ignore_index": -100,
        "image_token_index": 256000,
        "vocab_size": 257152,
        "projection_dim": 2048,
        "hidden_size": 2048,
    },
)


def _read_as_prefix(family: Family) -> Family:
    """A Gemma whose prompts are read by all of their tokens (``Vision.prefix``)."""
    return replace(
        family,
        defaults={**family.defaults, "vocab_size": 257152, "num_image_tokens": None},
        fixed={**family.fixed, "use_bidirectional_attention": True},
        outer=_PALIGEMMA,
        gguf=(),
    )


_QWEN_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_QWEN2_VL = replace(
    DENSE["Qwen2ForCausalLM"],
    types=("qwen2_vl_text", "qwen2_vl"),
    defaults={
        **DENSE["Qwen2ForCausalLM"].defaults,
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_window_layers": 80,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    nulls=(*KV_HEADS, "sliding_window", "max_window_layers", "use_sliding_window", "rope_theta"),
    outer=Family(("qwen2_vl",), _TOWER | _QWEN_TOKENS, either_ties=True),
    sections=True,
    pooled=True,
    gguf=(),
)
_QWEN3_VL = replace(
    DENSE["Qwen3ForCausalLM"],
    types=("qwen3_vl_text",),
    defaults={
        **DENSE["Qwen3ForCausalLM"].defaults,
        "max_position_embeddings": 128000,
        "rope_theta": 5e5,
    },
    outer=Family(("qwen3_vl",), _TOWER | _QWEN_TOKENS),
    sections=True,
    pooled=True,
    gguf=(),
)
_QWEN3_VL_MOE = replace(
    MIXTURES["Qwen3MoeForCausalLM"],
    types=("qwen3_vl_moe_text",),
    defaults={
        **MIXTURES["Qwen3MoeForCausalLM"].defaults,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "rope_theta": 5e5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
    },
    fixed={**MIXTURES["Qwen3MoeForCausalLM"].fixed, "norm_topk_prob": True},
    outer=Family(("qwen3_vl_moe",), _TOWER | _QWEN_TOKENS),
    mixture="sgla.model.mixture_spec:qwen3_vl",
    sections=True,
    pooled=False,
    gguf=(),
)
_OMNI = {
    "tie_word_embeddings": True,  # of its language model, where nothing is said
    "audio_config": None,
    "audio_token_index": 151646,
    "image_token_index": 151655,
    "video_token_index": 151656,
    "audio_start_token_id": 151647,
    "audio_end_token_id": 151648,
    "user_token_id": 872,
    "position_id_per_seconds": 25,
    "seconds_per_chunk": 2,
}
_GLM_TOKENS = {
    "image_token_id": 151343,
    "video_token_id": 151344,
    "image_start_token_id": 151339,
    "image_end_token_id": 151340,
    "video_start_token_id": 151341,
    "video_end_token_id": 151342,
}
_GLM4V = replace(
    DENSE["Glm4ForCausalLM"],
    types=("glm4v_text", "glm4v"),
    defaults={
        **WITHOUT_HEAD_DIM,
        **sizes(151552, 4096, 13696, 40, 32, 32768, 2),
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
    },
    fixed={**DENSE["Glm4ForCausalLM"].fixed, "attention_bias": True},
    nulls=KV_HEADS,
    qkv_bias=True,
    outer=Family(("glm4v",), _TOWER | _GLM_TOKENS, either_ties=True),
    sections=True,
    gguf=(),
)
_GLM4V_MOE = replace(
    MIXTURES["Glm4MoeForCausalLM"],
    types=("glm4v_moe_text", "glm4v_moe"),
    defaults={
        **MIXTURES["Glm4MoeForCausalLM"].defaults,
        "vocab_size": 151424,
        "max_position_embeddings": 65536,
        "attention_bias": True,
    },
    outer=Family(
        ("glm4v_moe",),
        _TOWER | _GLM_TOKENS | {"image_token_id": 151363, "video_token_id": 151364},
        either_ties=True,
    ),
    sections=True,
    predictor=None,
    qk_norm="",
    gguf=(),
)
_KIMI_TOKENS = {
    "image_token_id": 163605,
    "video_token_id": 163840,
    "vision_start_token_id": 163602,
    "vision_end_token_id": 163604,
}
_KIMI = {"tie_word_embeddings": True, "projection_hidden_size": 1152, "projection_layer_norm_eps": 1e-5}
_MINICPM = {
    "insert_layer_id": 6,
    "image_size": 448,
    "drop_vision_last_layer": False,
    "image_token_id": None,
    "video_token_id": None,
    "downsample_mode": "16x",
    "merge_kernel_size": (2, 2),
    "merger_times": 1,
}
# Of models whose towers have no code here.
_MINICPM_IDS = "image_token_id", "video_token_id"
_MINICPM_MARKS = "image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id"
_MINICPM_OCR = _MINICPM | {"tie_word_embeddings": True, "downsample_mode": "4x", "patch_size": 16}
_IDEFICS3 = {"scale_factor": 2, "image_token_id": 128257}
_INTERNVL = {
    "tie_word_embeddings": True,
    "image_token_id": 151667,
    "image_seq_length": 256,
    "downsample_ratio": 0.5,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}

PICTURED = {
    "Glm4vForConditionalGeneration": _GLM4V,
    "Glm4vMoeForConditionalGeneration": _GLM4V_MOE,
    "Idefics2ForConditionalGeneration": replace(
        DENSE["MistralForCausalLM"],
        outer=Family(("idefics2",), _TOWER | {"image_token_id": 32001, "perceiver_config": None}),
        also=(),
        texts={},
        pooled=False,
    ),
    "Idefics3ForConditionalGeneration": replace(
        _BESIDE_TILES, outer=Family(("idefics3",), _TOWER | _IDEFICS3)
    ),
    "InternVLForConditionalGeneration": replace(
        DENSE["Qwen2ForCausalLM"],
        outer=Family(("internvl",), _TOWER | _INTERNVL),
        texts={"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"},
        pooled=False,
        gguf=(),
    ),
    "Kimi_K25ForConditionalGeneration": replace(
        LATENT["DeepseekV3ForCausalLM"],
        also=("KimiK25ForConditionalGeneration",),  # as files call it
        outer=Family(("kimi_k25",), _TOWER | _KIMI_TOKENS | _KIMI, {"use_unified_vision_chunk": True}),
        predictor=None,
        gguf=(),
    ),
    "LlavaForConditionalGeneration": replace(
        _LLAMA,
        outer=Family(("llava",), _TOWER | _LLAVA, either_ties=True),
        texts={"mistral": "MistralForCausalLM"},
    ),
    "LlavaNextForConditionalGeneration": replace(
        _LLAMA,
        outer=Family(("llava_next",), _TOWER | _TILES | _LLAVA_NEXT),
        texts={"mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"},
    ),
    "LlavaOnevisionForConditionalGeneration": replace(
        DENSE["Qwen2ForCausalLM"],
        outer=Family(("llava_onevision",), _TOWER | _TILES | _ONEVISION, either_ties=True),
        pooled=False,
        gguf=(),
    ),
    "MiniCPMV4_6ForConditionalGeneration": replace(
        HYBRIDS["Qwen3_5ForCausalLM"], also=(), outer=Family(("minicpmv4_6",), _TOWER | _MINICPM), gguf=()
    ),
    "MiniCPMV4_7ForConditionalGeneration": replace(
        HYBRIDS["Qwen3_5ForCausalLM"],
        also=(),
        outer=Family(
            ("minicpmv4_7",),
            _TOWER | _MINICPM | dict.fromkeys(_MINICPM_MARKS),
            nulls=(*_MINICPM_IDS, *_MINICPM_MARKS),
        ),
        gguf=(),
    ),
    "MiniCPMOcrForConditionalGeneration": replace(
        HYBRIDS["Qwen3_5ForCausalLM"],
        also=(),
        outer=Family(("minicpm_ocr",), _TOWER | _MINICPM_OCR, nulls=_MINICPM_IDS),
        gguf=(),
    ),
    "PaliGemmaForConditionalGeneration": replace(
        _read_as_prefix(GEMMA["GemmaForCausalLM"]),
        texts={"gemma2": "PaliGemma2ForConditionalGeneration"},
    ),
    # No file names it: PaliGemma 2 calls itself as PaliGemma does.
    "PaliGemma2ForConditionalGeneration": _read_as_prefix(GEMMA["Gemma2ForCausalLM"]),
    "Qwen2_5OmniThinkerForConditionalGeneration": replace(
        _QWEN2_VL,
        types=("qwen2_5_omni_text",),
        defaults={
            **_QWEN2_VL.defaults,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_window_layers": 28,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
        outer=Family(("qwen2_5_omni_thinker",), _TOWER | _OMNI, {"ignore_index": -100}, either_ties=True),
        pooled=False,
    ),
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": replace(
        _QWEN2_VL,
        types=("qwen2_5_vl_text", "qwen2_5_vl"),
        outer=Family(("qwen2_5_vl",), _TOWER | _QWEN_TOKENS, either_ties=True),
    ),
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL_MOE,
    "SmolVLMForConditionalGeneration": replace(_BESIDE_TILES, outer=Family(("smolvlm",), _TOWER | _IDEFICS3)),
}
