"""The shapes of hybrids of attention and gated delta nets (Qwen3-Next and Qwen3.5). Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.layers.spec import AttentionSpec, StateSpec, StateTensor
from sgla.model.limits import HEAD_DIM, HEADS, LAYERS, WIDTH
from sgla.model.ropes import ROPE, ropes, without_sections

TAPS = 64  # tokens that a short convolution reads at most


@dataclass(frozen=True)
class GatedSpec(AttentionSpec):
    """What comes of each head is multiplied by the sigmoid of as many values made of the input."""

    def weights(self, hidden: int) -> int:
        return super().weights(hidden) + hidden * self.heads * self.head_dim


@dataclass(frozen=True)
class DeltaSpec(StateSpec):
    """A gated delta net (arXiv 2412.06464): ``keys`` heads of ``key_dim`` values, ``values`` heads of
    ``value_dim``, so many of which share a key head; q, k and v go through a convolution over ``taps``
    tokens. ``signed``: what is written may also take the place of twice what it finds."""

    keys: int = 0
    values: int = 0
    key_dim: int = 0
    value_dim: int = 0
    taps: int = 0
    signed: bool = False

    @property
    def share(self) -> int:
        """Heads of values for each head of keys."""
        return self.values // self.keys

    def channels(self, keys: int) -> int:
        """Of the convolution, for so many heads of keys."""
        return keys * (2 * self.key_dim + self.share * self.value_dim)

    def unit(self, own: Callable[[int], int]) -> tuple[StateTensor, ...]:
        keys, qk = own(self.keys), (self.keys, self.key_dim)
        qkv = qk, qk, (self.keys, self.share * self.value_dim)
        shape = keys * self.share, self.key_dim, self.value_dim
        return (
            StateTensor("conv", (self.channels(keys), self.taps - 1), runs=qkv),
            StateTensor("memory", shape, "float32", ((self.keys, self.share),)),
        )

    def weights(self, hidden: int) -> int:
        channels, value = self.channels(self.keys), self.values * self.value_dim
        return hidden * (channels + 2 * value + 2 * self.values) + channels * self.taps


def read(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``."""
    heads, kv_heads = c.integer("num_attention_heads", HEADS), c.integer("num_key_value_heads", HEADS)
    head_dim = c.integer("head_dim", HEAD_DIM)
    keys, values = c.integer("linear_num_key_heads", HEADS), c.integer("linear_num_value_heads", HEADS)
    for many, few, names in (
        (heads, kv_heads, "attention heads among {} KV heads (num_key_value_heads)"),
        (values, keys, "linear_num_value_heads among {} linear_num_key_heads"),
    ):
        if many % few:
            raise ConfigError(f"config.json: {many} {names.format(few)} do not divide", param="model")
    rope, _ = ropes(without_sections(c), head_dim, positions, partial=True)
    full = GatedSpec(heads, kv_heads, head_dim, head_dim**-0.5, rope)
    linear = DeltaSpec(
        keys=keys,
        values=values,
        key_dim=c.integer("linear_key_head_dim", HEAD_DIM),
        value_dim=c.integer("linear_value_head_dim", HEAD_DIM),
        taps=c.integer("linear_conv_kernel_dim", TAPS, 2),
    )
    return tuple(linear if kind else full for kind in _linear(c, layers))


def olmo(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``. Without a base of the rotation nothing rotates."""
    heads, hidden = c.integer("num_attention_heads", HEADS), c.integer("hidden_size", WIDTH)
    kv_heads = c.integer("num_key_value_heads", HEADS) if c.given("num_key_value_heads") else heads
    keys, values = (
        c.integer(f"linear_num_{kind}_heads", HEADS) if c.given(f"linear_num_{kind}_heads") else heads
        for kind in ("key", "value")
    )
    for many, few, names in (
        (hidden, heads, "the hidden size, {}, is no multiple of the {} heads"),
        (heads, kv_heads, "{} attention heads do not divide among {} KV heads (num_key_value_heads)"),
        (values, keys, "{} linear_num_value_heads do not divide among {} linear_num_key_heads"),
    ):
        if many % few:
            raise ConfigError(f"config.json: {names.format(many, few)}", param="model")
    dim, given = hidden // heads, c.table(ROPE, nulls=True) or c.table("rope_scaling", nulls=True)
    rope = None
    if given.get("rope_theta", c.values.get("rope_theta")) is not None:
        rope, _ = ropes(c, dim, positions)
    key, value = "linear_key_head_dim", "linear_value_head_dim"
    key_dim = c.integer(key, HEAD_DIM) if c.given(key) else int(0.75 * hidden / keys)
    linear = DeltaSpec(
        keys=keys,
        values=values,
        key_dim=key_dim,
        value_dim=c.integer(value, HEAD_DIM) if c.given(value) else 2 * key_dim,
        taps=c.integer("linear_conv_kernel_dim", TAPS, 2),
        signed=c.flag("linear_allow_neg_eigval"),
    )
    kinds = _linear(c, layers)
    if c.values["layer_types"] is None and all(kinds):
        kinds[-1] = False
    if not any(kinds) or all(kinds):
        raise c.error("layer_types", "a list with both linear_attention and full_attention")
    full = AttentionSpec(heads, kv_heads, dim, dim**-0.5, rope)
    return tuple(linear if kind else full for kind in kinds)


def _linear(c: Reader, layers: int) -> list[bool]:
    """Which layers are delta nets."""
    kinds = c.values["layer_types"]
    if kinds is None:
        period = 4
        if "full_attention_interval" in c.values:
            period = c.integer("full_attention_interval", LAYERS)
        return [(i + 1) % period > 0 for i in range(layers)]
    known = ("linear_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise c.error("layer_types", f"a list of {layers} kinds, linear_attention or full_attention")
    return [kind == "linear_attention" for kind in kinds]
