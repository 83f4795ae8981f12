"""The shapes of models with Mamba 2 layers. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.kernels.routing import Routing
from sgla.layers.spec import AttentionSpec, MoESpec, StateSpec, StateTensor
from sgla.model import mixture_spec
from sgla.model.limits import EXPERTS, HEAD_DIM, HEADS, INNER, LAYERS
from sgla.model.ropes import ropes
from sgla.model.spec import ModelSpec

TAPS = 64  # tokens that a short convolution reads at most
MAMBA, FULL, MLP, EXPERT = "linear_attention", "full_attention", "mlp", "moe"
_OLD_KINDS = {"mamba": MAMBA, "attention": FULL}
_INFINITY = {"__float__": "Infinity"}  # as transformers writes it
_LETTERS = {"M": MAMBA, "*": FULL, "-": MLP, "E": EXPERT}


@dataclass(frozen=True)
class MambaSpec(StateSpec):
    """Mamba 2 (arXiv 2405.21060): ``count`` heads of ``width`` values with a state of ``size`` for each, and
    ``groups`` of them that share B and C; x, B and C go through a convolution over ``taps`` tokens. ``least``
    and ``most``: of time steps. ``norm``: of each group's values, ``behind`` the gate, ``before`` it or none.
    ``factors``: by which z, x, B, C and dt are multiplied."""

    count: int = 0
    width: int = 0
    groups: int = 1
    size: int = 0
    taps: int = 0
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool = False
    least: float = 0.0
    most: float = math.inf
    norm: Literal["behind", "before", ""] = "behind"
    factors: tuple[float, ...] = (1.0,) * 5

    @property
    def inner(self) -> int:
        """Values of all heads."""
        return self.count * self.width

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.groups * self.size

    def unit(self, own: Callable[[int], int]) -> tuple[StateTensor, ...]:
        heads, groups = own(self.count), own(self.groups)
        channels, bc = heads * self.width + 2 * groups * self.size, (self.groups, self.size)
        return (
            StateTensor("conv", (channels, self.taps - 1), runs=((self.count, self.width), bc, bc)),
            StateTensor("memory", (heads, self.width, self.size), "float32", ((self.count, 1),)),
        )

    def weights(self, hidden: int) -> int:
        rows = self.inner + self.channels + self.count
        return hidden * (rows + self.inner) + self.channels * self.taps


class Factors(NamedTuple):
    """By which Falcon-H1 multiplies what goes into the parts of a layer, and what comes out."""

    mamba: tuple[float, float] = (1.0, 1.0)
    attention: tuple[float, float] = (1.0, 1.0)
    mlp: tuple[float, float] = (1.0, 1.0)  # the gate, and what comes out


NO_FACTORS = Factors()


@dataclass(frozen=True)
class BesideSpec(AttentionSpec):
    """Attention with a Mamba beside it, which reads the same."""

    mamba: MambaSpec = MambaSpec()
    factors: Factors = NO_FACTORS

    def unit(self, own: Callable[[int], int]) -> tuple[StateTensor, ...]:
        return self.mamba.unit(own)

    def weights(self, hidden: int) -> int:
        return super().weights(hidden) + self.mamba.weights(hidden)


@dataclass(frozen=True)
class FirstMambaSpec(StateSpec):
    """Mamba 1 (arXiv 2312.00752): each of ``inner`` channels has a state of ``size`` values, with a decay for
    each; time steps are made of ``rank`` values. ``norms`` of these, of B and of C: with weights, plain, or
    none; ``eps``: of norms."""

    inner: int = 0
    size: int = 0
    rank: int = 0
    taps: int = 0
    conv_bias: bool = True
    bias: bool = False
    norms: Literal["weighted", "plain", ""] = ""
    eps: float = 0.0

    def unit(self, own: Callable[[int], int]) -> tuple[StateTensor, ...]:
        channels, runs = own(self.inner), ((self.inner, 1),)
        return (
            StateTensor("conv", (channels, self.taps - 1), runs=runs),
            StateTensor("memory", (channels, 1, self.size), "float32", runs),
        )

    def weights(self, hidden: int) -> int:
        made = 2 * self.rank + 3 * self.size + self.taps
        return self.inner * (3 * hidden + made)


@dataclass(frozen=True)
class NothingSpec(StateSpec):
    """A layer that keeps nothing: an MLP or a mixture."""


def granite(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``: ``layer_types``, and without them a Mamba in every layer."""
    kinds = _kinds(c, layers) if c.given("layer_types") else [MAMBA] * layers
    rotated = c.values["position_embedding_type"]
    if rotated not in (None, "rope", "nope"):
        raise c.error("position_embedding_type", "rope, nope, or null")
    full = _attention(c, positions, scale=c.number("attention_multiplier"), rotated=rotated == "rope")
    mamba = _mamba(c, _expanded(c)) if MAMBA in kinds else MambaSpec()
    return tuple(mamba if kind == MAMBA else full for kind in kinds)


