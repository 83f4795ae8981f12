"""What families' entries say of their GGUF files (``families``), and words for it. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sgla.hub.gguf_layout import Deltas, HFTensor, Scans, Stored

PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **POST_NORMS}
GLM4_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
ONE_NORM = {"attn_norm": "input_layernorm"}
BARE_NORM = {"attn_norm": "norm"}
# The norm before the MLP is called after what comes before it.
AFTER_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}


def one(name: str, dims: str, **more: Any) -> Stored:
    return Stored((HFTensor(name, dims),), **more)


BALANCED = {"exp_probs_b.bias": one("mlp.gate.e_score_correction_bias", "e", layers="sparse")}
UNNAMED_NORM = {"ffn_norm": one("post_attention_layernorm.weight", "d")}  # as converters leave it
SHARED_GATE = {"ffn_gate_inp_shexp.weight": one("mlp.shared_expert_gate.weight", "1d", layers="sparse")}
EXPERT_BIASES = {
    "ffn_gate_inp.bias": one("mlp.gate.bias", "e", layers="sparse"),
    "ffn_gate_exps.bias": one("mlp.experts.gate_proj_bias", "em", layers="sparse"),
    "ffn_up_exps.bias": one("mlp.experts.up_proj_bias", "em", layers="sparse"),
    "ffn_down_exps.bias": one("mlp.experts.down_proj_bias", "ed", layers="sparse"),
}
# What Gemma 4's layers have where each is given values of its own, and where experts stand beside the MLP.
GEMMA4 = {
    "layer_output_scale.weight": one("layer_scalar", "1"),
    "inp_gate.weight": one("per_layer_input_gate.weight", "Wd"),
    "proj.weight": one("per_layer_projection.weight", "dW"),
    "post_norm.weight": one("post_per_layer_input_norm.weight", "d", given="W"),
    "ffn_gate_inp.weight": one("moe.gate.weight", "ed"),
    "ffn_gate_inp.scale": one("router.scale", "d", given="e"),
    "ffn_down_exps.scale": one("router.per_expert_scale", "e"),
    "pre_ffw_norm_2.weight": one("pre_feedforward_layernorm_2.weight", "d", given="e"),
    "post_ffw_norm_1.weight": one("post_feedforward_layernorm_1.weight", "d", given="e"),
    "post_ffw_norm_2.weight": one("post_feedforward_layernorm_2.weight", "d", given="e"),
    **{
        f"ffn_{part}_exps.weight": one(f"moe.experts.{{e}}.{part}_proj.weight", dims)
        for part, dims in (("gate", "emd"), ("up", "emd"), ("down", "edm"))
    },
}
# MiMo-V2's values are narrower than its keys.
MIMO = {
    **BALANCED,
    "attn_v.weight": one("self_attn.v_proj.weight", "Kd"),
    "attn_output.weight": one("self_attn.o_proj.weight", "do"),
    "attn_sinks.weight": one("self_attn.sinks", "n", layers="slides"),
}
GEMMA3N = {
    "inp_gate.weight": one("per_layer_input_gate.weight", "Wd"),
    "proj.weight": one("per_layer_projection.weight", "dW"),
    "post_norm.weight": one("post_per_layer_input_norm.weight", "d"),
    "altup_correct_coef.weight": one("altup.correction_coefs.weight", "AA"),
    "altup_correct_scale.weight": one("altup.correct_output_scale", "d"),
    "altup_predict_coef.weight": one("altup.prediction_coefs.weight", "BA"),
    "altup_router.weight": one("altup.modality_router.weight", "Ad"),
    "altup_router_norm.weight": one("altup.router_norm.weight", "d"),
    "laurel_l.weight": one("laurel.linear_left.weight", "Ud"),
    "laurel_r.weight": one("laurel.linear_right.weight", "dU"),
    "laurel_post_norm.weight": one("laurel.post_laurel_norm.weight", "d"),
}


def _linear(name: str, hf: str, dims: str) -> dict[str, Stored]:
    return {
        f"{name}.weight": one(f"{hf}.weight", dims),
        f"{name}.bias": one(f"{hf}.bias", dims[0]),
    }


BERT_TOP = {
    "token_embd.weight": one("embeddings.word_embeddings.weight", "vd"),
    "token_types.weight": one("embeddings.token_type_embeddings.weight", "Yd"),
    "position_embd.weight": one("embeddings.position_embeddings.weight", "Pd"),
    **_linear("token_embd_norm", "embeddings.LayerNorm", "d"),
}
BERT = {
    **_linear("attn_q", "attention.self.query", "dd"),
    **_linear("attn_k", "attention.self.key", "dd"),
    **_linear("attn_v", "attention.self.value", "dd"),
    **_linear("attn_output", "attention.output.dense", "dd"),
    **_linear("attn_output_norm", "attention.output.LayerNorm", "d"),
    **_linear("ffn_up", "intermediate.dense", "fd"),
    **_linear("ffn_down", "output.dense", "df"),
    **_linear("layer_output_norm", "output.LayerNorm", "d"),
}
BERT_HEAD = {
    **_linear("cls", "pooler.dense", "dd"),
    **_linear("cls.output", "classifier", "Cd"),
}
NOMIC_TOP = {name: stored for name, stored in BERT_TOP.items() if name != "position_embd.weight"}
NOMIC = {
    **{f"attn_{part}.weight": one(f"self_attn.{part}_proj.weight", "dd") for part in "qkv"},
    "attn_output.weight": one("self_attn.o_proj.weight", "dd"),
    **{f"ffn_{part}.weight": one(f"mlp.{part}_proj.weight", "fd") for part in ("gate", "up")},
    "ffn_down.weight": one("mlp.down_proj.weight", "df"),
    **_linear("attn_output_norm", "post_attention_layernorm", "d"),
    **_linear("layer_output_norm", "post_mlp_layernorm", "d"),
}
MODERN_TOP = {
    "token_embd.weight": one("embeddings.word_embeddings.weight", "vd"),
    "token_embd_norm.weight": one("embeddings.LayerNorm.weight", "d"),
    "output_norm.weight": one("final_norm.weight", "d"),
}
MODERN = {
    "attn_norm.weight": one("post_attention_layernorm.weight", "d", layers="later"),
    **{f"attn_{part}.weight": one(f"self_attn.{part}_proj.weight", "dd") for part in "qkv"},
    "attn_output.weight": one("self_attn.o_proj.weight", "dd"),
    "ffn_norm.weight": one("post_mlp_layernorm.weight", "d"),
    "ffn_up.weight": Stored(tuple(HFTensor(f"mlp.{part}_proj.weight", "fd") for part in ("gate", "up"))),
    "ffn_down.weight": one("mlp.down_proj.weight", "df"),
}
GEMMA_TOP = {
    "token_embd.weight": one("embed_tokens.weight", "vd"),
    "output_norm.weight": one("norm.weight", "d"),
    "dense_2.weight": one("dense.0.weight", "Fd", given="F"),
    "dense_3.weight": one("dense.1.weight", "GF", given="F"),
}
_GROUPED = {
    "attn_q.weight": one("self_attn.q_proj.weight", "qd"),
    **{f"attn_{part}.weight": one(f"self_attn.{part}_proj.weight", "kd") for part in "kv"},
    "attn_output.weight": one("self_attn.o_proj.weight", "dq"),
    **{f"ffn_{part}.weight": one(f"mlp.{part}_proj.weight", "fd") for part in ("gate", "up")},
    "ffn_down.weight": one("mlp.down_proj.weight", "df"),
}
GEMMA = _GROUPED | {
    **{f"{name}.weight": one(f"{hf}.weight", "d") for name, hf in GEMMA_NORMS.items()},
    **{f"attn_{part}_norm.weight": one(f"self_attn.{part}_norm.weight", "h") for part in "qk"},
}
EURO_TOP = {name: GEMMA_TOP[name] for name in ("token_embd.weight", "output_norm.weight")}
EURO = _GROUPED | {f"{name}.weight": one(f"{hf}.weight", "d") for name, hf in PRE_NORMS.items()}
SOFTMAX, SIGMOID, CHOSEN_SOFTMAX = 1, 2, 3  # values of expert_gating_func; 0 is none


@dataclass(frozen=True)
class Gguf:
    """How the GGUF files of a family differ from most. ``norms``: of a layer, in HF's words; ``mlp``: HF's
    up and down without a gate. ``joined``: ``ffn_up`` is gate and up. ``tensors``: more of a layer; of an
    encoder, which has ``top``, all. The others are those of ``Layout``. ``shared``: the MLP is what mixtures
    of the family share; ``dense``: none of its layers is a mixture."""

    name: str
    norms: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)
    mlp: tuple[str, str] = ("up_proj", "down_proj")
    mlp_bias: bool = False
    joined: bool = False
    permuted: bool = False
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    missing: Mapping[str, Any] = field(default_factory=dict)
    gating: tuple[int, ...] = (0, SOFTMAX)
    when: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    by_width: int = 0
    scans: Scans = ""
    first_mamba: bool = False
    convolves: bool = False
    deltas: Deltas = ""
    kinds: bool = False
    wider: bool = False
    altup: bool = False
    last_norm: str = "output_norm"
    shared: bool = False
    dense: bool = False
    longrope: bool = False
    windows_optional: bool = False
    top: Mapping[str, Stored] = field(default_factory=dict)
    layers: str = "model.layers"
    full_first: bool = False
    both_ways: bool = False  # files that pool mean that tokens see those behind them
    sees: bool = False
    judges: bool = False
    head: str = "Model"  # ends the name of an encoder's class
