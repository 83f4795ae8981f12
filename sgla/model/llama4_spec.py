"""The shapes of Llama 4's layers. Loads no torch."""

from __future__ import annotations

from dataclasses import replace

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.kernels.routing import Routing
from sgla.layers.spec import AttentionSpec, Growth, MoESpec
from sgla.model.limits import EXPERTS, HEAD_DIM, HEADS, INNER, LAYERS, POSITIONS
from sgla.model.ropes import ropes, unmagnified
from sgla.model.spec import ModelSpec
from sgla.model.windows import named

CHUNK = "attention_chunk_size"
_FULL, _CHUNKED = "full_attention", "chunked_attention"


def read(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``."""
    heads, kv_heads = c.integer("num_attention_heads", HEADS), c.integer("num_key_value_heads", HEADS)
    head_dim = c.integer("head_dim", HEAD_DIM)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"config.json: {heads} attention heads (num_attention_heads) of {head_dim} values (head_dim), "
            f"{kv_heads} of keys and values (num_key_value_heads): they must divide, and head_dim be even",
            param="model",
        )
    rope, _ = ropes(c, head_dim, positions)
    if c.flag("use_qk_norm"):  # behind the rotation
        rope = unmagnified(rope)
    grown = None
    if c.flag("attn_temperature_tuning"):
        grown = Growth(c.number("attn_scale"), c.integer("floor_scale", POSITIONS), 1)
    flags = c.integers("no_rope_layers", LAYERS) or None  # an empty list says no more than a null
    flat = named(Reader(c.architecture, {**c.values, "no_rope_layers": flags}), (0,) * layers)
    whole = range(layers) if c.values[CHUNK] is None else flat
    kinds = c.values["layer_types"]
    if kinds is None:
        kinds = [_FULL if i in whole else _CHUNKED for i in range(layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not {_FULL, _CHUNKED}.issuperset(map(str, kinds))
    ):
        raise c.error("layer_types", f"a list of {layers} words, {_FULL} or {_CHUNKED}")
    chunk = c.integer(CHUNK, POSITIONS) if _CHUNKED in kinds else 0
    turned = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, rope)
    still = replace(turned, rope=None, growth=grown)
    made = [still if i in flat else turned for i in range(layers)]
    return tuple(
        replace(layer, window=chunk, chunked=True) if kind == _CHUNKED else layer
        for layer, kind in zip(made, kinds)
    )


def complete(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``. Experts are as wide as the shared one, other MLPs have a width of their
    own."""
    experts, width = c.integer("num_local_experts", EXPERTS), c.integer("intermediate_size", INNER)
    if c.integer("num_experts_per_tok", experts) != 1:
        raise c.error("num_experts_per_tok", "1")
    step = c.integer("interleave_moe_layer_step", LAYERS)
    mixed = c.integers("moe_layers", LAYERS) if c.given("moe_layers") else range(step - 1, spec.layers, step)
    moe = MoESpec(
        experts,
        width,
        Routing(1, normalize=True),
        frozenset(i for i in mixed if i < spec.layers),
        crossed=True,
        halves=True,
        shared=width,
    )
    return replace(spec, intermediate=c.integer("intermediate_size_mlp", INNER), moe=moe)
