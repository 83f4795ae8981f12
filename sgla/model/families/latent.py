"""Decoders with multi-head latent attention."""

from __future__ import annotations

from sgla.model.families.keys import (
    BIASES,
    CAUSAL,
    DECODER,
    DEEPSEEK_PREDICTOR,
    HEAD_DIM,
    KV_HEADS,
    MISTRAL3,
    ROUTED,
    SIGMOID_ROUTED,
    WITHOUT_HEAD_DIM,
    sizes,
)
from sgla.model.family import Family
from sgla.model.gguf_words import BALANCED, SIGMOID, Gguf

_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_head_dim": None,  # the sum of both, which the class works out anew
}
_INDEXED = {
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "mlp_layer_types": None,
    "layer_types": None,
    "num_nextn_predict_layers": 1,
    "index_topk": 2048,
    "index_head_dim": 128,
}
# By which name the class has it for the rotation; classes that declare the key take it from there always.
_ROTATED_HEAD = {"head_dim": "qk_rope_head_dim"}

FAMILIES = {
    "MiniCPM3ForCausalLM": Family(
        ("minicpm3",),
        DECODER
        | sizes(73448, 2560, 6400, 62, 40, 32768, 40)
        | {
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "qk_head_dim": None,  # the sum of both, which the class works out anew
            "v_head_dim": None,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        CAUSAL | BIASES,
        honoured=("attention_bias", "mlp_bias"),
        model="sgla.model.latent:Latent",
        nulls=HEAD_DIM + KV_HEADS + ("v_head_dim",),
        attention="sgla.model.latent_spec:read",
        gguf=(
            Gguf(
                "minicpm3",
                longrope=True,
                missing={"rope.scaling.original_context_length": None, "rope.scaling.attn_factor": 1.0},
            ),
        ),
    ),
    "DeepseekV2ForCausalLM": Family(
        ("deepseek_v2",),
        DECODER
        | sizes(102400, 4096, 11008, 32, 32, 2048)
        | _LATENT
        | {
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": None,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "n_group": None,
            "topk_group": None,
        },
        CAUSAL | BIASES | {"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
        {"num_experts": "n_routed_experts"},
        honoured=("attention_bias", "mlp_bias"),
        model="sgla.model.latent:Latent",
        nulls=(*HEAD_DIM, *KV_HEADS, "n_group", "topk_group"),
        attention="sgla.model.latent_spec:read",
        mixture="sgla.model.mixture_spec:deepseek_v2",
        interleaved=True,
        gguf=(Gguf("deepseek2"),),
    ),
    "DeepseekV3ForCausalLM": Family(
        ("deepseek_v3", "kimi_k2"),
        WITHOUT_HEAD_DIM
        | sizes(129280, 7168, 18432, 61, 128, 4096, 128)
        | _LATENT
        | ROUTED
        | {
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "num_nextn_predict_layers": 1,
        },
        CAUSAL | SIGMOID_ROUTED | {"rope_interleave": True, "attention_bias": False},
        {"num_local_experts": "n_routed_experts", **_ROTATED_HEAD},
        honoured=("attention_bias", "rope_interleave"),
        model="sgla.model.latent:Latent",
        nulls=(*KV_HEADS, "norm_topk_prob"),
        attention="sgla.model.latent_spec:read",
        mixture="sgla.model.mixture_spec:deepseek_v3",
        predictor=DEEPSEEK_PREDICTOR,
        interleaved=True,
        gguf=(Gguf("deepseek2", tensors=BALANCED, gating=(SIGMOID,), when={"expert_gating_func": SIGMOID}),),
    ),
    "Glm4MoeLiteForCausalLM": Family(
        ("glm4_moe_lite",),
        WITHOUT_HEAD_DIM
        | sizes(154880, 2048, 10240, 47, 20, 202752, 20)
        | _LATENT
        | ROUTED
        | {
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "mlp_layer_types": None,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "num_nextn_predict_layers": 1,
        },
        CAUSAL
        | SIGMOID_ROUTED
        | {"rope_interleave": True, "attention_bias": False, "partial_rotary_factor": 1.0}
        | {"first_k_dense_replace": 1},
        {"num_local_experts": "n_routed_experts", **_ROTATED_HEAD},
        honoured=("attention_bias", "rope_interleave"),
        model="sgla.model.latent:Latent",
        attention="sgla.model.latent_spec:read",
        mixture="sgla.model.mixture_spec:deepseek_v3",
        predictor=DEEPSEEK_PREDICTOR,
        interleaved=True,
    ),
    "DeepseekV32ForCausalLM": Family(
        ("deepseek_v32",),
        WITHOUT_HEAD_DIM
        | sizes(129280, 7168, 18432, 61, 128, 163840, 128)
        | _LATENT
        | ROUTED
        | _INDEXED
        | {"head_dim": 64, "index_n_heads": 64, "n_group": 8, "topk_group": 4},
        CAUSAL | SIGMOID_ROUTED | BIASES,
        {"num_local_experts": "n_routed_experts"},
        model="sgla.model.indexed:Indexed",
        attention="sgla.model.indexed_spec:deepseek",
        mixture="sgla.model.mixture_spec:deepseek_v3",
        interleaved=True,
        gguf=(Gguf("deepseek32", tensors=BALANCED, gating=(SIGMOID,)),),
    ),
    "GlmMoeDsaForCausalLM": Family(
        ("glm_moe_dsa",),
        WITHOUT_HEAD_DIM
        | sizes(154880, 6144, 12288, 78, 64, 202752, 64)
        | _LATENT
        | ROUTED
        | _INDEXED
        | {
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "head_dim": 64,
            "index_n_heads": 32,
            "indexer_types": None,
            "index_topk_pattern": None,
            "index_topk_freq": 1,
            "index_skip_topk_offset": 2,
        },
        CAUSAL
        | SIGMOID_ROUTED
        | BIASES
        | {"rope_interleave": True, "indexer_rope_interleave": True, "moe_router_dtype": "float32"},
        dict.fromkeys(("num_local_experts", "num_experts"), "n_routed_experts"),
        model="sgla.model.indexed:Indexed",
        nulls=("indexer_types", "index_topk_pattern", "num_experts"),
        attention="sgla.model.indexed_spec:glm",
        mixture="sgla.model.mixture_spec:deepseek_v3",
        interleaved=True,
        gguf=(Gguf("glm-dsa", tensors=BALANCED, gating=(0, SIGMOID)),),
    ),
    "LongcatFlashForCausalLM": Family(
        ("longcat_flash",),
        WITHOUT_HEAD_DIM
        | _LATENT
        | {
            "vocab_size": 131072,
            "hidden_size": 6144,
            "ffn_hidden_size": 12288,
            "num_layers": 28,
            "num_attention_heads": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e7,
            "moe_topk": 12,
            "n_routed_experts": 512,
            "zero_expert_num": 256,
            "expert_ffn_hidden_size": 2048,
            "routed_scaling_factor": 6.0,
        },
        CAUSAL
        | {"attention_bias": False, "router_bias": False, "zero_expert_type": "identity"}
        | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA"},
        {
            "num_local_experts": "n_routed_experts",
            "num_experts_per_tok": "moe_topk",
            "intermediate_size": "ffn_hidden_size",
            "moe_intermediate_size": "expert_ffn_hidden_size",
            **_ROTATED_HEAD,
        },
        names={"num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size"},
        model="sgla.model.longcat:Longcat",
        nulls=KV_HEADS,
        attention="sgla.model.latent_spec:longcat",
        completed="sgla.model.latent_spec:with_pairs",
        mixture="sgla.model.mixture_spec:longcat",
        renamed=((".mlp.router.classifier.", ".mlp.gate."), (".mlp.router.", ".mlp.gate.")),
        interleaved=True,
    ),
    "AXK2ForCausalLM": Family(
        ("axk2",),
        WITHOUT_HEAD_DIM
        | sizes(163840, 2048, 5120, 48, 32, 131072, 32)
        | _LATENT
        | ROUTED
        | _INDEXED
        | {
            "num_nextn_predict_layers": 0,
            "kv_lora_rank": 128,
            "q_lora_rank": 384,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "n_routed_experts": 128,
            "moe_intermediate_size": 512,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": None,
            "topk_group": None,
            "head_dim": 64,
            "index_n_heads": 16,
            "gated_norm_rank": 16,
        },
        CAUSAL
        | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "attention_bias": False}
        | dict.fromkeys(("gated_norm", "attention_output_gate", "attn_gate_fused"), True),
        {"num_local_experts": "n_routed_experts"},
        model="sgla.model.axk2:AXK2",
        nulls=("n_group", "topk_group"),
        attention="sgla.model.indexed_spec:gated",
        completed="sgla.model.indexed_spec:with_norm_gates",
        mixture="sgla.model.mixture_spec:axk",
        interleaved=True,
    ),
    "HYV4ForCausalLM": Family(
        ("hy_v4",),
        WITHOUT_HEAD_DIM
        | sizes(120832, 2816, 6912, 34, 32, 262144, 32)
        | _LATENT
        | ROUTED
        | {key: _INDEXED[key] for key in ("mlp_layer_types", "layer_types", "index_topk", "index_head_dim")}
        | {
            "rms_norm_eps": 1e-5,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "moe_intermediate_size": 768,
            "routed_scaling_factor": 2.827,
            "head_dim": 256,
            "index_n_heads": 16,
            "indexer_types": None,
            "hc_mult": 4,
            "hc_magnitude": 2.0,
            "learnable_sink_init": 0.0,  # of training
            "hc_eps": 1e-6,
            "swiglu_limit": 10.0,
        },
        CAUSAL
        | SIGMOID_ROUTED
        | {"attention_bias": False, "gating_type": "elementwise"}
        | dict.fromkeys(("learnable_sink", "enable_lm_head_fp32", "enable_ihc"), True)
        | dict.fromkeys(("gated_mla", "use_mla", "use_dsa"), True),
        {"num_local_experts": "n_routed_experts"},
        model="sgla.model.hy4:Hy4",
        nulls=("indexer_types",),
        attention="sgla.model.indexed_spec:hunyuan",
        completed="sgla.model.indexed_spec:with_streams",
        mixture="sgla.model.mixture_spec:hunyuan_v4",
        renamed=(
            (".linear_gate.", ".gate_proj."),
            (".learnable_sink_param", ".sinks"),
            (".hc_pre.hc_attn_layer.", ".attn_hc."),
            (".hc_pre.hc_mlp_layer.", ".ffn_hc."),
            (".hc_pre.hc_head.", ".hc_head."),
            (".hc_attn_layer.hc_pre.", ".attn_hc."),
            (".hc_mlp_layer.hc_pre.", ".ffn_hc."),
        ),
    ),
    "DeepseekV4ForCausalLM": Family(
        ("deepseek_v4",),
        {key: value for key, value in DECODER.items() if key != "hidden_act"}
        | {
            "vocab_size": 129280,
            "hidden_size": 4096,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 43,
            "num_attention_heads": 64,
            "num_key_value_heads": 1,  # of any number one is read
            "max_position_embeddings": 1048576,
            "head_dim": 512,
            "q_lora_rank": 1024,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "sliding_window": 128,
            "layer_types": None,
            "compress_rates": None,
            "compress_ratios": None,
            "compress_rate_csa": None,
            "compress_rate_hca": None,
            "compress_rope_theta": 160000.0,
            "partial_rotary_factor": None,
            "qk_rope_head_dim": None,
            "index_topk": 512,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "norm_topk_prob": True,
            "scoring_func": "sqrtsoftplus",
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "mlp_layer_types": None,
            "num_hash_layers": None,
            "num_nextn_predict_layers": 1,
            "expert_dtype": None,  # see quant/methods.py
        },
        {key: value for key, value in CAUSAL.items() if key != "partial_rotary_factor"}
        | {"hidden_act": "silu"}
        | BIASES
        | {
            "n_shared_experts": 1,
            "topk_method": "noaux_tc",
        },
        {"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
        honoured=("hidden_act",),
        model="sgla.model.deepseek_v4:DeepseekV4",
        nulls=(
            *("layer_types", "compress_rates", "partial_rotary_factor", "mlp_layer_types"),
            *("compress_ratios", "compress_rate_csa", "compress_rate_hca", "num_hash_layers"),
            *("qk_rope_head_dim", "expert_dtype"),
        ),
        attention="sgla.model.compressed_spec:read",
        completed="sgla.model.compressed_spec:complete",
        mixture="sgla.model.mixture_spec:deepseek_v4",
        renamed=(
            (".attn.kv_norm.", ".attn.norm."),
            (".w1.", ".gate_proj."),
            (".w2.", ".down_proj."),
            (".w3.", ".up_proj."),
            (".ffn.gate.bias", ".ffn.gate.e_score_correction_bias"),
            ("hc_head.hc_", "hc_head_"),
            *((f"^{name}", f"model.{name}") for name in ("layers.", "norm.", "hc_head_")),
            (".scale$", ".weight_scale_inv"),
            ("^embed.", "model.embed_tokens."),
            ("^head.", "lm_head."),
        ),
        numbers=(".tid2eid",),
    ),
    "Mistral4ForCausalLM": Family(
        ("mistral4",),
        WITHOUT_HEAD_DIM
        | sizes(131072, 4096, 12288, 36, 32, 1048576, 32)
        | _LATENT
        | ROUTED
        | {
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "head_dim": None,  # as qk_head_dim
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 1e4,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "max_position_embeddings": 1048576,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            "first_k_dense_replace": 0,
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
        },
        CAUSAL | {"rope_interleave": True, "attention_bias": False},
        {"num_local_experts": "n_routed_experts"},
        honoured=("attention_bias", "rope_interleave"),
        model="sgla.model.mistral4:Mistral4",
        nulls=(*KV_HEADS, "norm_topk_prob", "rope_theta"),
        attention="sgla.model.latent_spec:growing",
        mixture="sgla.model.mixture_spec:mistral4",
        interleaved=True,
        growing=True,
        gguf=(Gguf("mistral4", missing={"attention.temperature_scale": 0.1}),),
        outer=MISTRAL3,
    ),
    "YoutuForCausalLM": Family(
        ("youtu",),
        WITHOUT_HEAD_DIM
        | sizes(128256, 2048, 6144, 32, 16, 131072, 16)
        | _LATENT
        | {"tie_word_embeddings": True},
        CAUSAL | {"rope_interleave": True, "attention_bias": False},
        _ROTATED_HEAD,
        honoured=("attention_bias", "rope_interleave"),
        model="sgla.model.latent:Latent",
        attention="sgla.model.latent_spec:read",
        interleaved=True,
    ),
}
