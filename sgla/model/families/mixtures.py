"""Mixtures of experts whose attention keeps k and v."""

from __future__ import annotations

from sgla.model.families.keys import (
    BIASES,
    CAUSAL,
    DECODER,
    DEEPSEEK_PREDICTOR,
    EXAONE,
    GRANITE,
    GRANITE_SWA,
    HEAD_DIM,
    HUNYUAN,
    HUNYUAN_NORMS,
    HUNYUAN_SAME,
    KV_HEADS,
    ROTATED,
    ROUTED,
    SIGMOID_ROUTED,
    WINDOWS,
    WITHOUT_HEAD_DIM,
    sizes,
)
from sgla.model.family import Family, PredictorNames
from sgla.model.gguf_words import (
    AFTER_NORMS,
    BALANCED,
    CHOSEN_SOFTMAX,
    EXPERT_BIASES,
    MIMO,
    SHARED_GATE,
    SIGMOID,
    SOFTMAX,
    Gguf,
)
from sgla.model.windows import (
    but_first_of,
    early,
    every,
    everywhere,
    full_among_windows,
    late,
    listed,
    switched,
)

MIXTRAL = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)
GRANITE_MOE = (
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.router.", ".mlp.gate."),
    (".block_sparse_moe.", ".mlp."),
    (".shared_mlp.input_linear.", ".mlp.shared_experts.gate_up_proj."),
    (".shared_mlp.output_linear.", ".mlp.shared_experts.down_proj."),
)
_OLMOE = WITHOUT_HEAD_DIM | {"attention_bias": False, "norm_topk_prob": False}
_MIMO_LAYER = "model.mtp.layers.0"  # of several, of which each guesses a token further ahead
# Keys of files that say what the class works out of others.
_MIMO_SAYS = "hybrid_layer_pattern", "moe_layer_freq", "swa_num_key_value_heads"
_MIMO_PREDICTOR = PredictorNames(
    f"{_MIMO_LAYER}.enorm",
    f"{_MIMO_LAYER}.hnorm",
    f"{_MIMO_LAYER}.eh_proj",
    _MIMO_LAYER,
    f"{_MIMO_LAYER}.final_layernorm",
    counted=False,
    windows=True,
)
_GRANITE_EXPERTS = GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2}

_BAILING = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "use_qkv_bias": "attention_bias",
}

