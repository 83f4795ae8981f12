"""Configurations as they are published, and doctored ones, each with what must come of it.

Sizes of those that run are made small; which keys there are, and what they say of the rest, is as published.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from published_configs import EXAONE_4, HUNYUAN_A13B, K_EXAONE, MINIMAX_M2, PUBLISHED

Config = dict[str, Any]


class Case(NamedTuple):
    """``refused``: a word that the error must have; None: the model must equal HF's. ``twin``: the
    configuration that HF is given where it cannot read this one. ``fp8``: how the weights are stored, and
    HF's have the same values."""

    config: Config
    refused: str | None = None
    twin: Config | None = None
    fp8: Literal["tensor", "channel", "block"] | None = None


TINY: Config = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
USUAL: Config = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "float32",
    "transformers_version": "4.45.0",
    "use_cache": True,
}


FALCON: Config = {
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "bias": False,
    "bos_token_id": 11,
    "hidden_dropout": 0.0,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "parallel_attn": True,
    "use_cache": True,
    "vocab_size": 97,
}

MPT: Config = {
    "architectures": ["MPTForCausalLM"],
    "attn_config": {
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False,
        "clip_qkv": None,
        "prefix_lm": False,
        "qk_ln": False,
        "softmax_scale": None,
    },
    "d_model": 32,
    "emb_pdrop": 0,
    "embedding_fraction": 1.0,
    "expansion_ratio": 4,
    "init_device": "cpu",
    "learned_pos_emb": True,
    "logit_scale": None,
    "max_seq_len": 128,
    "model_type": "mpt",
    "n_heads": 4,
    "n_layers": 3,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "resid_pdrop": 0,
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "verbose": 0,
    "vocab_size": 97,
}


def llama(**changes: Any) -> Config:
    own = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
    return TINY | USUAL | own | changes


def exaone(**changes: Any) -> Config:
    own = {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "head_dim": 8, "num_layers": 3}
    own |= {"activation_function": "silu", "layer_norm_epsilon": 1e-5, "embed_dropout": 0.0}
    own["auto_map"] = {"AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM"}
    usual = {
        key: value for key, value in (TINY | USUAL).items() if key not in ("num_hidden_layers", "hidden_act")
    }
    return usual | own | changes


def qwen2(**changes: Any) -> Config:
    own = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
    windows = {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 21}
    return TINY | USUAL | own | windows | {"rope_theta": 1e6} | changes


def qwen3(**changes: Any) -> Config:
    own = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 16}
    windows = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}
    rest = {"attention_bias": False, "rope_scaling": None, "rope_theta": 1000000}
    return TINY | USUAL | own | windows | rest | changes


def qwen3_moe(**changes: Any) -> Config:
    own = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    config = qwen3() | own | changes
    return {key: value for key, value in config.items() if value is not ...}


def decoder(name: str, model_type: str, **changes: Any) -> Config:
    """Of a family that has no function here, whose activation is its own."""
    usual = {key: value for key, value in USUAL.items() if key != "hidden_act"}
    return TINY | usual | {"architectures": [name], "model_type": model_type} | changes


def qwen3_next(**changes: Any) -> Config:
    own = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "full_attention_interval": 3,
        "head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
        "mlp_only_layers": [],
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1e7,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 24,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    return TINY | USUAL | own | changes


def mixtral(**changes: Any) -> Config:
    own = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    return TINY | USUAL | own | changes


def deepseek_v4(**changes: Any) -> Config:
    own = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "attention_bias": False,
        "compress_ratios": [0, 4, 128, 0],
        "compress_rope_theta": 160000,
        "expert_dtype": "fp4",
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 16,
        "hidden_act": "silu",
        "index_head_dim": 16,
        "index_n_heads": 8,
        "index_topk": 16,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 3,
        "num_hash_layers": 1,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1,
        "o_groups": 2,
        "o_lora_rank": 8,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 4,
            "original_max_position_embeddings": 32,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
    }
    found = TINY | USUAL | own | {"intermediate_size": ...} | changes
    return {key: value for key, value in found.items() if value is not ...}


V4_PART = {"partial_rotary_factor": 0.5, "rope_theta": 1e4, "rope_type": "default"}
LATENT: Config = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
PICKED: Config = LATENT | {
    "attention_bias": False,
    "index_head_dim": 16,
    "index_n_heads": 8,
    "index_topk": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
}


def hunyuan_v4(**changes: Any) -> Config:
    own = {
        "architectures": ["HYV4ForCausalLM"],
        "model_type": "hy_v4",
        "enable_ihc": True,
        "enable_lm_head_fp32": True,
        "gated_mla": True,
        "gating_type": "elementwise",
        "hc_eps": 1e-6,
        "hc_magnitude": 2.0,
        "hc_mult": 4,
        "head_dim": 8,
        "indexer_types": ["full", "full", "shared"],
        "layer_types": ["deepseek_sparse_attention"] * 3,
        "learnable_sink": True,
        "learnable_sink_init": 0.0,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "mtp_loss_factor": 0.1,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "swiglu_limit": 10.0,
        "use_dsa": True,
        "use_mla": True,
    }
    return TINY | USUAL | PICKED | own | changes


def deepseek(version: int, **changes: Any) -> Config:
    """As published; both have keys that transformers does not read."""
    own = {
        "architectures": [f"DeepseekV{version}ForCausalLM"],
        "model_type": f"deepseek_v{version}",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "moe_intermediate_size": 24,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "norm_topk_prob": version == 3,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 4,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 32,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid" if version == 3 else "softmax",
        "seq_aux": True,
        "topk_group": 2,
        "n_group": 4,
        "topk_method": "noaux_tc" if version == 3 else "group_limited_greedy",
        "v_head_dim": 8,
    }
    return TINY | USUAL | {"rms_norm_eps": 1e-6} | own | changes


GPT_OSS: Config = TINY | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "experts_per_token": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 8,
    "swiglu_limit": 0.5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def gemma3(**changes: Any) -> Config:
    own = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
    }
    base = {key: value for key, value in (TINY | USUAL).items() if key != "hidden_act"}
    config = base | own | changes
    return {key: value for key, value in config.items() if value is not ...}


GEMMA4_WHOLE = ["full_attention", "full_attention", "sliding_attention", "full_attention"]


def gemma4(text: Config, **changes: Any) -> Config:
    """As published, without towers: the language model's keys stand in ``text_config``."""
    small = {
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 32,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "model_type": "gemma4_text",
        "num_global_key_value_heads": None,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": 97,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "audio_token_id": 96,
        "boi_token_id": 95,
        "dtype": "float32",
        "image_token_id": 94,
        "model_type": "gemma4",
        "text_config": TINY | small | text,
        "tie_word_embeddings": True,
        "transformers_version": "5.5.0.dev0",
        "vision_config": None,
    } | changes


def llama4(text: Config, **changes: Any) -> Config:
    """As published, without a tower."""
    small = {
        "attention_bias": False,
        "attention_chunk_size": 16,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 16,
        "for_llm_compressor": False,
        "head_dim": 16,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 48,
        "model_type": "llama4_text",
        "moe_layers": [],
        "no_rope_layers": [],
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "rope_scaling": LLAMA3 | {"high_freq_factor": 1.0},
        "rope_theta": 500000.0,
        "router_jitter_noise": 0.0,
        "use_qk_norm": True,
    }
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 95,
        "dtype": "float32",
        "image_token_index": 94,
        "model_type": "llama4",
        "text_config": TINY | small | text,
        "tie_word_embeddings": False,
        "transformers_version": "4.51.0.dev0",
    } | changes


GEMMA4_EXPERTS = {
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "top_k_experts": 2,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}


def gemma3_vision(text: Config, **changes: Any) -> Config:
    """The language model's ``head_dim`` and heads are those of HF's classes, as in the 4B."""
    tower = {
        "hidden_size": 16,
        "image_size": 28,
        "intermediate_size": 16,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "patch_size": 14,
        "vision_use_head": False,
    }
    small = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 8,
        "vocab_size": 97,
        "max_position_embeddings": 128,
    }
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 93,
        "eoi_token_index": 94,
        "eos_token_id": [1, 96],
        "image_token_index": 95,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 4,
        "model_type": "gemma3",
        "text_config": small | text,
        "torch_dtype": "float32",
        "transformers_version": "4.50.0.dev0",
        "vision_config": tower,
    } | changes


def other(architecture: str, model_type: str, **changes: Any) -> Config:
    return TINY | {"architectures": [architecture], "model_type": model_type} | changes


def quantized(method: str | None, **changes: Any) -> Config:
    return llama(quantization_config={"quant_method": method} | changes)


def encoder(family: str, model_type: str, **changes: Any) -> Config:
    return {
        "architectures": [f"{family}Model"],
        "model_type": model_type,
        "attention_probs_dropout_prob": 0.1,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 40,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": 97,
    } | changes


DOTS1: Config = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": False,
    "num_experts_per_tok": 2,
}
GRANITE_MOE: Config = {
    "attention_bias": True,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 6.0,
    "logits_scaling": 4.0,
    "num_experts_per_tok": 3,
    "num_local_experts": 4,
    "residual_multiplier": 0.3,
}
MINICPM3: Config = {
    "dim_model_base": 16,
    "kv_lora_rank": 16,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "scale_depth": 0.7,
    "scale_emb": 3,
}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [2.0] * 4}
# How published fp8 checkpoints say it: ModelOpt, compressed-tensors, DeepSeek.
FP8: dict[Literal["tensor", "channel", "block"], Config] = {
    "tensor": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "input_activations": {"dynamic": True, "num_bits": 8, "type": "float"},
                "weights": {"dynamic": False, "num_bits": 8, "strategy": "channel", "type": "float"},
            }
        },
    },
    "block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [16, 16],
    },
}
PACKED: Config = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
    "input_activations": None,
}
FP8_GROUP: Config = FP8["channel"]["config_groups"]["group_0"]
FP8_NAMES: dict[str, Config] = {
    "compressed-tensors": {"format": "float-quantized"},
    "modelopt": {"quant_algo": "FP8"},
    "fp8": {},
}
SHAPES: Config = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
DISTILBERT: Config = {
    "architectures": ["DistilBertModel"],
    "model_type": "distilbert",
    "activation": "gelu",
    "attention_dropout": 0.1,
    "dim": 32,
    "dropout": 0.1,
    "hidden_dim": 40,
    "initializer_range": 0.02,
    "max_position_embeddings": 64,
    "n_heads": 4,
    "n_layers": 2,
    "pad_token_id": 0,
    "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2,
    "sinusoidal_pos_embds": False,
    "tie_weights_": True,
    "vocab_size": 97,
}

