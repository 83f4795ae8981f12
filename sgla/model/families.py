"""The keys of ``config.json`` that each family has,
what HF's classes fill in for them, and what becomes of all the others.

The rule: a model computes what HF's class computes with this file, and a key that asks for something else is
refused by name. The keys that HF's class reads are honoured. Those that it ignores are not: they are passed
over if no forward pass reads them (``HARMLESS``: training, sampling, where the file comes from) or if their
value describes what the class does anyway, refused if a word of their name is one that configurations use for
mathematics, and noted otherwise. Loads no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sgla.errors import ConfigError
from sgla.model.gguf_words import (
    AFTER_NORMS,
    BALANCED,
    CHOSEN_SOFTMAX,
    EXPERT_BIASES,
    GEMMA_NORMS,
    GLM4_NORMS,
    ONE_NORM,
    POST_NORMS,
    SHARED_GATE,
    SIGMOID,
    SOFTMAX,
    Gguf,
)

EVERY = 1 << 30  # a pattern in which every layer has a window


@dataclass(frozen=True)
class Family:
    """``types``: what ``model_type`` may say. ``defaults``: the keys that HF's class reads, with what it
    fills in. ``fixed``: keys it does not read, or reads in vain, each with the value that describes what the
    class does. ``same``: keys it does not read, each with the one that says the same.

    ``nulls``: keys that may be null, beside ``NULLS``; with a null in any other, HF's class fails, or
    computes what is not computed here.

    ``model``: module and class that run it; an encoder has none. ``pooled``: whether there are architectures
    that make vectors of it. ``attention``: module and function (without torch) that reads the shapes of the
    layers, ``(reader, layers, positions) -> tuple[AttentionSpec, ...]``, where other keys say them than most
    families have. The others are values of ``ModelSpec`` that no key says."""

    types: tuple[str, ...]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    nulls: tuple[str, ...] = ()
    model: str = ""
    attention: str = ""
    layers_differ: bool = False  # heads, KV heads and head_dim may be lists
    pooled: bool = False
    also: tuple[str, ...] = ()  # other architectures that it runs
    qkv_bias: bool = False
    out_bias: bool = True  # where attention has a bias
    qk_norm: Literal["", "head", "width"] = ""
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = True
    norm_offset: float = 0.0
    gated: bool = True
    interleaved: bool = False
    longrope: bool = False  # the only rope scaling
    rotates: Literal["all", "listed", "windows"] = "all"  # which layers
    pattern: int = 0  # every how many layers there is one without a window, where no key says it
    windows_optional: bool = False
    local_theta: float = 0.0  # base of the rotation in layers with windows, where no key says it
    alpha: bool = False  # "dynamic" scaling with an alpha stretches the base once
    names: Mapping[str, str] = field(default_factory=dict)  # of keys that others call otherwise
    learned: bool = False  # positions have vectors, and nothing is rotated
    crossed: tuple[str, ...] = ()  # modules whose weights are stored as [input, output]
    by_head: bool = False  # joined rows of q, k and v are stored head by head
    growing: bool = False  # the queries, with their positions
    biased: bool = False  # linear layers, where no key says it
    head_bias: bool = False
    late_norm: bool = False  # q and k are rotated before their norms
    scaled_embedding: bool = False  # by the root of the width
    sinks: bool = False  # of attention
    mixture: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    gguf: tuple[Gguf, ...] = ()  # architectures of GGUF files
    classifier: tuple[str, str, str] | None = None  # of an encoder: first layer, its activation, last layer
    keys: Mapping[str, str] = field(default_factory=dict)  # of an encoder: BERT's, and its own names for them
    positions_behind_padding: bool = False  # the first is that of pad_token_id + 1


_HEAD_DIM, _KV_HEADS = ("head_dim",), ("num_key_value_heads",)  # null: as many as follow from the others
_ROTATED = ("partial_rotary_factor",)  # null: all dims, not the family's share
_DECODER = {
    "hidden_act": "silu",
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rope_parameters": None,
    "original_max_position_embeddings": None,
    "dual_chunk_attention_config": None,  # of Qwen's models for a million tokens
}
_CAUSAL = {
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "partial_rotary_factor": 1,
    "rope_interleaved": False,
    "text_config": None,
}
_WINDOWS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_BERT = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_ENCODER = {
    "is_decoder": False,
    "is_causal": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
}
_SAME = {"embedding_size": "hidden_size"}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_LAYER_NORMED = {key: value for key, value in _DECODER.items() if key != "rms_norm_eps"} | {
    "layer_norm_eps": 1e-5
}
_COHERE = _LAYER_NORMED | {
    "logit_scale": 0.0625,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "attention_bias": False,
}

_MIXTRAL = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)
_GRANITE_MOE = (
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.router.", ".mlp.gate."),
    (".block_sparse_moe.", ".mlp."),
    (".shared_mlp.input_linear.", ".mlp.shared_experts.gate_up_proj."),
    (".shared_mlp.output_linear.", ".mlp.shared_experts.down_proj."),
)


def _sizes(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, positions: int, kv_heads: int | None = None
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }


_GLM = _sizes(151552, 4096, 13696, 40, 32, 131072, 2) | {
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_WITHOUT_HEAD_DIM = {key: value for key, value in _DECODER.items() if key != "head_dim"}
_OLMOE = _WITHOUT_HEAD_DIM | {"attention_bias": False, "norm_topk_prob": False}
_GRANITE = {
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GRANITE_EXPERTS = _GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2}
_GEMMA2 = {
    "attention.sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}  # in old GGUF files
_ROUTED = {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
_BALANCED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_head_dim": None,  # the sum of both, which the class works out anew
}
_WITHOUT_HIDDEN_ACT = {key: value for key, value in _DECODER.items() if key != "hidden_act"}
_SOFTCAPPED = (
    _WITHOUT_HIDDEN_ACT
    | _sizes(256000, 2304, 9216, 26, 8, 8192, 4)
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
_HUNYUAN_NORMS = ((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm."))
_GPT2 = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
_ROTATED_HEAD = {"head_dim": "qk_rope_head_dim"}  # by which name the class has it for the rotation
_DISTILBERT = (
    ("transformer.layer.", "encoder.layer."),
    (".attention.q_lin.", ".attention.self.query."),
    (".attention.k_lin.", ".attention.self.key."),
    (".attention.v_lin.", ".attention.self.value."),
    (".attention.out_lin.", ".attention.output.dense."),
    (".sa_layer_norm.", ".attention.output.LayerNorm."),
    (".ffn.lin1.", ".intermediate.dense."),
    (".ffn.lin2.", ".output.dense."),
    (".output_layer_norm.", ".output.LayerNorm."),
    ("pre_classifier.", "pooler.dense."),
)
_ROBERTA = Family(
    ("roberta", "xlm-roberta"),
    _BERT | {"vocab_size": 50265, "pad_token_id": 1},
    _ENCODER,
    _SAME,
    classifier=("classifier.dense", "tanh", "classifier.out_proj"),
    positions_behind_padding=True,
)
FAMILIES = {
    "LlamaForCausalLM": Family(
        ("llama",),
        _DECODER
        | {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
        },
        _CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=_HEAD_DIM + _KV_HEADS,
        pooled=True,
        gguf=(Gguf("llama", permuted=True),),
    ),
    "MiniCPM3ForCausalLM": Family(
        ("minicpm3",),
        _DECODER
        | _sizes(73448, 2560, 6400, 62, 40, 32768, 40)
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
        _CAUSAL | _BIASES,
        model="sgla.model.latent:Latent",
        nulls=_HEAD_DIM + _KV_HEADS + ("v_head_dim",),
        attention="sgla.model.latent_spec:read",
    ),
    "Qwen2ForCausalLM": Family(
        ("qwen2",),
        _DECODER
        | _WINDOWS
        | {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
        },
        _CAUSAL | {"qkv_bias": True},
        model="sgla.model.llama:Llama",
        nulls=_KV_HEADS,
        pooled=True,
        qkv_bias=True,
        gguf=(Gguf("qwen2"),),
    ),
    "Qwen3ForCausalLM": Family(
        ("qwen3",),
        _DECODER
        | _WINDOWS
        | {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "attention_bias": False,
        },
        _CAUSAL | {"use_qk_norm": True, "qk_norm": True},
        model="sgla.model.llama:Llama",
        nulls=_KV_HEADS,
        pooled=True,
        qk_norm="head",
        gguf=(Gguf("qwen3"),),
    ),
    "Qwen3MoeForCausalLM": Family(
        ("qwen3_moe",),
        _DECODER
        | {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": None,  # in every published file; the window is that of all layers
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": None,  # 128
            "num_local_experts": None,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
        },
        _CAUSAL | {"use_qk_norm": True, "qk_norm": True},
        model="sgla.model.llama:Llama",
        nulls=("max_window_layers",),
        mixture="sgla.model.mixture_spec:qwen3",
        qk_norm="head",
        gguf=(Gguf("qwen3moe", missing={"expert_weights_norm": True}),),
    ),
    "MixtralForCausalLM": Family(
        ("mixtral",),
        _DECODER
        | {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": None,  # 8
            "num_experts": None,
        },
        _CAUSAL | {"norm_topk_prob": True},
        model="sgla.model.llama:Llama",
        nulls=_HEAD_DIM,
        mixture="sgla.model.mixture_spec:mixtral",
        renamed=_MIXTRAL,
        gguf=(Gguf("llama", permuted=True, when={"expert_count": True}),),
    ),
    "Qwen2MoeForCausalLM": Family(
        ("qwen2_moe",),
        _DECODER
        | _WINDOWS
        | _sizes(151936, 2048, 5632, 24, 16, 32768, 16)
        | {
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
            "qkv_bias": True,
        },
        _CAUSAL,
        {"num_local_experts": "num_experts"},
        model="sgla.model.llama:Llama",
        nulls=("num_local_experts",),
        mixture="sgla.model.mixture_spec:qwen2",
        renamed=((".shared_expert.", ".shared_experts."),),
        pattern=2,
        gguf=(Gguf("qwen2moe", tensors=SHARED_GATE),),
    ),
    "OlmoeForCausalLM": Family(
        ("olmoe",),
        _OLMOE
        | _sizes(50304, 2048, 2048, 16, 16, 4096)
        | {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_experts": 64},
        _CAUSAL | {"clip_qkv": None},
        {"num_local_experts": "num_experts"},
        model="sgla.model.llama:Llama",
        nulls=_KV_HEADS,
        mixture="sgla.model.mixture_spec:olmo",
        qk_norm="width",
        gguf=(Gguf("olmoe"),),
    ),
    "FlexOlmoForCausalLM": Family(
        ("flex_olmo",),
        _OLMOE
        | _sizes(100352, 4096, 11008, 32, 32, 4096)
        | {"rope_theta": 5e5, "num_experts_per_tok": 5, "num_experts": 7},
        _CAUSAL,
        {"num_local_experts": "num_experts"},
        model="sgla.model.olmo:Olmo2",
        nulls=_KV_HEADS,
        mixture="sgla.model.mixture_spec:olmo",
        qk_norm="width",
    ),
    "GptOssForCausalLM": Family(
        ("gpt_oss",),
        _DECODER
        | _sizes(201088, 2880, 2880, 36, 64, 131072, 8)
        | {
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1.5e5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128,
            "layer_types": None,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        _CAUSAL,
        {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        model="sgla.model.llama:Llama",
        mixture="sgla.model.mixture_spec:gpt_oss",
        renamed=((".mlp.router.", ".mlp.gate."),),
        pattern=2,
        sinks=True,
        gguf=(Gguf("gpt-oss", AFTER_NORMS, tensors=EXPERT_BIASES, gating=(0, SOFTMAX, CHOSEN_SOFTMAX)),),
    ),
    "DeepseekV2ForCausalLM": Family(
        ("deepseek_v2",),
        _DECODER
        | _sizes(102400, 4096, 11008, 32, 32, 2048)
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
        _CAUSAL | _BIASES | {"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
        {"num_experts": "n_routed_experts"},
        model="sgla.model.latent:Latent",
        nulls=(*_HEAD_DIM, *_KV_HEADS, "n_group", "topk_group"),
        attention="sgla.model.latent_spec:read",
        mixture="sgla.model.mixture_spec:deepseek_v2",
        interleaved=True,
        gguf=(Gguf("deepseek2"),),
    ),
    "DeepseekV3ForCausalLM": Family(
        ("deepseek_v3",),
        _WITHOUT_HEAD_DIM
        | _sizes(129280, 7168, 18432, 61, 128, 4096, 128)
        | _LATENT
        | _ROUTED
        | {
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "num_nextn_predict_layers": 1,
        },
        _CAUSAL | _BALANCED | {"rope_interleave": True, "attention_bias": False},
        {"num_local_experts": "n_routed_experts", **_ROTATED_HEAD},
        model="sgla.model.latent:Latent",
        nulls=(*_KV_HEADS, "norm_topk_prob"),
        attention="sgla.model.latent_spec:read",
        mixture="sgla.model.mixture_spec:deepseek_v3",
        interleaved=True,
        gguf=(Gguf("deepseek2", tensors=BALANCED, gating=(SIGMOID,), when={"expert_gating_func": SIGMOID}),),
    ),
    "Glm4MoeForCausalLM": Family(
        ("glm4_moe",),
        _DECODER
        | _sizes(151552, 4096, 10944, 46, 96, 131072, 8)
        | _ROUTED
        | {
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "attention_bias": False,
            "use_qk_norm": False,
            "first_k_dense_replace": 1,
            "n_routed_experts": 128,
            "moe_intermediate_size": 1408,
            "num_nextn_predict_layers": 1,
        },
        _CAUSAL | _BALANCED,
        {"num_local_experts": "n_routed_experts"},
        model="sgla.model.llama:Llama",
        nulls=_ROTATED,
        mixture="sgla.model.mixture_spec:deepseek_v3",
        qk_norm="head",
        out_bias=False,
        gguf=(Gguf("glm4moe", AFTER_NORMS, tensors=BALANCED, gating=(0, SIGMOID)),),
    ),
    "Glm4MoeLiteForCausalLM": Family(
        ("glm4_moe_lite",),
        _WITHOUT_HEAD_DIM
        | _sizes(154880, 2048, 10240, 47, 20, 202752, 20)
        | _LATENT
        | _ROUTED
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
        _CAUSAL
        | _BALANCED
        | {"rope_interleave": True, "attention_bias": False, "partial_rotary_factor": 1.0},
        {"num_local_experts": "n_routed_experts", **_ROTATED_HEAD},
        model="sgla.model.latent:Latent",
        attention="sgla.model.latent_spec:read",
        mixture="sgla.model.mixture_spec:deepseek_v3",
        interleaved=True,
    ),
    "Dots1ForCausalLM": Family(
        ("dots1",),
        _DECODER
        | _sizes(152064, 4608, 10944, 62, 32, 2048, 32)
        | _ROUTED
        | {
            "sliding_window": 4096,
            "max_window_layers": 62,
            "layer_types": None,
            "attention_bias": False,
            "first_k_dense_replace": 0,
            "n_routed_experts": None,
            "n_shared_experts": None,
            "num_experts_per_tok": None,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
        },
        _CAUSAL | _BALANCED,
        {"num_local_experts": "n_routed_experts"},
        model="sgla.model.llama:Llama",
        nulls=(*_KV_HEADS, "norm_topk_prob"),
        mixture="sgla.model.mixture_spec:deepseek_v3",
        qk_norm="head",
        gguf=(Gguf("dots1", tensors=BALANCED, gating=(SIGMOID,)),),
    ),
    "GraniteMoeForCausalLM": Family(
        ("granitemoe",),
        _DECODER | _sizes(32000, 4096, 11008, 32, 32, 2048) | _GRANITE_EXPERTS,
        _CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=_KV_HEADS,
        mixture="sgla.model.mixture_spec:mixtral",
        renamed=_GRANITE_MOE,
    ),
    "GraniteMoeSharedForCausalLM": Family(
        ("granitemoeshared",),
        _DECODER
        | _sizes(32000, 4096, 11008, 32, 32, 2048)
        | _GRANITE_EXPERTS
        | {"shared_intermediate_size": 0},
        _CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=_KV_HEADS,
        mixture="sgla.model.mixture_spec:mixtral",
        renamed=_GRANITE_MOE,
        gguf=(Gguf("granitemoe", permuted=True),),
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        ("ernie4_5_moe",),
        _DECODER
        | _sizes(103424, 2560, 12288, 28, 20, 131072, 4)
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        },
        _CAUSAL | {"use_bias": False, "moe_gate": "topk", "moe_use_aux_free": True, "use_rmsnorm": True},
        {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        model="sgla.model.llama:Predicting",
        mixture="sgla.model.mixture_spec:ernie",
        renamed=((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
        interleaved=True,
        gguf=(Gguf("ernie4_5-moe", tensors=BALANCED),),
    ),
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
        _CAUSAL | {"use_bidirectional_attention": False, "attn_logit_softcapping": None},
        {"hidden_act": "hidden_activation"},
        model="sgla.model.gemma:Gemma3",
        also=("Gemma3ForConditionalGeneration",),
        qk_norm="head",
        norm_offset=1.0,
        scaled_embedding=True,
        gguf=(Gguf("gemma3", GEMMA_NORMS, missing={"rope.freq_base": 1e6}, by_width=62),),
    ),
    "MistralForCausalLM": Family(
        ("mistral",),
        _DECODER | _sizes(32000, 4096, 14336, 32, 32, 131072, 8) | {"sliding_window": 4096},
        _CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=_HEAD_DIM,
    ),
    "Phi3ForCausalLM": Family(
        ("phi3",),
        _DECODER
        | _sizes(32064, 3072, 8192, 32, 32, 4096)
        | {
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
        },
        _CAUSAL | {"attention_bias": False},
        model="sgla.model.llama:Llama",
        nulls=(*_KV_HEADS, "attention_bias"),
        longrope=True,
        gguf=(Gguf("phi3", joined=True),),
    ),
    "GraniteForCausalLM": Family(
        ("granite",),
        _DECODER | _sizes(32000, 4096, 11008, 32, 32, 2048) | _GRANITE | _BIASES,
        _CAUSAL,
        model="sgla.model.llama:Llama",
        gguf=(Gguf("granite", permuted=True),),
        nulls=_KV_HEADS,
    ),
    "SmolLM3ForCausalLM": Family(
        ("smollm3",),
        _DECODER
        | _sizes(128256, 2048, 11008, 36, 16, 32768, 4)
        | _BIASES
        | {
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        _CAUSAL | {"max_window_layers": 28},
        model="sgla.model.llama:Llama",
        nulls=_KV_HEADS,
        rotates="listed",
        gguf=(Gguf("smollm3", permuted=True),),
    ),
    "SeedOssForCausalLM": Family(
        ("seed_oss",),
        _DECODER
        | _sizes(155136, 4096, 27648, 64, 80, 524288, 8)
        | {"head_dim": 128, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
        _CAUSAL,
        model="sgla.model.llama:Llama",
        gguf=(Gguf("seed_oss", AFTER_NORMS),),
        nulls=_HEAD_DIM + _KV_HEADS,
    ),
    "HeliumForCausalLM": Family(
        ("helium",),
        _DECODER
        | _sizes(48000, 2560, 7040, 24, 20, 4096, 20)
        | _BIASES
        | {"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
        _CAUSAL,
        model="sgla.model.llama:Llama",
        interleaved=True,
        out_bias=False,
    ),
    "Ernie4_5ForCausalLM": Family(
        ("ernie4_5",),
        _DECODER
        | _sizes(103424, 1024, 3072, 18, 16, 131072, 2)
        | {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "use_bias": False,
            "tie_word_embeddings": True,
        },
        _CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=(*_HEAD_DIM, *_KV_HEADS, "use_bias"),
        interleaved=True,
        gguf=(Gguf("ernie4_5"),),
    ),
    "GlmForCausalLM": Family(
        ("glm",),
        _DECODER | _GLM,
        _CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=_ROTATED,
        interleaved=True,
        out_bias=False,
        gguf=(Gguf("chatglm", joined=True),),
    ),
    "Glm4ForCausalLM": Family(
        ("glm4",),
        _DECODER | _GLM,
        _CAUSAL,
        model="sgla.model.gemma:Glm4",
        nulls=_ROTATED,
        interleaved=True,
        out_bias=False,
        gguf=(Gguf("glm4", GLM4_NORMS, joined=True),),
    ),
    "GemmaForCausalLM": Family(
        ("gemma",),
        _DECODER
        | _sizes(256000, 3072, 24576, 28, 16, 8192, 16)
        | {
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "attention_bias": False,
        },
        _CAUSAL | {"use_bidirectional_attention": False},
        {"hidden_activation": "hidden_act"},
        model="sgla.model.llama:Llama",
        norm_offset=1.0,
        scaled_embedding=True,
        gguf=(Gguf("gemma"),),
    ),
    "Gemma2ForCausalLM": Family(
        ("gemma2",),
        _SOFTCAPPED,
        _CAUSAL | {"use_bidirectional_attention": False, "sliding_window_size": 4096},
        {"hidden_act": "hidden_activation"},
        model="sgla.model.gemma:Gemma3",
        norm_offset=1.0,
        scaled_embedding=True,
        pattern=2,
        gguf=(Gguf("gemma2", GEMMA_NORMS, missing=_GEMMA2, by_width=46),),
    ),
    "StableLmForCausalLM": Family(
        ("stablelm",),
        _LAYER_NORMED
        | _sizes(50304, 2560, 6912, 32, 32, 4096, 32)
        | {"use_qkv_bias": False, "partial_rotary_factor": 0.25},
        _CAUSAL | {"use_parallel_residual": False, "qk_layernorm": False, "head_dim": None},
        model="sgla.model.llama:Llama",
        nulls=_HEAD_DIM,
        norm="layer",
        gguf=(Gguf("stablelm"),),
    ),
    "Starcoder2ForCausalLM": Family(
        ("starcoder2",),
        {key: value for key, value in _LAYER_NORMED.items() if key != "layer_norm_eps"}
        | _sizes(49152, 3072, 12288, 30, 24, 4096, 2)
        | {
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
        _CAUSAL | {"mlp_type": "default", "norm_type": "layer_norm"},
        model="sgla.model.llama:Starcoder2",
        nulls=_HEAD_DIM,
        norm="layer",
        gated=False,
        gguf=(Gguf("starcoder2", mlp=("c_fc", "c_proj")),),
    ),
    "NemotronForCausalLM": Family(
        ("nemotron",),
        {key: value for key, value in _LAYER_NORMED.items() if key != "layer_norm_eps"}
        | _sizes(256000, 6144, 24576, 32, 48, 4096)
        | _BIASES
        | {"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
        _CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=_HEAD_DIM,
        norm="layer",
        norm_offset=1.0,
        gated=False,
        gguf=(Gguf("nemotron"),),
    ),
    "ArceeForCausalLM": Family(
        ("arcee",),
        _DECODER
        | _sizes(32000, 2560, 18432, 32, 32, 4096)
        | _BIASES
        | {"hidden_act": "relu2", "rms_norm_eps": 1e-5},
        _CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=_HEAD_DIM + _KV_HEADS,
        gated=False,
        gguf=(Gguf("arcee", permuted=True),),
    ),
    "Olmo2ForCausalLM": Family(
        ("olmo2",),
        _DECODER | _sizes(50304, 4096, 11008, 32, 32, 2048) | {"attention_bias": False, "rms_norm_eps": 1e-5},
        _CAUSAL,
        model="sgla.model.olmo:Olmo2",
        nulls=_KV_HEADS,
        qk_norm="width",
        gguf=(Gguf("olmo2", POST_NORMS),),
    ),
    "Exaone4ForCausalLM": Family(
        ("exaone4",),
        _DECODER
        | _sizes(102400, 4096, 16384, 32, 32, 2048, 32)
        | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        _CAUSAL,
        model="sgla.model.olmo:Olmo2",
        qk_norm="head",
        rotates="windows",
        windows_optional=True,
        gguf=(Gguf("exaone4", POST_NORMS),),
    ),
    "CohereForCausalLM": Family(
        ("cohere",),
        _COHERE | _sizes(256000, 8192, 22528, 40, 64, 8192),
        _CAUSAL | {"use_qk_norm": False},
        model="sgla.model.cohere:Cohere",
        nulls=_KV_HEADS,
        norm="layer",
        norm_bias=False,
        interleaved=True,
        gguf=(Gguf("command-r", ONE_NORM),),
    ),
    "Cohere2ForCausalLM": Family(
        ("cohere2",),
        _COHERE
        | _sizes(256000, 8192, 22528, 40, 64, 8192)
        | {"rope_theta": 1e4, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        _CAUSAL
        | {"use_qk_norm": False, "use_gated_activation": True, "use_parallel_block": True, "rotary_pct": 1.0},
        model="sgla.model.cohere:Cohere",
        nulls=_KV_HEADS,
        norm="layer",
        norm_bias=False,
        interleaved=True,
        rotates="windows",
        gguf=(Gguf("cohere2", ONE_NORM),),
    ),
    "Olmo3ForCausalLM": Family(
        ("olmo3",),
        _DECODER
        | _sizes(50304, 4096, 11008, 32, 32, 2048)
        | {
            "attention_bias": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "sliding_window": 4096,
            "layer_types": None,
        },
        _CAUSAL,
        model="sgla.model.olmo:Olmo2",
        nulls=_KV_HEADS,
        qk_norm="width",
        pattern=4,
        local_theta=5e5,
        gguf=(Gguf("olmo2", POST_NORMS, when={"attention.sliding_window": True}),),
    ),
    "MinistralForCausalLM": Family(
        ("ministral",),
        _DECODER
        | _sizes(32000, 4096, 14336, 32, 32, 131072, 8)
        | {"sliding_window": 4096, "layer_types": None},
        _CAUSAL,
        model="sgla.model.llama:Llama",
        pattern=EVERY,
        windows_optional=True,
    ),
    "VaultGemmaForCausalLM": Family(
        ("vaultgemma",),
        _SOFTCAPPED,
        _CAUSAL,
        {"hidden_act": "hidden_activation"},
        model="sgla.model.llama:Llama",
        renamed=((".pre_feedforward_layernorm.", ".post_attention_layernorm."),),
        norm_offset=1.0,
        scaled_embedding=True,
        pattern=2,
    ),
    "YoutuForCausalLM": Family(
        ("youtu",),
        _WITHOUT_HEAD_DIM
        | _sizes(128256, 2048, 6144, 32, 16, 131072, 16)
        | _LATENT
        | {"tie_word_embeddings": True},
        _CAUSAL | {"rope_interleave": True, "attention_bias": False},
        _ROTATED_HEAD,
        model="sgla.model.latent:Latent",
        attention="sgla.model.latent_spec:read",
        interleaved=True,
    ),
    "Jais2ForCausalLM": Family(
        ("jais2",),
        _LAYER_NORMED
        | _sizes(150272, 3328, 26624, 32, 26, 8192)
        | {"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
        _CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=_HEAD_DIM + _KV_HEADS,
        norm="layer",
        gated=False,
        gguf=(Gguf("jais2"),),
    ),
    "SolarOpenForCausalLM": Family(
        ("solar_open",),
        _DECODER
        | _sizes(196608, 4096, 10240, 48, 64, 131072, 8)
        | _ROUTED
        | {
            "intermediate_size": None,  # files have it, and there is no such layer
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "attention_bias": False,
            "n_routed_experts": 128,
            "moe_intermediate_size": 1280,
        },
        _CAUSAL | _BALANCED | {"use_qk_norm": False, "first_k_dense_replace": 0},
        {"num_local_experts": "n_routed_experts"},
        model="sgla.model.llama:Llama",
        nulls=("intermediate_size",),
        mixture="sgla.model.mixture_spec:deepseek_v3",
        out_bias=False,
    ),
    "ExaoneMoeForCausalLM": Family(
        ("exaone_moe",),
        _DECODER
        | _sizes(102400, 4096, 16384, 32, 32, 2048, 32)
        | {
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
        },
        _CAUSAL | _BALANCED,
        model="sgla.model.llama:Predicting",
        mixture="sgla.model.mixture_spec:exaone",
        renamed=((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
        qk_norm="head",
        rotates="windows",
        windows_optional=True,
    ),
    "MiniMaxM2ForCausalLM": Family(
        ("minimax_m2",),
        _DECODER
        | _sizes(200064, 3072, 1536, 62, 48, 196608, 8)
        | {
            "head_dim": 128,
            "rope_theta": 5e6,
            "rotary_dim": None,
            "partial_rotary_factor": None,
            "attn_type_list": None,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
        },
        _CAUSAL
        | dict.fromkeys(
            (f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")), 1.0
        )
        | {
            "scoring_func": "sigmoid",
            "shared_moe_mode": "sigmoid",
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "shared_intermediate_size": 0,
            "mlp_intermediate_size": 8192,
        },
        {"num_experts": "num_local_experts"},
        model="sgla.model.llama:Llama",
        nulls=(*_ROTATED, "rotary_dim", "attn_type_list"),
        mixture="sgla.model.mixture_spec:minimax",
        renamed=(*_MIXTRAL, (".mlp.e_score", ".mlp.gate.e_score")),
        qk_norm="width",
        gguf=(Gguf("minimax-m2", tensors=BALANCED, gating=(SIGMOID,)),),
    ),
    "HYV3ForCausalLM": Family(
        ("hy_v3",),
        _DECODER
        | _sizes(120832, 4096, 13312, 80, 64, 131072, 8)
        | _BIASES
        | {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11_158_840.0,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
            "mlp_layer_types": None,
        },
        _CAUSAL,
        {"num_local_experts": "num_experts"},
        model="sgla.model.llama:Llama",
        mixture="sgla.model.mixture_spec:hunyuan_v3",
        renamed=(
            (".mlp.router.gate.", ".mlp.gate."),
            (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
            (".mlp.e_score", ".mlp.gate.e_score"),
            (".mlp.shared_mlp.", ".mlp.shared_experts."),
        ),
        qk_norm="head",
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        ("hunyuan_v1_dense",),
        _DECODER
        | _sizes(290943, 4096, 11008, 32, 32, 2048)
        | {"rms_norm_eps": 1e-5, "attention_bias": False},
        _CAUSAL | {"use_qk_norm": True},
        model="sgla.model.llama:Llama",
        nulls=_KV_HEADS,
        renamed=_HUNYUAN_NORMS,
        qk_norm="head",
        late_norm=True,
        alpha=True,
        gguf=(Gguf("hunyuan-dense"),),
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        ("hunyuan_v1_moe",),
        _DECODER
        | _sizes(290943, 4096, 11008, 32, 32, 2048)
        | {"rms_norm_eps": 1e-5, "attention_bias": False, "num_experts": 1, "moe_topk": 1},
        _CAUSAL | {"use_qk_norm": True},
        {"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
        model="sgla.model.llama:Llama",
        nulls=_KV_HEADS,
        mixture="sgla.model.mixture_spec:hunyuan",
        renamed=(
            *_HUNYUAN_NORMS,
            (".mlp.gate.wg.", ".mlp.gate."),
            (".mlp.shared_mlp.", ".mlp.shared_experts."),
        ),
        qk_norm="head",
        late_norm=True,
        alpha=True,
    ),
    "Ministral3ForCausalLM": Family(
        ("ministral3",),
        _DECODER
        | _sizes(131072, 4096, 14336, 34, 32, 262144, 8)
        | {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "max_position_embeddings": 262144,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            "sliding_window": None,
        },
        _CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=("rope_theta",),
        growing=True,
    ),
    "ApertusForCausalLM": Family(
        ("apertus",),
        _DECODER
        | _sizes(131072, 4096, 14336, 32, 32, 65536)
        | {
            "hidden_act": "xielu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 1.2e7,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1.2e7,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            "attention_bias": False,
        },
        _CAUSAL | {"qk_norm": True, "post_norm": False},
        model="sgla.model.apertus:Apertus",
        nulls=(*_KV_HEADS, "rope_theta"),
        renamed=(
            (".attention_layernorm.", ".input_layernorm."),
            (".feedforward_layernorm.", ".post_attention_layernorm."),
        ),
        qk_norm="head",
        gated=False,
    ),
    "PhiForCausalLM": Family(
        ("phi",),
        _LAYER_NORMED
        | _sizes(51200, 2048, 8192, 24, 32, 2048)
        | {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        _CAUSAL | {"qk_layernorm": False},
        model="sgla.model.cohere:Phi",
        nulls=_KV_HEADS,
        renamed=((".self_attn.dense.", ".self_attn.o_proj."), ("model.final_layernorm.", "model.norm.")),
        norm="layer",
        biased=True,
        head_bias=True,
        gated=False,
    ),
    "GPT2LMHeadModel": Family(
        ("gpt2",),
        {
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        },
        {"is_encoder_decoder": False},
        {"n_ctx": "n_positions", **{ours: theirs for theirs, ours in _GPT2.items() if theirs != "n_inner"}},
        nulls=("n_inner", "n_ctx"),
        names=_GPT2,
        model="sgla.model.llama:Gpt2",
        attention="sgla.model.gpt2_spec:read",
        renamed=(
            ("transformer.", ""),
            ("h.", "model.layers."),
            ("wte.", "model.embed_tokens."),
            ("wpe.", "model.embed_positions."),
            ("ln_f.", "model.norm."),
            (".ln_1.", ".input_layernorm."),
            (".ln_2.", ".post_attention_layernorm."),
            (".attn.c_attn.", ".self_attn.qkv_proj."),
            (".attn.c_proj.", ".self_attn.o_proj."),
        ),
        norm="layer",
        biased=True,
        learned=True,
        crossed=("qkv_proj", "o_proj", "c_fc", "c_proj"),
        gated=False,
    ),
    "GPTNeoXForCausalLM": Family(
        ("gpt_neox",),
        {
            "vocab_size": 50432,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "rotary_pct": 0.25,
            "rotary_emb_base": 1e4,
            "rope_scaling": None,
            "rope_parameters": None,
            "use_parallel_residual": True,
            "tie_word_embeddings": False,
            "is_decoder": False,
        },
        {"attention_bias": True, "is_encoder_decoder": False},
        {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        names={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        model="sgla.model.neox:Neox",
        renamed=(
            ("gpt_neox.", "model."),
            ("embed_in.", "embed_tokens."),
            ("embed_out.", "lm_head."),
            ("model.final_layer_norm.", "model.norm."),
            (".attention.query_key_value.", ".self_attn.qkv_proj."),
            (".attention.dense.", ".self_attn.o_proj."),
        ),
        norm="layer",
        biased=True,
        by_head=True,
        gated=False,
    ),
    "Bert": Family(
        ("bert",),
        _BERT,
        _ENCODER,
        _SAME,
        nulls=("pad_token_id",),
        classifier=("pooler.dense", "tanh", "classifier"),
    ),
    "DistilBert": Family(
        ("distilbert",),
        {
            "vocab_size": 30522,
            "max_position_embeddings": 512,
            "n_layers": None,
            "n_heads": None,
            "dim": None,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "hidden_size": 768,
            "hidden_dim": 3072,
            "activation": "gelu",
            "pad_token_id": 0,
        },
        _ENCODER | {"layer_norm_eps": 1e-12},
        nulls=("pad_token_id", "is_decoder", "add_cross_attention"),
        classifier=("pooler.dense", "relu", "classifier"),
        keys={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
        renamed=_DISTILBERT,
    ),
    "Roberta": _ROBERTA,
    "XLMRoberta": replace(_ROBERTA, defaults=_BERT | {"pad_token_id": 1}),
}
# The file of Gemma 3 with a vision tower: the language model has keys of its own in ``text_config``.
GEMMA3 = Family(("gemma3",), {"tie_word_embeddings": True, "text_config": None, "vision_config": None})

# Keys that say "none" with a null, or are worked out then.
NULLS = frozenset(
    """
    layer_types mlp_layer_types mlp_only_layers no_rope_layers rope_scaling rope_parameters
    dual_chunk_attention_config sliding_window _sliding_window_pattern q_lora_rank qk_head_dim
    attn_logit_softcapping final_logit_softcapping num_nextn_predict_layers dim_model_base scale_depth
    text_config vision_config
    """.split()  # noqa: SIM905
)
# Keys that HF's classes read in vain, or under another name, and yet not as null.
_NOT_NULL = frozenset(
    """
    is_causal rope_interleave attention_bias mlp_bias qk_layernorm use_parallel_residual num_experts
    num_local_experts num_experts_per_tok head_dim
    """.split()  # noqa: SIM905
)
_NOT_NULL_OF_ENCODERS = frozenset({"add_cross_attention", "is_decoder"})

# Keys without a part in the forward pass: a whole name, or the end of one.
HARMLESS = frozenset(
    """
    architectures model_type dtype torch_dtype auto_map tokenizer_class is_composition
    vocab_size_or_config_json_file
    quantization_config compression_config tie_word_embeddings use_flash_attention
    initializer_range embedding_initializer_range initializer_factor init_std use_cache pretraining_tp
    gradient_checkpointing
    cache_implementation use_flash_attn flash_attn_2_enabled
    output_attentions output_hidden_states output_past output_scores output_router_logits return_dict
    return_dict_in_generate torchscript xla_device use_bfloat16 chunk_size_feed_forward
    tie_encoder_decoder tie_weights cross_attention_hidden_size fused_rms_norm fused_mlp mm_tokens_per_image
    max_sequence_length model_max_length max_length min_length do_sample early_stopping num_beams
    num_beam_groups
    diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    renormalize_logits finetuning_task task_specific_params prefix problem_type num_labels id2label label2id
    directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
    pooler_type
    sentence_transformers sbert_ce_default_activation_function matryoshka_dimensions is_matryoshka
    sinusoidal_pos_embds neftune_noise_alpha router_jitter_noise is_llama_config transformers.js_config
    ep_size seq_aux aux_loss_alpha moe_capacity num_nextn_predict_layers num_mtp_layers num_mtp_modules
    reorder_and_upcast_attn summary_type summary_use_proj summary_activation summary_proj_to_labels
    mtp_transformer_layers use_mtp enable_moe_fp32_combine
    """.split()  # noqa: SIM905
)
_HARMLESS_END = re.compile(
    r".*(_token_ids?|_token_index|dropout|dropout_prob|_pdrop|_loss|_coef|_coeff|_version|name_or_path|commit_hash)$"
    r"|(attn|experts)_implementation.*|unsloth.*"
)
# Words of which the names of mathematical keys consist, in the configurations of transformers.
_MATHEMATICS = frozenset(
    """
    act activation alibi alpha attention attn beta bias bidirectional block cap capping causal chunk clamp
    clip conv decoder
    dense depth dim dims embed embedding embeddings encoder eps epsilon expert experts factor ffn freq
    frequency gate gating
    global group groups head heads hidden index indexer inner interleave interleaved intermediate kernel kv
    latent layer layernorm layers
    lightning limit linear local logit logits lora mamba mask mixer mlp moe mrope mscale mtp multiplier n
    nextn ngram nope norm
    normalization normalize ntk parallel pattern position positional positions prefix prenorm q qk qkv quant
    quantization query
    rank recurrent relative residual rms rmsnorm rope rotary routed router routing sandwich scale scales
    scaling shared sink
    sinks skip sliding smear softcap softcapping sparse sparsity ssm state step swiglu temperature theta tie
    topk untie v value window width
    """.split()  # noqa: SIM905
)
_FACTORS = frozenset({"multiplier", "scale", "scales", "scaling", "factor", "mscale"})
_SHOWN = 60  # characters of a value in an error


def check_keys(architecture: str, family: Family, config: Mapping[str, Any]) -> list[str]:
    """The keys of ``config`` that nobody knows and whose names do not speak of mathematics. Raises
    ConfigError for those that ask for something else than HF's class computes."""
    if (found := config.get("model_type")) is not None and found not in family.types:
        raise ConfigError(
            f"config.json: model_type {shown(found)} is not that of {architecture}, which is "
            f"{' or '.join(map(repr, family.types))}; transformers would run another class",
            param="model",
        )
    unknown = []
    for key, value in config.items():
        name = key.strip("_")
        if value is None and not may_be_null(family, key):
            raise ConfigError(
                f"config.json: {key} null is not supported for {architecture}; give it a value, or leave "
                "it out",
                param="model",
            )
        if key in family.defaults or name in HARMLESS or _HARMLESS_END.match(name):
            continue
        if key in family.fixed:
            if value is not None and value != family.fixed[key]:
                raise ConfigError(
                    f"config.json: {key} {shown(value)} is not supported for {architecture}; "
                    f"{family.fixed[key]!r} is",
                    param="model",
                )
        elif key in family.same:
            other = family.same[key]
            if value is not None and value != (meant := {**family.defaults, **config}[other]):
                raise ConfigError(
                    f"config.json: {key} is {shown(value)} and {other} {shown(meant)}; transformers reads "
                    f"the latter alone for {architecture}: remove {key} for the same numbers as there",
                    param="model",
                )
        elif _MATHEMATICS.isdisjoint(re.findall(r"[a-z]+", name.lower())):
            unknown.append(key)
        elif not _off(name, value):
            raise ConfigError(
                f"config.json: {shown(key)} ({shown(value)}) may change what the model computes, and "
                f"{architecture} has no such key, here or in transformers; remove it if the weights were "
                "trained without it",
                param="model",
            )
    return unknown


