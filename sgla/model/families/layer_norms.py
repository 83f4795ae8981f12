"""Decoders with layer norms."""

from __future__ import annotations

from dataclasses import replace

from sgla.model.families.keys import BIASES, CAUSAL, DECODER, HEAD_DIM, KV_HEADS, sizes
from sgla.model.family import Family
from sgla.model.gguf_words import ONE_NORM, Gguf
from sgla.model.windows import every, full, listed

_CAUSAL = {key: CAUSAL[key] for key in ("is_causal", "is_encoder_decoder")}
_LAYER_NORMED = {key: value for key, value in DECODER.items() if key != "rms_norm_eps"} | {
    "layer_norm_eps": 1e-5
}
_COHERE = _LAYER_NORMED | {
    "logit_scale": 0.0625,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
_IN_SEQUENCE = {"use_parallel_residual": False}
_GPT2 = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
_SIZES = {"max_position_embeddings", "hidden_size", "num_attention_heads", "num_hidden_layers"}
_GPTJ = Family(
    ("gptj",),
    {
        "vocab_size": 50400,
        "n_positions": 2048,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "rotary_dim": 64,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    _CAUSAL | {"rotary": True, "scale_attn_weights": True},
    {ours: theirs for theirs, ours in _GPT2.items() if ours in _SIZES},
    nulls=("n_inner",),
    names=_GPT2,
    model="sgla.model.cohere:GptJ",
    attention="sgla.model.gpt2_spec:gptj",
    completed="sgla.model.gpt2_spec:with_biases",
    renamed=(
        ("transformer.h.", "model.layers."),
        ("transformer.wte.", "model.embed_tokens."),
        ("transformer.ln_f.", "model.norm."),
        (".ln_1.", ".input_layernorm."),
        (".attn.out_proj.", ".attn.o_proj."),
        (".attn.", ".self_attn."),
    ),
    norm="layer",
    interleaved=True,
    head_bias=True,
    gated=False,
)

FAMILIES = {
    "StableLmForCausalLM": Family(
        ("stablelm",),
        _LAYER_NORMED
        | sizes(50304, 2560, 6912, 32, 32, 4096, 32)
        | {"use_qkv_bias": False, "partial_rotary_factor": 0.25}
        | {"use_parallel_residual": False, "qk_layernorm": False},
        CAUSAL | {"head_dim": None},
        model="sgla.model.cohere:StableLm",
        nulls=HEAD_DIM,
        renamed=((".q_layernorm.norms.", ".q_norm."), (".k_layernorm.norms.", ".k_norm.")),
        norm="layer",
        qk_norm="heads",
        gguf=(
            Gguf("stablelm", missing=_IN_SEQUENCE),
            Gguf("stablelm", ONE_NORM, when={"use_parallel_residual": True}),
        ),
    ),
    "Starcoder2ForCausalLM": Family(
        ("starcoder2",),
        {key: value for key, value in _LAYER_NORMED.items() if key != "layer_norm_eps"}
        | sizes(49152, 3072, 12288, 30, 24, 4096, 2)
        | {
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
        CAUSAL
        | {"mlp_type": "default", "norm_type": "layer_norm"}
        | dict.fromkeys(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"), True)
        | {"scale_attn_weights": True},
        dict.fromkeys(("layer_norm_epsilon", "rms_norm_eps"), "norm_epsilon"),
        model="sgla.model.llama:Starcoder2",
        nulls=(*HEAD_DIM, "norm_type"),
        norm="layer",
        gated=False,
        gguf=(Gguf("starcoder2", mlp=("c_fc", "c_proj")),),
    ),
    "NemotronForCausalLM": Family(
        ("nemotron",),
        {key: value for key, value in _LAYER_NORMED.items() if key != "layer_norm_eps"}
        | sizes(256000, 6144, 24576, 32, 48, 4096)
        | BIASES
        | {"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
        CAUSAL,
        {"layer_norm_eps": "norm_eps"}
        | dict.fromkeys(("rope_percent", "rope_percentage"), "partial_rotary_factor"),
        model="sgla.model.llama:Llama",
        nulls=HEAD_DIM,
        norm="layer",
        norm_offset=1.0,
        gated=False,
        gguf=(Gguf("nemotron"),),
    ),
    "CohereForCausalLM": Family(
        ("cohere",),
        _COHERE | sizes(256000, 8192, 22528, 40, 64, 8192) | {"use_qk_norm": False},
        CAUSAL,
        model="sgla.model.cohere:Cohere",
        nulls=(*KV_HEADS, "use_qk_norm"),
        norm="layer",
        qk_norm="heads",
        norm_bias=False,
        interleaved=True,
        gguf=(Gguf("command-r", ONE_NORM),),
    ),
    "Cohere2ForCausalLM": Family(
        ("cohere2",),
        _COHERE
        | sizes(256000, 8192, 22528, 40, 64, 8192)
        | {"rope_theta": 1e4, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        CAUSAL
        | {"use_qk_norm": False, "use_gated_activation": True, "use_parallel_block": True, "rotary_pct": 1.0}
        | {"order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj"},
        {"use_embedding_sharing": "tie_word_embeddings", "layer_switch": "sliding_window_pattern"},
        model="sgla.model.cohere:Cohere",
        nulls=KV_HEADS,
        norm="layer",
        norm_bias=False,
        interleaved=True,
        windows=listed(every()),
        unrotated=full,
        gguf=(Gguf("cohere2", ONE_NORM),),
    ),
    "Jais2ForCausalLM": Family(
        ("jais2",),
        _LAYER_NORMED
        | sizes(150272, 3328, 26624, 32, 26, 8192)
        | {"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
        CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=HEAD_DIM + KV_HEADS,
        norm="layer",
        gated=False,
        gguf=(Gguf("jais2"),),
    ),
    "PhiForCausalLM": Family(
        ("phi",),
        _LAYER_NORMED
        | sizes(51200, 2048, 8192, 24, 32, 2048)
        | {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        CAUSAL | {"qk_layernorm": False},
        honoured=("qk_layernorm",),
        model="sgla.model.cohere:Phi",
        nulls=KV_HEADS,
        renamed=((".self_attn.dense.", ".self_attn.o_proj."), ("model.final_layernorm.", "model.norm.")),
        norm="layer",
        biased=True,
        head_bias=True,
        gated=False,
        gguf=(Gguf("phi2", ONE_NORM, mlp=("fc1", "fc2")),),
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
        _CAUSAL,
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
        gguf=(Gguf("gpt2", mlp=("c_fc", "c_proj")),),
    ),
    "GPTJForCausalLM": _GPTJ,
    "CodeGenForCausalLM": replace(
        _GPTJ,
        types=("codegen",),
        defaults={**_GPTJ.defaults, "n_ctx": 2048},  # which nothing reads
        attention="sgla.model.gpt2_spec:codegen",
        by_quarter=True,
    ),
    "GPTNeoForCausalLM": Family(
        ("gpt_neo",),
        {
            "vocab_size": 50257,
            "max_position_embeddings": 2048,
            "hidden_size": 2048,
            "num_layers": 24,
            "attention_types": None,
            "attention_layers": None,
            "num_heads": 16,
            "intermediate_size": None,
            "window_size": 256,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        _CAUSAL,
        {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
        nulls=("intermediate_size", "attention_types"),
        names={
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "layer_norm_eps",
        },
        model="sgla.model.llama:Gpt2",
        attention="sgla.model.gpt2_spec:neo",
        completed="sgla.model.gpt2_spec:with_more_biases",
        renamed=(
            ("transformer.", ""),
            ("h.", "model.layers."),
            ("wte.", "model.embed_tokens."),
            ("wpe.", "model.embed_positions."),
            ("ln_f.", "model.norm."),
            (".ln_1.", ".input_layernorm."),
            (".ln_2.", ".post_attention_layernorm."),
            (".attn.attention.", ".self_attn."),
            (".self_attn.out_proj.", ".self_attn.o_proj."),
        ),
        norm="layer",
        learned=True,
        gated=False,
    ),
    "OPTForCausalLM": Family(
        ("opt",),
        {
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": None,
            "num_attention_heads": 12,
            "activation_function": "relu",
            "tie_word_embeddings": True,
        },
        _CAUSAL
        | {
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        },
        honoured=(
            "do_layer_norm_before",
            "_remove_final_layer_norm",
            "enable_bias",
            "layer_norm_elementwise_affine",
        ),
        nulls=("word_embed_proj_dim",),
        names={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
        model="sgla.model.llama:Opt",
        attention="sgla.model.gpt2_spec:opt",
        renamed=(
            ("model.decoder.", "model."),
            ("decoder.", "model."),
            ("model.final_layer_norm.", "model.norm."),
            (".self_attn_layer_norm.", ".input_layernorm."),
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
        _CAUSAL | {"attention_bias": True},
        {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        honoured=("attention_bias",),
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
        gguf=(Gguf("gptneox", mlp=("dense_h_to_4h", "dense_4h_to_h")),),
    ),
}
