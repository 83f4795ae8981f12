"""Decoders with RMSNorm and one MLP a layer."""

from __future__ import annotations

from sgla.model.families.keys import (
    BIASES,
    CAUSAL,
    DECODER,
    EXAONE,
    GRANITE,
    GRANITE_SWA,
    HEAD_DIM,
    HUNYUAN,
    HUNYUAN_NORMS,
    HUNYUAN_SAME,
    KV_HEADS,
    MISTRAL3,
    QWEN,
    ROTATED,
    WINDOWS,
    sizes,
)
from sgla.model.family import Family, PredictorNames
from sgla.model.gguf_words import AFTER_NORMS, GLM4_NORMS, POST_NORMS, Gguf
from sgla.model.windows import (
    but_first_of,
    every,
    everywhere,
    full_among_windows,
    listed,
    named,
    switched,
    unrotated,
)

_GLM = sizes(151552, 4096, 13696, 40, 32, 131072, 2) | {
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_QWEN2 = DECODER | WINDOWS | sizes(151936, 4096, 22016, 32, 32, 32768, 32)
_MIMO_LAYER = "model.mtp_layers.0"
_EXAONE = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
FAMILIES = {
    "LlamaForCausalLM": Family(
        ("llama",),
        DECODER
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
        CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=HEAD_DIM + KV_HEADS,
        pooled=True,
        gguf=(Gguf("llama", permuted=True),),
    ),
    "Qwen2ForCausalLM": Family(
        ("qwen2",),
        _QWEN2,
        CAUSAL | {"qkv_bias": True},
        model="sgla.model.llama:Llama",
        nulls=KV_HEADS,
        pooled=True,
        windows=QWEN,
        qkv_bias=True,
        gguf=(Gguf("qwen2"), Gguf("qwen2vl", sees=True)),
    ),
    "MiMoForCausalLM": Family(  # MiMo-7B
        ("mimo",),
        _QWEN2 | {"num_nextn_predict_layers": 0},
        CAUSAL | {"attention_bias": True, "use_mrope": False},
        model="sgla.model.llama:Predicting",
        nulls=(*KV_HEADS, "attention_bias"),
        of_checkpoints=True,
        windows=QWEN,
        qkv_bias=True,
        predictor=PredictorNames(
            f"{_MIMO_LAYER}.token_layernorm",
            f"{_MIMO_LAYER}.hidden_layernorm",
            f"{_MIMO_LAYER}.input_proj",
            _MIMO_LAYER,
            f"{_MIMO_LAYER}.final_layernorm",
            hidden_first=True,
        ),
    ),
    "Qwen3ForCausalLM": Family(
        ("qwen3",),
        DECODER
        | WINDOWS
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
        CAUSAL | {"use_qk_norm": True, "qk_norm": True},
        model="sgla.model.llama:Llama",
        nulls=KV_HEADS,
        pooled=True,
        windows=QWEN,
        qk_norm="head",
        gguf=(Gguf("qwen3", judges=True), Gguf("qwen3vl", sees=True)),
    ),
    "MistralForCausalLM": Family(
        ("mistral",),
        DECODER | sizes(32000, 4096, 14336, 32, 32, 131072, 8) | {"sliding_window": 4096},
        CAUSAL,
        model="sgla.model.llama:Mistral",
        nulls=HEAD_DIM,
        also=("Mistral3ForConditionalGeneration",),
        outer=MISTRAL3,
        texts={"ministral3": "Ministral3ForCausalLM", "mistral4": "Mistral4ForCausalLM"},
        pooled=True,
        gguf=(Gguf("mistral3", permuted=True),),
    ),
    "Phi3ForCausalLM": Family(
        ("phi3",),
        DECODER
        | sizes(32064, 3072, 8192, 32, 32, 4096)
        | {
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
        },
        CAUSAL | BIASES | {"lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1},
        model="sgla.model.llama:Llama",
        nulls=(*KV_HEADS, "attention_bias", "mlp_bias"),
        longrope=True,
        gguf=(Gguf("phi3", joined=True),),
    ),
    "GraniteForCausalLM": Family(
        ("granite",),
        DECODER | sizes(32000, 4096, 11008, 32, 32, 2048) | GRANITE | BIASES,
        CAUSAL,
        model="sgla.model.llama:Llama",
        gguf=(Gguf("granite", permuted=True),),
        nulls=KV_HEADS,
    ),
    "GraniteSWAForCausalLM": Family(
        ("granite_swa",),
        DECODER
        | sizes(100352, 2560, 8192, 24, 20, 8192, 4)
        | GRANITE
        | BIASES
        | GRANITE_SWA
        | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        CAUSAL,
        model="sgla.model.llama:Llama",
        completed="sgla.model.granite_spec:with_bases",
        windows=listed(but_first_of(4)),
        sinks=True,
        nulls=(*KV_HEADS, "layer_rope_theta"),
    ),
    "HyperCLOVAXForCausalLM": Family(
        ("hyperclovax",),
        DECODER | sizes(32000, 4096, 11008, 32, 32, 2048) | GRANITE | BIASES | {"attention_multiplier": None},
        CAUSAL | {"use_post_norm": True},
        model="sgla.model.gemma:HyperClova",
        completed="sgla.model.hyperclova_spec:with_logit_scale",
        nulls=(*HEAD_DIM, *KV_HEADS, "attention_multiplier"),
        honoured=("use_post_norm",),
    ),
    "SmolLM3ForCausalLM": Family(
        ("smollm3",),
        DECODER
        | sizes(128256, 2048, 11008, 36, 16, 32768, 4)
        | BIASES
        | {
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        CAUSAL | {"max_window_layers": 28},
        model="sgla.model.llama:Llama",
        nulls=KV_HEADS,
        windows=switched(listed(unrotated, optional=True)),
        unrotated=named,
        gguf=(Gguf("smollm3", permuted=True),),
    ),
    "SeedOssForCausalLM": Family(
        ("seed_oss",),
        DECODER
        | sizes(155136, 4096, 27648, 64, 80, 524288, 8)
        | {"head_dim": 128, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
        CAUSAL,
        model="sgla.model.llama:Llama",
        gguf=(Gguf("seed_oss", AFTER_NORMS),),
        nulls=HEAD_DIM + KV_HEADS,
    ),
    "HeliumForCausalLM": Family(
        ("helium",),
        DECODER
        | sizes(48000, 2560, 7040, 24, 20, 4096, 20)
        | BIASES
        | {"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
        CAUSAL,
        model="sgla.model.llama:Llama",
        interleaved=True,
        out_bias=False,
    ),
    "Ernie4_5ForCausalLM": Family(
        ("ernie4_5",),
        DECODER
        | sizes(103424, 1024, 3072, 18, 16, 131072, 2)
        | {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "use_bias": False,
            "tie_word_embeddings": True,
        },
        CAUSAL,
        model="sgla.model.llama:Llama",
        also=("Ernie4_5_ForCausalLM",),  # as older files call it
        nulls=(*HEAD_DIM, *KV_HEADS, "use_bias"),
        interleaved=True,
        gguf=(Gguf("ernie4_5"),),
    ),
    "GlmForCausalLM": Family(
        ("glm",),
        DECODER | _GLM,
        CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=ROTATED,
        interleaved=True,
        out_bias=False,
        gguf=(Gguf("chatglm", joined=True),),
    ),
    "Glm4ForCausalLM": Family(
        ("glm4",),
        DECODER | _GLM,
        CAUSAL,
        model="sgla.model.gemma:Glm4",
        nulls=ROTATED,
        interleaved=True,
        out_bias=False,
        gguf=(Gguf("glm4", GLM4_NORMS, joined=True),),
    ),
    "ArceeForCausalLM": Family(
        ("arcee",),
        DECODER
        | sizes(32000, 2560, 18432, 32, 32, 4096)
        | BIASES
        | {"hidden_act": "relu2", "rms_norm_eps": 1e-5},
        CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=HEAD_DIM + KV_HEADS,
        gated=False,
        gguf=(Gguf("arcee", permuted=True),),
    ),
    "Olmo2ForCausalLM": Family(
        ("olmo2",),
        DECODER | sizes(50304, 4096, 11008, 32, 32, 2048) | {"attention_bias": False, "rms_norm_eps": 1e-5},
        CAUSAL,
        model="sgla.model.olmo:Olmo2",
        nulls=KV_HEADS,
        qk_norm="width",
        gguf=(Gguf("olmo2", POST_NORMS),),
    ),
    "ExaoneForCausalLM": Family(
        ("exaone",),
        DECODER
        | BIASES
        | sizes(102400, 4096, 14336, 32, 32, 4096, 8)
        | {"rms_norm_eps": 1e-5, "rope_theta": 5e5}
        | dict.fromkeys(_EXAONE),
        CAUSAL,
        names=_EXAONE,
        model="sgla.model.llama:Llama",
        nulls=KV_HEADS + HEAD_DIM,
        of_checkpoints=True,
        renamed=(
            ("^transformer.wte.", "model.embed_tokens."),
            ("^transformer.h.", "model.layers."),
            ("^transformer.ln_f.", "model.norm."),
            (".ln_1.", ".input_layernorm."),
            (".ln_2.", ".post_attention_layernorm."),
            (".attn.attention.out_proj.", ".self_attn.o_proj."),
            (".attn.attention.", ".self_attn."),
            (".c_fc_0.", ".gate_proj."),
            (".c_fc_1.", ".up_proj."),
            (".c_proj.", ".down_proj."),
        ),
        gguf=(Gguf("exaone"),),
    ),
    "Exaone4ForCausalLM": Family(
        ("exaone4",),
        DECODER
        | sizes(102400, 4096, 16384, 32, 32, 2048, 32)
        | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        CAUSAL,
        model="sgla.model.olmo:Olmo2",
        qk_norm="head",
        windows=EXAONE,
        unrotated=full_among_windows,
        gguf=(Gguf("exaone4", POST_NORMS, windows_optional=True),),
    ),
    "Olmo3ForCausalLM": Family(
        ("olmo3",),
        DECODER
        | sizes(50304, 4096, 11008, 32, 32, 2048)
        | {
            "attention_bias": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "sliding_window": 4096,
            "layer_types": None,
        },
        CAUSAL,
        model="sgla.model.olmo:Olmo2",
        nulls=KV_HEADS,
        qk_norm="width",
        windows=listed(every(4)),
        local_theta=5e5,
        gguf=(Gguf("olmo2", POST_NORMS, when={"attention.sliding_window": True}),),
    ),
    "MinistralForCausalLM": Family(
        ("ministral",),
        DECODER
        | sizes(32000, 4096, 14336, 32, 32, 131072, 8)
        | {"sliding_window": 4096, "layer_types": None},
        CAUSAL,
        model="sgla.model.llama:Llama",
        windows=listed(everywhere, optional=True),
    ),
    "CwmForCausalLM": Family(
        ("cwm",),
        DECODER
        | sizes(128256, 6144, 21504, 64, 48, 131072, 8)
        | {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "mlp_bias": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e6,
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
            "sliding_window": 8192,
            "layer_types": None,
        },
        CAUSAL,
        model="sgla.model.llama:Llama",
        nulls=("rope_theta",),
        windows=listed(but_first_of(4)),
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        ("hunyuan_v1_dense",),
        DECODER | sizes(290943, 4096, 11008, 32, 32, 2048) | {"rms_norm_eps": 1e-5, "attention_bias": False},
        CAUSAL | HUNYUAN | {"num_experts": 1},
        HUNYUAN_SAME,
        model="sgla.model.llama:Llama",
        nulls=(*KV_HEADS, "norm_type", "num_experts"),
        renamed=HUNYUAN_NORMS,
        qk_norm="head",
        late_norm=True,
        alpha=True,
        gguf=(Gguf("hunyuan-dense"),),
    ),
    "Ministral3ForCausalLM": Family(
        ("ministral3",),
        DECODER
        | sizes(131072, 4096, 14336, 34, 32, 262144, 8)
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
        CAUSAL,
        model="sgla.model.llama:Mistral",
        nulls=("rope_theta",),
        growing=True,
        gguf=(Gguf("mistral3", permuted=True, when={"attention.temperature_scale": True}),),
    ),
    "ApertusForCausalLM": Family(
        ("apertus",),
        DECODER
        | sizes(131072, 4096, 14336, 32, 32, 65536)
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
        CAUSAL | {"qk_norm": True, "post_norm": False},
        model="sgla.model.apertus:Apertus",
        nulls=(*KV_HEADS, "rope_theta"),
        renamed=(
            (".attention_layernorm.", ".input_layernorm."),
            (".feedforward_layernorm.", ".post_attention_layernorm."),
        ),
        qk_norm="head",
        gated=False,
        gguf=(Gguf("apertus"),),
    ),
}
