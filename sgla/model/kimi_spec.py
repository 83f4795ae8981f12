"""The shapes of hybrids of latent attention and Kimi delta attention (arXiv 2510.26692). Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.layers.spec import AttentionSpec, StateSpec, StateTensor
from sgla.model import latent_spec
from sgla.model.delta_spec import TAPS
from sgla.model.limits import HEAD_DIM, HEADS, LAYERS
from sgla.model.ropes import ROPE


@dataclass(frozen=True)
class KimiDeltaSpec(StateSpec):
    """``count`` heads of ``dim`` values of q, k and v, which go through convolutions over ``taps`` tokens.
    Each channel of a head's key has a decay of its own, whose logarithm is not below ``least``, if that is
    not 0. ``whole``: gates have full rank."""

    count: int = 0
    dim: int = 0
    taps: int = 0
    least: float = 0.0
    whole: bool = False

    def unit(self, own: Callable[[int], int]) -> tuple[StateTensor, ...]:
        count = own(self.count)
        return (
            StateTensor("conv", (3 * count * self.dim, self.taps - 1), runs=((self.count, self.dim),) * 3),
            StateTensor("memory", (count, self.dim, self.dim), "float32", ((self.count, 1),)),
        )

    def weights(self, hidden: int) -> int:
        width = self.count * self.dim
        if self.whole:
            return 6 * hidden * width + hidden * self.count + 3 * width * self.taps
        narrow = 2 * self.dim * (hidden + width) + hidden * self.count
        return 4 * hidden * width + narrow + 3 * width * self.taps


def read(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``: no layer rotates."""
    own = c.table("linear_attn_config")
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    said = Reader(
        c.architecture, {**c.values, **{ours: own[key] for key, ours in names.items() if key in own}}
    )
    linear = KimiDeltaSpec(
        count=said.integer("linear_num_heads", HEADS),
        dim=said.integer("linear_head_dim", HEAD_DIM),
        taps=said.integer("linear_conv_kernel_dim", TAPS, 2),
    )
    still = Reader(c.architecture, {**c.values, ROPE: {"rope_type": "default", "rope_theta": 1e4}})
    full = replace(latent_spec.read(still, 1, positions)[0], rope=None)
    return tuple(linear if kind else full for kind in _linear(c, own, layers))


@dataclass(frozen=True)
class GatedLatentSpec(latent_spec.LatentSpec):
    """A gate for each head."""

    def weights(self, hidden: int) -> int:
        return super().weights(hidden) + hidden * self.heads


def bailing(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``. Files of transformers have the names of sizes that Kimi Linear has, beside
    ``head_dim``, which is another one then."""
    names = {
        "linear_head_dim": "head_dim",
        "linear_num_heads": "num_attention_heads",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }
    sizes = [c.integer(own if c.given(own) else other, HEADS) for own, other in names.items()]
    bound = -Reader(c.architecture, {"kda_lower_bound": -c.values["kda_lower_bound"]}).number(
        "kda_lower_bound"
    )
    linear = KimiDeltaSpec(
        dim=sizes[0],
        count=sizes[1],
        taps=sizes[2],
        least=bound if c.flag("kda_safe_gate") else 0.0,
        whole=True,
    )
    plain = Reader(c.architecture, {**c.values, "num_key_value_heads": None})
    latent = latent_spec.read(plain, 1, positions)[0]
    full = GatedLatentSpec(**{field.name: getattr(latent, field.name) for field in fields(latent)})
    if c.values["layer_types"] is None:
        period = c.integer("layer_group_size", LAYERS)
        return tuple(linear if (i + 1) % period else full for i in range(layers))
    return tuple(linear if kind else full for kind in _linear(c, {}, layers))


def _linear(c: Reader, own: dict[str, object], layers: int) -> list[bool]:
    """Which layers keep states. ``own``: the table that published files have, with layers from 1 on."""
    kinds, keys = c.values["layer_types"], ("kda_layers", "full_attn_layers")
    if kinds is not None:
        known = ("linear_attention", "full_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise c.error("layer_types", f"a list of {layers} kinds, linear_attention or full_attention")
        return [kind == "linear_attention" for kind in kinds]
    if not all(key in own for key in keys):
        return [not i or i % 4 > 0 for i in range(layers)]
    table = Reader(f"{c.architecture}, linear_attn_config", own)
    linear, full = (table.integers(key, LAYERS) for key in keys)
    if sorted([*linear, *full]) != list(range(1, layers + 1)):
        raise ConfigError(
            f"config.json: linear_attn_config must name each layer from 1 to {layers} once, in kda_layers or "
            "full_attn_layers",
            param="model",
        )
    return [i + 1 in linear for i in range(layers)]
