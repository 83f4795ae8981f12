"""The shapes of Gemma 4's layers. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.kernels.routing import Routing
from sgla.layers.spec import AttentionSpec, MoESpec, PerLayerInputs
from sgla.model.limits import EXPERTS, HEAD_DIM, HEADS, INNER, LAYERS, POSITIONS, VOCAB
from sgla.model.ropes import ropes
from sgla.model.spec import ModelSpec
from sgla.model.windows import layer_types

PERIOD = 6  # every so many layers one sees all, where no key says it
PER_LAYER = "per_layer_config"


@dataclass(frozen=True)
class Gemma4Attention(AttentionSpec):
    """``joined``: one matrix makes keys and values."""

    joined: bool = False

    def weights(self, hidden: int) -> int:
        own = 0 if self.reads is not None else self.kv_heads * (1 if self.joined else 2)
        return hidden * self.head_dim * (2 * self.heads + own)


def read(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``."""
    if c.values["use_bidirectional_attention"] not in (None, "vision"):
        raise c.error("use_bidirectional_attention", "null, or vision, which text does not see")
    window, heads = c.integer("sliding_window", POSITIONS), c.integer("num_attention_heads", HEADS)
    kinds = [i % PERIOD != PERIOD - 1 for i in range(layers)]
    if c.given("layer_types"):
        kinds = [kind == "sliding_attention" for kind in layer_types(c, layers, window)]
    kinds[-1] = False  # as HF's class has it
    head_dim, kv_heads = c.integer("head_dim", HEAD_DIM), c.integer("num_key_value_heads", HEADS)
    wide, wide_heads = _whole(c, kinds, head_dim, kv_heads)
    if heads % kv_heads or heads % wide_heads:
        raise ConfigError(
            f"config.json: {heads} attention heads (num_attention_heads) do not divide among {kv_heads} or "
            f"{wide_heads} KV heads (num_key_value_heads, num_global_key_value_heads)",
            param="model",
        )
    _, local = ropes(c, head_dim, positions, local_theta=1e4)
    rope, _ = ropes(c, wide, positions, local_theta=1e4)
    sliding = Gemma4Attention(heads, kv_heads, head_dim, 1.0, local, window)
    full = Gemma4Attention(heads, wide_heads, wide, 1.0, rope, joined=c.flag("attention_k_eq_v"))
    return tuple(
        replace(sliding if slides else full, reads=reads) for slides, reads in zip(kinds, shared(c, kinds))
    )


def _whole(c: Reader, kinds: list[bool], head_dim: int, kv_heads: int) -> tuple[int, int]:
    """Width of a head and KV heads of the layers without a window, by keys of their own or by a table."""
    if not c.given(PER_LAYER):
        if c.given("num_global_key_value_heads") and c.flag("attention_k_eq_v"):
            kv_heads = c.integer("num_global_key_value_heads", HEADS)
        return c.integer("global_head_dim", HEAD_DIM), kv_heads
    tables = c.table(PER_LAYER)
    own: Mapping[str, Any] = next(iter(tables.values()), {})
    # The numbers of layers, which transformers writes with as many digits as the last one has.
    named = {int(key) for key in tables if key.isdecimal() and len(key) < 9}
    whole = {i for i, slides in enumerate(kinds) if not slides}
    known = isinstance(own, dict) and own.keys() <= {"head_dim", "num_key_value_heads"}
    alike = len(named) == len(tables) and all(table == own for table in tables.values())
    if tables and not (known and alike and named == whole):  # none: all layers have the same heads
        wanted = "one table of head_dim and num_key_value_heads for all layers without a window"
        raise c.error(PER_LAYER, wanted)
    p = Reader(c.architecture, {"head_dim": head_dim, "num_key_value_heads": kv_heads, **own})
    return p.integer("head_dim", HEAD_DIM), p.integer("num_key_value_heads", HEADS)


def shared(c: Reader, kinds: list[bool]) -> list[int | None]:
    """The last layers read what the last one of their kind before them keeps."""
    first = len(kinds) - c.integer("num_kv_shared_layers", len(kinds) - 1, 0)
    last = {slides: i for i, slides in enumerate(kinds[:first])}
    if not set(kinds[first:]) <= last.keys():
        raise c.error("num_kv_shared_layers", "a number that leaves a layer of each kind before them")
    return [None if i < first else last[slides] for i, slides in enumerate(kinds)]


def complete(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    per_layer = None
    if width := c.integer("hidden_size_per_layer_input", INNER, 0):
        pad = c.integer("pad_token_id", VOCAB, 0) if c.given("pad_token_id") else 0
        per_layer = PerLayerInputs(width, c.integer("vocab_size_per_layer_input", VOCAB), pad)
    inner: tuple[int, ...] = ()
    if c.flag("use_double_wide_mlp"):
        inner = tuple(spec.intermediate * (1 if a.reads is None else 2) for a in spec.attention)
    return replace(spec, per_layer=per_layer, inner=inner, moe=_mixture(c, spec))


def unified(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``: the 12B, with neither experts nor parts of the embedding for each layer."""
    without = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    return complete(Reader(c.architecture, {**c.values, **without}), spec)


def _mixture(c: Reader, spec: ModelSpec) -> MoESpec | None:
    """Beside the MLP of every layer."""
    if not c.flag("enable_moe_block"):
        return None
    experts = c.integer("num_experts", EXPERTS)
    routing = Routing(c.integer("top_k_experts", experts), normalize=True)
    width = c.integer("moe_intermediate_size", INNER)
    if c.flag("use_double_wide_mlp"):
        raise c.error("use_double_wide_mlp", "false beside experts")
    every = frozenset(range(min(spec.layers, LAYERS)))
    return MoESpec(experts, width, routing, every, shared=spec.intermediate)
