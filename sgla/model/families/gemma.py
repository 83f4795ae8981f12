"""The Gemma models."""

from __future__ import annotations

from dataclasses import replace

from sgla.model.diffusion_gemma_spec import BUILT_IN
from sgla.model.families.keys import CAUSAL, DECODER, sizes
from sgla.model.family import Family
from sgla.model.gguf_words import GEMMA3N, GEMMA4, GEMMA_NORMS, Gguf
from sgla.model.windows import every, listed

_GEMMA2 = {
    "attention.sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}  # in old GGUF files
_WITHOUT_HIDDEN_ACT = {key: value for key, value in DECODER.items() if key != "hidden_act"}
_ALTERNATING = listed(every(2))
_SOFTCAPPED = (
    _WITHOUT_HIDDEN_ACT
    | sizes(256000, 2304, 9216, 26, 8, 8192, 4)
    | {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }
)

# Files with towers.
_GEMMA3 = Family(("gemma3",), {"tie_word_embeddings": True, "text_config": None, "vision_config": None})
_GEMMA4 = Family(
    ("gemma4",),
    {"tie_word_embeddings": True, "text_config": None, "vision_config": None, "audio_config": None},
)
_DIFFUSION = Family(
    ("diffusion_gemma",),
    {
        "tie_word_embeddings": True,
        "text_config": None,
        "vision_config": None,
        "boi_token_id": 255999,
        "eoi_token_id": 258882,
        "image_token_id": 258880,
        "canvas_length": 256,
    },
    beside=("canvas_length",),
)

_GEMMA4_NAMES = ((".router.proj.", ".moe.gate."), (".experts.", ".moe.experts."))

_GEMMA4_TEXT = (
    {key: value for key, value in _WITHOUT_HIDDEN_ACT.items() if key != "rope_theta"}
    | sizes(262144, 2304, 9216, 30, 8, 131072, 4)
    | {
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "per_layer_config": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
        "attention_bias": False,
        "sliding_window": 512,
        "layer_types": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": None,
    }
)
_GEMMA4_LAYERS = {"attention_k_eq_v": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
_EXPERTS = {"num_experts": None, "top_k_experts": None, "moe_intermediate_size": None}
_GEMMA4_KEYS = _GEMMA4_TEXT | _EXPERTS
_GEMMA4_NULLS = "num_global_key_value_heads", "per_layer_config", "use_bidirectional_attention"

FAMILIES = {
    "Gemma3ForCausalLM": Family(
        ("gemma3_text",),
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": None,
            "rope_parameters": None,
            "attention_bias": False,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "_sliding_window_pattern": None,
            "layer_types": None,
            "final_logit_softcapping": None,
        },
        CAUSAL | {"use_bidirectional_attention": False, "attn_logit_softcapping": None},
        {"hidden_act": "hidden_activation"},
        model="sgla.model.gemma:Gemma3",
        also=("Gemma3ForConditionalGeneration",),
        outer=_GEMMA3,
        pooled=True,
        windows=listed(every()),
        qk_norm="head",
        norm_offset=1.0,
        scaled_embedding=True,
        gguf=(Gguf("gemma3", GEMMA_NORMS, missing={"rope.freq_base": 1e6}, by_width=62, both_ways=True),),
    ),
    "DiffusionGemmaForBlockDiffusion": Family(
        ("diffusion_gemma_text",),
        _GEMMA4_KEYS | {"final_logit_softcapping": 30.0, "canvas_length": 256},
        CAUSAL | BUILT_IN | {"attn_logit_softcapping": None, "vocab_size_per_layer_input": 262144},
        {"hidden_act": "hidden_activation"},
        model="sgla.model.diffusion_gemma:DiffusionGemma",
        nulls=(*_GEMMA4_NULLS, *_EXPERTS),
        attention="sgla.model.diffusion_gemma_spec:read",
        scaled_embedding=True,
        qk_norm="head",
        completed="sgla.model.diffusion_gemma_spec:complete",
        outer=_DIFFUSION,
        renamed=(("model.decoder.", "model."), *_GEMMA4_NAMES),
    ),
    "Gemma3nForCausalLM": Family(
        ("gemma3n_text",),
        _WITHOUT_HIDDEN_ACT
        | sizes(262400, 2048, 16384, 35, 8, 32768, 2)
        | {
            "head_dim": 256,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "attention_bias": False,
            "sliding_window": 512,
            "layer_types": None,
            "final_logit_softcapping": 30.0,
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,  # in training
            "altup_correct_scale": True,
            "altup_num_inputs": 4,
            "num_kv_shared_layers": 15,
            "laurel_rank": 64,
            "activation_sparsity_pattern": None,
        },
        CAUSAL
        | {"attn_logit_softcapping": None, "query_pre_attn_scalar": 256}
        | dict.fromkeys(("hidden_activation", "hidden_act"), "gelu_pytorch_tanh"),
        honoured=("hidden_activation",),
        model="sgla.model.gemma3n:Gemma3n",
        nulls=("activation_sparsity_pattern",),
        layers_differ=True,
        attention="sgla.model.gemma3n_spec:read",
        scaled_embedding=True,
        qk_norm="head",
        completed="sgla.model.gemma3n_spec:complete",
        also=("Gemma3nForConditionalGeneration",),
        outer=replace(_GEMMA4, types=("gemma3n",)),
        gguf=(
            Gguf(
                "gemma3n",
                GEMMA_NORMS,
                altup=True,
                tensors=GEMMA3N,
                missing={"final_logit_softcapping": 30.0, "rope.freq_base": 1e6},
            ),
        ),
    ),
    "Gemma4ForCausalLM": Family(
        ("gemma4_text",),
        _GEMMA4_KEYS
        | _GEMMA4_LAYERS
        | {
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "enable_moe_block": False,
        },
        CAUSAL | {"attn_logit_softcapping": None},
        {"hidden_act": "hidden_activation"},
        model="sgla.model.gemma4:Gemma4",
        nulls=(*_GEMMA4_NULLS, *_EXPERTS),
        attention="sgla.model.gemma4_spec:read",
        scaled_embedding=True,
        qk_norm="head",
        completed="sgla.model.gemma4_spec:complete",
        also=("Gemma4ForConditionalGeneration",),
        outer=_GEMMA4,
        renamed=_GEMMA4_NAMES,
        gguf=(Gguf("gemma4", GEMMA_NORMS, kinds=True, tensors=GEMMA4),),
    ),
    "Gemma4UnifiedForCausalLM": Family(
        ("gemma4_unified_text",),
        _GEMMA4_TEXT
        | _GEMMA4_LAYERS
        | {
            "max_position_embeddings": 262144,
            "sliding_window": 1024,
            "use_bidirectional_attention": "vision",
        },
        CAUSAL
        | {"attn_logit_softcapping": None, "hidden_size_per_layer_input": 0, "enable_moe_block": False},
        {"hidden_act": "hidden_activation"},
        model="sgla.model.gemma4:Gemma4",
        nulls=_GEMMA4_NULLS,
        attention="sgla.model.gemma4_spec:read",
        scaled_embedding=True,
        qk_norm="head",
        completed="sgla.model.gemma4_spec:unified",
        also=("Gemma4UnifiedForConditionalGeneration",),
        outer=replace(_GEMMA4, types=("gemma4_unified",)),
    ),
    "GemmaForCausalLM": Family(
        ("gemma",),
        DECODER
        | sizes(256000, 3072, 24576, 28, 16, 8192, 16)
        | {
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "attention_bias": False,
        },
        CAUSAL | {"use_bidirectional_attention": False},
        {"hidden_activation": "hidden_act"},
        words={"gelu": "gelu_pytorch_tanh"},
        model="sgla.model.llama:Llama",
        norm_offset=1.0,
        scaled_embedding=True,
        gguf=(Gguf("gemma"),),
    ),
    "Gemma2ForCausalLM": Family(
        ("gemma2",),
        _SOFTCAPPED,
        CAUSAL | {"use_bidirectional_attention": False},
        {"hidden_act": "hidden_activation", "sliding_window_size": "sliding_window"},
        model="sgla.model.gemma:Gemma3",
        norm_offset=1.0,
        scaled_embedding=True,
        windows=_ALTERNATING,
        pooled=True,
        gguf=(Gguf("gemma2", GEMMA_NORMS, missing=_GEMMA2, by_width=46),),
    ),
    "VaultGemmaForCausalLM": Family(
        ("vaultgemma",),
        _SOFTCAPPED,
        CAUSAL,
        {"hidden_act": "hidden_activation"},
        model="sgla.model.llama:Llama",
        renamed=((".pre_feedforward_layernorm.", ".post_attention_layernorm."),),
        norm_offset=1.0,
        scaled_embedding=True,
        windows=_ALTERNATING,
    ),
}
