"""The shapes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), by the keys that its families
share. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.layers.spec import AttentionSpec, RopeSpec, StateTensor
from sgla.model.limits import HEADS, INNER, WIDTH
from sgla.model.ropes import ROPE, growth, ropes
from sgla.model.spec import ModelSpec


@dataclass(frozen=True)
class LatentSpec(AttentionSpec):
    """Of a token one latent of ``v_dim`` values is kept, which all heads share, with the ``rotated`` values
    of its key behind it: ``head_dim`` in all. A head's query has ``nope`` values that stay as they are before
    its ``rotated`` ones; its value has ``value``. ``q_rank``: width of the queries' own latent, 0 without.
    ``gates``: values that a query's head has behind these, whose sigmoids multiply what it sees; what makes
    queries of their latent then reads this before its norm, too. ``latent_scale``: of the latent, behind its
    norm."""

    q_rank: int = 0
    nope: int = 0
    rotated: int = 0
    value: int = 0
    gates: int = 0
    latent_scale: float = 1.0

    @property
    def split(self) -> list[int]:
        """Values of a query's head, and its gates."""
        return [self.nope + self.rotated, self.gates]

    @property
    def v_dim(self) -> int:
        return self.head_dim - self.rotated

    @property
    def latent(self) -> bool:
        return True

    def kept(self, kv_heads: int) -> tuple[StateTensor, ...]:
        return (StateTensor("k", (1, self.head_dim)),)

    def weights(self, hidden: int) -> int:
        queries = self.heads * (self.nope + self.rotated + self.gates) * (2 if self.gates else 1)
        down = hidden * (self.q_rank + self.head_dim)
        up = (self.q_rank or hidden) * queries + self.v_dim * self.heads * (self.nope + self.value)
        return down + up + self.heads * self.value * hidden


def read(c: Reader, layers: int, positions: int) -> tuple[LatentSpec, ...]:
    """See ``Family.attention``."""
    heads, hidden = c.integer("num_attention_heads", HEADS), c.integer("hidden_size", WIDTH)
    if c.given("num_key_value_heads") and c.values["num_key_value_heads"] != heads:
        raise c.error("num_key_value_heads", f"that of num_attention_heads, {heads}")
    rotated, nope = c.integer("qk_rope_head_dim", INNER), c.integer("qk_nope_head_dim", INNER)
    if rotated % 2:
        raise ConfigError(f"config.json: qk_rope_head_dim must be even, not {rotated}", param="model")
    rope, _ = ropes(c, rotated, positions)
    layer = LatentSpec(
        heads=heads,
        kv_heads=1,
        head_dim=c.integer("kv_lora_rank", INNER) + rotated,
        scale=(nope + rotated) ** -0.5 * _warmer(rope),
        rope=rope,
        q_rank=c.integer("q_lora_rank", INNER) if c.given("q_lora_rank") else 0,
        nope=nope,
        rotated=rotated,
        value=c.integer("v_head_dim", INNER) if c.given("v_head_dim") else hidden // heads,
    )
    return (layer,) * layers


def longcat(c: Reader, layers: int, positions: int) -> tuple[LatentSpec, ...]:
    """LongCat-Flash: two in each of its layers, whose latents are as large as if they were not narrow."""
    hidden = c.integer("hidden_size", WIDTH)
    (layer,) = set(read(c, layers, positions))
    q, kv = hidden / c.integer("q_lora_rank", INNER), hidden / layer.v_dim
    return (replace(layer, scale=layer.scale * q**0.5, latent_scale=kv**0.5),) * (2 * layers)


def with_pairs(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``: an MLP behind each attention, beside the mixture."""
    return replace(spec, inner=(spec.intermediate,) * spec.layers, pairs=True)


def growing(c: Reader, layers: int, positions: int) -> tuple[LatentSpec, ...]:
    """Mistral 4's, whose queries grow, and whose table of rope has the rotated share of a head."""
    said, grown = growth(c)
    table, key = dict(said.table(ROPE)), "partial_rotary_factor"
    rotated, nope = c.integer("qk_rope_head_dim", INNER), c.integer("qk_nope_head_dim", INNER)
    if c.given("head_dim") and c.values["head_dim"] != rotated + nope:
        raise c.error("head_dim", f"{rotated + nope}, qk_nope_head_dim and qk_rope_head_dim together")
    if table.pop(key, rotated / (rotated + nope)) != rotated / (rotated + nope):
        raise c.error(key, f"{rotated / (rotated + nope)}, the share of qk_rope_head_dim")
    plain = Reader(c.architecture, {**said.values, ROPE: table})
    return tuple(replace(layer, growth=grown) for layer in read(plain, layers, positions))


def _warmer(rope: RopeSpec) -> float:
    """What a stretched context multiplies the scores by, beside what the angles' magnitude does."""
    weight, factor = rope.scaling.get("mscale_all_dim"), rope.scaling.get("factor", 1.0)
    return (0.1 * weight * math.log(factor) + 1.0) ** 2 if weight and factor > 1 else 1.0
