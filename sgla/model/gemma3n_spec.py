"""The shapes of Gemma 3n's layers. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.layers.spec import AltUp, PerLayerInputs
from sgla.model.gemma4_spec import Gemma4Attention, shared
from sgla.model.limits import HEAD_DIM, HEADS, INNER, POSITIONS, VOCAB
from sgla.model.ropes import ropes
from sgla.model.spec import ModelSpec
from sgla.model.windows import layer_types

PERIOD = 5  # every so many layers one sees all, where no key says it
SPARSE, SPARSITY = 10, 0.95  # layers whose MLPs are sparse, and how much, where no key says it
MOST_INPUTS = 64


@dataclass(frozen=True)
class Gemma3nAttention(Gemma4Attention):
    """``rank``: of what stands beside it (LAuReL)."""

    rank: int = 0

    def weights(self, hidden: int) -> int:
        return super().weights(hidden) + 2 * hidden * self.rank


def read(c: Reader, layers: int, positions: int) -> tuple[Gemma3nAttention, ...]:
    """See ``Family.attention``."""
    window, head_dim = c.integer("sliding_window", POSITIONS), c.integer("head_dim", HEAD_DIM)
    kinds = [i % PERIOD != PERIOD - 1 for i in range(layers)]
    if c.given("layer_types"):
        kinds = [kind == "sliding_attention" for kind in layer_types(c, layers, window)]
    heads, kv_heads = c.integer("num_attention_heads", HEADS), c.integer("num_key_value_heads", HEADS)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: {heads} attention heads (num_attention_heads) do not divide among {kv_heads} KV "
            "heads (num_key_value_heads)",
            param="model",
        )
    rope, local = ropes(c, head_dim, positions)
    full = Gemma3nAttention(heads, kv_heads, head_dim, 1.0, rope, rank=c.integer("laurel_rank", INNER))
    sliding = replace(full, rope=local, window=window)
    return tuple(
        replace(sliding if slides else full, reads=reads) for slides, reads in zip(kinds, shared(c, kinds))
    )


def complete(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    c.number("final_logit_softcapping")  # which Gemma 4 may lack
    inputs = c.integer("altup_num_inputs", MOST_INPUTS)
    altup = AltUp(
        inputs,
        c.integer("altup_active_idx", inputs - 1, 0),
        c.flag("altup_correct_scale"),
        _sparsity(c, spec.layers),
    )
    per_layer = PerLayerInputs(
        c.integer("hidden_size_per_layer_input", INNER), c.integer("vocab_size_per_layer_input", VOCAB)
    )
    inner = (spec.intermediate,) * spec.layers
    if isinstance(c.values["intermediate_size"], list):
        inner = tuple(c.integers("intermediate_size", INNER))
        if len(inner) != spec.layers or 0 in inner:
            raise c.error("intermediate_size", f"a number, or {spec.layers} numbers above 0")
    return replace(spec, per_layer=per_layer, inner=inner, altup=altup)


def _sparsity(c: Reader, layers: int) -> tuple[float, ...]:
    """Of each layer, how many of its MLP's inner values are none."""
    key = "activation_sparsity_pattern"
    found: Any = c.values[key]
    if found is None:
        sparse = SPARSE if layers > SPARSE else 0
        return (SPARSITY,) * sparse + (0.0,) * (layers - sparse)
    if not isinstance(found, list) or len(found) != layers:
        raise c.error(key, f"a list of {layers} numbers")
    values = tuple(Reader(c.architecture, {key: value}).number(key, 1.0) if value else 0.0 for value in found)
    if 1.0 in values:
        raise c.error(key, "a list of numbers below 1")
    return values
