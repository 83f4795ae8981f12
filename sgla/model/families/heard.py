"""Language models of families that take sounds (``model/hearing``), and decoders that hear nothing else."""

from __future__ import annotations

from dataclasses import replace

from sgla.model.families.dense import FAMILIES as DENSE
from sgla.model.family import Family

_TOWER = {"tie_word_embeddings": False, "text_config": None, "audio_config": None}
_ASR = {
    "tie_word_embeddings": True,
    "audio_token_id": 151676,
    "timestamp_token_id": 151705,
    "token_classification_bias": False,
}
_VOXTRAL = {"audio_token_id": None, "projector_hidden_act": "gelu", "hidden_size": 3072}
# The encoder's, which transformers' module reads, and keys of training and of timestamps of words.
_ENCODER = {
    "num_mel_bins": 80,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "max_source_positions": 1500,
    "encoder_layerdrop": 0.0,
}
_TRAINED = {
    "decoder_layerdrop": 0.0,
    "forced_decoder_ids": None,
    "classifier_proj_size": 256,
    "median_filter_width": 7,
    "apply_spec_augment": False,
    "mask_time_prob": 0.05,
    "mask_time_length": 10,
    "mask_time_min_masks": 2,
    "mask_feature_prob": 0.0,
    "mask_feature_length": 10,
    "mask_feature_min_masks": 0,
}

HEARD = {
    "Qwen2AudioForConditionalGeneration": replace(
        DENSE["Qwen2ForCausalLM"],
        fixed={**DENSE["Qwen2ForCausalLM"].fixed, "use_mrope": False},
        outer=Family(("qwen2_audio",), _TOWER | {"audio_token_index": 151646, "ignore_index": -100}),
        pooled=False,
        gguf=(),
    ),
    "Qwen3ASRForConditionalGeneration": replace(
        DENSE["Qwen3ForCausalLM"],
        outer=Family(("qwen3_asr",), _TOWER | _ASR),
        pooled=False,
        also=(),
        gguf=(),
    ),
    "VoxtralForConditionalGeneration": replace(
        DENSE["LlamaForCausalLM"],
        outer=Family(("voxtral",), _TOWER | _VOXTRAL),
        pooled=False,
        gguf=(),
    ),
    "WhisperForConditionalGeneration": Family(
        ("whisper",),
        {
            "vocab_size": 51865,
            "d_model": 384,
            "decoder_layers": 4,
            "decoder_attention_heads": 6,
            "decoder_ffn_dim": 1536,
            "max_target_positions": 448,
            "activation_function": "gelu",
            "scale_embedding": False,
            "tie_word_embeddings": True,
            **_ENCODER,
            **_TRAINED,
        },
        {"is_encoder_decoder": True, "use_weighted_layer_sum": False},
        {"num_hidden_layers": "encoder_layers"},
        nulls=("forced_decoder_ids",),
        names={
            "d_model": "hidden_size",
            "decoder_layers": "num_hidden_layers",
            "decoder_attention_heads": "num_attention_heads",
            "decoder_ffn_dim": "intermediate_size",
            "max_target_positions": "max_position_embeddings",
            "activation_function": "hidden_act",
        },
        model="sgla.model.whisper:Whisper",
        attention="sgla.model.whisper_spec:read",
        completed="sgla.model.whisper_spec:with_encoder",
        renamed=(
            ("model.decoder.", "model."),
            ("proj_out.", "lm_head."),
            ("model.layer_norm.", "model.norm."),
            (".self_attn_layer_norm.", ".input_layernorm."),
            (".encoder_attn_layer_norm.", ".cross_layernorm."),
            (".encoder_attn.", ".cross_attn."),
            (".final_layer_norm.", ".post_attention_layernorm."),
            (".out_proj.", ".o_proj."),
            (".fc1.", ".mlp.fc1."),
            (".fc2.", ".mlp.fc2."),
        ),
        norm="layer",
        biased=True,
        learned=True,
        gated=False,
    ),
}