def granite_mixture(c: Reader, layers: int) -> MoESpec | None:
    """None: there are no experts, and what is shared else is each layer's MLP."""
    return mixture_spec.mixtral(c, layers) if c.integer("num_local_experts", EXPERTS, 0) else None


def granite_complete(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    return spec if spec.moe else replace(spec, intermediate=c.integer("shared_intermediate_size", INNER))


def bamba(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """Attention in the layers of ``attn_layer_indices``, which rotates half of each head."""
    chosen = c.integers("attn_layer_indices", LAYERS)
    half = Reader(c.architecture, {**c.values, "partial_rotary_factor": 0.5})
    full, mamba = _attention(half, positions, partial=True), _mamba(c, _expanded(c))
    if c.given("attn_rotary_emb") and c.values["attn_rotary_emb"] != full.head_dim // 2:
        raise c.error("attn_rotary_emb", f"{full.head_dim // 2}, half of a head")
    return tuple(full if i in chosen else mamba for i in range(layers))


def falcon(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """Both in every layer. Factors of keys are those of scores."""
    inner = c.integer("mamba_d_ssm", INNER) if c.given("mamba_d_ssm") else _expanded(c)
    norm: Literal["behind", "before", ""] = ""
    if c.flag("mamba_rms_norm"):
        norm = "before" if c.flag("mamba_norm_before_gate") else "behind"
    factors = multipliers(c, "ssm_multipliers", 5)
    into, out = c.number("ssm_in_multiplier"), c.number("ssm_out_multiplier")
    seen, said = c.number("attention_in_multiplier"), c.number("attention_out_multiplier")
    full, square = _attention(c, positions), 1.0
    if not c.flag("proj_bias"):  # then what goes in may be multiplied behind the projection
        factors, into = tuple(factor * into for factor in factors), 1.0
    if not c.flag("attention_bias"):
        seen, said, square = 1.0, said * seen, seen**2
    mamba = replace(_mamba(c, inner), norm=norm, factors=factors, out_bias=c.flag("projectors_bias"))
    gate, down = multipliers(c, "mlp_multipliers", 2)
    layer = BesideSpec(
        full.heads,
        full.kv_heads,
        full.head_dim,
        full.scale * c.number("key_multiplier") * square,
        full.rope,
        mamba=mamba,
        factors=Factors((into, out), (seen, said), (gate, down)),
    )
    return (layer,) * layers


def falcon_complete(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    return replace(spec, logit_scale=c.number("lm_head_multiplier"))


def nemotron(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """One part in each layer, by a list of kinds or a letter for each; how many layers there are follows from
    these, as in transformers."""
    least = c.number("time_step_min")
    full = _attention(c, positions, rotated=False)
    inner = c.integer("num_heads", HEADS) * c.integer("mamba_head_dim", HEAD_DIM)
    mamba = replace(_mamba(c, inner), least=least, most=math.inf)
    of = {MAMBA: mamba, FULL: full}
    return tuple(of.get(kind, NothingSpec()) for kind in nemotron_kinds(c))


def nemotron_kinds(c: Reader) -> list[str]:
    pattern, kinds = c.values.get("hybrid_override_pattern"), c.values.get("layers_block_type")
    if kinds is not None:
        return _kinds(c, None, "layers_block_type", (MAMBA, FULL, MLP, EXPERT))
    if pattern is None:
        return [MAMBA, EXPERT, FULL, MLP]
    known = isinstance(pattern, str) and 0 < len(pattern) <= LAYERS and set(pattern) <= _LETTERS.keys()
    if not known:
        raise c.error("hybrid_override_pattern", f"a letter for each layer, of {''.join(_LETTERS)}")
    return [_LETTERS[letter] for letter in pattern]


def nemotron_mixture(c: Reader, layers: int) -> MoESpec | None:
    """DeepSeek-V3's routing, to experts without a gate; a shared one has a width of its own."""
    mixed = frozenset(i for i, kind in enumerate(nemotron_kinds(c)) if kind == EXPERT)
    if not mixed:
        return None
    found = mixture_spec.deepseek_v3(Reader(c.architecture, {**c.values, "n_shared_experts": 1}), layers)
    shared = c.integer("moe_shared_expert_intermediate_size", INNER)
    latent = c.integer("moe_latent_size", INNER) if c.given("moe_latent_size") else 0
    if latent and c.flag("mlp_bias"):
        raise c.error("mlp_bias", "false beside moe_latent_size")
    return replace(found, layers=mixed, shared=shared, latent=latent)


def nemotron_complete(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    widths = tuple(spec.intermediate if kind == MLP else 0 for kind in nemotron_kinds(c))
    return replace(spec, inner=widths, qkv_bias=False, out_bias=False, mlp_bias=c.flag("mlp_bias"))


def jamba(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """Attention without positions in every ``attn_layer_period``-th layer from ``attn_layer_offset`` on."""
    full = _attention(c, positions, rotated=False)
    mamba = replace(
        _first_mamba(c, "mamba_dt_rank", _expanded(c)), norms="weighted", eps=c.number("rms_norm_eps")
    )
    chosen = _every(c, "attn_layer", layers)
    return tuple(full if i in chosen else mamba for i in range(layers))


def jamba_mixture(c: Reader, layers: int) -> MoESpec | None:
    """As wide as the MLPs of the other layers; with one expert all are MLPs."""
    if (experts := c.integer("num_experts", EXPERTS)) == 1:
        return None
    routing = Routing(c.integer("num_experts_per_tok", experts))
    return MoESpec(experts, c.integer("intermediate_size", INNER), routing, _every(c, "expert_layer", layers))


def _every(c: Reader, name: str, layers: int) -> frozenset[int]:
    """Layers with a period and an offset."""
    period = c.integer(f"{name}_period", LAYERS)
    return frozenset(range(c.integer(f"{name}_offset", period - 1, 0), layers, period))


def mamba2(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """Nothing else."""
    return (_mamba(c, _width(c)),) * layers


def first_mamba(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """Nothing else, with norms in Falcon Mamba."""
    mamba = _first_mamba(c, "time_step_rank", _width(c))
    if "mixer_rms_eps" in c.values:
        mamba = replace(mamba, norms="plain", eps=c.number("mixer_rms_eps"))
    return (mamba,) * layers


def mambas_complete(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    return replace(spec, inner=(0,) * spec.layers)


def multipliers(c: Reader, key: str, count: int) -> tuple[float, ...]:
    """A list of so many numbers; null: of ones."""
    found = c.values[key]
    if found is None:
        return (1.0,) * count
    if not isinstance(found, list) or len(found) != count:
        raise c.error(key, f"a list of {count} numbers")
    each = Reader(f"{c.architecture}, {key}", dict(zip(map(str, range(count)), found)))
    return tuple(each.number(str(i)) for i in range(count))


def _expanded(c: Reader) -> int:
    """Values of all heads, as many times the width as is said."""
    return c.integer("expand", 64) * c.integer("hidden_size", INNER)


def _width(c: Reader) -> int:
    """The same, as the configurations of models without other layers may say once more."""
    if c.given("intermediate_size") and c.values["intermediate_size"] != _expanded(c):
        raise c.error("intermediate_size", f"{_expanded(c)}, what expand makes of hidden_size")
    return _expanded(c)


def _mamba(c: Reader, inner: int) -> MambaSpec:
    """Raises ConfigError for heads that are not as many values as ``inner``."""
    count, groups = c.integer("num_heads", HEADS), c.integer("n_groups", HEADS)
    act = "mamba_hidden_act" if "mamba_hidden_act" in c.values else "hidden_act"
    if c.values[act] not in ("silu", "swish"):
        raise c.error(act, "silu")
    given = c.values["mamba_head_dim"]
    width = inner // count if given == "auto" else c.integer("mamba_head_dim", HEAD_DIM)
    if width * count != inner:
        raise ConfigError(
            f"config.json: {count} heads of {width} values are not the {inner} values of a Mamba",
            param="model",
        )
    if count % groups:
        raise ConfigError(
            f"config.json: {count} heads of a Mamba do not divide among {groups} groups", param="model"
        )
    least, most = _limits(c)
    return MambaSpec(
        count=count,
        width=width,
        groups=groups,
        size=c.integer("state_size", HEAD_DIM),
        taps=c.integer("conv_kernel", TAPS, 2),
        conv_bias=c.flag("use_conv_bias"),
        bias=c.flag("proj_bias"),
        out_bias=c.flag("proj_bias"),
        least=least,
        most=most,
    )


def _first_mamba(c: Reader, rank_key: str, inner: int) -> FirstMambaSpec:
    if c.values["hidden_act"] not in ("silu", "swish"):
        raise c.error("hidden_act", "silu")
    rank = -(-c.integer("hidden_size", INNER) // 16)
    if c.values[rank_key] != "auto":
        rank = c.integer(rank_key, INNER)
    return FirstMambaSpec(
        inner=inner,
        size=c.integer("state_size", HEAD_DIM),
        rank=rank,
        taps=c.integer("conv_kernel", TAPS, 2),
        conv_bias=c.flag("use_conv_bias"),
        bias=c.flag("proj_bias"),
    )


def _limits(c: Reader) -> tuple[float, float]:
    """Of time steps."""
    found = c.values.get("time_step_limit")
    if found is None:
        return 0.0, math.inf
    ends = [math.inf if end == _INFINITY else end for end in found] if isinstance(found, list | tuple) else []
    numbers = [type(end) in (int, float) for end in ends] == [True, True]
    if not numbers or not 0 <= ends[0] < ends[1] or any(1e30 < end < math.inf for end in ends):
        raise c.error("time_step_limit", "a list of two numbers from 0 on, of which the second is larger")
    return float(ends[0]), float(ends[1])


def _kinds(
    c: Reader, layers: int | None, key: str = "layer_types", known: tuple[str, ...] = (MAMBA, FULL)
) -> list[str]:
    kinds = c.values[key]
    found = [_OLD_KINDS.get(kind, kind) for kind in kinds] if _words(kinds) else []
    if not found or not set(found) <= set(known) or len(found) != (layers or len(found)):
        words = ", ".join((*_OLD_KINDS, *known))
        raise c.error(key, f"a list of {layers or 'all'} layers' kinds, of {words}")
    return found


def _words(kinds: object) -> bool:
    return isinstance(kinds, list) and len(kinds) <= LAYERS and all(isinstance(kind, str) for kind in kinds)


def _attention(
    c: Reader, positions: int, *, scale: float = 0.0, partial: bool = False, rotated: bool = True
) -> AttentionSpec:
    heads = c.integer("num_attention_heads", HEADS)
    kv_heads = c.integer("num_key_value_heads", HEADS) if c.given("num_key_value_heads") else heads
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: {heads} attention heads (num_attention_heads) do not divide among {kv_heads} KV "
            "heads (num_key_value_heads)",
            param="model",
        )
    dim = c.integer("hidden_size", INNER) // heads
    if c.given("head_dim"):
        dim = c.integer("head_dim", HEAD_DIM)
    if dim % 2 or not dim:
        raise ConfigError(f"config.json: rotary positions need an even head_dim, not {dim}", param="model")
    rope = ropes(c, dim, positions, partial)[0] if rotated else None
    return AttentionSpec(heads, kv_heads, dim, scale or dim**-0.5, rope)