# As published.
RUN: dict[str, Case] = {
    "Llama-2-7b": Case(llama(pretraining_tp=1, rope_scaling=None, tie_word_embeddings=False)),
    "Llama-2-13b pretraining_tp": Case(llama(pretraining_tp=2, num_key_value_heads=4)),
    "llama-7b": Case(llama(num_key_value_heads=None, max_sequence_length=2048, rms_norm_eps=1e-6)),
    "Llama-3.1-8B": Case(
        llama(rope_scaling=LLAMA3, rope_theta=500000.0, mlp_bias=False, attention_bias=False)
    ),
    "Llama-3.2-1B": Case(llama(rope_scaling=LLAMA3, rope_theta=5e5, head_dim=16, tie_word_embeddings=True)),
    "Llama-3.2-1B by unsloth": Case(llama(rope_scaling=LLAMA3, unsloth_fixed=True, tie_word_embeddings=True)),
    "SmolLM2-135M": Case(
        llama(
            is_llama_config=True,
            rope_interleaved=False,
            rope_theta=100000,
            tie_word_embeddings=True,
            num_key_value_heads=1,
            **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
        )
    ),
    "EXAONE-3.5-7.8B": Case(exaone(rope_scaling=LLAMA3, rope_theta=1e6)),
    "TinyLlama": Case(llama(num_key_value_heads=1)),
    "deepseek-coder": Case(llama(rope_scaling={"factor": 4.0, "type": "linear"}, rope_theta=100000)),
    "granite-code": Case(llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "Yarn-Llama-2": Case(llama(rope_scaling=YARN | {"finetuned": True}, auto_map={"AutoConfig": "c.C"})),
    "llama dynamic": Case(llama(rope_scaling={"type": "dynamic", "factor": 2.0})),
    "llama of transformers 5": Case(
        llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, dtype="float32")
    ),
    "llama with gelu": Case(llama(hidden_act="gelu_pytorch_tanh")),
    "Llama defaults of HF": Case(
        {k: v for k, v in llama().items() if k not in ("rms_norm_eps", "hidden_act")}
    ),
    "Qwen2-0.5B": Case(qwen2(tie_word_embeddings=True)),
    "Qwen2.5-7B": Case(qwen2(rope_scaling=None)),
    "Qwen2.5 yarn": Case(qwen2(rope_scaling=YARN, tie_word_embeddings=False)),
    "R1-Distill-Qwen": Case(qwen2(use_mrope=False)),
    "Qwen2 wide heads": Case(qwen2(head_dim=16)),
    "Qwen2 kv heads null": Case(qwen2(num_key_value_heads=None)),
    "Qwen3-0.6B": Case(qwen3(tie_word_embeddings=True)),
    "Qwen3-8B": Case(qwen3()),
    "Qwen3 yarn": Case(qwen3(rope_scaling=YARN | {"rope_type": "yarn"})),
    "Qwen3-30B-A3B": Case(qwen3_moe()),
    "Qwen3-Coder-30B-A3B": Case(
        qwen3_moe(qkv_bias=False, shared_expert_intermediate_size=0, use_qk_norm=True)
    ),
    "Qwen3-MoE of transformers 5": Case(qwen3_moe(num_experts=..., num_local_experts=8)),
    "Mixtral-8x7B": Case(mixtral()),
    "DeepSeek-V2": Case(deepseek(2)),
    "DeepSeek-V2-Lite": Case(deepseek(2, q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1)),
    "DeepSeek-V3": Case(deepseek(3, num_nextn_predict_layers=1)),
    "gpt-oss-20b in bf16": Case(GPT_OSS),
    "Kimi-K2": Case(
        deepseek(
            3,
            model_type="kimi_k2",
            auto_map={"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
            num_nextn_predict_layers=0,
            rope_scaling={
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16,
                "type": "yarn",
            },
        ),
        twin=deepseek(
            3,
            rope_scaling={
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16,
                "type": "yarn",
            },
        ),
    ),
    "DeepSeek-R1 in fp8": Case(deepseek(3, quantization_config=FP8["block"]), twin=deepseek(3), fp8="block"),
    "Qwen1.5-MoE-A2.7B": Case(
        decoder(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            hidden_act="silu",
            decoder_sparse_step=1,
            max_window_layers=21,
            moe_intermediate_size=24,
            norm_topk_prob=False,
            num_experts=6,
            num_experts_per_tok=2,
            output_router_logits=False,
            router_aux_loss_coef=0.001,
            shared_expert_intermediate_size=48,
            sliding_window=32768,
            use_sliding_window=False,
        )
    ),
    "OLMoE-1B-7B": Case(
        decoder(
            "OlmoeForCausalLM",
            "olmoe",
            hidden_act="silu",
            clip_qkv=None,
            norm_topk_prob=False,
            num_experts=6,
            num_experts_per_tok=2,
            rope_scaling=None,
            router_aux_loss_coef=0.01,
        )
    ),
    "ERNIE-4.5-21B-A3B": Case(
        decoder(
            "Ernie4_5_MoeForCausalLM",
            "ernie4_5_moe",
            hidden_act="silu",
            moe_capacity=[64, 64, 64],
            moe_gate="topk",
            moe_intermediate_size=24,
            moe_k=2,
            moe_layer_interval=1,
            moe_layer_start_index=1,
            moe_num_experts=6,
            moe_num_shared_experts=2,
            moe_use_aux_free=True,
            use_bias=False,
            use_rmsnorm=True,
        )
    ),
    "Mixtral-8x22B": Case(mixtral(router_jitter_noise=0.0, head_dim=16)),
    "gemma-3-1b": Case(gemma3()),
    "gemma-3-270m": Case(
        gemma3(
            _sliding_window_pattern=3,
            sliding_window_pattern=...,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            use_bidirectional_attention=False,
        )
    ),
    "gemma-3-4b": Case(gemma3_vision({})),
    "gemma-3-27b": Case(
        gemma3_vision(
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 8}
        )
    ),
    "gemma-3 without its text's model_type": Case(
        gemma3_vision({"model_type": "gemma3_text"}, tie_word_embeddings=True)
    ),
    "gemma-4-E2B": Case(gemma4({})),
    "gemma-4-26B-A4B": Case(gemma4(GEMMA4_EXPERTS)),
    "gemma-4, saved anew": Case(
        gemma4({"global_head_dim": 64, "per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32}}})
    ),
    "gemma-4 of eleven layers, saved anew": Case(
        gemma4(
            {"num_hidden_layers": 11, "layer_types": ["sliding_attention"] * 7 + GEMMA4_WHOLE}
            | {"per_layer_config": {f"{i:02}": {"head_dim": 32} for i in (7, 8, 10)}}
        )
    ),
    "gemma-4 of equal heads, saved anew": Case(gemma4({"global_head_dim": 64, "per_layer_config": {}})),
    "opt-125m": Case(
        {
            "_remove_final_layer_norm": False,
            "activation_dropout": 0.0,
            "activation_function": "relu",
            "architectures": ["OPTForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 2,
            "do_layer_norm_before": True,
            "dropout": 0.1,
            "ffn_dim": 40,
            "hidden_size": 32,
            "init_std": 0.02,
            "layerdrop": 0.0,
            "max_position_embeddings": 128,
            "model_type": "opt",
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "pad_token_id": 1,
            "prefix": "</s>",
            "torch_dtype": "float16",
            "transformers_version": "4.21.0.dev0",
            "use_cache": True,
            "vocab_size": 97,
            "word_embed_proj_dim": 32,
        }
    ),
    "GPT-J": Case(
        {
            "architectures": ["GPTJForCausalLM"],
            "activation_function": "gelu_new",
            "attn_pdrop": 0.0,
            "bos_token_id": 96,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gptj",
            "n_embd": 32,
            "n_head": 4,
            "n_inner": None,
            "n_layer": 3,
            "n_positions": 128,
            "rotary": True,
            "rotary_dim": 4,
            "scale_attn_weights": True,
            "summary_type": "cls_index",
            "tie_word_embeddings": False,
            "tokenizer_class": "GPT2Tokenizer",
            "transformers_version": "4.18.0.dev0",
            "vocab_size": 97,
        }
    ),
    "Falcon-7B": Case(FALCON | {"multi_query": True, "num_kv_heads": 4}),
    "Falcon-40B": Case(FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "BLOOM": Case(
        {
            "apply_residual_connection_post_layernorm": False,
            "architectures": ["BloomForCausalLM"],
            "attention_dropout": 0.0,
            "attention_softmax_in_fp32": True,
            "bias_dropout_fusion": True,
            "hidden_dropout": 0.0,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "masked_softmax_fusion": True,
            "model_type": "bloom",
            "n_embed": 32,
            "n_head": 4,
            "n_inner": None,
            "n_layer": 3,
            "num_attention_heads": 4,
            "offset_alibi": 100,
            "pretraining_tp": 4,
            "seq_length": 128,
            "skip_bias_add": True,
            "skip_bias_add_qkv": False,
            "slow_but_exact": False,
            "unk_token_id": 0,
            "use_cache": True,
            "vocab_size": 97,
        }
    ),
    "MPT-7B": Case(MPT, twin=MPT | {"architectures": ["MptForCausalLM"]}),
    "GPT-Neo": Case(
        {
            "activation_function": "gelu_new",
            "architectures": ["GPTNeoForCausalLM"],
            "attention_dropout": 0,
            "attention_layers": ["global", "local", "global", "local"],
            "attention_types": [[["global", "local"], 2]],
            "bos_token_id": 96,
            "embed_dropout": 0,
            "gradient_checkpointing": False,
            "hidden_size": 32,
            "initializer_range": 0.02,
            "intermediate_size": None,
            "layer_norm_epsilon": 1e-05,
            "max_position_embeddings": 128,
            "model_type": "gpt_neo",
            "num_heads": 4,
            "num_layers": 4,
            "resid_dropout": 0,
            "summary_activation": None,
            "summary_type": "cls_index",
            "tokenizer_class": "GPT2Tokenizer",
            "use_cache": True,
            "vocab_size": 97,
            "window_size": 16,
        }
    ),
    "CodeGen": Case(
        {
            "activation_function": "gelu_new",
            "architectures": ["CodeGenForCausalLM"],
            "attn_pdrop": 0.0,
            "layer_norm_epsilon": 1e-05,
            "model_type": "codegen",
            "n_ctx": 64,
            "n_embd": 32,
            "n_head": 4,
            "n_inner": None,
            "n_layer": 3,
            "n_positions": 128,
            "rotary_dim": 4,
            "scale_attn_weights": True,
            "summary_type": "cls_index",
            "tie_word_embeddings": False,
            "vocab_size": 97,
        }
    ),
    "Ling-mini-2.0": Case(
        USUAL
        | {
            "architectures": ["BailingMoeV2ForCausalLM"],
            "auto_map": {"AutoConfig": "configuration_bailing_moe_v2.BailingMoeV2Config"},
            "embedding_dropout": 0.0,
            "first_k_dense_replace": 1,
            "head_dim": 8,
            "hidden_size": 32,
            "intermediate_size": 40,
            "max_position_embeddings": 128,
            "max_window_layers": 20,
            "model_type": "bailing_moe",
            "moe_intermediate_size": 16,
            "moe_router_enable_expert_bias": True,
            "moe_shared_expert_intermediate_size": 16,
            "mtp_loss_scaling_factor": 0,
            "n_group": 4,
            "norm_topk_prob": True,
            "num_attention_heads": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "num_nextn_predict_layers": 0,
            "num_shared_experts": 1,
            "output_dropout": 0.0,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 600000,
            "routed_scaling_factor": 2.5,
            "router_dtype": "fp32",
            "score_function": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": 2,
            "use_bias": False,
            "use_qk_norm": True,
            "use_qkv_bias": False,
            "use_rmsnorm": True,
            "vocab_size": 97,
        }
    ),
    "DeepSeek-V3.2": Case(
        deepseek(3, q_lora_rank=24)
        | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
        | {"index_topk": 16, "index_n_heads": 8, "index_head_dim": 16}
    ),
    "Hy4-preview": Case(hunyuan_v4()),
    "LongCat-Flash": Case(
        {
            key: value
            for key, value in (TINY | USUAL).items()
            if key not in ("num_hidden_layers", "num_key_value_heads", "intermediate_size", "hidden_act")
        }
        | LATENT
        | {
            "architectures": ["LongcatFlashForCausalLM"],
            "attention_bias": False,
            "attention_method": "MLA",
            "auto_map": {"AutoConfig": "configuration_longcat_flash.LongcatFlashConfig"},
            "expert_ffn_hidden_size": 24,
            "ffn_hidden_size": 320,
            "head_dim": 8,
            "mla_scale_kv_lora": True,
            "mla_scale_q_lora": True,
            "model_type": "longcat_flash",
            "moe_topk": 3,
            "n_routed_experts": 8,
            "num_layers": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e7,
            "routed_scaling_factor": 6.0,
            "zero_expert_num": 1,
            "zero_expert_type": "identity",
        }
    ),
    "A.X-K2": Case(
        TINY
        | USUAL
        | PICKED
        | {
            "architectures": ["AXK2ForCausalLM"],
            "attention_output_gate": True,
            "first_k_dense_replace": 1,
            "gated_norm": True,
            "gated_norm_rank": 4,
            "model_type": "axk2",
            "moe_layer_freq": 1,
            "n_group": 2,
            "num_key_value_heads": 4,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "scoring_func": "sigmoid",
            "topk_group": 1,
            "topk_method": "noaux_tc",
        }
    ),
    "DeepSeek-V3.2 with its older word for its layers": Case(
        deepseek(3, q_lora_rank=24)
        | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
        | {"layer_types": ["deepseek_sparse_attention"] * 3, "index_topk": 16}
        | {"index_n_heads": 8, "index_head_dim": 16}
    ),
    "DeepSeek-V4": Case(deepseek_v4()),
    "DeepSeek-V4 by its newer keys": Case(
        deepseek_v4(**dict.fromkeys(("compress_ratios", "num_hash_layers", "qk_rope_head_dim"), ...))
        | {"layer_types": ["sliding_attention", "compressed_sparse_attention", "compressed_sparse_attention"]}
        | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}}
        | {"mlp_layer_types": ["hash_moe", "moe", "moe"], "partial_rotary_factor": 0.5}
    ),
    "Llama-4-Maverick's text": Case(
        USUAL | llama4({"moe_layers": None})["text_config"] | {"architectures": ["Llama4ForCausalLM"]}
    ),
    "Llama 4 without chunks": Case(
        USUAL
        | llama4({"attention_chunk_size": None})["text_config"]
        | {"architectures": ["Llama4ForCausalLM"]}
    ),
    "bge-small": Case(encoder("Bert", "bert", id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})),
    "MiniLM-L6": Case(encoder("Bert", "bert", _name_or_path="nreimers/MiniLM-L6-H384-uncased")),
    "bert-base-multilingual": Case(
        encoder(
            "Bert",
            "bert",
            directionality="bidi",
            pooler_fc_size=768,
            pooler_num_attention_heads=12,
            pooler_num_fc_layers=3,
            pooler_size_per_head=128,
            pooler_type="first_token_transform",
        )
    ),
    "multilingual-e5": Case(
        encoder(
            "XLMRoberta",
            "xlm-roberta",
            pad_token_id=1,
            type_vocab_size=1,
            output_past=True,
            layer_norm_eps=1e-5,
        )
    ),
    "roberta-base": Case(
        encoder("Roberta", "roberta", pad_token_id=1, type_vocab_size=1, layer_norm_eps=1e-5)
    ),
    "distilbert-base": Case(DISTILBERT),
    "bert gelu_new": Case(encoder("Bert", "bert", hidden_act="gelu_new")),
}

GEMMA3N: Config = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "audio_config": None,
    "audio_soft_tokens_per_image": 188,
    "audio_token_id": 96,
    "boa_token_id": 95,
    "boi_token_id": 94,
    "eos_token_id": [1, 93],
    "image_token_id": 92,
    "model_type": "gemma3n",
    "text_config": {key: value for key, value in TINY.items() if key != "intermediate_size"}
    | {
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_lr_multiplier": 1.0,
        "altup_num_inputs": 4,
        "final_logit_softcapping": 30.0,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 12,
        "intermediate_size": [48] * 4,
        "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "model_type": "gemma3n_text",
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 8,
        "torch_dtype": "float32",
        "vocab_size_per_layer_input": 90,
    },
    "torch_dtype": "float32",
    "vision_config": None,
    "vision_soft_tokens_per_image": 256,
}
GEMMA3N_TEXT = {"architectures": ["Gemma3nForCausalLM"], "tie_word_embeddings": True}
RUN["gemma-3n-E2B"] = Case(GEMMA3N, twin=GEMMA3N_TEXT | GEMMA3N["text_config"])  # towers need timm
GEMMA4_12B = gemma4(
    {"model_type": "gemma4_unified_text", "use_bidirectional_attention": "vision"},
    architectures=["Gemma4UnifiedForConditionalGeneration"],
    model_type="gemma4_unified",
)
for unknown in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block"):
    del GEMMA4_12B["text_config"][unknown]
