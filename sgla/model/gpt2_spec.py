"""What keys of GPT-2, GPT-J and OPT say: GPT-2's scores have scales of their own, GPT-J rotates so many dims
of a head and has biases in MLPs alone. Loads no torch."""

from __future__ import annotations

from dataclasses import replace

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.layers.spec import AttentionSpec, RopeSpec
from sgla.model.limits import HEADS, WIDTH
from sgla.model.spec import ModelSpec


def read(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``."""
    heads, hidden = c.integer("num_attention_heads", HEADS), c.integer("hidden_size", WIDTH)
    dim = hidden // heads
    if hidden % heads or dim % 2:
        raise ConfigError(
            f"config.json: n_embd {hidden} is not an even number for each of the {heads} heads (n_head)",
            param="model",
        )
    if c.flag("add_cross_attention"):
        raise c.error("add_cross_attention", "false")
    scale = dim**-0.5 if c.flag("scale_attn_weights") else 1.0
    deep = c.flag("scale_attn_by_inverse_layer_idx")
    return tuple(
        AttentionSpec(heads, heads, dim, scale / (i + 1) if deep else scale, None) for i in range(layers)
    )


def gptj(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``."""
    heads, hidden = c.integer("num_attention_heads", HEADS), c.integer("hidden_size", WIDTH)
    if hidden % heads:
        raise c.error("n_embd", f"a multiple of the {heads} heads (n_head)")
    rotated = c.integer("rotary_dim", hidden // heads)
    if rotated % 2:
        raise c.error("rotary_dim", "even")
    rope = RopeSpec(1e4, rotated)
    return (AttentionSpec(heads, heads, hidden // heads, (hidden // heads) ** -0.5, rope),) * layers


def opt(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``."""
    heads, hidden = c.integer("num_attention_heads", HEADS), c.integer("hidden_size", WIDTH)
    if hidden % heads:
        raise c.error("hidden_size", f"a multiple of the {heads} heads (num_attention_heads)")
    if c.given("word_embed_proj_dim") and c.values["word_embed_proj_dim"] != hidden:
        raise c.error("word_embed_proj_dim", f"that of hidden_size, {hidden}")
    return (AttentionSpec(heads, heads, hidden // heads, (hidden // heads) ** -0.5, None),) * layers


def with_biases(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    return replace(spec, mlp_bias=True)
