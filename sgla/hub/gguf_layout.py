"""What the files of a GGUF architecture hold, in the words of HF's class.

The tables here hold for all architectures. A ``Layout`` says what one of them has of these, and what it has
besides; the families (``model/gguf_layouts.py``) hand it down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


class HFTensor(NamedTuple):
    """A tensor's name in HF's class, and its dims: letters that ``GGUFFile`` has the sizes of. ``{e}``: the
    tensor is one of each expert, or whatever the first of them counts.

    d hidden, f of the MLP, q and k of all heads, h of one, n heads, N of keys, t half of what is rotated, v
    tokens, P positions. W values that a layer is given of each of V tokens, X those of all layers. A are
    residual streams, e those but one, B the square of A, U the rank of LAuReL. Of mixtures e experts, m of
    one, s of the shared one. Of latent attention a the queries' latent, r that of keys and values, l with the
    rotated part, u queries, g a head's part that is not rotated, y its value, o all values, b keys and
    values. Of Mamba 2 i all rows, c channels of the convolution, w its taps, j the values of all heads, z
    heads, x groups, p values of a group; w is also that of short convolutions. L is the latent of what
    experts read, E what they read. Of indexers H heads, D values of one, I of all. K are values where keys
    have another width. Of Mamba 1 i, c, w and j, S values of a channel's state, R what time steps are made
    of, T the same with B and C. Of gated delta nets i, c, w, j, z and p as of Mamba 2, Z twice z; Q are
    queries with their gates. Of Kimi's delta nets w, j, z and p as of Mamba 2. Of encoders Y types of
    tokens, C classes, F and G what two layers behind the pooling make."""

    name: str
    dims: str


@dataclass(frozen=True)
class Stored:
    """A tensor of a layer: the ``tensors`` of HF's class that its rows are, one below the other.
    ``layers``: all, those without or with experts, with an indexer, with a window or behind the first.
    ``flag``: the key of HF's configuration that says whether there is one. ``unless``: a size without which
    alone there is one, ``given``: one without which there is none. ``mixer``: of layers that alone have
    one."""

    tensors: tuple[HFTensor, ...]
    layers: Literal["all", "dense", "sparse", "picks", "slides", "later"] = "all"
    flag: str = ""
    unless: str = ""
    given: str = ""
    mixer: Literal["", "attention", "mamba", "conv", "mlp", "delta"] = ""


# Where Mambas are: in layers without KV heads instead of attention, in all layers beside it, alone in a
# layer, as attention and MLPs are in others, or in all layers, and nothing else is.
Scans = Literal["", "instead", "beside", "alone", "only"]
# How a class has the matrices of gated delta nets: queries, keys and values apart from their gates, or all
# rows of a head of keys joined. Files of the first kind have the heads of values in another order. Kimi's
# have a decay of each channel, and are in layers without KV heads.
Deltas = Literal["", "apart", "joined", "channels"]


@dataclass(frozen=True)
class Layout:
    """``known``: keys that HF's class reads; ``fixed``: keys with the only value it has. ``tensors``: of a
    layer, without ``blk.N.``. ``missing``: keys of the metadata that mean something where they are missing;
    ``only``: keys with the values that alone are supported; ``when``: keys and values by which this one is
    told from others of the same name. ``shift``: what files add to the weights of norms. ``permuted``: rows
    of q and k are interleaved. ``latent``: attention is multi-head latent. ``by_width``: layers of the one
    model whose queries are scaled by hidden/heads, which no key says."""

    name: str
    hf_class: str
    model_type: str
    known: frozenset[str]
    fixed: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    missing: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    when: Mapping[str, Any] = field(default_factory=dict)
    eps: str = "attention.layer_norm_rms_epsilon"
    shift: float = 0.0
    permuted: bool = False
    latent: bool = False
    learned: bool = False  # positions have vectors
    head_bias: bool = False
    mixture: bool = False
    by_width: int = 0
    scans: Scans = ""
    first_mamba: bool = False  # these are Mamba 1
    names: Mapping[str, str] = field(default_factory=dict)  # HF's, of what is called otherwise here
    keys: Mapping[str, str] = field(default_factory=dict)  # HF's of keys, which most classes call otherwise
    windows_optional: bool = False  # HF's class runs without any
    convolves: bool = False  # layers without KV heads are short convolutions
    kinds: bool = False  # layers with windows have heads of their own
    wider: bool = False  # layers with windows have more KV heads
    altup: bool = False  # the residual stream is several wide
    deltas: Deltas = ""  # all layers but each so many-th one are gated delta nets
    last_norm: str = "output_norm"
    yarn: Mapping[str, Any] = field(default_factory=dict)  # of HF's scaling, which no key says
    stretched: bool = False  # HF's class fills in a scaling where none is said
    growing: bool = False  # so do queries, with their positions
    xielu: bool = False  # the metadata has numbers of the activation of each layer
    longrope: bool = False
    mscales: bool = False  # HF's longrope says by what cosines and sines are multiplied
    pooled: bool = False  # vectors are made of it, too
    full_first: bool = False  # of as many layers as a pattern says, the first has no window
    sees: bool = False  # what makes pictures of tokens is in another file
    judges: bool = False  # files of rerankers have beside the rows of what it may answer
    encoder: bool = False  # tokens see all others, and there is no output layer
    top: Mapping[str, Stored] = field(default_factory=dict)  # of an encoder: tensors of no layer
    layers: str = "model.layers"  # what the names of layers begin with

    def hf_key(self, key: str) -> str:
        """HF's name of a key of the metadata; empty if the class reads none."""
        if key == "attention.sliding_window" and not self.known.isdisjoint(_OTHER_WINDOWS):
            return ""
        if key in self.keys:
            return self.keys[key]
        found = (name if name in self.known else self.names.get(name, "") for name in HF_KEYS.get(key, ()))
        return next(filter(None, found), "")

    @property
    def periodic(self) -> bool:
        """HF's class has experts in every so many-th layer; of files the tensors say in which."""
        return "expert_layer_period" in self.known

    @property
    def indexed(self) -> bool:
        return "index_topk" in self.known

    @property
    def rotates(self) -> bool:
        return "rope_theta" in (*self.known, *self.names) or "rope.freq_base" in self.keys

    @property
    def windowed(self) -> bool:
        return bool(self.hf_key("attention.sliding_window"))


