"""Families with Mamba layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgla.model.families.keys import CAUSAL, DECODER, GRANITE, KV_HEADS, sizes
from sgla.model.families.mixtures import GRANITE_MOE
from sgla.model.family import Family
from sgla.model.gguf_words import BALANCED, BARE_NORM, ONE_NORM, SIGMOID, UNNAMED_NORM, Gguf

_MAMBA = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, float("inf")),
}
# By the names that ``mamba_spec`` reads.
_NAMES = {
    "mamba_n_heads": "num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "proj_bias",
}
_FALCON = {
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "projectors_bias": False,
    "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "mlp_multipliers": None,
    "key_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "ssm_multipliers": None,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
}
_NEMOTRON = {
    "layers_block_type": None,
    "hybrid_override_pattern": None,
    "layer_norm_epsilon": 1e-5,
    "head_dim": 128,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "n_groups": 8,
    "conv_kernel": 4,
    "expand": 2,
    "use_conv_bias": True,
    "use_bias": False,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "time_step_min": 0.001,
    "time_step_limit": (0.0, float("inf")),
    "chunk_size": 128,
    "mtp_layers_block_type": None,
    "mtp_hybrid_override_pattern": None,
}
_JAMBA = {
    "num_experts_per_tok": 2,
    "num_experts": 16,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_FIRST = {
    "vocab_size": 50280,
    "hidden_size": 768,
    "state_size": 16,
    "num_hidden_layers": 32,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "time_step_rank": "auto",
    "tie_word_embeddings": True,
    "intermediate_size": None,  # what follows from the width
}
_BAMBA_NAMES = (
    (".feed_forward.", ".mlp."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    ("model.final_layernorm.", "model.norm."),
)
_BACKBONE = (
    ("backbone.", "model."),
    ("model.embeddings.", "model.embed_tokens."),
    ("model.embedding.", "model.embed_tokens."),
    ("model.norm_f.", "model.norm."),
)


def _only(types: tuple[str, ...], defaults: dict[str, Any], when: Mapping[str, Any] | None = None) -> Family:
    """Of Mamba 1 and nothing else."""
    return Family(
        types,
        defaults,
        CAUSAL | {"rms_norm": True, "ssm_cfg": {}},
        {"d_inner": "intermediate_size", "d_model": "hidden_size", "n_layer": "num_hidden_layers"},
        names={"use_bias": "proj_bias", "layer_norm_epsilon": "rms_norm_eps"},
        model="sgla.model.nemotron_h:NemotronH",
        attention="sgla.model.mamba_spec:first_mamba",
        completed="sgla.model.mamba_spec:mambas_complete",
        renamed=_BACKBONE,
        gguf=(Gguf("mamba", BARE_NORM, scans="only", first_mamba=True, when=when or {}),),
    )


FAMILIES = {
    "GraniteMoeHybridForCausalLM": Family(
        ("granitemoehybrid",),
        DECODER
        | sizes(32000, 4096, 11008, 32, 32, 2048)
        | GRANITE
        | _MAMBA
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "position_embedding_type": None,
            "layer_types": None,
        },
        CAUSAL | {"normalization_function": "rmsnorm"},
        {"layers_block_type": "layer_types"},
        names=_NAMES,
        model="sgla.model.mamba:GraniteHybrid",
        nulls=(*KV_HEADS, "position_embedding_type"),
        attention="sgla.model.mamba_spec:granite",
        mixture="sgla.model.mamba_spec:granite_mixture",
        completed="sgla.model.mamba_spec:granite_complete",
        renamed=GRANITE_MOE,
        gguf=(
            Gguf("granitehybrid", permuted=True, scans="instead", when={"expert_count": True}),
            Gguf("granitehybrid", permuted=True, scans="instead", shared=True),
        ),
    ),
    "BambaForCausalLM": Family(
        ("bamba",),
        DECODER
        | sizes(128000, 4096, 14336, 32, 32, 262144, 8)
        | _MAMBA
        | {"rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False, "attn_layer_indices": None}
        | {"attn_rotary_emb": None},
        CAUSAL | {"partial_rotary_factor": 0.5},
        names=_NAMES,
        model="sgla.model.mamba:Hybrid",
        nulls=(*KV_HEADS, "attn_layer_indices", "attn_rotary_emb"),
        attention="sgla.model.mamba_spec:bamba",
        renamed=_BAMBA_NAMES,
    ),
    "JambaForCausalLM": Family(
        ("jamba",),
        sizes(65536, 4096, 14336, 32, 32, 262144, 8)
        | {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": None}
        | _JAMBA,
        CAUSAL | {"mamba_inner_layernorms": True, "sliding_window": None},
        {"num_local_experts": "num_experts", "n_ctx": "max_position_embeddings"},
        names={theirs: ours for theirs, ours in _NAMES.items() if theirs in _JAMBA},
        model="sgla.model.jamba:Jamba",
        attention="sgla.model.mamba_spec:jamba",
        mixture="sgla.model.mamba_spec:jamba_mixture",
        renamed=((".feed_forward.router.", ".mlp.gate."), *_BAMBA_NAMES),
        gguf=(Gguf("jamba", scans="instead", first_mamba=True),),
    ),
    "FalconH1ForCausalLM": Family(
        ("falcon_h1",),
        DECODER
        | sizes(128000, 4096, 14336, 32, 32, 8192, 8)
        | _MAMBA
        | _FALCON
        | {"rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False},
        CAUSAL | {"attn_layer_indices": None, "mamba_use_mlp": True},
        names=_NAMES,
        model="sgla.model.falcon_h1:FalconH1",
        nulls=(
            *KV_HEADS,
            *("mamba_d_ssm", "mamba_expand", "mlp_multipliers", "ssm_multipliers", "mamba_conv_bias"),
            *("mamba_proj_bias", "mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias"),
        ),
        attention="sgla.model.mamba_spec:falcon",
        completed="sgla.model.mamba_spec:falcon_complete",
        renamed=_BAMBA_NAMES,
        gguf=(Gguf("falcon-h1", ONE_NORM, scans="beside", tensors=UNNAMED_NORM),),
    ),
    "NemotronHForCausalLM": Family(
        ("nemotron_h",),
        sizes(131072, 4096, 21504, 4, 32, 4096, 8) | _NEMOTRON,
        CAUSAL
        | {"attention_bias": False, "mamba_proj_bias": False, "sliding_window": None}
        | {"n_shared_experts": 1, "rope_theta": 1e4, "mlp_hidden_act": "relu2", "hidden_act": "relu2"},
        {"attention_head_dim": "head_dim", "rms_norm_eps": "layer_norm_epsilon"}
        | {"norm_eps": "layer_norm_epsilon"}
        | {"mamba_conv_bias": "use_conv_bias", "mamba_d_conv": "conv_kernel", "mamba_expand": "expand"}
        | {"mamba_n_groups": "n_groups", "mamba_dt_limit": "time_step_limit"},
        names={
            "mamba_num_heads": "num_heads",
            "ssm_state_size": "state_size",
            "use_bias": "proj_bias",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        honoured=("mlp_hidden_act",),
        model="sgla.model.nemotron_h:NemotronH",
        nulls=("layers_block_type", "mtp_layers_block_type", "moe_latent_size"),
        attention="sgla.model.mamba_spec:nemotron",
        mixture="sgla.model.mamba_spec:nemotron_mixture",
        completed="sgla.model.mamba_spec:nemotron_complete",
        renamed=_BACKBONE,
        gated=False,
        gguf=(
            Gguf("nemotron_h", BARE_NORM, scans="alone", dense=True),
            Gguf("nemotron_h_moe", BARE_NORM, scans="alone", tensors=BALANCED, gating=(0, SIGMOID)),
        ),
    ),
    "Mamba2ForCausalLM": Family(
        ("mamba2",),
        {
            "num_heads": 128,
            "head_dim": 64,
            "vocab_size": 32768,
            "hidden_size": 4096,
            "state_size": 128,
            "num_hidden_layers": 64,
            "layer_norm_epsilon": 1e-5,
            "expand": 2,
            "conv_kernel": 4,
            "n_groups": 8,
            "use_bias": False,
            "use_conv_bias": True,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "time_step_limit": (0.0, float("inf")),
            "chunk_size": 256,
            "intermediate_size": None,  # what follows from the width
            "norm_before_gate": True,  # which no class reads: it stands behind
        },
        CAUSAL | {"rms_norm": True},
        names={
            "head_dim": "mamba_head_dim",
            "use_bias": "proj_bias",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        model="sgla.model.nemotron_h:NemotronH",
        nulls=("intermediate_size", "norm_before_gate"),
        attention="sgla.model.mamba_spec:mamba2",
        completed="sgla.model.mamba_spec:mambas_complete",
        renamed=_BACKBONE,
        gguf=(Gguf("mamba2", BARE_NORM, scans="only"),),
    ),
    "MambaForCausalLM": _only(("mamba",), _FIRST),
    "FalconMambaForCausalLM": _only(
        ("falcon_mamba",), _FIRST | {"mixer_rms_eps": 1e-6}, when={"ssm.dt_b_c_rms": True}
    ),
}
