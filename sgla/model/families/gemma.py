"""The Gemma models."""

from __future__ import annotations

from sgla.model.families.keys import CAUSAL, DECODER, sizes
from sgla.model.family import Family
from sgla.model.gguf_words import GEMMA_NORMS, Gguf

_GEMMA2 = {
    "attention.sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}  # in old GGUF files
_WITHOUT_HIDDEN_ACT = {key: value for key, value in DECODER.items() if key != "hidden_act"}
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
        qk_norm="head",
        norm_offset=1.0,
        scaled_embedding=True,
        gguf=(Gguf("gemma3", GEMMA_NORMS, missing={"rope.freq_base": 1e6}, by_width=62),),
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
        model="sgla.model.llama:Llama",
        norm_offset=1.0,
        scaled_embedding=True,
        gguf=(Gguf("gemma"),),
    ),
    "Gemma2ForCausalLM": Family(
        ("gemma2",),
        _SOFTCAPPED,
        CAUSAL | {"use_bidirectional_attention": False, "sliding_window_size": 4096},
        {"hidden_act": "hidden_activation"},
        model="sgla.model.gemma:Gemma3",
        norm_offset=1.0,
        scaled_embedding=True,
        pattern=2,
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
        pattern=2,
    ),
}
# The file of Gemma 3 with a vision tower: the language model has keys of its own in ``text_config``.
GEMMA3 = Family(("gemma3",), {"tie_word_embeddings": True, "text_config": None, "vision_config": None})
