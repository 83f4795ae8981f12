"""The shapes of MiMo-V2-Flash's layers (arXiv 2601.02780). Loads no torch."""

from __future__ import annotations

from dataclasses import replace

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.layers.spec import AttentionSpec
from sgla.model.limits import HEAD_DIM, HEADS, POSITIONS
from sgla.model.ropes import BY_LAYERS, ROPE, ropes
from sgla.model.windows import layer_types

PERIOD = 6  # every so many layers one sees all, as the first does, where no key says it

SHARE = 0.334


def read(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``. Layers with windows have twice as many KV heads, and sinks."""
    window = c.integer("sliding_window", POSITIONS)
    if c.given("sliding_window_size"):  # those before the token
        window = c.integer("sliding_window_size", POSITIONS) + 1
    kinds = [i > 0 and (i + 1) % PERIOD > 0 for i in range(layers)]
    if c.given("layer_types"):
        kinds = [kind == "sliding_attention" for kind in layer_types(c, layers, window)]
    heads, kv_heads = c.integer("num_attention_heads", HEADS), c.integer("num_key_value_heads", HEADS)
    if heads % (kv_heads * (2 if any(kinds) else 1)):
        raise ConfigError(
            f"config.json: {heads} attention heads (num_attention_heads) do not divide among {kv_heads} KV "
            "heads (num_key_value_heads), or twice as many in layers with windows",
            param="model",
        )
    c.agrees("hybrid_layer_pattern", kinds, "layer_types")
    c.agrees("swa_num_key_value_heads", 2 * kv_heads, "num_key_value_heads, doubled,")
    head_dim = c.integer("head_dim", HEAD_DIM)
    rope, local = ropes(_shared(c), head_dim, positions, True, 1e4)
    full = AttentionSpec(
        heads,
        kv_heads,
        head_dim,
        head_dim**-0.5,
        rope,
        values=c.integer("v_head_dim", HEAD_DIM),
        value_scale=c.number("attention_value_scale") if c.given("attention_value_scale") else 1.0,
    )
    sliding = replace(full, kv_heads=2 * kv_heads, rope=local, window=window, sinks=True)
    return tuple(sliding if slides else full for slides in kinds)


def _shared(c: Reader) -> Reader:
    """A rope that is not stretched turns a third of a head's dims, where its table does not say it."""
    given = c.table(ROPE)
    tables = {kind: given.get(kind, {}) for kind in BY_LAYERS}
    for kind, table in tables.items():
        if isinstance(table, dict) and table.get("rope_type", table.get("type", "default")) == "default":
            tables[kind] = {"partial_rotary_factor": SHARE, **table}
    return Reader(c.architecture, {**c.values, ROPE: {**given, **tables}})