# In these the window has conditions, and files have none.
_OTHER_WINDOWS = frozenset({"use_sliding_window", "max_window_layers"})
# Keys of the metadata, and what families call them in config.json.
HF_KEYS: dict[str, tuple[str, ...]] = {
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "rope.freq_base_swa": ("rope_local_base_freq",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"),
    "attention.indexer.head_count": ("index_n_heads",),
    "attention.indexer.key_length": ("index_head_dim",),
    "attention.indexer.top_k": ("index_topk",),
    "shortconv.l_cache": ("conv_L_cache",),
    "interleave_moe_layer_step": ("moe_layer_interval", "interleave_moe_layer_step"),
    "moe_latent_size": ("moe_latent_size",),
    "nextn_predict_layers": ("num_nextn_predict_layers",),
}
# What it means that one of them is missing, or 0.
MISSING: dict[str, Any] = {
    "attention.sliding_window": None,
    "attention.q_lora_rank": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope.freq_base_swa": 10000.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": False,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "leading_dense_block_count": 0,
    "interleave_moe_layer_step": 1,
    "nextn_predict_layers": 0,
    "use_parallel_residual": True,
}
TOP = {
    "token_embd.weight": Stored((HFTensor("model.embed_tokens.weight", "vd"),)),
    "output_norm.weight": Stored((HFTensor("model.norm.weight", "d"),)),
    "output_norm.bias": Stored((HFTensor("model.norm.bias", "d"),)),
    "output.weight": Stored((HFTensor("lm_head.weight", "vd"),)),
}
POSITIONS = {"position_embd.weight": Stored((HFTensor("model.embed_positions.weight", "Pd"),))}
PER_LAYER = {
    "per_layer_token_embd.weight": Stored((HFTensor("model.embed_tokens_per_layer.weight", "VX"),)),
    "per_layer_model_proj.weight": Stored((HFTensor("model.per_layer_model_projection.weight", "Xd"),)),
    "per_layer_proj_norm.weight": Stored((HFTensor("model.per_layer_projection_norm.weight", "W"),)),
}
ALTUP = {
    "altup_proj.weight": Stored((HFTensor("model.altup_projections.{e}.weight", "edd"),)),
    "altup_unembd_proj.weight": Stored((HFTensor("model.altup_unembed_projections.{e}.weight", "edd"),)),
}
# Tensors that some files have in place of others, joined along the rows.
JOINED = {
    "attn_qkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "attn_qkv.bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "ffn_gate_up_exps.weight": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
}
