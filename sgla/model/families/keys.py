"""Keys that several families have, with what HF's classes fill in for them."""

from __future__ import annotations

from typing import Any

from sgla.model.family import Family, PredictorNames
from sgla.model.windows import every, late, listed, switched

HEAD_DIM, KV_HEADS = ("head_dim",), ("num_key_value_heads",)  # null: as many as follow from the others
ROTATED = ("partial_rotary_factor",)  # null: all dims, not the family's share
DECODER = {
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
CAUSAL = {
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "partial_rotary_factor": 1,
    "rope_interleaved": False,
    "text_config": None,
}
WINDOWS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
EXAONE = listed(every(optional=True), optional=True)
QWEN = switched(listed(late, optional=True))
BIASES = {"attention_bias": False, "mlp_bias": False}


def sizes(
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


WITHOUT_HEAD_DIM = {key: value for key, value in DECODER.items() if key != "head_dim"}
GRANITE = {
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
GRANITE_SWA = {"sliding_window": 128, "layer_types": None, "layer_rope_theta": None}
ROUTED = {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
SIGMOID_ROUTED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
_BEHIND = "model.layers.{n}"
DEEPSEEK_PREDICTOR = PredictorNames(
    f"{_BEHIND}.enorm", f"{_BEHIND}.hnorm", f"{_BEHIND}.eh_proj", _BEHIND, f"{_BEHIND}.shared_head.norm"
)
HUNYUAN = {
    "use_qk_norm": True,
    "norm_type": "rms",
    "use_rotary_pos_emb": True,
    "use_cla": False,
    "cla_share_factor": 2,
    "use_mla": False,
}
HUNYUAN_SAME = {"attention_head_dim": "head_dim"}
HUNYUAN_NORMS = ((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm."))
MISTRAL3 = Family(
    ("mistral3",),
    {
        "tie_word_embeddings": True,
        "text_config": None,
        "vision_config": None,
        "vision_feature_layer": -1,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
    },
)