FAMILIES = {
    "Qwen3MoeForCausalLM": Family(
        ("qwen3_moe",),
        DECODER
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
        CAUSAL | {"use_qk_norm": True, "qk_norm": True},
        model="sgla.model.llama:Llama",
        nulls=("max_window_layers",),
        mixture="sgla.model.mixture_spec:qwen3",
        windows=switched(everywhere),
        qk_norm="head",
        gguf=(
            Gguf("qwen3moe", missing={"expert_weights_norm": True}),
            Gguf("qwen3vlmoe", missing={"expert_weights_norm": True}, sees=True),
        ),
    ),
    "MellumForCausalLM": Family(
        ("mellum",),
        {key: value for key, value in DECODER.items() if key not in ("rope_theta", "rope_scaling")}
        | sizes(98304, 2304, 7168, 28, 32, 131072, 4)
        | {
            "head_dim": 128,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "attention_bias": False,
            "sliding_window": 1024,
            "layer_types": None,
            "mlp_layer_types": None,
            "mtp_layer_types": None,  # of layers that guess, which are left out
            "mtp_mlp_layer_types": None,
            "moe_intermediate_size": 896,
            "num_experts_per_tok": 8,
            "num_experts": None,  # 64
            "num_local_experts": None,
            "norm_topk_prob": True,
        },
        CAUSAL | {"rope_theta": 5e5, "rope_scaling": None},  # which its tables say
        model="sgla.model.llama:Predicting",
        nulls=("mtp_layer_types", "mtp_mlp_layer_types"),
        mixture="sgla.model.mixture_spec:mellum",
        qk_norm="head",
        windows=listed(every(1), optional=True),
        local_theta=1e4,
    ),
    "Llama4ForCausalLM": Family(
        ("llama4_text",),
        DECODER
        | sizes(202048, 5120, 8192, 48, 40, 131072, 8)
        | {
            "intermediate_size_mlp": 16384,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "layer_types": None,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "attention_bias": False,
        },
        CAUSAL,
        {"num_experts": "num_local_experts"},
        model="sgla.model.llama4:Llama4",
        nulls=("moe_layers", "num_experts", "attention_chunk_size"),
        attention="sgla.model.llama4_spec:read",
        completed="sgla.model.llama4_spec:complete",
        also=("Llama4ForConditionalGeneration",),
        outer=Family(("llama4",), {"tie_word_embeddings": False, "text_config": None, "vision_config": None}),
        renamed=(
            (".feed_forward.", ".mlp."),
            (".mlp.router.", ".mlp.gate."),
            (".mlp.shared_expert.", ".mlp.shared_experts."),
        ),
        interleaved=True,
        qk_norm="unit",
        gguf=(
            Gguf(
                "llama4",
                keys={
                    "feed_forward_length": "intermediate_size_mlp",
                    "expert_feed_forward_length": "intermediate_size",
                },
                missing={"expert_shared_count": 1},
            ),
        ),
    ),
    "MixtralForCausalLM": Family(
        ("mixtral",),
        DECODER
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
        CAUSAL | {"norm_topk_prob": True},
        model="sgla.model.llama:Llama",
        nulls=HEAD_DIM,
        mixture="sgla.model.mixture_spec:mixtral",
        renamed=MIXTRAL,
        gguf=(Gguf("llama", permuted=True, when={"expert_count": True}),),
    ),
    "DeepseekForCausalLM": Family(
        ("deepseek",),
        DECODER
        | sizes(102400, 4096, 11008, 30, 32, 2048)
        | {
            "attention_bias": False,
            "n_routed_experts": None,
            "n_shared_experts": None,
            "num_experts_per_tok": None,
            "moe_intermediate_size": 1407,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
        CAUSAL | {"mlp_bias": False, "scoring_func": "softmax", "topk_method": "greedy"},
        model="sgla.model.llama:Llama",
        nulls=(
            *KV_HEADS,
            *HEAD_DIM,
            "n_routed_experts",
            "n_shared_experts",
            "num_experts_per_tok",
            "norm_topk_prob",
        ),
        of_checkpoints=True,
        mixture="sgla.model.mixture_spec:deepseek",
        gguf=(Gguf("deepseek", permuted=True),),
    ),
    "PhimoeForCausalLM": Family(
        ("phimoe",),
        DECODER
        | sizes(32064, 4096, 6400, 32, 32, 4096 * 32, 8)
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 16,
            "router_jitter_noise": 0.01,
            "attention_bias": False,
            "lm_head_bias": False,
        },
        CAUSAL,
        model="sgla.model.llama:Llama",
        also=("PhiMoEForCausalLM",),
        mixture="sgla.model.mixture_spec:phi",
        renamed=(*MIXTRAL, (".mlp.router.", ".mlp.gate.")),
        norm="layer",
        longrope=True,
        mscales=True,
        gguf=(Gguf("phimoe"),),
    ),
    "Qwen2MoeForCausalLM": Family(
        ("qwen2_moe",),
        DECODER
        | WINDOWS
        | sizes(151936, 2048, 5632, 24, 16, 32768, 16)
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
        CAUSAL,
        {"num_local_experts": "num_experts"},
        model="sgla.model.llama:Llama",
        nulls=("num_local_experts",),
        mixture="sgla.model.mixture_spec:qwen2",
        renamed=((".shared_expert.", ".shared_experts."),),
        windows=switched(listed(early, optional=True)),
        gguf=(Gguf("qwen2moe", tensors=SHARED_GATE),),
    ),
    "OlmoeForCausalLM": Family(
        ("olmoe",),
        _OLMOE
        | sizes(50304, 2048, 2048, 16, 16, 4096)
        | {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_experts": 64},
        CAUSAL | {"clip_qkv": None},
        {"num_local_experts": "num_experts"},
        honoured=("clip_qkv",),
        model="sgla.model.llama:Llama",
        nulls=KV_HEADS,
        mixture="sgla.model.mixture_spec:olmo",
        qk_norm="width",
        gguf=(Gguf("olmoe"),),
    ),
    "FlexOlmoForCausalLM": Family(
        ("flex_olmo",),
        _OLMOE
        | sizes(100352, 4096, 11008, 32, 32, 4096)
        | {"rope_theta": 5e5, "num_experts_per_tok": 5, "num_experts": 7},
        CAUSAL,
        {"num_local_experts": "num_experts"},
        model="sgla.model.olmo:Olmo2",
        nulls=KV_HEADS,
        mixture="sgla.model.mixture_spec:olmo",
        qk_norm="width",
    ),
    "GptOssForCausalLM": Family(
        ("gpt_oss",),
        DECODER
        | sizes(201088, 2880, 2880, 36, 64, 131072, 8)
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
        CAUSAL,
        {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        model="sgla.model.llama:Llama",
        mixture="sgla.model.mixture_spec:gpt_oss",
        renamed=((".mlp.router.", ".mlp.gate."),),
        windows=listed(every(2)),
        sinks=True,
        gguf=(Gguf("gpt-oss", AFTER_NORMS, tensors=EXPERT_BIASES, gating=(0, SOFTMAX, CHOSEN_SOFTMAX)),),
    ),
    "Glm4MoeForCausalLM": Family(
        ("glm4_moe",),
        DECODER
        | sizes(151552, 4096, 10944, 46, 96, 131072, 8)
        | ROUTED
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
        CAUSAL | SIGMOID_ROUTED,
        {"num_local_experts": "n_routed_experts"},
        model="sgla.model.llama:Llama",
        nulls=ROTATED,
        mixture="sgla.model.mixture_spec:deepseek_v3",
        predictor=DEEPSEEK_PREDICTOR,
        qk_norm="head",
        out_bias=False,
        gguf=(Gguf("glm4moe", AFTER_NORMS, tensors=BALANCED, gating=(0, SIGMOID)),),
    ),
    "BailingMoeV2ForCausalLM": Family(
        ("bailing_moe", "bailing_moe_v2", "sarvam_moe"),
        DECODER
        | sizes(262144, 4096, 8192, 19, 64, 131072, 4)
        | ROUTED
        | {
            "head_dim": 64,
            "rope_theta": 8e6,
            "partial_rotary_factor": 1.0,
            "attention_bias": False,
            "use_qk_norm": True,
            "moe_intermediate_size": 1024,
            "num_experts_per_tok": 6,
            "n_routed_experts": 128,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
            "moe_shared_expert_intermediate_size": None,
            "max_window_layers": None,  # of windows that there are not
            **dict.fromkeys(_BAILING),
        },
        {key: value for key, value in CAUSAL.items() if key != "partial_rotary_factor"}
        | {
            "moe_router_enable_expert_bias": True,
            "router_dtype": "fp32",
            "score_function": "sigmoid",
            "use_bias": False,
            "use_rmsnorm": True,
        },
        {"num_local_experts": "n_routed_experts"},
        model="sgla.model.llama:Predicting",
        also=("SarvamMoEForCausalLM",),
        of_checkpoints=True,
        nulls=(*ROTATED, "use_qkv_bias", "moe_shared_expert_intermediate_size", "max_window_layers"),
        names=_BAILING,
        mixture="sgla.model.mixture_spec:bailing",
        renamed=(
            ("model.word_embeddings.", "model.embed_tokens."),
            (".attention.", ".self_attn."),
            (".query_key_value.", ".qkv_proj."),
            (".self_attn.dense.", ".self_attn.o_proj."),
            *HUNYUAN_NORMS,
            (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
        ),
        qk_norm="head",
        out_bias=False,
        gguf=(Gguf("bailingmoe2", tensors=BALANCED, gating=(SIGMOID,)),),
    ),
    "Dots1ForCausalLM": Family(
        ("dots1",),
        DECODER
        | sizes(152064, 4608, 10944, 62, 32, 2048, 32)
        | ROUTED
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
        CAUSAL | SIGMOID_ROUTED,
        {"num_local_experts": "n_routed_experts"},
        words={"noaux_tc": "sigmoid"},
        model="sgla.model.llama:Llama",
        nulls=(*KV_HEADS, "norm_topk_prob"),
        mixture="sgla.model.mixture_spec:deepseek_v3",
        windows=listed(late, optional=True),
        qk_norm="head",
        gguf=(Gguf("dots1", tensors=BALANCED, gating=(SIGMOID,)),),
    ),
    "GraniteMoeForCausalLM": Family(
        ("granitemoe",),
        DECODER | sizes(32000, 4096, 11008, 32, 32, 2048) | _GRANITE_EXPERTS,
        CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=KV_HEADS,
        mixture="sgla.model.mixture_spec:mixtral",
        renamed=GRANITE_MOE,
    ),
    "GraniteMoeSWAForCausalLM": Family(
        ("granitemoe_swa",),
        DECODER
        | sizes(32000, 4096, 11008, 32, 32, 2048)
        | _GRANITE_EXPERTS
        | GRANITE_SWA
        | {"shared_intermediate_size": 0},
        CAUSAL,
        model="sgla.model.llama:Llama",
        completed="sgla.model.granite_spec:with_bases",
        mixture="sgla.model.mixture_spec:mixtral",
        renamed=GRANITE_MOE,
        windows=listed(but_first_of(4)),
        sinks=True,
        nulls=(*KV_HEADS, "layer_rope_theta"),
    ),
    "GraniteMoeSharedForCausalLM": Family(
        ("granitemoeshared",),
        DECODER
        | sizes(32000, 4096, 11008, 32, 32, 2048)
        | _GRANITE_EXPERTS
        | {"shared_intermediate_size": 0},
        CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=KV_HEADS,
        mixture="sgla.model.mixture_spec:mixtral",
        renamed=GRANITE_MOE,
        gguf=(Gguf("granitemoe", permuted=True),),
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        ("ernie4_5_moe",),
        DECODER
        | sizes(103424, 2560, 12288, 28, 20, 131072, 4)
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
        CAUSAL | {"use_bias": False, "moe_gate": "topk", "moe_use_aux_free": True, "use_rmsnorm": True},
        {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        honoured=("use_bias",),
        model="sgla.model.llama:Predicting",
        mixture="sgla.model.mixture_spec:ernie",
        renamed=((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
        interleaved=True,
        gguf=(Gguf("ernie4_5-moe", tensors=BALANCED),),
    ),
    "SolarOpenForCausalLM": Family(
        ("solar_open",),
        DECODER
        | sizes(196608, 4096, 10240, 48, 64, 131072, 8)
        | ROUTED
        | {
            "intermediate_size": None,  # files have it, and there is no such layer
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "attention_bias": False,
            "n_routed_experts": 128,
            "moe_intermediate_size": 1280,
        },
        CAUSAL | SIGMOID_ROUTED | {"use_qk_norm": False, "first_k_dense_replace": 0},
        {"num_local_experts": "n_routed_experts"},
        model="sgla.model.llama:Llama",
        nulls=("intermediate_size",),
        mixture="sgla.model.mixture_spec:deepseek_v3",
        out_bias=False,
    ),
    "ExaoneMoeForCausalLM": Family(
        ("exaone_moe",),
        DECODER
        | sizes(102400, 4096, 16384, 32, 32, 2048, 32)
        | {
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
            "is_moe_layer": None,
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
        },
        CAUSAL | SIGMOID_ROUTED,
        model="sgla.model.llama:Predicting",
        also=("ExaoneMoEForCausalLM",),  # as files call it
        mixture="sgla.model.mixture_spec:exaone",
        renamed=((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
        qk_norm="head",
        nulls=("is_moe_layer",),
        windows=EXAONE,
        unrotated=full_among_windows,
        gguf=(Gguf("exaone-moe", tensors=BALANCED, gating=(SIGMOID,)),),
    ),
    "MiniMaxM2ForCausalLM": Family(
        ("minimax_m2",),
        DECODER
        | sizes(200064, 3072, 1536, 62, 48, 196608, 8)
        | {
            "head_dim": 128,
            "rope_theta": 5e6,
            "rotary_dim": None,
            "partial_rotary_factor": None,
            "attn_type_list": None,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
        },
        CAUSAL
        | dict.fromkeys(
            (f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")), 1.0
        )
        | {
            "scoring_func": "sigmoid",
            "shared_moe_mode": "sigmoid",
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "swa_rope_theta": -1.0,
            "use_routing_bias": True,
            "shared_intermediate_size": 0,
            "mlp_intermediate_size": 8192,
        },
        {"num_experts": "num_local_experts"},
        model="sgla.model.llama:Llama",
        nulls=(*ROTATED, "rotary_dim", "attn_type_list"),
        mixture="sgla.model.mixture_spec:minimax",
        renamed=(*MIXTRAL, (".mlp.e_score", ".mlp.gate.e_score")),
        qk_norm="width",
        gguf=(Gguf("minimax-m2", tensors=BALANCED, gating=(SIGMOID,)),),
    ),
    "MiMoV2FlashForCausalLM": Family(
        ("mimo_v2_flash",),
        DECODER
        | sizes(152576, 4096, 16384, 48, 64, 131072, 4)
        | {
            "head_dim": 192,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "default",
                    "rope_theta": 5e6,
                    "partial_rotary_factor": 0.334,
                },
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.334,
                },
            },
            "attention_bias": False,
            "attention_value_scale": 0.707,
            "sliding_window": 129,
            "sliding_window_size": None,
            **dict.fromkeys(_MIMO_SAYS),
            "layer_types": None,
            "mlp_layer_types": None,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        CAUSAL
        | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        | {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
        | {
            "partial_rotary_factor": 0.334,
            "rope_theta": 5e6,
            "swa_rope_theta": 1e4,
            "n_shared_experts": None,
        },
        {
            "num_local_experts": "n_routed_experts",
            "swa_head_dim": "head_dim",
            "swa_v_head_dim": "v_head_dim",
            "swa_num_attention_heads": "num_attention_heads",
            "layernorm_epsilon": "rms_norm_eps",
            "attention_chunk_size": "sliding_window_size",
        },
        model="sgla.model.llama:Predicting",
        nulls=(
            "attention_value_scale",
            "routed_scaling_factor",
            "n_shared_experts",
            "rope_theta",
            "sliding_window_size",
            *_MIMO_SAYS,
        ),
        attention="sgla.model.mimo_spec:read",
        mixture="sgla.model.mixture_spec:mimo",
        gguf=(
            Gguf("mimo2", tensors=MIMO, gating=(SIGMOID,), missing={"expert_weights_norm": True}, wider=True),
        ),
        predictor=_MIMO_PREDICTOR,
        renamed=((".attention_sink_bias", ".sinks"), (".pre_mlp_layernorm", ".post_attention_layernorm")),
        out_bias=False,
    ),
    "HYV3ForCausalLM": Family(
        ("hy_v3",),
        DECODER
        | sizes(120832, 4096, 13312, 80, 64, 131072, 8)
        | BIASES
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
        CAUSAL,
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
    "HunYuanMoEV1ForCausalLM": Family(
        ("hunyuan_v1_moe",),
        DECODER
        | sizes(290943, 4096, 11008, 32, 32, 2048)
        | {"rms_norm_eps": 1e-5, "attention_bias": False, "num_experts": 1, "moe_topk": 1},
        CAUSAL
        | HUNYUAN
        | {"num_shared_expert": 1, "moe_layer_num_skipped": 0}
        | {"norm_topk_prob": True, "use_mixed_mlp_moe": True},
        {
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "moe_topk",
            "moe_intermediate_size": "intermediate_size",
            **HUNYUAN_SAME,
        },
        model="sgla.model.llama:Llama",
        nulls=(*KV_HEADS, "norm_type"),
        by_layer=("moe_topk",),
        mixture="sgla.model.mixture_spec:hunyuan",
        renamed=(
            *HUNYUAN_NORMS,
            (".mlp.gate.wg.", ".mlp.gate."),
            (".mlp.shared_mlp.", ".mlp.shared_experts."),
        ),
        qk_norm="head",
        late_norm=True,
        alpha=True,
        gguf=(Gguf("hunyuan-moe", missing={"expert_shared_count": 1}),),
    ),
}
