"""The attention of GPT-2, whose scores have scales of their own. Loads no torch."""

from __future__ import annotations

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.layers.spec import AttentionSpec
from sgla.model.limits import HEADS, WIDTH


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
