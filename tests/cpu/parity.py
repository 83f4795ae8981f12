"""The table docs/parity.md: of each architecture tiny random checkpoints in several layouts, whose greedy
tokens and their logprobs are compared with transformers', float32 on the CPU.

    python tests/cpu/parity.py [ARCHITECTURE ...] [--write docs/parity.md]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from checkpoints import DELTA_NET, SMALL, TIE, Eager, random_prompts, save_checkpoint

from sgla.hub import source as files
from sgla.loading.load import load_model
from sgla.model.families import FAMILIES
from sgla.model.generic import probe
from sgla.model.generic_spec import FACTS

NEW = 64  # greedy tokens
MOST = 1e-3  # nats, between two logprobs of a token
PROMPTS = random_prompts([5, 40])
LINEAR = {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1}
EVERY_HEAD = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64}
WINDOW = {"sliding_window": 7}
SLIDES = WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1}
LATENT = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
MORE_LATENT = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "v_head_dim": 24}
PARTS = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}
DELTA = DELTA_NET | {"num_hidden_layers": 4}
DELTA_HEADS = HEADS | {"linear_num_key_heads": 3, "linear_num_value_heads": 3}
SHARED = {"shared_expert_intermediate_size": 72}
DELTA_KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"]
CONV = {"layer_types": ["conv", "full_attention", "conv"]}
SSM = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
KINDS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
GROWING = YARN | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
COMPRESSED = "compressed_sparse_attention"
FAST = {"rope_type": "default", "rope_theta": 100.0}
ALONE = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "max_position_embeddings"), ...)
ALONE |= {"intermediate_size": ...}  # no attention and no MLPs
TIED = {"tie_word_embeddings": True}


class Layouts(NamedTuple):
    """What all layouts of an architecture share; then what the second, with other heads, the third, with
    other windows or another rope, and ``more`` have in place of the usual."""

    shared: dict[str, Any] = {}
    heads: dict[str, Any] = HEADS
    other: dict[str, Any] = {"rope_parameters": LINEAR}
    more: tuple[dict[str, Any], ...] = ()


GPT2 = {"intermediate_size": ..., "num_key_value_heads": ...}
MPT = dict.fromkeys(
    ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"), ...
)
LAYOUTS: dict[str, Layouts] = {
    "llama": Layouts(other={"rope_parameters": YARN}),
    "qwen2": Layouts(other=WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": Layouts(heads=HEADS | {"head_dim": 24}),
    "mistral": Layouts(other=WINDOW),
    "phi3": Layouts(other=WINDOW | {"rope_parameters": FAST | {"partial_rotary_factor": 0.5}}),
    "granite": Layouts({"attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 3.0}),
    "granite_swa": Layouts(
        WINDOW | {"attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 3.0} | TIED,
        other=SLIDES | {"layer_rope_theta": [500.0, 0, 1e4], "rope_parameters": LINEAR},
    ),
    "hyperclovax": Layouts({"attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.3}),
    "smollm3": Layouts(other={"no_rope_layers": [0, 1, 1]}),
    "seed_oss": Layouts({"head_dim": 16}),
    "helium": Layouts({"head_dim": 8}, heads=EVERY_HEAD | {"head_dim": 16}),
    "ernie4_5": Layouts({"head_dim": 16}, other={"use_bias": True}),
    "glm": Layouts({"head_dim": 16}, other={"rope_parameters": FAST | {"partial_rotary_factor": 0.25}}),
    "glm4": Layouts({"head_dim": 16}, other={"rope_parameters": FAST | {"partial_rotary_factor": 0.25}}),
    "llama4_text": Layouts(
        {"num_local_experts": 5, "head_dim": 8, "attention_chunk_size": 16, "num_hidden_layers": 4},
        other={"interleave_moe_layer_step": 2, "no_rope_layers": [0, 1, 1, 1], "floor_scale": 12},
    ),
    "mimo": Layouts(other=WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "exaone": Layouts(heads=HEADS | {"head_dim": 24}),
    "exaone4": Layouts(WINDOW, other=SLIDES),
    "olmo3": Layouts(WINDOW, other=SLIDES | {"rope_parameters": PARTS}),
    "ministral": Layouts({"head_dim": 8}, other=WINDOW),
    "cwm": Layouts({"head_dim": 8}, other=SLIDES),
    "hunyuan_v1_dense": Layouts(
        {"head_dim": 16}, other={"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}}
    ),
    "ministral3": Layouts(
        {"head_dim": 8, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}}, other=WINDOW
    ),
    "apertus": Layouts({"head_dim": 8}, other={"rope_parameters": YARN}),
    "gemma3_text": Layouts({"head_dim": 16} | TIED, other=SLIDES | {"rope_parameters": PARTS}),
    "gemma4_text": Layouts(
        SLIDES
        | {"head_dim": 8, "global_head_dim": 16, "vocab_size_per_layer_input": 311}
        | {"hidden_size_per_layer_input": 12}
        | TIED,
        other={"num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]},
    ),
    "gemma3n_text": Layouts(
        SLIDES
        | {"head_dim": 8, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 300}
        | {"laurel_rank": 8, "num_kv_shared_layers": 0, "altup_num_inputs": 3}
        | TIED,
        other={"num_hidden_layers": 5, "num_kv_shared_layers": 2, "intermediate_size": [64, 96, 96, 96, 64]}
        | {"activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.8, 0.0], "altup_active_idx": 1}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]},
    ),
    "gemma4_unified_text": Layouts(
        SLIDES | {"head_dim": 8, "global_head_dim": 16} | TIED,
        other={"num_hidden_layers": 5, "num_kv_shared_layers": 2, "attention_k_eq_v": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]},
    ),
    "gemma": Layouts({"head_dim": 16} | TIED),
    "gemma2": Layouts({"head_dim": 16, "query_pre_attn_scalar": 24} | TIED, other=SLIDES),
    "vaultgemma": Layouts({"head_dim": 8, "query_pre_attn_scalar": 24} | TIED, other=SLIDES),
    "stablelm": Layouts(
        {"head_dim": None},
        other={"rope_parameters": FAST | {"partial_rotary_factor": 0.5}},
        more=({"use_parallel_residual": True, "qk_layernorm": True},),
    ),
    "starcoder2": Layouts(TIED, other=WINDOW),
    "cohere": Layouts({"logit_scale": 0.5} | TIED, more=({"use_qk_norm": True},)),
    "cohere2": Layouts({"logit_scale": 0.5} | TIED, other=SLIDES),
    "phi": Layouts(heads=EVERY_HEAD, other={"rope_parameters": FAST | {"partial_rotary_factor": 0.25}}),
    "gpt2": Layouts(
        GPT2 | TIED,
        heads={"hidden_size": 64, "num_attention_heads": 4},
        other={"scale_attn_by_inverse_layer_idx": True, "n_inner": 80},
    ),
    "opt": Layouts(
        {"intermediate_size": ..., "num_key_value_heads": ..., "ffn_dim": 96} | TIED,
        heads={"hidden_size": 64, "num_attention_heads": 4},
        other={"activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "gptj": Layouts(
        GPT2 | {"rotary_dim": 4},
        heads={"hidden_size": 64, "num_attention_heads": 4},
        other={"rotary_dim": 8, "n_inner": 80},
    ),
    "gpt_neox": Layouts(
        {"num_key_value_heads": ...},
        heads={"hidden_size": 64, "num_attention_heads": 4, "use_parallel_residual": False},
        other={"rotary_pct": 0.5, "rotary_emb_base": 500.0},
    ),
    "gpt_neo": Layouts(
        {
            "num_key_value_heads": ...,
            "window_size": 9,
            "attention_types": [[["global", "local"], 1], [["local"], 1]],
        },
        heads={"hidden_size": 64, "num_attention_heads": 4},
        other={"attention_types": [[["local"], 3]], "intermediate_size": None},
    ),
    "codegen": Layouts(
        GPT2 | {"rotary_dim": 4, "hidden_size": 64, "num_attention_heads": 8},
        heads={"num_attention_heads": 4},
        other={"rotary_dim": 8, "n_inner": 80},
    ),
    "falcon": Layouts(
        GPT2 | TIED,
        heads={
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
        },
        other={"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "bloom": Layouts(
        GPT2 | TIED | {"max_position_embeddings": ...},
        heads={"hidden_size": 64, "num_attention_heads": 4},
        other={"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    ),
    "mpt": Layouts(
        GPT2 | MPT | {"d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 512} | TIED,
        heads={"d_model": 64, "n_heads": 4},
        other={"attn_config": {"clip_qkv": 0.4, "softmax_scale": 0.2}},
    ),
    "minicpm3": Layouts(LATENT | TIED, heads=MORE_LATENT),
    "deepseek_v2": Layouts(
        LATENT | ROUTED, heads=MORE_LATENT | {"q_lora_rank": None}, other={"rope_parameters": YARN}
    ),
    "deepseek_v3": Layouts(
        LATENT | ROUTED | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
        heads=MORE_LATENT | {"q_lora_rank": None},
        other={"rope_parameters": YARN | {"mscale_all_dim": 1.0}},
    ),
    "deepseek_v32": Layouts(
        LATENT | ROUTED | {"index_topk": 16, "index_n_heads": 12, "index_head_dim": 16, "n_group": 4},
        heads=MORE_LATENT,
        other={"rope_parameters": YARN},
    ),
    "hy_v4": Layouts(
        LATENT | ROUTED | {"index_topk": 16, "index_n_heads": 12, "index_head_dim": 16, "swiglu_limit": 0.5},
        heads=MORE_LATENT,
        other={"rope_parameters": YARN, "hc_mult": 2},
    ),
    "longcat_flash": Layouts(
        LATENT
        | {"num_hidden_layers": ..., "intermediate_size": ..., "num_layers": 2, "n_routed_experts": 6}
        | {
            "moe_topk": 3,
            "zero_expert_num": 3,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
            "head_dim": 8,
        },
        heads=MORE_LATENT,
        other={"rope_parameters": YARN, "zero_expert_num": 1, "num_layers": 1},
    ),
    "axk2": Layouts(
        LATENT | ROUTED | {"index_topk": 16, "index_n_heads": 12, "index_head_dim": 16, "gated_norm_rank": 6},
        heads=MORE_LATENT,
        other={"rope_parameters": YARN, "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v4": Layouts(
        {"num_key_value_heads": 1, "intermediate_size": ..., "head_dim": 32}
        | {"partial_rotary_factor": 0.25, "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 12}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {"index_topk": 16, "index_n_heads": 12, "index_head_dim": 16, "sliding_window": 16}
        | {"compress_rates": {COMPRESSED: 4, "heavily_compressed_attention": 16}}
        | {"layer_types": ["sliding_attention", "heavily_compressed_attention", COMPRESSED]},
        heads={"num_attention_heads": 4, "num_key_value_heads": 1, "o_groups": 4, "hc_mult": 2},
        other={"rope_parameters": YARN, "layer_types": [COMPRESSED] * 3, "num_hash_layers": 1},
    ),
    "glm_moe_dsa": Layouts(
        LATENT | ROUTED | {"index_topk": 16, "index_n_heads": 12, "index_head_dim": 16},
        heads=MORE_LATENT,
        other={"index_topk_freq": 2},
    ),
    "mistral4": Layouts(
        LATENT | ROUTED | {"first_k_dense_replace": 1, "rope_parameters": GROWING},
        heads=MORE_LATENT | {"n_group": 4, "topk_group": 2},
        other={"q_lora_rank": None, "qk_rope_head_dim": 16},
    ),
    "glm4_moe_lite": Layouts(LATENT | ROUTED, heads=MORE_LATENT),
    "youtu": Layouts(LATENT | TIED, heads=MORE_LATENT),
    "qwen3_moe": Layouts(EXPERTS, other={"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "mellum": Layouts(
        EXPERTS | {"head_dim": 8, "rope_parameters": PARTS},
        other=SLIDES | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "mixtral": Layouts({"num_local_experts": 5}, other=WINDOW),
    "deepseek": Layouts(
        ROUTED | {"first_k_dense_replace": 1}, other={"moe_layer_freq": 2, "norm_topk_prob": True}
    ),
    "phimoe": Layouts(
        {"num_local_experts": 5, "router_jitter_noise": 0.1, "lm_head_bias": True},
        other=WINDOW | {"attention_bias": True},
    ),
    "qwen2_moe": Layouts(
        EXPERTS | {"shared_expert_intermediate_size": 72},
        other=WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
    ),
    "olmoe": Layouts({"num_experts": 6, "num_experts_per_tok": 2}),
    "flex_olmo": Layouts({"num_experts": 6, "num_experts_per_tok": 2}),
    "gpt_oss": Layouts({"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3} | WINDOW),
    "glm4_moe": Layouts(ROUTED | {"head_dim": 8}, other={"use_qk_norm": True}),
    "dots1": Layouts(ROUTED | {"head_dim": 8}, other=WINDOW | {"max_window_layers": 1}),
    "granitemoe": Layouts({"num_local_experts": 5, "attention_multiplier": 0.2}),
    "granitemoe_swa": Layouts(
        WINDOW | {"num_local_experts": 5, "attention_multiplier": 0.2},
        other=SLIDES | {"shared_intermediate_size": 64, "layer_rope_theta": [500.0, 0, 1e4]},
    ),
    "granitemoeshared": Layouts({"num_local_experts": 5, "shared_intermediate_size": 64}),
    "ernie4_5_moe": Layouts({"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32}),
    "solar_open": Layouts(ROUTED | {"head_dim": 8}),
    "exaone_moe": Layouts(
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_shared_experts": 1}
        | {"head_dim": 8}
        | WINDOW,
        other=SLIDES,
    ),
    "minimax_m2": Layouts(
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}
    ),
    "mimo_v2_flash": Layouts(
        {key: value for key, value in ROUTED.items() if key != "n_shared_experts"}
        | {"num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 12}
        | WINDOW,
        other=SLIDES | {"mlp_layer_types": ["sparse", "dense", "sparse"], "rope_parameters": PARTS},
    ),
    "hunyuan_v1_moe": Layouts({"num_experts": 5, "moe_topk": 2, "head_dim": 8}),
    "hy_v3": Layouts(EXPERTS | {"head_dim": 8, "num_shared_experts": 1}),
    "qwen3_next": Layouts(
        DELTA | EXPERTS | SHARED,
        heads=DELTA_HEADS,
        other={"rope_parameters": FAST | {"partial_rotary_factor": 0.5}, "mlp_only_layers": [1]},
    ),
    "qwen3_5_text": Layouts(
        DELTA, heads=DELTA_HEADS, other={"rope_parameters": FAST | {"partial_rotary_factor": 1.0}} | TIED
    ),
    "granitemoehybrid": Layouts(
        SSM | KINDS | {"num_local_experts": 5, "shared_intermediate_size": 72, "logits_scaling": 3.0},
        other={"num_local_experts": 0, "position_embedding_type": "rope", "rope_parameters": LINEAR},
    ),
    "bamba": Layouts(SSM | {"attn_layer_indices": [1]}),
    "jamba": Layouts(
        {"num_experts": 5, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8},
        other={"attn_layer_offset": 2, "mamba_dt_rank": 5, "mamba_proj_bias": True},
    ),
    "falcon_h1": Layouts(
        SSM | {"mamba_d_ssm": None, "key_multiplier": 0.6, "ssm_multipliers": [0.5, 0.7, 1.2, 1.1, 0.9]},
        other={"rope_parameters": LINEAR, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron_h": Layouts(
        {"num_hidden_layers": ..., "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2}
        | {"ssm_state_size": 8, "head_dim": 8, "layers_block_type": ["mamba", "moe", "attention", "mlp"]}
        | {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56},
        heads=HEADS | {"n_groups": 1, "mamba_num_heads": 3, "mamba_head_dim": 16},
        other={"moe_latent_size": 32, "use_bias": True},
    ),
    "mamba2": Layouts(
        ALONE | {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 8},
        heads={"num_heads": 3, "head_dim": 32, "n_groups": 1, "state_size": 16},
        other=TIED | {"use_bias": True, "conv_kernel": 3},
    ),
    "mamba": Layouts(
        ALONE | {"state_size": 8},
        heads={"state_size": 12, "time_step_rank": 5, "expand": 3},
        other={"tie_word_embeddings": False, "use_bias": True, "conv_kernel": 3},
    ),
    "falcon_mamba": Layouts(
        ALONE | {"state_size": 8},
        heads={"state_size": 12, "time_step_rank": 5, "expand": 3},
        other={"tie_word_embeddings": False, "mixer_rms_eps": 1e-4, "use_conv_bias": False},
    ),
    "qwen3_5_moe_text": Layouts(
        DELTA | EXPERTS | SHARED | {"intermediate_size": ..., "num_local_experts": ...},
        heads=DELTA_HEADS,
        other={"rope_parameters": FAST | {"partial_rotary_factor": 0.5}, "linear_conv_kernel_dim": 3},
    ),
    "bailing_hybrid": Layouts(
        LATENT
        | {"q_lora_rank": None, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "n_group": 4}
        | {"topk_group": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "layer_group_size": 2},
        heads=MORE_LATENT,
        other={"kda_safe_gate": False, "short_conv_kernel_size": 3, "q_lora_rank": 24},
    ),
    "bailing_moe": Layouts(
        ROUTED
        | {"n_group": 4, "topk_group": 2, "head_dim": 8, "first_k_dense_replace": 1}
        | {"rope_parameters": FAST | {"partial_rotary_factor": 0.5}},
        other={"use_qk_norm": False, "attention_bias": True, "norm_topk_prob": False},
    ),
    "olmo_hybrid": Layouts(
        KINDS | {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 8},
        other={"rope_parameters": FAST, "linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 3},
    ),
    "minimax": Layouts(
        {"num_local_experts": 5, "head_dim": 16, "block_size": 16}
        | {"full_attn_alpha_factor": 1.5, "linear_attn_beta_factor": 0.7, "mlp_alpha_factor": 1.2},
        other={"rope_parameters": FAST, "sliding_window": 9}
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    ),
    "kimi_linear": Layouts(
        LATENT
        | {"q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 3, "num_local_experts": 8}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_hidden_layers": 5},
        heads=MORE_LATENT | {"linear_num_heads": 4},
        other={"linear_conv_kernel_dim": 3, "layer_types": DELTA_KINDS},
    ),
    "lfm2": Layouts(
        {"block_multiple_of": 16} | CONV | TIED, other={"rope_parameters": LINEAR, "conv_L_cache": 4}
    ),
    "lfm3": Layouts(
        {"head_dim": 16, "num_hidden_layers": 5, "sliding_window": 9},
        other={"layer_types": ["sliding_attention", "conv", "full_attention"] + ["conv"] * 2}
        | {"conv_L_cache": 4},
    ),
    "lfm2_moe": Layouts(
        {key: value for key, value in EXPERTS.items() if key != "num_local_experts"}
        | {"num_dense_layers": 1}
        | CONV,
        other={"use_expert_bias": False, "conv_bias": True},
    ),
}
MIXED = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 10}
FEW = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VALUES = {"kv_lora_rank": 16, "q_lora_rank": 16, "num_key_value_heads": 6, "v_head_dim": 12}
VALUES |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
# Through transformers' module. What some are here for stands behind them.
GENERIC: dict[str, dict[str, Any]] = {
    "afmoe": MIXED | FEW | {"head_dim": 8},  # gated attention, no rope in some layers
    "apertus1p5_text": {},
    "aria_text": {"moe_num_experts": 4},
    "axk1": LATENT | ROUTED | {"num_key_value_heads": 3, "n_group": 4, "topk_group": 2},
    "beam": {},
    "bitnet": {},
    "cohere2_moe": MIXED | FEW | {"head_dim": 8, "logit_scale": 0.5},
    "cohere_compass_text": MIXED | {"rope_parameters": PARTS},
    "ctrl": {},
    "flint": {"head_dim": 8},
    "gpt2": {},  # learned positions
    "gpt_bigcode": {},  # one KV head
    "gpt_neox": {},  # parallel blocks
    "granite_swa": MIXED | {"logits_scaling": 3.0, "attention_multiplier": 0.2},  # sinks
    "granitemoe_swa": MIXED | {"num_local_experts": 4},
    "kolibri1": {"head_dim": 8},
    "laguna": FEW | {"head_dim": 8},
    "modernbert-decoder": {"local_attention": 16},
    "moshi": {"head_dim": 8},
    "nanochat": {},  # soft cap of logits
    "olmo": {"clip_qkv": 0.3},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32},  # which native code refuses
    "persimmon": {},
    "vaultgemma": MIXED | {"head_dim": 8, "final_logit_softcapping": 5.0},
    "youtu": VALUES,  # v of another width than k
}
_GPT2_HEADS = {"hidden_size": 64, "num_attention_heads": 4}
# Their other heads, and what else the third layout has, where it is not the usual.
GENERIC_OTHERS: dict[str, tuple[dict[str, Any], ...]] = {
    "axk1": (MORE_LATENT, {"rope_parameters": YARN}),
    "beam": (HEADS, {"rope_parameters": PARTS}),
    "cohere_compass_text": (HEADS, {"sliding_window": 21}),
    "ctrl": (_GPT2_HEADS, {"dff": 64}),
    "gpt_bigcode": (_GPT2_HEADS | {"multi_query": False}, {"activation_function": "gelu"}),
    "laguna": (HEADS, {"rope_parameters": PARTS}),
    "modernbert-decoder": (EVERY_HEAD, {"local_attention": 8}),
    "persimmon": (EVERY_HEAD,),
}


class Row(NamedTuple):
    """``logprob``: the largest difference between two logprobs of a token, in nats. ``ties``: tokens that
    were not transformers' own, but as likely to ``checkpoints.TIE``."""

    architecture: str
    layout: str
    tokens: int
    ties: int
    logprob: float

    @property
    def holds(self) -> bool:
        return self.logprob <= MOST