def may_be_null(family: Family, key: str) -> bool:
    """Whether HF's class runs with a null there, and then as is computed here."""
    if key in NULLS or key in family.nulls:
        return True
    refused = _NOT_NULL if family.model else _NOT_NULL_OF_ENCODERS
    read = key in refused and (key in family.fixed or key in family.same)
    return key not in family.defaults and not read


def _off(name: str, value: Any) -> bool:
    """Whether a value says that there is none of what its key names."""
    if _FACTORS.isdisjoint(name.lower().split("_")):
        return value is None or value in (False, "", [], {})
    return value is None or value is False or (value is not True and value in (1, [], {}))


def shown(value: Any) -> str:
    """A value for an error."""
    try:
        text = repr(value[:_SHOWN] if isinstance(value, str | list) else value)
    except (RecursionError, ValueError):
        return "a value"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


class Reader:
    """Typed values of a configuration over the defaults of its family.
    Every error names the key and what it may be."""

    def __init__(self, architecture: str, values: Mapping[str, Any]) -> None:
        self.architecture, self.values = architecture, values

    def given(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, most: int, least: int = 1) -> int:
        value = self._value(key)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        raise self.error(key, f"a whole number from {least} to {most}")

    def number(self, key: str, most: float = 1e12) -> float:
        """Above 0."""
        value = self._value(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most:
            return float(value)
        raise self.error(key, f"a number above 0 and at most {most:g}")

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.error(key, "true or false")

    def table(self, key: str, *, nulls: bool = False) -> dict[str, Any]:
        """An object, without its nulls unless they say something; empty if there is none."""
        value = self.values.get(key)
        if value is None or isinstance(value, dict):
            return {name: entry for name, entry in (value or {}).items() if nulls or entry is not None}
        raise self.error(key, "an object")

    def integers(self, key: str, most: int) -> list[int]:
        """A list of whole numbers from 0 on; empty if there is none."""
        value = self.values.get(key)
        if value is None:
            return []
        if isinstance(value, list) and len(value) <= most and all(type(x) is int and x >= 0 for x in value):
            return value
        raise self.error(key, f"a list of at most {most} whole numbers")

    def error(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(
            f"config.json of {self.architecture}: {key} is "
            f"{shown(self.values.get(key))}; it must be {wanted}",
            param="model",
        )

    def _value(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            raise ConfigError(f"config.json of {self.architecture} lacks {key!r}", param="model")
        return value