RUN["gemma-4-12B"] = Case(GEMMA4_12B)
RUN["gpt2"] = Case(
    {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 128,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 128,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 97,
    }
)

RUN["pythia"] = Case(
    {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    | {
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_act": "gelu",
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-05,
        "model_type": "gpt_neox",
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "use_cache": True,
        "use_parallel_residual": True,
    }
)

RUN["Kimi-Linear-48B-A3B"] = Case(
    {key: value for key, value in TINY.items() if key not in ("max_position_embeddings", "num_hidden_layers")}
    | {
        "architectures": ["KimiLinearForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
        "bos_token_id": 1,
        "dtype": "float32",
        "eos_token_id": 2,
        "first_k_dense_replace": 1,
        "head_dim": 6,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "kv_lora_rank": 16,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "head_dim": 8,
            "kda_layers": [1, 2, 3],
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 128,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 16,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "pad_token_id": 0,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": 8,
    }
)
MIMO = decoder(
    "MiMoV2FlashForCausalLM",
    "mimo_v2_flash",
    add_full_attention_sink_bias=False,
    add_swa_attention_sink_bias=True,
    attention_chunk_size=8,
    attention_value_scale=0.707,
    head_dim=24,
    hybrid_layer_pattern=[0, 1, 1, 1],
    moe_layer_freq=[0, 1, 1, 1],
    moe_intermediate_size=16,
    n_routed_experts=8,
    n_shared_experts=None,
    num_experts_per_tok=2,
    num_hidden_layers=4,
    num_key_value_heads=2,
    rope_theta=5000000,
    routed_scaling_factor=None,
    scoring_func="sigmoid",
    sliding_window=8,
    sliding_window_size=8,
    swa_head_dim=24,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=4,
    swa_rope_theta=10000,
    swa_v_head_dim=16,
    topk_method="noaux_tc",
    v_head_dim=16,
)
RUN["MiMo-V2-Flash"] = Case(MIMO)
for _name, _config in PUBLISHED.items():
    RUN[_name] = Case(_config)
RUN["K-EXAONE"] = Case(K_EXAONE, twin=K_EXAONE | {"architectures": ["ExaoneMoeForCausalLM"]})
RUN["MiniMax-M2"] = Case(MINIMAX_M2, fp8="block", twin=MINIMAX_M2 | {"quantization_config": None})
MINIMAX = TINY | {
    "attn_type_list": [0, 1, 0],
    "head_dim": 16,
    "hidden_act": "silu",
    "layernorm_full_attention_alpha": 1.5,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 1.5,
    "layernorm_linear_attention_beta": 0.5,
    "layernorm_mlp_alpha": 1.2,
    "layernorm_mlp_beta": 1.0,
    "model_type": "minimax_m1",
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "postnorm": True,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000,
    "rotary_dim": 16,
    "router_jitter_noise": 0.0,
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "torch_dtype": "float32",
}
RUN["MiniMax-M1"] = Case(
    MINIMAX | {"architectures": ["MiniMaxM1ForCausalLM"]},
    twin={key: value for key, value in MINIMAX.items() if not key.startswith("layernorm")}
    | {
        "architectures": ["MiniMaxForCausalLM"],
        "full_attn_alpha_factor": 1.5,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_attn_alpha_factor": 1.5,
        "linear_attn_beta_factor": 0.5,
        "mlp_alpha_factor": 1.2,
        "model_type": "minimax",
    },
)
RUN["LFM2-1.2B"] = Case(
    TINY
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": True,
        "block_dim": 32,
        "block_ff_dim": 192,
        "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0,
        "block_multiple_of": 16,
        "block_norm_eps": 1e-05,
        "block_out_init_scale": 1.0,
        "block_use_swiglu": True,
        "block_use_xavier_init": True,
        "bos_token_id": 1,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 32,
        "conv_dim_out": 32,
        "conv_use_xavier_init": True,
        "eos_token_id": 7,
        "full_attn_idxs": [2],
        "initializer_range": 0.02,
        "model_type": "lfm2",
        "norm_eps": 1e-05,
        "num_heads": 4,
        "pad_token_id": 0,
        "rope_theta": 1000000.0,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_pos_enc": True,
    }
)
RUN["LFM2-VL-1.6B"] = Case(
    {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "do_image_splitting": True,
        "downsample_factor": 2,
        "encoder_patch_size": 16,
        "image_token_id": 90,
        "max_image_tokens": 256,
        "max_num_patches": 1024,
        "max_pixels_tolerance": 2.0,
        "max_tiles": 10,
        "min_image_tokens": 64,
        "min_tiles": 2,
        "model_type": "lfm2_vl",
        "projector_bias": True,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 24,
        "text_config": RUN["LFM2-1.2B"].config,
        "tile_size": 512,
        "torch_dtype": "float32",
        "use_image_special_tokens": True,
        "use_thumbnail": True,
        "vision_config": {
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 16,
            "intermediate_size": 24,
            "model_type": "siglip2_vision_model",
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
        },
        "vision_feature_layer": -1,
    }
)
RUN["LFM3-1.7B"] = Case(
    TINY
    | {
        "architectures": ["Lfm3ForCausalLM"],
        "conv_L_cache": 7,
        "conv_bias": False,
        "dtype": "float32",
        "head_dim": 16,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "model_type": "lfm3",
        "norm_eps": 1e-05,
        "pad_token_id": 0,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.5,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 8,
        "use_attention_gate": True,
        "use_sandwich_norm": True,
    }
)
RUN["LFM2-8B-A1B"] = Case(
    TINY
    | {
        "architectures": ["Lfm2MoeForCausalLM"],
        "bos_token_id": 1,
        "conv_L_cache": 3,
        "conv_bias": False,
        "dtype": "float32",
        "eos_token_id": 7,
        "initializer_range": 0.02,
        "layer_types": ["conv", "conv", "full_attention"],
        "model_type": "lfm2_moe",
        "moe_intermediate_size": 24,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_dense_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "pad_token_id": 0,
        "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0,
        "use_cache": True,
        "use_expert_bias": True,
    }
)

RUN["deepseek-moe-16b"] = Case(
    TINY
    | USUAL
    | {
        "architectures": ["DeepseekForCausalLM"],
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "model_type": "deepseek",
        "moe_intermediate_size": 24,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_experts_per_tok": 3,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
    }
)
PIXTRAL = {
    "head_dim": 8,
    "hidden_act": "gelu",
    "hidden_size": 16,
    "image_size": 28,
    "intermediate_size": 16,
    "model_type": "pixtral",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 14,
}


def mistral3(**text: Any) -> Config:
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": TINY
        | {"head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-05, "sliding_window": None}
        | text,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vision_config": PIXTRAL,
        "vision_feature_layer": -1,
    }


RUN["Mistral-Small-3.2"] = Case(mistral3(model_type="mistral", rope_theta=1e9))
RUN["Ministral-3-8B"] = Case(
    mistral3(
        model_type="ministral3",
        rope_parameters={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 1e6,
            "rope_type": "yarn",
            "type": "yarn",
        },
    )
)
MISTRAL4 = {key: value for key, value in mistral3(model_type="mistral4").items() if key != "text_config"} | {
    "text_config": TINY
    | {
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "kv_lora_rank": 16,
        "model_type": "mistral4",
        "moe_intermediate_size": 16,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-06,
        "rope_interleave": True,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
            "type": "yarn",
        },
        "topk_group": 1,
        "v_head_dim": 8,
    }
}
RUN["Mistral-Small-4"] = Case(MISTRAL4)
RUN["Phi-3.5-MoE"] = Case(
    TINY
    | USUAL
    | {
        "architectures": ["PhimoeForCausalLM"],
        "attention_bias": True,
        "eos_token_id": 32000,
        "hidden_dropout": 0.0,
        "input_jitter_noise": 0.01,
        "lm_head_bias": True,
        "model_type": "phimoe",
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "original_max_position_embeddings": 128,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [1.1] * 4,
            "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 128,
            "short_factor": [1.0] * 4,
            "short_mscale": 1.243163121016122,
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.01,
        "sliding_window": 128,
        "tie_word_embeddings": False,
    }
)
RUN["Qwen3-Next-80B-A3B"] = Case(qwen3_next())

