"""How families say which layers are mixtures of experts, of what, and how tokens find them: functions of the
keys of ``config.json``, as ``Family.mixture`` names them. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable

from sgla.errors import ConfigError
from sgla.kernels.routing import Routing
from sgla.model.families import Reader
from sgla.model.spec import EXPERTS, INNER, LAYERS, MoESpec


def qwen(c: Reader, layers: int) -> MoESpec:
    """A mixture in every ``decoder_sparse_step``-th layer but the ``mlp_only_layers``."""
    step, dense = c.integer("decoder_sparse_step", LAYERS), c.integers("mlp_only_layers", LAYERS)
    return MoESpec(
        experts=(experts := _experts(c, 128)),
        intermediate=c.integer("moe_intermediate_size", INNER),
        routing=_routing(c, experts, normalize=c.flag("norm_topk_prob")),
        layers=frozenset(i for i in range(layers) if (i + 1) % step == 0 and i not in dense),
    )


def mixtral(c: Reader, layers: int) -> MoESpec:
    """A mixture in every layer, of MLPs as wide as ``intermediate_size``."""
    experts = _experts(c, 8)
    routing = _routing(c, experts, normalize=True)
    return MoESpec(experts, c.integer("intermediate_size", INNER), routing, frozenset(range(layers)))


def _experts(c: Reader, otherwise: int, names: Iterable[str] = ("num_experts", "num_local_experts")) -> int:
    """Of a key with several names, which mean the same in transformers."""
    given = [name for name in names if c.given(name)]
    if len({str(c.values[name]) for name in given}) > 1:
        raise ConfigError(f"config.json: {' and '.join(given)} are not the same", param="model")
    return c.integer(given[0], EXPERTS) if given else otherwise


def _routing(
    c: Reader,
    experts: int,
    *,
    key: str = "num_experts_per_tok",
    sigmoid: bool = False,
    normalize: bool = False,
    least: float = 0.0,
    scale: float = 1.0,
) -> Routing:
    top_k = c.integer(key, EXPERTS)
    if top_k > experts:
        raise ConfigError(f"config.json: {key}: {top_k} experts a token of {experts} experts", param="model")
    return Routing(top_k, "sigmoid" if sigmoid else "softmax", normalize, least=least, scale=scale)
