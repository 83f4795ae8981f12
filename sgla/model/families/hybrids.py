"""Families in which most layers keep a state of all tokens instead of the tokens."""

from __future__ import annotations

from sgla.model.families.keys import CAUSAL, DECODER, HEAD_DIM, KV_HEADS, sizes
from sgla.model.families.mixtures import MIXTRAL
from sgla.model.family import Family, PredictorNames
from sgla.model.gguf_words import AFTER_NORMS, BALANCED, SHARED_GATE, SIGMOID, Gguf

_SILU = {"hidden_act": "silu"}  # of MLPs, and of what goes into a state
_DELTA = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "full_attention_interval": 4,
}
_EXPERTS = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
}
_SHARED = ((".shared_expert.", ".shared_experts."),)
_CAUSAL = {key: value for key, value in CAUSAL.items() if key != "partial_rotary_factor"} | {
    **_SILU,
    "attention_bias": False,
    "attn_output_gate": True,
    "output_gate_type": "swish",  # of what the states give
    "mamba_ssm_dtype": "float32",
}
_CONV = {
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "tie_embedding": None,
    "head_dim": None,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "rope_parameters": None,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": None,
}
_CONV_NAMES = (
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    ("model.embedding_norm.", "model.norm."),
    (".feed_forward.", ".mlp."),
    (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
)
_KIMI = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_BAILING = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_MINIMAX = {
    f"layernorm_{theirs}_{factor}": f"{ours}_{factor}_factor"
    for theirs, ours in (
        ("full_attention", "full_attn"),
        ("linear_attention", "linear_attn"),
        ("mlp", "mlp"),
    )
    for factor in ("alpha", "beta")
}
_PREDICTOR = PredictorNames(
    "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.layers.0", "mtp.norm", counted=False
)
_TOWERS = {"tie_word_embeddings": False, "text_config": None, "vision_config": None}
_LFM2_VL = {
    "tie_word_embeddings": True,
    "projector_hidden_act": "gelu",
    "projector_hidden_size": 2560,
    "projector_bias": True,
    "projector_use_layernorm": True,
    "downsample_factor": 2,
    "image_token_id": 396,
    **dict.fromkeys(("encoder_patch_size", "vision_feature_layer")),  # of its tower, in files alone
}
_LFM3_VL = {
    "tie_word_embeddings": True,
    "projector_hidden_act": "gelu",
    "projector_hidden_size": 4096,
    "projector_bias": True,
    "image_token_id": 125_030,
    "video_token_id": 125_029,
    "vision_start_token_id": 125_009,
    "vision_end_token_id": 125_010,
}

FAMILIES = {
    "Qwen3NextForCausalLM": Family(
        ("qwen3_next",),
        _DELTA
        | sizes(151936, 2048, 5632, 48, 16, 32768, 2)
        | _EXPERTS
        | {"decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": None},
        _CAUSAL,
        {"num_local_experts": "num_experts"},
        honoured=(*_SILU,),
        model="sgla.model.delta:JoinedDelta",
        predictor=_PREDICTOR,
        attention="sgla.model.delta_spec:read",
        mixture="sgla.model.mixture_spec:qwen2",
        renamed=_SHARED,
        qk_norm="head",
        norm_offset=1.0,
        gguf=(
            Gguf(
                "qwen3next",
                AFTER_NORMS,
                deltas="joined",
                tensors=SHARED_GATE,
                missing={"expert_weights_norm": True},
            ),
        ),
    ),
    "Qwen3_5ForCausalLM": Family(
        ("qwen3_5_text",),
        _DELTA | sizes(248320, 4096, 12288, 32, 16, 32768, 4),
        _CAUSAL,
        honoured=(*_SILU,),
        model="sgla.model.delta:Delta",
        also=("Qwen3_5ForConditionalGeneration",),
        outer=Family(("qwen3_5",), _TOWERS),
        predictor=_PREDICTOR,
        attention="sgla.model.delta_spec:read",
        qk_norm="head",
        norm_offset=1.0,
        gguf=(Gguf("qwen35", AFTER_NORMS, deltas="apart"),),
    ),
    "Qwen3_5MoeForCausalLM": Family(
        ("qwen3_5_moe_text",),
        {key: value for key, value in sizes(248320, 2048, 0, 40, 16, 32768, 2).items() if value}
        | _DELTA
        | _EXPERTS
        | {"num_experts_per_tok": 8, "num_experts": 256},
        _CAUSAL,
        {"num_local_experts": "num_experts"},
        honoured=(*_SILU,),
        model="sgla.model.delta:Delta",
        also=("Qwen3_5MoeForConditionalGeneration",),
        outer=Family(("qwen3_5_moe",), _TOWERS),
        predictor=_PREDICTOR,
        attention="sgla.model.delta_spec:read",
        mixture="sgla.model.mixture_spec:qwen3_5",
        renamed=_SHARED,
        qk_norm="head",
        norm_offset=1.0,
        gguf=(Gguf("qwen35moe", AFTER_NORMS, deltas="apart", tensors=SHARED_GATE),),
    ),
    "OlmoHybridForCausalLM": Family(
        ("olmo_hybrid",),
        {key: value for key, value in DECODER.items() if key not in ("hidden_act", "head_dim", "rope_theta")}
        | sizes(100352, 3840, 11008, 32, 30, 65536)
        | {
            "attention_bias": False,
            "rope_theta": None,
            "layer_types": None,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": None,
            "linear_value_head_dim": None,
            "linear_num_key_heads": None,
            "linear_num_value_heads": None,
            "linear_allow_neg_eigval": True,
        },
        CAUSAL | _SILU,
        honoured=(*_SILU,),
        model="sgla.model.olmo_hybrid:OlmoHybrid",
        nulls=(
            *KV_HEADS,
            "rope_theta",
            *(f"linear_{kind}_head_dim" for kind in ("key", "value")),
            *(f"linear_num_{kind}_heads" for kind in ("key", "value")),
        ),
        attention="sgla.model.delta_spec:olmo",
        renamed=(
            (".attention_layer_norm.", ".input_layernorm."),
            (".feedforward_layer_norm.", ".post_attention_layernorm."),
        ),
        qk_norm="width",
    ),
    "MiniMaxForCausalLM": Family(
        ("minimax", "minimax_m1", "minimax_text_01"),
        {key: value for key, value in DECODER.items() if key not in _SILU}
        | sizes(32000, 4096, 14336, 32, 32, 131072, 8)
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "rotary_dim": None,
            "sliding_window": None,
            "layer_types": None,
            "attn_type_list": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "router_jitter_noise": 0.0,  # in training
            "block_size": 256,
            **dict.fromkeys(_MINIMAX, None),
            **dict.fromkeys(_MINIMAX.values(), 1),
        },
        CAUSAL | _SILU | {"postnorm": True, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid"},
        {"num_experts": "num_local_experts"},
        honoured=(*_SILU,),
        names=_MINIMAX,
        model="sgla.model.minimax:MiniMax",
        nulls=(*HEAD_DIM, *_MINIMAX, "rotary_dim", "attn_type_list"),
        attention="sgla.model.minimax_spec:read",
        mixture="sgla.model.mixture_spec:mixtral",
        renamed=MIXTRAL,
        also=("MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM"),
    ),
    "KimiLinearForCausalLM": Family(
        ("kimi_linear",),
        sizes(163840, 2304, 9216, 27, 32, 1048576, 32)
        | {
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "moe_intermediate_size": 1024,
            "n_shared_experts": 1,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.446,
            "mlp_layer_types": None,
            "first_k_dense_replace": None,
            "layer_types": None,
            "linear_attn_config": None,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
            "head_dim": None,
            "qk_head_dim": None,
            "rope_theta": None,
            **dict.fromkeys(_KIMI),
        },
        {key: value for key, value in CAUSAL.items() if key != "partial_rotary_factor"}
        | _SILU
        | {
            "attention_bias": False,
            "mla_use_nope": True,
            "moe_layer_freq": 1,
            "moe_router_activation_func": "sigmoid",
            "rope_scaling": None,
            "use_grouped_topk": True,
        },
        honoured=(*_SILU,),
        model="sgla.model.kimi:Kimi",
        nulls=(*KV_HEADS, *HEAD_DIM, "rope_theta"),
        names=_KIMI,
        attention="sgla.model.kimi_spec:read",
        mixture="sgla.model.mixture_spec:kimi",
        renamed=(
            (".block_sparse_moe.", ".mlp."),
            (".forget_gate.", "."),
            (".w1.", ".gate_proj."),
            (".w2.", ".down_proj."),
            (".w3.", ".up_proj."),
        ),
        gguf=(
            Gguf(
                "kimi-linear",
                tensors=BALANCED,
                missing={"expert_weights_norm": True},
                gating=(SIGMOID,),
                deltas="channels",
            ),
        ),
    ),
    "BailingHybridForCausalLM": Family(
        ("bailing_hybrid",),
        {key: value for key, value in DECODER.items() if key not in ("hidden_act", "head_dim")}
        | sizes(157184, 2560, 6144, 42, 32, 262144, 32)
        | {
            "rope_theta": 6e6,
            "head_dim": 128,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_head_dim": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "moe_intermediate_size": 768,
            "n_shared_experts": 1,
            "num_local_experts": 512,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 2,
            "mlp_layer_types": None,
            "layer_types": None,
            "layer_group_size": 6,
            "short_conv_kernel_size": 4,
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
            "linear_head_dim": None,
            "linear_num_heads": None,
            "linear_conv_kernel_dim": None,
            **dict.fromkeys(_BAILING),
        },
        {key: value for key, value in CAUSAL.items() if key != "partial_rotary_factor"}
        | _SILU
        | {"rope_interleave": True, "attention_bias": False},
        honoured=(*_SILU,),
        model="sgla.model.bailing:Bailing",
        nulls=(*KV_HEADS, *(_BAILING.keys() - {"num_experts", "num_shared_experts"})),
        names=_BAILING,
        attention="sgla.model.kimi_spec:bailing",
        mixture="sgla.model.mixture_spec:kimi",
        renamed=(
            ("model.word_embeddings.", "model.embed_tokens."),
            (".attention.", ".self_attn."),
            (".self_attn.dense.", ".self_attn.o_proj."),
            (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
            (".forget_gate.", "."),
        ),
        interleaved=True,
    ),
    "Lfm2ForCausalLM": Family(
        ("lfm2",),
        _CONV
        | sizes(65536, 2560, 12288, 32, 32, 128_000, 8)
        | {
            "full_attn_idxs": None,
            "block_ff_dim": None,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        CAUSAL | {"hidden_act": "silu", "block_use_swiglu": True, "use_pos_enc": True},
        dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), "hidden_size")
        | {"block_norm_eps": "norm_eps", "num_heads": "num_attention_heads"},
        model="sgla.model.lfm2:Lfm2",
        nulls=("full_attn_idxs",),
        attention="sgla.model.conv_spec:read",
        completed="sgla.model.conv_spec:completed",
        also=("Lfm2VlForConditionalGeneration",),
        outer=Family(("lfm2_vl",), _TOWERS | _LFM2_VL),
        renamed=_CONV_NAMES,
        qk_norm="head",
        gguf=(Gguf("lfm2", convolves=True, last_norm="token_embd_norm"),),
    ),
    "Lfm3ForCausalLM": Family(
        ("lfm3",),
        sizes(128_000, 2048, 7680, 24, 16, 128_000, 4)
        | {
            "norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "head_dim": 128,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e6,
                    "partial_rotary_factor": 0.5,
                },
            },
            "conv_bias": False,
            "conv_L_cache": 7,
            "sliding_window": 256,
            "layer_types": None,
        },
        CAUSAL
        | {
            "attention_bias": False,
            "hidden_act": "silu",
            "use_attention_gate": True,
            "use_sandwich_norm": True,
        },
        {"rms_norm_eps": "norm_eps"},
        model="sgla.model.lfm3:Lfm3",
        also=("Lfm3VlForConditionalGeneration",),
        outer=Family(("lfm3_vl",), _TOWERS | _LFM3_VL),
        attention="sgla.model.conv_spec:lfm3",
        renamed=(*_CONV_NAMES, (".self_attn.g_proj.", ".self_attn.gate_proj.")),
        qk_norm="head",
    ),
    "Lfm2MoeForCausalLM": Family(
        ("lfm2_moe",),
        _CONV
        | sizes(65536, 2048, 7168, 32, 32, 128_000, 8)
        | {
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "use_expert_bias": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        CAUSAL | {"hidden_act": "silu"},
        model="sgla.model.lfm2:Lfm2",
        attention="sgla.model.conv_spec:read",
        completed="sgla.model.conv_spec:completed",
        mixture="sgla.model.mixture_spec:lfm2",
        renamed=_CONV_NAMES,
        qk_norm="head",
        gguf=(
            Gguf(
                "lfm2moe",
                convolves=True,
                last_norm="token_embd_norm",
                tensors=BALANCED,
                gating=(SIGMOID,),
                missing={"expert_weights_norm": True},
            ),
        ),
    ),
}