def layouts(model_type: str, generic: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and changes of ``checkpoints.SMALL``."""
    if generic:
        made = Layouts(GENERIC[model_type], *GENERIC_OTHERS.get(model_type, ()))
    else:
        made = LAYOUTS.get(model_type, Layouts())
    shared, heads, other, more = made
    yield "6 heads", shared
    for changes in (heads, other, *more):
        yield said(changes), shared | changes


def said(changes: dict[str, Any]) -> str:
    """What a layout has, in a few words."""
    words = []
    if "num_attention_heads" in changes:
        kv = changes.get("num_key_value_heads", changes["num_attention_heads"])
        words.append(f"{changes['num_attention_heads']} heads, {kv} of k and v")
    if "sliding_window" in changes or "sliding_attention" in changes.get("layer_types", ()):
        words.append("windows")
    rope = changes.get("rope_parameters")
    if rope:
        rope = rope.get("full_attention", rope)
        share = f" of {rope['partial_rotary_factor']:g} of a head" if "partial_rotary_factor" in rope else ""
        words.append(f"{rope['rope_type']} rope{share}")
    rest = [key for key in changes if key not in {*SMALL, "rope_parameters", "layer_types", "sliding_window"}]
    return " and ".join(words) or ", ".join(rest)


@torch.no_grad()
def compare(model_type: str, layout: str, changes: dict[str, Any], generic: bool = False) -> Row:
    """By induction over the tokens: each is transformers' greedy choice after the same tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hf = save_checkpoint(folder, model_type, **deepcopy(changes))  # which transformers fills in
        source = files.open_source(folder)
        if generic:
            source = replace(source, config=source.config | {FACTS: probe(source.config, folder)})
        rows = Eager(load_model(source), page_size=16, native=True).generate(PROMPTS, NEW)
    ties, most = 0, 0.0
    for row in rows:
        expected = hf(torch.tensor([row.tokens[:-1]])).logits[0, -NEW:].float().log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(row.tokens[-NEW:])[:, None])[:, 0]
        behind = expected.max(-1).values - chosen
        assert behind.max() <= TIE, f"{model_type}, {layout}: another token than transformers'"
        ties += int((behind > 0).sum())
        most = max(most, float((chosen - torch.tensor(row.logprobs)).abs().max()))
    return Row(source.config["architectures"][0], layout, len(rows) * NEW, ties, most)


