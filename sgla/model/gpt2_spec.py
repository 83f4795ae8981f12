"""What keys of GPT-2, GPT-Neo, GPT-J, CodeGen and OPT say: GPT-2's scores have scales of their own, GPT-Neo's
none, GPT-J rotates so many dims of a head and has biases in MLPs alone. Loads no torch."""

from __future__ import annotations

from dataclasses import replace

from sgla.errors import ConfigError, UnsupportedValue
from sgla.hub.reader import Reader
from sgla.layers.spec import AttentionSpec, RopeSpec
from sgla.model.limits import HEADS, LAYERS, POSITIONS, WIDTH
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


def codegen(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``. Files have the heads in four parts."""
    if c.integer("num_attention_heads", HEADS) % 4:
        raise c.error("n_head", "a multiple of 4")
    return gptj(c, layers, positions)


def neo(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``."""
    heads, hidden = c.integer("num_attention_heads", HEADS), c.integer("hidden_size", WIDTH)
    if hidden % heads:
        raise c.error("hidden_size", f"a multiple of the {heads} heads (num_heads)")
    window, kinds = c.integer("window_size", POSITIONS), _kinds(c, layers)
    layer = AttentionSpec(heads, heads, hidden // heads, 1.0, None)
    return tuple(replace(layer, window=window if kind == "local" else 0) for kind in kinds)


_NEO = {"global", "local"}


def _kinds(c: Reader, layers: int) -> list[str]:
    """Of each layer: global or local."""
    key, found = "attention_layers", c.values["attention_layers"]
    if found is not None:
        if not isinstance(found, list) or len(found) != layers or not set(map(str, found)) <= _NEO:
            raise c.error(key, f"a list of {layers} words, global or local")
        return found
    key, found = "attention_types", []
    wanted = f"a list of pairs, kinds (global or local) and how often they come, for {layers} layers"
    given = [[["global", "local"], 12]] if c.values[key] is None else c.values[key]
    for pair in given if isinstance(given, list) else [given]:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[1]) is not int:
            raise c.error(key, wanted)
        kinds, count = pair
        if not isinstance(kinds, list) or not set(map(str, kinds)) <= _NEO or count > LAYERS:
            raise c.error(key, wanted)
        found += kinds * count
    if len(found) != layers:
        raise c.error(key, wanted)
    return found


def with_more_biases(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    return replace(spec, mlp_bias=True, out_bias=True)


def opt(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``."""
    heads, hidden = c.integer("num_attention_heads", HEADS), c.integer("hidden_size", WIDTH)
    if hidden % heads:
        raise c.error("hidden_size", f"a multiple of the {heads} heads (num_attention_heads)")
    if c.given("word_embed_proj_dim") and c.values["word_embed_proj_dim"] != hidden:
        said = c.error("word_embed_proj_dim", f"that of hidden_size, {hidden}")
        raise UnsupportedValue(said.message, param=said.param)
    return (AttentionSpec(heads, heads, hidden // heads, (hidden // heads) ** -0.5, None),) * layers


def with_biases(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    return replace(spec, mlp_bias=True)