MAMBA: Config = {
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "mamba_proj_bias": False,
    "tie_word_embeddings": False,
}
TIME_STEPS: Config = {"time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001}
FALCON_H1 = other(
    "FalconH1ForCausalLM",
    "falcon_h1",
    **MAMBA,
    **TIME_STEPS,
    attention_bias=False,
    attention_in_multiplier=1.0,
    attention_out_multiplier=0.9375,
    attn_layer_indices=None,
    embedding_multiplier=5.656854249492381,
    head_dim=8,
    key_multiplier=0.390625,
    lm_head_multiplier=0.01953125,
    mamba_d_ssm=64,
    mamba_norm_before_gate=False,
    mamba_rms_norm=False,
    mamba_use_mlp=True,
    mlp_bias=False,
    mlp_expansion_factor=8,
    mlp_multipliers=[0.8838834764831844, 0.5859375],
    num_logits_to_keep=1,
    projectors_bias=False,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=100000000000.0,
    ssm_in_multiplier=1.25,
    ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    ssm_out_multiplier=0.23570226039551587,
    time_step_rank="auto",
)
GRANITE_4 = other(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    **MAMBA | {"tie_word_embeddings": True},
    attention_bias=False,
    attention_multiplier=0.125,
    embedding_multiplier=12,
    init_method="mup",
    layer_types=["mamba", "attention", "mamba"],
    logits_scaling=6,
    normalization_function="rmsnorm",
    num_experts_per_tok=2,
    num_local_experts=5,
    output_router_logits=False,
    position_embedding_type="nope",
    residual_multiplier=0.22,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=10000,
    router_aux_loss_coef=0.01,
    shared_intermediate_size=24,
)
NEMOTRON_H = other(
    "NemotronHForCausalLM",
    "nemotron_h",
    **TIME_STEPS,
    attention_bias=False,
    attention_head_dim=8,
    chunk_size=128,
    conv_kernel=4,
    expand=2,
    head_dim=8,
    hidden_dropout=0.0,
    hybrid_override_pattern="M-*-",
    layer_norm_epsilon=1e-5,
    mamba_head_dim=16,
    mamba_hidden_act="silu",
    mamba_num_heads=4,
    mamba_proj_bias=False,
    mlp_bias=False,
    mlp_hidden_act="relu2",
    n_groups=2,
    num_hidden_layers=4,
    num_logits_to_keep=1,
    rescale_prenorm_residual=True,
    residual_in_fp32=False,
    rms_norm_eps=1e-5,
    sliding_window=None,
    ssm_state_size=8,
    tie_word_embeddings=False,
    time_step_limit=[0.0, float("inf")],
    time_step_rank=256,
    use_bias=False,
    use_conv_bias=True,
    use_mamba_kernels=True,
)
MAMBA_2: Config = {
    **{key: value for key, value in USUAL.items() if key != "attention_dropout"},
    **TIME_STEPS,
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "chunk_size": 256,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "layer_norm_epsilon": 1e-5,
    "n_groups": 2,
    "norm_before_gate": True,
    "num_heads": 4,
    "num_hidden_layers": 3,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "rms_norm": True,
    "state_size": 8,
    "tie_word_embeddings": False,
    "time_step_init_scheme": "random",
    "time_step_limit": [0.0, float("inf")],
    "time_step_rank": 256,
    "time_step_scale": 1.0,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 97,
}
MAMBA_1: Config = {
    **{key: value for key, value in USUAL.items() if key != "attention_dropout"},
    **{key: value for key, value in TIME_STEPS.items() if key != "time_step_limit"},
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "conv_kernel": 4,
    "d_inner": 64,
    "d_model": 32,
    "expand": 2,
    "fused_add_norm": True,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "layer_norm_epsilon": 1e-5,
    "n_layer": 3,
    "num_hidden_layers": 3,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "rms_norm": True,
    "ssm_cfg": {},
    "state_size": 8,
    "time_step_init_scheme": "random",
    "time_step_rank": 2,
    "time_step_scale": 1.0,
    "use_bias": False,
    "use_conv_bias": True,
}
FALCON_MAMBA: Config = {
    **{
        key: value
        for key, value in MAMBA_1.items()
        if not key.startswith(("d_", "n_", "fused", "rms", "ssm"))
    },
    "architectures": ["FalconMambaForCausalLM"],
    "model_type": "falcon_mamba",
    "mixer_rms_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_mambapy": False,
}
RUN |= {
    "Falcon-H1-1.5B": Case(FALCON_H1),
    "granite-4.0-h-tiny": Case(GRANITE_4),
    "granite-4.0-micro": Case(
        GRANITE_4
        | {"layer_types": ["attention"] * 3, "num_local_experts": 0, "num_experts_per_tok": 0}
        | {"position_embedding_type": "rope", "mamba_n_heads": 4}
    ),
    "Bamba-9B": Case(
        other(
            "BambaForCausalLM",
            "bamba",
            **MAMBA,
            attention_bias=False,
            attn_layer_indices=[1],
            attn_rotary_emb=4,
            mlp_bias=False,
            num_logits_to_keep=1,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
        )
    ),
    "Jamba-v0.1": Case(
        other(
            "JambaForCausalLM",
            "jamba",
            attn_layer_offset=1,
            attn_layer_period=3,
            calc_logits_for_entire_prompt=False,
            expert_layer_offset=1,
            expert_layer_period=2,
            mamba_conv_bias=True,
            mamba_d_conv=4,
            mamba_d_state=8,
            mamba_dt_rank=5,
            mamba_expand=2,
            mamba_inner_layernorms=True,
            mamba_proj_bias=False,
            n_ctx=128,
            num_experts=4,
            num_experts_per_tok=2,
            num_logits_to_keep=1,
            output_router_logits=False,
            rms_norm_eps=1e-6,
            router_aux_loss_coef=0.001,
            sliding_window=None,
            tie_word_embeddings=False,
            use_mamba_kernels=True,
        )
    ),
    "Nemotron-H-8B": Case(NEMOTRON_H),
    "Nemotron-3-Nano-30B-A3B": Case(
        NEMOTRON_H
        | {"hybrid_override_pattern": "ME*E", "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1}
        | {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "topk_group": 1}
        | {"num_experts_per_tok": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
        | {"norm_eps": 1e-5, "partial_rotary_factor": 1.0, "rope_theta": 10000}
        | {"mamba_ssm_cache_dtype": "float32"}
    ),
    "Mamba-Codestral-7B": Case(MAMBA_2),
    "mamba-130m": Case(MAMBA_1),
    "falcon-mamba-7b": Case(FALCON_MAMBA),
}

RUN["ModernBERT-base"] = Case(
    {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    | {
        "architectures": ["ModernBertModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 81,
        "classifier_activation": "gelu",
        "classifier_bias": False,
        "classifier_dropout": 0.0,
        "classifier_pooling": "mean",
        "cls_token_id": 81,
        "decoder_bias": True,
        "deterministic_flash_attn": False,
        "embedding_dropout": 0.0,
        "eos_token_id": 82,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "gradient_checkpointing": False,
        "hidden_activation": "gelu",
        "initializer_cutoff_factor": 2.0,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-05,
        "local_attention": 16,
        "local_rope_theta": 10000.0,
        "mlp_bias": False,
        "mlp_dropout": 0.0,
        "model_type": "modernbert",
        "norm_bias": False,
        "norm_eps": 1e-05,
        "pad_token_id": 83,
        "position_embedding_type": "absolute",
        "sep_token_id": 82,
        "torch_dtype": "float32",
    }
)
EMBEDDING_GEMMA = {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3TextModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "dtype": "float32",
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"],
    "max_position_embeddings": 128,
    "model_type": "gemma3_text",
    "num_attention_heads": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 14,
    "transformers_version": "4.57.0.dev0",
    "use_bidirectional_attention": True,
    "use_cache": True,
    "vocab_size": 97,
}
RUN["embeddinggemma-300m"] = Case(EMBEDDING_GEMMA)
EUROBERT = {
    "architectures": ["EuroBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "modeling_eurobert.EuroBertModel"},
    "bos_token": "<|begin_of_text|>",
    "bos_token_id": 80,
    "clf_pooling": "late",
    "eos_token": "<|end_of_text|>",
    "eos_token_id": 81,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_dropout": 0.0,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "mask_token": "<|mask|>",
    "mask_token_id": 82,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "eurobert",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "pad_token": "<|end_of_text|>",
    "pad_token_id": 81,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 250000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "vocab_size": 97,
}
RUN["EuroBERT-210m"] = Case(EUROBERT | {"architectures": ["EuroBertModel"]})
RUN["nomic-embed-text-v1.5"] = Case(
    {
        "activation_function": "swiglu",
        "architectures": ["NomicBertModel"],
        "attn_pdrop": 0.0,
        "causal": False,
        "embd_pdrop": 0.0,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-12,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "model_type": "nomic_bert",
        "n_embd": 32,
        "n_head": 4,
        "n_inner": 40,
        "n_layer": 2,
        "n_positions": 128,
        "parallel_block": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "resid_pdrop": 0.0,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "scale_attn_by_inverse_layer_idx": False,
        "type_vocab_size": 2,
        "use_rms_norm": False,
        "vocab_size": 97,
    },
    twin={
        "hidden_size": 32,
        "intermediate_size": 40,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "vocab_size": 97,
    },
)
RUN["gte-multilingual-base"] = Case(
    encoder("Gte", "gte", pad_token_id=1, type_vocab_size=1)
    | {"rope_parameters": {"rope_theta": 160000.0, "rope_type": "default"}}
)

# Doctored, with keys that HF honours, or ignores because they change nothing.
HONOURED: dict[str, Case] = {
    **{
        f"Qwen3-Next with {changes}": Case(qwen3_next(**changes))
        for changes in (
            {
                "layer_types": ["full_attention", "linear_attention", "linear_attention"],
                "mlp_only_layers": [0],
            },
            {"partial_rotary_factor": 1.0, "norm_topk_prob": False, "linear_conv_kernel_dim": 2},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            {"full_attention_interval": 2, "decoder_sparse_step": 2, "tie_word_embeddings": True},
        )
    },
    "Mistral-7B-v0.1": Case(
        decoder("MistralForCausalLM", "mistral", hidden_act="silu", rms_norm_eps=1e-5, sliding_window=16)
    ),
    "Phi-4-mini without LongRoPE": Case(
        decoder(
            "Phi3ForCausalLM",
            "phi3",
            attention_bias=False,
            embd_pdrop=0.0,
            pad_token_id=0,
            resid_pdrop=0.0,
            hidden_act="silu",
            num_attention_heads=2,
            partial_rotary_factor=0.75,
            rope_scaling=None,
            rms_norm_eps=1e-5,
            sliding_window=262144,
            original_max_position_embeddings=128,
        )
    ),
    "granite-3.3": Case(
        decoder(
            "GraniteForCausalLM",
            "granite",
            attention_bias=False,
            attention_multiplier=0.0625,
            embedding_multiplier=12.0,
            hidden_act="silu",
            logits_scaling=8.0,
            mlp_bias=False,
            residual_multiplier=0.22,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            rope_theta=10000000.0,
            tie_word_embeddings=True,
        )
    ),
    "gemma-2-2b": Case(
        decoder(
            "Gemma2ForCausalLM",
            "gemma2",
            attention_bias=False,
            attn_logit_softcapping=50.0,
            cache_implementation="hybrid",
            final_logit_softcapping=30.0,
            head_dim=16,
            hidden_act="gelu_pytorch_tanh",
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=16,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            sliding_window=8,
        )
    ),
    "stablelm-2": Case(
        decoder(
            "StableLmForCausalLM",
            "stablelm",
            hidden_act="silu",
            hidden_dropout=0.0,
            layer_norm_eps=1e-5,
            partial_rotary_factor=0.25,
            qk_layernorm=False,
            rope_scaling=None,
            rope_theta=10000,
            tie_word_embeddings=False,
            use_parallel_residual=False,
            use_qkv_bias=True,
        )
    ),
    "stablelm-2-12b": Case(
        decoder(
            "StableLmForCausalLM",
            "stablelm",
            hidden_act="silu",
            hidden_dropout=0.0,
            layer_norm_eps=1e-5,
            partial_rotary_factor=0.25,
            qk_layernorm=True,
            rope_scaling=None,
            rope_theta=10000,
            tie_word_embeddings=False,
            use_parallel_residual=True,
            use_qkv_bias=False,
        )
    ),
    "command-r-plus": Case(
        decoder(
            "CohereForCausalLM",
            "cohere",
            hidden_act="silu",
            layer_norm_eps=1e-5,
            logit_scale=0.8333333333333334,
            rope_theta=75000000.0,
            use_qk_norm=True,
            tie_word_embeddings=True,
        )
    ),
    **{
        f"smollm3 windows {words}": Case(
            decoder(
                "SmolLM3ForCausalLM",
                "smollm3",
                use_sliding_window=True,
                sliding_window=8,
                pad_token_id=0,
                **changes,
            )
        )
        for words, changes in (
            ("where no layer rotates", {"no_rope_layers": [1, 0, 1]}),
            ("by interval", {"no_rope_layer_interval": 2, "max_window_layers": 28}),
            (
                "by layer",
                {
                    "no_rope_layers": [0, 1, 1],
                    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                },
            ),
        )
    },
    "cohere2 full everywhere": Case(
        decoder("Cohere2ForCausalLM", "cohere2", sliding_window=8, layer_types=["full_attention"] * 3)
    ),
    **{
        f"{model_type} {words}": Case(decoder(name, model_type, pad_token_id=0, **changes))
        for name, model_type, words, changes in (
            (
                "Cohere2ForCausalLM",
                "cohere2",
                "every second layer",
                {"sliding_window": 8, "sliding_window_pattern": 2},
            ),
            (
                "Cohere2ForCausalLM",
                "cohere2",
                "with biases",
                {"sliding_window": 8, "attention_bias": True, "logit_scale": 0.5},
            ),
            (
                "Exaone4ForCausalLM",
                "exaone4",
                "every second layer",
                {"sliding_window": 8, "sliding_window_pattern": 2},
            ),
            (
                "Exaone4ForCausalLM",
                "exaone4",
                "full everywhere beside a window",
                {"sliding_window": 8, "layer_types": ["full_attention"] * 3, "head_dim": 16},
            ),
            (
                "GlmForCausalLM",
                "glm",
                "a quarter rotated",
                {"head_dim": 16, "partial_rotary_factor": 0.25, "attention_bias": False},
            ),
            (
                "Glm4ForCausalLM",
                "glm4",
                "all rotated",
                {"head_dim": 16, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-2},
            ),
            (
                "Olmo2ForCausalLM",
                "olmo2",
                "with biases",
                {"attention_bias": True, "rms_norm_eps": 1e-2, "rope_theta": 5e5},
            ),
            (
                "Dots1ForCausalLM",
                "dots1",
                "windows from a layer on",
                DOTS1 | {"sliding_window": 8, "max_window_layers": 1},
            ),
            (
                "Dots1ForCausalLM",
                "dots1",
                "in groups",
                DOTS1 | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
            ),
            ("GraniteMoeForCausalLM", "granitemoe", "with multipliers", GRANITE_MOE),
            (
                "GraniteMoeSharedForCausalLM",
                "granitemoeshared",
                "with multipliers",
                GRANITE_MOE | {"shared_intermediate_size": 24},
            ),
            ("MiniCPM3ForCausalLM", "minicpm3", "with scales", MINICPM3),
        )
    },
    "qwen2 with as many KV heads": Case(qwen2(num_key_value_heads=None)),
    "granite with as many KV heads": Case(
        TINY
        | USUAL
        | {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "num_key_value_heads": None}
    ),
    "ernie with heads that follow": Case(
        TINY
        | USUAL
        | {
            "architectures": ["Ernie4_5ForCausalLM"],
            "model_type": "ernie4_5",
            "head_dim": None,
            "num_key_value_heads": None,
        }
    ),
    "seed-oss with heads that follow": Case(
        TINY
        | USUAL
        | {
            "architectures": ["SeedOssForCausalLM"],
            "model_type": "seed_oss",
            "head_dim": None,
            "num_key_value_heads": None,
        }
    ),
    "deepseek without a latent of queries": Case(
        deepseek(3, q_lora_rank=None, num_nextn_predict_layers=None)
    ),
    "deepseek with a head_dim that says the same": Case(deepseek(3, head_dim=8)),
    "gpt-oss without a table of rope": Case(GPT_OSS | {"rope_scaling": None, "rope_parameters": None}),
    "Qwen2.5-1M within its chunks": Case(
        qwen2(
            dual_chunk_attention_config={
                "chunk_size": 96,
                "local_size": 16,
                "original_max_position_embeddings": 96,
            }
        )
    ),
    "qwen2 window by layer": Case(qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen2 window without max_window_layers": Case(
        {
            k: v
            for k, v in qwen2(use_sliding_window=True, sliding_window=8).items()
            if k != "max_window_layers"
        }
    ),
    "qwen3 layer types": Case(
        qwen3(
            use_sliding_window=True,
            sliding_window=8,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        )
    ),
    "qwen3_moe window of all layers": Case(qwen3_moe(use_sliding_window=True, sliding_window=8)),
    "qwen3_moe without model_type": Case(qwen3_moe(model_type=...)),
    "qwen3_moe unnormalized": Case(qwen3_moe(norm_topk_prob=False, decoder_sparse_step=2)),
    "qwen3_moe dense layers": Case(qwen3_moe(mlp_only_layers=[0, 2])),
    "mixtral window": Case(mixtral(sliding_window=8)),
    "gemma3 softcap": Case(gemma3(final_logit_softcapping=3.0)),
    "gemma3 activation twice": Case(gemma3(hidden_act="gelu_pytorch_tanh")),
    "gemma3 untied": Case(gemma3(tie_word_embeddings=False)),
    "gemma3 biases": Case(gemma3(attention_bias=True)),
    "gemma3 linear rope": Case(gemma3(rope_scaling={"rope_type": "linear", "factor": 8.0})),
    "qwen3 biases": Case(qwen3(attention_bias=True)),
    "llama yarn extras": Case(
        llama(rope_scaling=YARN | {"beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.5})
    ),
    "llama yarn untruncated": Case(llama(rope_scaling=YARN | {"truncate": False, "attention_factor": 1.5})),
    "llama yarn with one dim between": Case(
        llama(
            head_dim=32,
            rope_scaling=YARN | {"original_max_position_embeddings": 128, "beta_fast": 1, "beta_slow": 32},
        )
    ),
    "llama yarn of four positions": Case(
        llama(head_dim=32, rope_theta=100.0, rope_scaling=YARN | {"original_max_position_embeddings": 4})
    ),
    "gemma3 yarn": Case(gemma3(rope_scaling=YARN | {"rope_type": "yarn"})),
    "llama longrope": Case(llama(rope_scaling=LONGROPE)),
    "llama longrope, trained on more than its table says": Case(
        llama(
            rope_scaling=LONGROPE | {"original_max_position_embeddings": 64},
            original_max_position_embeddings=128,
        )
    ),
    "llama longrope beyond its training": Case(
        llama(rope_scaling=LONGROPE | {"original_max_position_embeddings": 32})
    ),
    "llama longrope beyond its training, said outside": Case(
        llama(
            rope_scaling=LONGROPE | {"original_max_position_embeddings": 128, "factor": 3.0},
            original_max_position_embeddings=32,
        )
    ),
    "Phi-4-mini": Case(
        decoder("Phi3ForCausalLM", "phi3", pad_token_id=0, partial_rotary_factor=0.75, hidden_size=64)
        | {
            "rope_scaling": LONGROPE
            | {"short_factor": [1.0] * 6, "long_factor": [1.0, 1.2, 2.0, 3.0, 9.0, 30.0]}
        }
        | {"original_max_position_embeddings": 32, "num_attention_heads": 4, "tie_word_embeddings": True}
    ),
    "phi3 longrope within its training": Case(
        decoder("Phi3ForCausalLM", "phi3", pad_token_id=0, rope_scaling=LONGROPE)
    ),
    "llama original positions outside": Case(
        llama(rope_scaling={"type": "yarn", "factor": 4.0}, original_max_position_embeddings=32)
    ),
    "llama rope_scaling before rope_parameters": Case(
        llama(
            rope_scaling={"type": "linear", "factor": 2.0},
            rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        )
    ),
    "gemma-3 with what transformers 5 writes beside its layers' ropes": Case(
        gemma3(
            rope_theta=...,
            rope_local_base_freq=...,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "rope_theta": None,
                "rope_type": "default",
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        )
    ),
    "MiMo whose ropes say no kind": Case(
        MIMO
        | {
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e6},
                "sliding_attention": {"rope_theta": 1e4},
            }
        }
    ),
    "MiMo with one rope for all layers": Case(
        MIMO | {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}, twin=MIMO
    ),
    "olmo3 of transformers 5, one rope for all layers": Case(
        PUBLISHED["Olmo-3-7B"]
        | {"rope_scaling": None, "rope_theta": 500000}
        | {"rope_parameters": {"rope_theta": 500000, "rope_type": "default"}}
    ),
    "llama yarn with nulls": Case(
        llama(rope_scaling=YARN | {"factor": None, "truncate": None, "beta_fast": None})
    ),
    "glm that rotates all dims": Case(
        decoder("GlmForCausalLM", "glm", head_dim=8, pad_token_id=0, partial_rotary_factor=None)
    ),
    "llama unknown metadata": Case(llama(made_by="somebody", license="none", data_card={"a": [1]})),
    "llama of any dtype": Case(llama(torch_dtype="auto"), twin=llama()),
    "bert is_causal null": Case(encoder("Bert", "bert", is_causal=None)),
    "bert width twice": Case(encoder("Bert", "bert", embedding_size=32)),
    "roberta width twice": Case(
        encoder("Roberta", "roberta", pad_token_id=1, type_vocab_size=1, embedding_size=32)
    ),
    **{
        f"{name} in fp8 by {layout}": Case(make(quantization_config=stored), twin=make(), fp8=layout)
        for name, make in (("llama", llama), ("qwen3", qwen3), ("qwen3_moe", qwen3_moe), ("gemma3", gemma3))
        for layout, stored in FP8.items()
    },
    "llama in fp8 by fbgemm": Case(
        llama(quantization_config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
        twin=llama(),
        fp8="channel",
    ),
    "llama in fp8 by blocks of compressed-tensors": Case(
        quantized(
            "compressed-tensors",
            format="float-quantized",
            config_groups={
                "group_0": FP8_GROUP
                | {"weights": FP8_GROUP["weights"] | {"strategy": "block", "block_structure": [16, 16]}}
            },
        ),
        twin=llama(),
        fp8="block",
    ),
    "llama by way of flash attention": Case(llama(use_flash_attention=True)),
    "llama keys that are off": Case(
        llama(sliding_window=None, logit_scale=1.0, alibi=False, num_experts=0, residual_multiplier=None)
    ),
    "distilbert by HF's other names": Case(
        {k: v for k, v in DISTILBERT.items() if k not in ("dim", "n_heads", "n_layers")}
        | {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    ),
}

# What HF computes otherwise, or nobody does: refused by the key.
REFUSED: dict[str, Case] = {
    **{
        f"Qwen3-Next {key} {value}": Case(qwen3_next(**{key: value}), key)
        for key, value in (
            ("linear_num_value_heads", 3),
            ("linear_num_key_heads", 0),
            ("linear_conv_kernel_dim", 1),
            ("linear_conv_kernel_dim", 1 << 20),
            ("linear_key_head_dim", 1 << 40),
            ("layer_types", ["linear_attention", "sliding_attention", "full_attention"]),
            ("layer_types", ["linear_attention"]),
            ("full_attention_interval", 0),
            ("full_attention_interval", 1.5),
            ("attention_bias", True),
            ("hidden_act", "gelu"),
            ("use_sliding_window", True),
            ("shared_expert_intermediate_size", -1),
            ("mamba_ssm_dtype", "bfloat16"),
            ("attn_output_gate", False),
        )
    },
    "deepseek with another head_dim": Case(deepseek(3, head_dim=2), "head_dim"),
    "deepseek with a head_dim of null": Case(deepseek(3, head_dim=None), "head_dim"),
    **{
        f"MiMo with another {key}": Case(MIMO | {key: value}, key)
        for key, value in (
            ("hybrid_layer_pattern", [0, 1, 1, 0]),
            ("moe_layer_freq", [1, 1, 1, 1]),
            ("swa_num_key_value_heads", 2),
            ("attention_chunk_size", 16),
        )
    },
    "K-EXAONE with another is_moe_layer": Case(K_EXAONE | {"is_moe_layer": [True] * 4}, "is_moe_layer"),
    "EXAONE 4 whose pattern nobody reads": Case(EXAONE_4 | {"layer_types": None}, "sliding_window_pattern"),
    "Hunyuan with experts of another width": Case(
        HUNYUAN_A13B | {"moe_intermediate_size": [40, 40, 40, 48]}, "moe_intermediate_size"
    ),
    "Hunyuan with other experts in one layer": Case(HUNYUAN_A13B | {"moe_topk": [2, 2, 2, 1]}, "moe_topk"),
    **{f"Hunyuan with {key}": Case(HUNYUAN_A13B | {key: True}, key) for key in ("use_cla", "use_mla")},
    "Command R7B with global layers first": Case(
        PUBLISHED["c4ai-command-r7b"] | {"order_of_interleaved_layers": "global_attn_first"},
        "order_of_interleaved_layers",
    ),
    "GLM-4.7-Flash with another head_dim": Case(
        decoder("Glm4MoeLiteForCausalLM", "glm4_moe_lite", head_dim=2), "head_dim"
    ),
    "GPT-2 that looks ahead": Case(
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "is_causal": False}, "is_causal"
    ),
    "Nemotron-H by its older names": Case(
        other("NemotronHForCausalLM", "nemotron_h", mamba_conv_bias=False), "mamba_conv_bias"
    ),
    "gte-Qwen2": Case(
        qwen2(is_causal=False, auto_map={"AutoModel": "modeling_qwen.Qwen2Model"}), "is_causal"
    ),
    **{
        f"{make.__name__} with a null that makes HF's attention bidirectional": Case(
            make(is_causal=None), "is_causal"
        )
        for make in (llama, qwen2, qwen3, qwen3_moe, mixtral, gemma3)
    },
    "Qwen2.5-1M without its chunks": Case(
        qwen2(dual_chunk_attention_config={"chunk_size": 64}), "dual_chunk_attention_config"
    ),
    "chunks within chunks": Case(
        qwen2(dual_chunk_attention_config={"chunk_size": 64, "local_size": 64}), "dual_chunk_attention_config"
    ),
    "other keys of chunks": Case(
        qwen2(dual_chunk_attention_config={"chunk_size": 64, "local_size": 8, "scale": 2}),
        "dual_chunk_attention_config",
    ),
    "no first layer with a window": Case(
        qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=None), "max_window_layers"
    ),
    "ELECTRA's embedding in BERT": Case(encoder("Bert", "bert", embedding_size=16), "embedding_size"),
    "fp8 groups a list": Case(quantized("fp8", config_groups=[1]), "config_groups"),
    "Qwen3 reads no norm": Case(qwen3(use_qk_norm=False), "use_qk_norm"),
    "Mistral's window in Llama": Case(llama(sliding_window=8), "sliding_window"),
    "Mistral's type in Llama": Case(llama(model_type="mistral"), "model_type"),
    "partial rotary": Case(llama(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "partial rotary inside": Case(
        llama(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor",
    ),
    "softcap in Llama": Case(llama(attn_logit_softcapping=30.0), "attn_logit_softcapping"),
    "softcap that HF's Gemma 3 ignores": Case(gemma3(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
    "logit_scale": Case(llama(logit_scale=0.0625), "logit_scale"),
    "residual_multiplier": Case(llama(residual_multiplier=0.22), "residual_multiplier"),
    "attention_multiplier": Case(llama(attention_multiplier=0.0156), "attention_multiplier"),
    "embedding_multiplier": Case(llama(embedding_multiplier=12), "embedding_multiplier"),
    "logits_scaling": Case(llama(logits_scaling=8), "logits_scaling"),
    "clip_qkv": Case(llama(clip_qkv=8.0), "clip_qkv"),
    "qk_layernorm": Case(llama(qk_layernorm=True), "qk_layernorm"),
    "no_rope_layers": Case(llama(no_rope_layers=[1, 1, 0]), "no_rope_layers"),
    "layer_types in Llama": Case(llama(layer_types=["full_attention"] * 3), "layer_types"),
    "per_layer_config": Case(llama(per_layer_config={"0": {"hidden_act": "gelu"}}), "per_layer_config"),
    "text_config in Llama": Case(llama(text_config={"hidden_size": 8}), "text_config"),
    "pruned heads": Case(encoder("Bert", "bert", pruned_heads={"0": [1]}), "pruned_heads"),
    "attention_bias in Mixtral": Case(mixtral(attention_bias=True), "attention_bias"),
    "norm_topk_prob in Mixtral": Case(mixtral(norm_topk_prob=False), "norm_topk_prob"),
    "mlp_bias in Qwen3": Case(qwen3(mlp_bias=True), "mlp_bias"),
    "shared experts": Case(qwen3_moe(shared_expert_intermediate_size=64), "shared_expert_intermediate_size"),
    "two numbers of experts": Case(qwen3_moe(num_local_experts=4), "num_local_experts"),
    "too many experts": Case(qwen3_moe(num_experts_per_tok=9), "num_experts_per_tok"),
    "linear attention": Case(qwen3(layer_types=["linear_attention"] * 3), "linear_attention"),
    "sliding without a window": Case(qwen3(layer_types=["sliding_attention"] * 3), "sliding_attention"),
    "layer types too few": Case(gemma3(layer_types=["full_attention"]), "layer_types"),
    "million layer types": Case(gemma3(layer_types=["full_attention"] * 1_000_000), "layer_types"),
    "embedding Gemma": Case(gemma3(use_bidirectional_attention=True), "use_bidirectional_attention"),
    "Gemma's own pattern": Case(
        gemma3(_sliding_window_pattern=2, sliding_window_pattern=...), "_sliding_window_pattern"
    ),
    "flat rope in Gemma": Case(gemma3(rope_parameters={"rope_theta": 1e5}), "rope_theta"),
    "flat rope in Gemma 4": Case(
        gemma4({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}), "move it into these"
    ),
    "flat yarn in OLMo 3": Case(
        PUBLISHED["Olmo-3-7B"]
        | {"rope_scaling": None, "rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 5e5}},
        "move it into these",
    ),
    "old type of rope in Gemma": Case(
        gemma3(rope_scaling={"type": "linear", "factor": 8.0}), "rope_scaling.type"
    ),
    "old yarn in Gemma": Case(gemma3(rope_scaling=YARN), "rope_scaling.type"),
    "old type beside a new table in Gemma": Case(
        gemma3(
            rope_scaling={"type": "linear", "factor": 8.0},
            rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        ),
        "rope_scaling.type",
    ),
    "untruncated yarn in Gemma": Case(
        gemma3(rope_scaling=YARN | {"rope_type": "yarn", "truncate": False}), "truncate"
    ),
    "untruncated yarn in Gemma's new table": Case(
        gemma3(rope_parameters={"full_attention": YARN | {"rope_type": "yarn", "truncate": False}}),
        "truncate",
    ),
    "hidden_act in Gemma": Case(gemma3(hidden_act="relu"), "hidden_act"),
    "ties inside that are none": Case(gemma3_vision({"tie_word_embeddings": "no"}), "tie_word_embeddings"),
    "GLM-5 that begins with what nobody picked": Case(
        decoder("GlmMoeDsaForCausalLM", "glm_moe_dsa", num_key_value_heads=4)
        | {"indexer_types": ["shared", "full", "shared"]},
        "indexer_types",
    ),
    **{
        f"Hy 4 with {key} {value}": Case(hunyuan_v4(**{key: value}), key)
        for key, value in (
            ("enable_ihc", False),
            ("gated_mla", False),
            ("learnable_sink", False),
            ("gating_type", "headwise"),
            ("swiglu_limit", 0),
        )
    },
    "OPT-350m": Case(
        {"architectures": ["OPTForCausalLM"], "model_type": "opt", "do_layer_norm_before": False},
        "do_layer_norm_before",
    ),
    "OPT with a narrow embedding": Case(
        {"architectures": ["OPTForCausalLM"], "model_type": "opt", "word_embed_proj_dim": 512},
        "word_embed_proj_dim",
    ),
    "GPT-J that rotates three dims": Case(
        {"architectures": ["GPTJForCausalLM"], "n_embd": 32, "n_head": 4, "rotary_dim": 3}, "rotary_dim"
    ),
    "Llama 4 with two experts a token": Case(llama4({"num_experts_per_tok": 2}), "num_experts_per_tok"),
    "Llama 4 with windows": Case(llama4({"layer_types": ["sliding_attention"] * 4}), "layer_types"),
    "Llama 4 with chunks of no size": Case(
        llama4({"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 4}),
        "attention_chunk_size",
    ),
    "MiMo with a KV head for each": Case(MIMO | {"num_key_value_heads": 4}, "num_key_value_heads"),
    "MiMo whose windows have other heads": Case(MIMO | {"swa_head_dim": 16}, "swa_head_dim"),
    "Gemma 4 that sees ahead": Case(
        gemma4({"use_bidirectional_attention": "all"}), "use_bidirectional_attention"
    ),
    "Gemma 4 that shares too much": Case(gemma4({"num_kv_shared_layers": 3}), "num_kv_shared_layers"),
    "Gemma 4 with a layer of its own": Case(
        gemma4({"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}}), "per_layer_config"
    ),
    "Gemma 4 with 3 KV heads": Case(gemma4({"num_key_value_heads": 3}), "num_key_value_heads"),
    "Gemma 4 wide and with experts": Case(
        gemma4(GEMMA4_EXPERTS | {"use_double_wide_mlp": True}), "use_double_wide_mlp"
    ),
    "a share of dims in Llama's kind of rope": Case(
        llama(rope_scaling={"rope_type": "proportional", "partial_rotary_factor": 2}), "partial_rotary_factor"
    ),
    "a size outside text_config": Case(gemma3_vision({}, num_attention_heads=4), "num_attention_heads"),
    "longrope with too few factors": Case(
        llama(rope_scaling=LONGROPE | {"long_factor": [2.0] * 3}), "long_factor"
    ),
    "mrope": Case(qwen2(rope_scaling={"type": "default", "mrope_section": [1, 1, 2]}), "mrope_section"),
    "yarn without a factor": Case(llama(rope_scaling={"type": "yarn"}), "factor"),
    "llama3 upside down": Case(llama(rope_scaling=LLAMA3 | {"high_freq_factor": 0.5}), "high_freq_factor"),
    "rope parameters by layer": Case(
        qwen3(rope_parameters={"full_attention": {"rope_type": "default"}}), "full_attention"
    ),
    "relu": Case(llama(hidden_act="relu"), "hidden_act"),
    "exact gelu": Case(llama(hidden_act="gelu"), "hidden_act"),
    "alibi": Case(encoder("Bert", "bert", position_embedding_type="alibi"), "position_embedding_type"),
    "relative positions": Case(
        encoder("Bert", "bert", position_embedding_type="relative_key"), "position_embedding_type"
    ),
    "bert as a decoder": Case(encoder("Bert", "bert", is_decoder=True), "is_decoder"),
    "quick gelu": Case(encoder("Bert", "bert", hidden_act="quick_gelu"), "hidden_act"),
    "distilbert eps": Case(DISTILBERT | {"layer_norm_eps": 1e-5}, "layer_norm_eps"),
    "distilbert twice": Case(DISTILBERT | {"hidden_size": 64}, "hidden_size"),
    "awq in another order": Case(
        quantized("awq", bits=4, group_size=128, version="gemv_new", zero_point=True), "version"
    ),
    "awq without zeros": Case(
        quantized("awq", bits=4, group_size=128, zero_point=False, version="gemv"), "zero_point"
    ),
    "gptq of 5 bits": Case(quantized("gptq", bits=5, group_size=128, desc_act=False, sym=True), "bits"),
    "gptq without groups": Case(quantized("gptq", bits=4, desc_act=False), "group_size"),
    "gptq of several sizes": Case(
        quantized("gptq", bits=4, group_size=128, dynamic={r"+:.*\.mlp\..*": {"bits": 7}}), "bits"
    ),
    "gptq of 8 bits for marlin": Case(
        quantized("gptq", bits=8, group_size=128, checkpoint_format="marlin"), "bits"
    ),
    "gptq for marlin in act-order": Case(
        quantized("gptq", bits=4, group_size=128, format="marlin", desc_act=True), "act-order"
    ),
    **{
        f"{method} with {key} {value}": Case(quantized(method, bits=4, group_size=128, **{key: value}), key)
        for method, key, value in (
            ("gptq", "format", "gptq_v3"),
            ("gptq", "adapter", {"name": "lora", "path": "eora", "rank": 64}),
            ("gptq", "rotation", "hadamard"),
            ("gptq", "pack_dtype", "int8"),
            ("awq", "format", "marlin_24"),
            ("awq", "lm_head", True),
        )
    },
    "gptq of two formats": Case(
        quantized("gptq", bits=4, group_size=128, format="gptq", checkpoint_format="gptq_v2"),
        "checkpoint_format",
    ),
    "fp8 of some layers": Case(quantized("fp8", modules_to_convert=["mlp"]), "modules_to_convert"),
    "fp8 with experts in int4": Case(quantized("fp8", expert_dtype="int4"), "expert_dtype"),
    "fp8 of compressed-tensors with rounded results": Case(
        llama(
            quantization_config=FP8["channel"]
            | {
                "config_groups": {
                    "g": {"weights": {"num_bits": 8, "type": "float"}, "output_activations": {"num_bits": 8}}
                }
            }
        ),
        "output_activations",
    ),
    "bitsandbytes of no bits": Case(quantized("bitsandbytes"), "load_in_4bit"),
    "bitsandbytes of old": Case(quantized(None, load_in_8bit=True, load_in_4bit=True), "load_in_4bit"),
    "hqq without settings": Case(
        quantized("hqq", quant_config={"weight_quant_params": {"group_size": 64}}), "nbits"
    ),
    "int4 of compressed-tensors without groups": Case(
        quantized("compressed-tensors", format="pack-quantized"), "config_groups"
    ),
    **{
        f"int4 of compressed-tensors: {words}": Case(
            quantized(
                "compressed-tensors",
                format="pack-quantized",
                config_groups={"group_0": PACKED | {key: value}},
            ),
            words,
        )
        for key, value, words in (
            ("targets", ["re:("], "is no regular expression"),
            ("targets", [], "targets"),
            ("output_activations", {"num_bits": 8, "type": "int"}, "output_activations"),
            ("format", "int-quantized", "format"),
            ("weights", {"num_bits": 1, "type": "int", "strategy": "channel"}, "weights"),
            ("weights", {"num_bits": 8, "type": "float", "strategy": "channel"}, "weights"),
            ("weights", {"num_bits": 4, "type": "int", "strategy": "tensor"}, "strategy"),
        )
    },
    **{
        f"int4 of compressed-tensors whose {key} is {value}": Case(
            quantized(
                "compressed-tensors",
                format="pack-quantized",
                config_groups={"group_0": PACKED | {"weights": PACKED["weights"] | {key: value}}},
            ),
            f"config_groups.group_0.weights: {key}",
        )
        for key, value in (
            ("rotation", "hadamard"),
            ("dynamic", True),
            ("dynamic", None),
            ("symmetric", None),
            ("num_bits", None),
            ("block_structure", [16, 16]),
            ("scale_dtype", "torch.float8_e4m3fn"),
            ("zp_dtype", "torch.float16"),
            ("group_size", 1.5),
            ("actorder", "random"),
            ("strategy", "tensor_group"),
        )
    },
    **{
        f"fp8 of {method} whose {key} of {part} is {value}": Case(
            quantized(
                method,
                **FP8_NAMES[method],
                config_groups={"group_0": FP8_GROUP | {part: FP8_GROUP[part] | {key: value}}},
            ),
            f"config_groups.group_0.{part}: {key}",
        )
        for method, part, key, value in (
            ("compressed-tensors", "weights", "rotation", "hadamard"),
            ("compressed-tensors", "weights", "dynamic", True),
            ("compressed-tensors", "weights", "symmetric", False),
            ("compressed-tensors", "weights", "strategy", "group"),
            ("compressed-tensors", "weights", "group_size", 128),
            ("compressed-tensors", "weights", "actorder", "group"),
            ("compressed-tensors", "weights", "scale_dtype", "torch.float8_e8m0fnu"),
            ("compressed-tensors", "input_activations", "num_bits", 4),
            ("compressed-tensors", "input_activations", "type", "int"),
            ("compressed-tensors", "input_activations", "dynamic", "local"),
            ("compressed-tensors", "input_activations", "strategy", "block"),
            ("compressed-tensors", "input_activations", "symmetric", False),
            ("compressed-tensors", "input_activations", "observer_of", "max"),
            ("modelopt", "weights", "num_bits", 4),
            ("modelopt", "weights", "block_sizes", {"-1": 16}),
            ("fp8", "weights", "type", "int"),
        )
    },
    "int4 of compressed-tensors in groups without a size": Case(
        quantized(
            "compressed-tensors",
            format="pack-quantized",
            config_groups={"group_0": PACKED | {"weights": PACKED["weights"] | {"group_size": None}}},
        ),
        "config_groups.group_0.weights lacks 'group_size'",
    ),
    "a group of compressed-tensors with another key": Case(
        quantized(
            "compressed-tensors",
            format="pack-quantized",
            config_groups={"group_0": PACKED | {"lora": {"r": 8}}},
        ),
        "config_groups.group_0: lora",
    ),
    "blocks of compressed-tensors that are no numbers": Case(
        quantized(
            "compressed-tensors",
            format="float-quantized",
            config_groups={"g": FP8_GROUP | {"weights": FP8_GROUP["weights"] | {"block_structure": "16x16"}}},
        ),
        "block_structure",
    ),
    "int8 of compressed-tensors without groups": Case(
        quantized("compressed-tensors", format="int-quantized"), "config_groups"
    ),
    "nvfp4 of scaled inputs": Case(quantized("modelopt", quant_algo="NVFP4_AWQ"), "NVFP4_AWQ"),
    "no layers of modelopt": Case(quantized("modelopt", quant_algo="MIXED_PRECISION"), "quantized_layers"),
    "sparse integers": Case(quantized("compressed-tensors", format="marlin-24"), "marlin-24"),
    "nvfp4 in groups of 32": Case(
        quantized(
            "compressed-tensors",
            format="nvfp4-pack-quantized",
            config_groups={"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
        ),
        "group_size",
    ),
    **{
        f"block of {size}": Case(quantized("fp8", weight_block_size=size), "weight_block_size")
        for size in (128, True, 1.5, 0, [128], [128, True], [0, 128], {"a": 1, "b": 2})
    },
    "rotated weights": Case(
        quantized(
            "compressed-tensors", format="float-quantized", transform_config={"config_groups": {"u": {}}}
        ),
        "transform_config",
    ),
    "sparse weights": Case(
        quantized(
            "compressed-tensors", format="float-quantized", sparsity_config={"format": "sparse-24-bitmask"}
        ),
        "sparsity_config",
    ),
    "int8 under the name of floats": Case(
        quantized(
            "compressed-tensors",
            format="float-quantized",
            config_groups={"group_0": {"weights": {"type": "int", "num_bits": 8}}},
        ),
        "config_groups",
    ),
    "eetq inside text_config": Case(gemma3_vision({"quantization_config": {"quant_method": "eetq"}}), "eetq"),
    "old key of compressed-tensors": Case(
        llama(compression_config={"quant_method": "compressed-tensors", "format": "marlin-24"}), "marlin-24"
    ),
    "two quantizations": Case(
        quantized("fp8") | {"compression_config": {"quant_method": "awq"}}, "compression_config"
    ),
    "mxfp4": Case(quantized("mxfp4"), "mxfp4"),
    "torchao": Case(quantized("torchao"), "quant_type"),
    "hqq": Case(quantized("hqq"), "quant_config"),
    "eetq of a mixture": Case(mixtral(quantization_config={"quant_method": "eetq"}), "eetq"),
    "mlx": Case(llama(quantization={"bits": 4, "group_size": 64}), "quantization"),
    "awq of an encoder": Case(
        encoder("Bert", "bert", quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128}),
        "quantization_config",
    ),
    "layers 1e9": Case(llama(num_hidden_layers=10**9), "num_hidden_layers"),
    "no layers": Case(llama(num_hidden_layers=0), "num_hidden_layers"),
    "width 2^40": Case(llama(hidden_size=1 << 40), "hidden_size"),
    "negative width": Case(llama(hidden_size=-32), "hidden_size"),
    "width in words": Case(llama(hidden_size="wide"), "hidden_size"),
    "half a head": Case(llama(num_attention_heads=2.5), "num_attention_heads"),
    "heads true": Case(llama(num_attention_heads=True), "num_attention_heads"),
    "no heads": Case(llama(num_attention_heads=0), "num_attention_heads"),
    "kv heads -1": Case(llama(num_key_value_heads=-1), "num_key_value_heads"),
    "kv heads 3": Case(llama(num_key_value_heads=3), "num_key_value_heads"),
    "more heads than width": Case(llama(num_attention_heads=64, num_key_value_heads=64), "head_dim"),
    "odd head_dim": Case(llama(head_dim=7), "head_dim"),
    "huge vocabulary": Case(llama(vocab_size=1 << 60), "vocab_size"),
    "eps 0": Case(llama(rms_norm_eps=0), "rms_norm_eps"),
    "eps NaN": Case(llama(rms_norm_eps=float("nan")), "rms_norm_eps"),
    "theta 0": Case(llama(rope_theta=0), "rope_theta"),
    "theta infinite": Case(llama(rope_theta=float("inf")), "rope_theta"),
    "factor -1": Case(llama(rope_scaling={"type": "linear", "factor": -1}), "factor"),
    "rope_scaling in words": Case(llama(rope_scaling="linear"), "rope_scaling"),
    "rope type a list": Case(llama(rope_scaling={"type": ["linear"], "factor": 2}), "linear"),
    "tied in words": Case(llama(tie_word_embeddings="yes"), "tie_word_embeddings"),
    "activation a list": Case(llama(hidden_act=["silu"]), "hidden_act"),
    "no positions": Case(llama(max_position_embeddings=0), "max_position_embeddings"),
    "dtype int3": Case(llama(torch_dtype="int3"), "torch_dtype"),
    "text_config in words": Case(gemma3_vision({}, text_config="none"), "text_config"),
    "text_config inside text_config": Case(gemma3_vision({"text_config": {"hidden_size": 1}}), "text_config"),
    "quantization in words": Case(llama(quantization_config="awq"), "quantization_config"),
    "query scalar 0": Case(gemma3(query_pre_attn_scalar=0), "query_pre_attn_scalar"),
    "padding beyond the vocabulary": Case(encoder("Roberta", "roberta", pad_token_id=-1), "pad_token_id"),
    "no types": Case(encoder("Bert", "bert", type_vocab_size=0), "type_vocab_size"),
    "EmbeddingGemma that sees one way": Case(
        EMBEDDING_GEMMA | {"use_bidirectional_attention": False}, "use_bidirectional_attention"
    ),
    "EmbeddingGemma that classifies": Case(
        EMBEDDING_GEMMA | {"architectures": ["Gemma3TextForSequenceClassification"]},
        "Gemma3TextModel is",
    ),
    "EuroBERT that classifies": Case(
        EUROBERT | {"architectures": ["EuroBertForSequenceClassification"]}, "EuroBertModel is"
    ),
    "EuroBERT in threes": Case(EUROBERT | {"num_key_value_heads": 3}, "must divide the heads"),
    "Gemma 3n with an odd head": Case(
        GEMMA3N | {"text_config": GEMMA3N["text_config"] | {"head_dim": 7}}, "even head_dim"
    ),
    "EmbeddingGemma with an odd head": Case(EMBEDDING_GEMMA | {"head_dim": 15}, "head_dim must be even"),
    "architectures a string": Case(llama(architectures="LlamaForCausalLM"), "architectures"),
    "architectures of numbers": Case(llama(architectures=[1]), "architectures"),
    **{
        f"{name} {key}": Case(decoder(name, model_type, **{key: value}), key)
        for name, model_type, key, value in (
            ("Phi3ForCausalLM", "phi3", "partial_rotary_factor", 0.1),
            ("Starcoder2ForCausalLM", "starcoder2", "mlp_type", "gated"),
            ("SmolLM3ForCausalLM", "smollm3", "no_rope_layers", [1, 0]),
            ("GraniteSWAForCausalLM", "granite_swa", "layer_rope_theta", [1e4]),
            ("GraniteMoeSWAForCausalLM", "granitemoe_swa", "layer_rope_theta", [1e4, True, 0]),
            ("SmolLM3ForCausalLM", "smollm3", "max_window_layers", 1),
            ("Cohere2ForCausalLM", "cohere2", "rotary_pct", 0.5),
            ("Cohere2ForCausalLM", "cohere2", "use_qk_norm", True),
            ("Exaone4ForCausalLM", "exaone4", "sliding_window_pattern", "LLLG"),
            ("Exaone4ForCausalLM", "exaone4", "attention_bias", True),
            ("GlmForCausalLM", "glm", "mlp_bias", True),
            ("Dots1ForCausalLM", "dots1", "use_sliding_window", True),
            ("GraniteMoeForCausalLM", "granitemoe", "shared_intermediate_size", 24),
            ("MiniCPM3ForCausalLM", "minicpm3", "partial_rotary_factor", 0.5),
            ("Olmo2ForCausalLM", "olmo2", "clip_qkv", 8.0),
            ("Olmo2ForCausalLM", "olmo2", "sliding_window", 8),
            ("Exaone4ForCausalLM", "exaone4", "sliding_window_pattern", 0),
            ("GemmaForCausalLM", "gemma", "use_bidirectional_attention", True),
            ("MistralForCausalLM", "mistral", "attention_bias", True),
            ("GraniteForCausalLM", "granite", "residual_multiplier", 0),
            ("HyperCLOVAXForCausalLM", "hyperclovax", "logits_scaling", 0),
            ("ArceeForCausalLM", "arcee", "hidden_act", "xielu"),
            ("ApertusForCausalLM", "apertus", "hidden_act", "silu"),
            ("PhiForCausalLM", "phi", "qk_layernorm", True),
            ("MiniMaxM2ForCausalLM", "minimax_m2", "attn_type_list", [1, 0, 1]),
            ("MiniMaxM2ForCausalLM", "minimax_m2", "shared_intermediate_size", 64),
            ("SolarOpenForCausalLM", "solar_open", "first_k_dense_replace", 1),
            ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", "moe_topk", [1, 2, 1]),
            ("HYV3ForCausalLM", "hy_v3", "mlp_layer_types", ["dense"]),
        )
    },
    **{
        f"GPT-2 with {key}": Case(RUN["gpt2"].config | {key: value}, key)
        for key, value in (("add_cross_attention", True), ("n_ctx", 4096), ("n_head", 5), ("rope_theta", 1e4))
    },
    **{
        f"{model_type} without a window": Case(
            decoder(name, model_type, sliding_window=None, layer_types=["full_attention"] * 3),
            "sliding_window",
        )
        for name, model_type in (
            ("Cohere2ForCausalLM", "cohere2"),
            ("Gemma2ForCausalLM", "gemma2"),
            ("Gemma3ForCausalLM", "gemma3_text"),
            ("GptOssForCausalLM", "gpt_oss"),
        )
    },
    **{
        f"Phi3 {kind}": Case(decoder("Phi3ForCausalLM", "phi3", rope_scaling=scaling, pad_token_id=0), kind)
        for kind, scaling in (
            ("linear", {"type": "linear", "factor": 2.0}),
            ("dynamic", {"type": "dynamic", "factor": 2.0}),
            ("yarn", YARN),
            ("llama3", LLAMA3),
        )
    },
    **{
        f"{name} tied or not": Case(config, "tie_word_embeddings")
        for name, config in (
            ("llama", llama(tie_word_embeddings=None)),
            ("gemma3", gemma3(tie_word_embeddings=None)),
            ("gemma3 with a tower", gemma3_vision({}, tie_word_embeddings=None)),
        )
    },
    **{
        name: Case(other(name, model_type, **changes), name)
        for name, model_type, changes in (
            ("FalconForCausalLM", "falcon", {"alibi": False}),
            ("MptForCausalLM", "mpt", {"d_model": 64}),
            ("BitNetForCausalLM", "bitnet", {"hidden_act": "relu2"}),
            ("Mamba2ForCausalLM", "mamba2", {"hidden_size": None}),
            ("RwkvForCausalLM", "rwkv", {"hidden_size": None}),
            ("LongcatFlashForCausalLM", "longcat_flash", {"num_hidden_layers": None}),
            ("NewModel", "new", {"position_embedding_type": "rope"}),
            ("JinaBertForMaskedLM", "bert", {"position_embedding_type": "alibi"}),
        )
    },
    "Bamba rotates half": Case(RUN["Bamba-9B"].config | {"attn_rotary_emb": 8}, "attn_rotary_emb"),
    "Falcon-H1 with layers of attention": Case(FALCON_H1 | {"attn_layer_indices": [1]}, "attn_layer_indices"),
    "Falcon-H1 without MLPs": Case(FALCON_H1 | {"mamba_use_mlp": False}, "mamba_use_mlp"),
    "Granite 4, layer norms": Case(GRANITE_4 | {"normalization_function": "layernorm"}, "normalization_fun"),
    "Nemotron, all of a head": Case(PUBLISHED["Nemotron-4-340B"] | {"rope_percent": 1.0}, "rope_percent"),
    "Nemotron-H, another eps": Case(NEMOTRON_H | {"rms_norm_eps": 1e-6}, "rms_norm_eps"),
    "Nemotron-H, windows": Case(NEMOTRON_H | {"sliding_window": 8}, "sliding_window"),
    "Mamba 2, another width": Case(MAMBA_2 | {"intermediate_size": 96}, "intermediate_size"),
    "Mamba, another width": Case(MAMBA_1 | {"intermediate_size": 96, "d_inner": 96}, "intermediate_size"),
    "Mamba, settings of old": Case(MAMBA_1 | {"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg"),
    "Mamba 2, plain gates": Case(MAMBA_2 | {"rms_norm": False}, "rms_norm"),
    "Nemotron-H, no float": Case(NEMOTRON_H | {"time_step_limit": [0.0, 10**400]}, "time_step_limit"),
    "Mellum, a base beside its tables": Case(
        PUBLISHED["Mellum2-12B-A2.5B"] | {"rope_theta": 7e4}, "rope_theta 70000.0 is not supported"
    ),
    "Mistral 4, a share of another head": Case(
        MISTRAL4 | {"text_config": MISTRAL4["text_config"] | {"head_dim": 8}}, "head_dim"
    ),
    "DeepSeek V4, whole heads rotated": Case(
        deepseek_v4(rope_scaling=..., rope_parameters={"main": V4_PART, "compress": {"rope_theta": 1e4}}),
        "partial_rotary_factor",
    ),
    "DeepSeek V4, proportional": Case(
        deepseek_v4(
            rope_scaling=...,
            rope_parameters={"main": V4_PART, "compress": V4_PART | {"rope_type": "proportional"}},
        ),
        "other kinds than proportional",
    ),
    "Ling 3, biases": Case(
        other("BailingHybridForCausalLM", "bailing_hybrid", attention_bias=True), "attention_bias"
    ),
}