def native() -> dict[str, str]:
    """The architectures that make text, with what their configurations call them; not those whose tokens come
    in blocks, of which no greedy choice is the next one (``test_diffusion.py``)."""
    one = (
        name for name, family in FAMILIES.items() if family.model and "canvas_length" not in family.defaults
    )
    return {name: FAMILIES[name].types[0] for name in one}


class Comparison(NamedTuple):
    model_type: str
    layout: str
    changes: dict[str, Any]
    generic: bool

    def run(self) -> Row:
        return compare(*self)


def comparisons() -> Iterator[Comparison]:
    for model_type in native().values():
        for layout, changes in layouts(model_type):
            yield Comparison(model_type, layout, changes, False)
    for model_type in sorted(GENERIC.keys() - native().values()):
        for layout, changes in layouts(model_type, True):
            yield Comparison(model_type, layout, changes, True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_type", nargs="*", help="all, where none is named")
    parser.add_argument("--write", type=Path, help="where the table goes")
    args = parser.parse_args()
    found, failed = [], False
    for comparison in comparisons():
        if args.model_type and comparison.model_type not in args.model_type:
            continue
        try:
            row = comparison.run()
        except Exception as error:
            print(comparison.model_type, comparison.layout, f"{type(error).__name__}: {error}"[:400])
            failed = True
            continue
        failed = failed or not row.holds
        found.append((comparison.generic, row))
        print(row.architecture, row.layout, f"{row.logprob:.1e}", row.ties or "", flush=True)
    if args.write and not failed:
        args.write.write_text(page(found))
    return 1 if failed else 0


PAGE = """# Parity with transformers

Made by `python tests/cpu/parity.py --write docs/parity.md` with transformers {transformers} and torch
{torch}, float32 on a CPU. Of each architecture a tiny checkpoint with random weights is made in each layout,
and two prompts go on for {new} greedy tokens, as this server computes them. All are transformers' own greedy
choices after the same tokens. The numbers are the largest difference between two logprobs of a token, in
nats; at most {most:g} is allowed. `tests/cpu/test_parity.py` compares some of them anew, others each day;
`tests/cpu/test_random_configs.py` does with configurations that are drawn, hundreds each night.

## Architectures with code here: {native}

{first}

Transformers has no `DeepseekForCausalLM` (DeepSeek-MoE), `BailingMoeV2ForCausalLM`, `ExaoneForCausalLM` or
`MiMoForCausalLM`; their references are `tests/cpu/deepseek.py`, and its classes for GLM-4.5
(`tests/cpu/bailing.py`), Llama (`tests/cpu/exaone.py`) and Qwen2 (`tests/cpu/mimo.py`).
Encoders, and decoders that answer with vectors, are compared in `tests/cpu/test_pooling.py`.

## Through transformers' module: {generic}

Some of those that run through [transformers' own module](models.md#any-other-model), which no list bounds.

{second}
"""


def page(found: list[tuple[bool, Row]]) -> str:
    """The file, of the rows of both kinds."""
    ours = [row for generic, row in found if not generic]
    theirs = [row for generic, row in found if generic]
    return PAGE.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        new=NEW,
        most=MOST,
        native=len({row.architecture for row in ours}),
        generic=len({row.architecture for row in theirs}),
        first=table(ours),
        second=table(theirs),
    )


def table(found: list[Row]) -> str:
    lines = ["| architecture | layouts: largest difference |", "|---|---|"]
    for name, group in groupby(found, lambda row: row.architecture):
        cells = "; ".join(f"{row.layout}: {row.logprob:.1e}" for row in group)
        lines.append(f"| `{name}` | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
