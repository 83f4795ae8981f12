"""The shapes of hybrids of attention and short convolutions (LFM2, LFM3). Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.layers.spec import AttentionSpec, StateSpec, StateTensor
from sgla.model.limits import HEAD_DIM, HEADS, INNER, LAYERS, POSITIONS, WIDTH
from sgla.model.ropes import ropes
from sgla.model.spec import ModelSpec

PERIOD = ("sliding_attention", "conv", "full_attention", "conv")  # LFM3's layers behind the first one
TAPS = 64  # tokens that a short convolution reads at most


@dataclass(frozen=True)
class ConvSpec(StateSpec):
    """A convolution of each channel over ``taps`` tokens, between two gates."""

    channels: int = 0
    taps: int = 0
    bias: bool = False  # of the convolution and of the products before and behind it

    def unit(self, own: Callable[[int], int]) -> tuple[StateTensor, ...]:
        return (StateTensor("conv", (own(self.channels), self.taps - 1), runs=((self.channels, 1),)),)

    def weights(self, hidden: int) -> int:
        return self.channels * (4 * hidden + self.taps)


def read(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``."""
    heads, kv_heads, head_dim = _heads(c)
    rope, _ = ropes(c, head_dim, positions)
    full = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, rope)
    short = _convolution(c)
    return tuple(short if kind else full for kind in _short(c, layers))


@dataclass(frozen=True)
class GatedSpec(AttentionSpec):
    """A gate for each head."""

    def weights(self, hidden: int) -> int:
        return super().weights(hidden) + hidden * self.heads


def lfm3(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``."""
    heads, kv_heads, head_dim = _heads(c)
    rope, local = ropes(c, head_dim, positions, local_theta=1e4)
    full = GatedSpec(heads, kv_heads, head_dim, head_dim**-0.5, rope)
    made: dict[str, AttentionSpec] = {"conv": _convolution(c), "full_attention": full}
    kinds = c.values["layer_types"]
    if kinds is None:
        kinds = ["conv", *(PERIOD[i % len(PERIOD)] for i in range(1, layers))]
    known = isinstance(kinds, list) and all(kind in PERIOD for kind in kinds)
    if not known or len(kinds) != layers:
        raise c.error("layer_types", f"a list of {layers} kinds, conv, full_attention or sliding_attention")
    if "sliding_attention" in kinds:
        window = c.integer("sliding_window", POSITIONS)
        made["sliding_attention"] = replace(full, rope=local, window=window)
    return tuple(made[kind] for kind in kinds)


def _heads(c: Reader) -> tuple[int, int, int]:
    """Of queries, of keys and values, and the values of one."""
    hidden = c.integer("hidden_size", WIDTH)
    heads, kv_heads = c.integer("num_attention_heads", HEADS), c.integer("num_key_value_heads", HEADS)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: {heads} attention heads (num_attention_heads) do not divide among {kv_heads} KV "
            "heads (num_key_value_heads)",
            param="model",
        )
    head_dim = c.integer("head_dim", HEAD_DIM, 2) if c.given("head_dim") else hidden // heads
    if head_dim % 2 or not head_dim:
        raise ConfigError(
            f"config.json: rotary positions need an even head_dim, not {head_dim}", param="model"
        )
    return heads, kv_heads, head_dim


def _convolution(c: Reader) -> ConvSpec:
    channels, taps = c.integer("hidden_size", WIDTH), c.integer("conv_L_cache", TAPS, 2)
    return ConvSpec(channels=channels, taps=taps, bias=c.flag("conv_bias"))


def _short(c: Reader, layers: int) -> list[bool]:
    """Which layers are convolutions."""
    kinds = c.values["layer_types"]
    if kinds is None and "full_attn_idxs" in c.values:
        full = c.integers("full_attn_idxs", LAYERS) if c.given("full_attn_idxs") else range(layers)
        return [i not in full for i in range(layers)]
    known = ("conv", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise c.error("layer_types", f"a list of {layers} kinds, conv or full_attention")
    return [kind == "conv" for kind in kinds]


def completed(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``: two keys with older names, and the width that MLPs are brought to."""
    if c.given("tie_embedding"):
        spec = replace(spec, tied=c.flag("tie_embedding"))
    if "block_ff_dim" not in c.values:
        return spec
    width = c.integer("block_ff_dim" if c.given("block_ff_dim") else "intermediate_size", INNER)
    if c.flag("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        if c.given("block_ffn_dim_multiplier"):
            unit = c.integer("block_multiple_of", INNER)
            width = -(-int(c.number("block_ffn_dim_multiplier") * width) // unit) * unit
    if not 1 <= width <= INNER:
        raise ConfigError(
            f"config.json: MLPs of the width {width}, of block_ff_dim or intermediate_size, "
            "block_ffn_dim_multiplier and block_multiple_of",
            param="model",
        )
    return replace(spec, intermediate=width)
