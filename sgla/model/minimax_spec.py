"""The shapes of MiniMax-01's layers (arXiv 2501.08313): lightning attention, and among it softmax attention.
Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.layers.spec import AttentionSpec, StateSpec, StateTensor
from sgla.model.limits import HEAD_DIM, HEADS, LAYERS, POSITIONS, WIDTH
from sgla.model.ropes import ropes

LINEAR, FULL = "linear_attention", "full_attention"


class Shares(NamedTuple):
    """By what a part's input and its output are multiplied before they are added."""

    kept: float
    added: float


PLAIN = Shares(1.0, 1.0)


@dataclass(frozen=True)
class SoftmaxSpec(AttentionSpec):
    """``attended`` and ``fed``: of attention and MLP."""

    attended: Shares = PLAIN
    fed: Shares = PLAIN


@dataclass(frozen=True)
class LightningSpec(StateSpec):
    """``count`` heads of ``dim`` values, whose states fade by themselves: the first ones of the first layers
    fastest. ``fade``: of this layer."""

    count: int = 0
    dim: int = 0
    fade: float = 1.0
    attended: Shares = PLAIN
    fed: Shares = PLAIN

    def unit(self, own: Callable[[int], int]) -> tuple[StateTensor, ...]:
        return (StateTensor("memory", (own(self.count), self.dim, self.dim), "float32", ((self.count, 1),)),)

    def weights(self, hidden: int) -> int:
        return 5 * hidden * self.count * self.dim


def read(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``."""
    heads, hidden = c.integer("num_attention_heads", HEADS), c.integer("hidden_size", WIDTH)
    kv_heads = c.integer("num_key_value_heads", HEADS) if c.given("num_key_value_heads") else heads
    dim = c.integer("head_dim", HEAD_DIM) if c.given("head_dim") else hidden // heads
    if heads % kv_heads or dim % 2 or not dim:
        raise ConfigError(
            f"config.json: {heads} attention heads (num_attention_heads) of {dim} values (head_dim), "
            f"{kv_heads} of keys and values (num_key_value_heads): they must divide, and head_dim be even",
            param="model",
        )
    # The class in transformers rotates whole heads; the code that comes with checkpoints, rotary_dim of each.
    rope, _ = ropes(c, dim, positions, partial=c.architecture != "MiniMaxForCausalLM")
    window = c.integer("sliding_window", POSITIONS) if c.given("sliding_window") else 0
    full, linear, fed = (
        Shares(c.number(f"{part}_alpha_factor"), c.number(f"{part}_beta_factor"))
        for part in ("full_attn", "linear_attn", "mlp")
    )
    softmax = SoftmaxSpec(heads, kv_heads, dim, dim**-0.5, rope, window, attended=full, fed=fed)
    fades = [1 - i / (layers - 1 + 1e-5) + 1e-5 for i in range(layers)]
    return tuple(
        softmax if kind == FULL else LightningSpec(count=heads, dim=dim, fade=fade, attended=linear, fed=fed)
        for kind, fade in zip(_kinds(c, layers), fades)
    )


def _kinds(c: Reader, layers: int) -> list[str]:
    """Of each layer; ``attn_type_list`` has a 0 for each of lightning attention."""
    kinds = c.values["layer_types"]
    if kinds is None and c.given("attn_type_list"):
        kinds = [{0: LINEAR, 1: FULL}.get(kind) for kind in c.integers("attn_type_list", LAYERS)]
    elif kinds is None:
        kinds = [LINEAR if i % 2 else FULL for i in range(layers)]
    known = isinstance(kinds, list) and all(kind in (LINEAR, FULL) for kind in kinds)
    if not known or len(kinds) != layers:
        raise c.error("layer_types", f"a list of {layers} kinds, {LINEAR} or {FULL}")
    return kinds
