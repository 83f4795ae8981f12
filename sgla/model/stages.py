"""How the layers of a model are shared out between the stages of a pipeline. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.model.apart import check_apart
from sgla.model.generic_spec import GenericSpec
from sgla.model.indexed_spec import IndexedSpec
from sgla.model.sizes import weight_bytes
from sgla.model.spec import ModelSpec
from sgla.model.state import kv_groups, state_of

# Settings that stages do not have, and why; all others they do.
REFUSED = {
    "enable_torch_compile": "a module of transformers is not cut into stages",
    "cpu_offload_gb": "a stage holds fewer layers instead",
    "kv_host_bytes": "it has not been tried with stages",
    "kv_host_ratio": "it has not been tried with stages",
    "enable_return_routed_experts": "each stage knows the experts of its own layers alone",
    "role": "the servers would have to cut their models alike",
}


def check_settings(config: Config, device: str, vectors: bool) -> None:
    """Raise ConfigError for what stages cannot be together with. ``vectors``: the model answers with some."""
    if config.pp == 1:
        return
    if device not in ("cpu", "cuda"):
        raise _refused(config, f"on --device {device}")
    if vectors:
        raise _refused(config, "by a model that answers with vectors")
    check_apart(config, f"--pp {config.pp}", REFUSED)


def stages_of(config: Config, spec: ModelSpec) -> list[ModelSpec]:
    """``spec`` as each stage has it: with layers in order, so that the stage with most bytes of weights has
    as few as can be. The first one has the embedding, too, the last one the output layer. Raises ConfigError
    for a model that cannot be cut so."""
    if config.pp == 1:
        return [spec]
    _check(config, spec)
    device = "cuda" if config.device == "cuda" else "cpu"
    quantization, dtype = spec.quantized(config.quantization, device), _dtype(config)
    alone = (replace(spec, stage=range(layer, layer + 1)) for layer in range(spec.layers))
    shares = config.tp, device, config.heads_over, config.mlps_over
    sizes = [weight_bytes(layer, dtype, quantization, *shares) for layer in alone]
    stages = [replace(spec, stage=layers) for layers in cut(sizes, config.pp)]
    _check_groups(config, stages)
    return stages


def _dtype(config: Config) -> str:
    return "bfloat16" if config.dtype == "auto" else config.dtype


def cut(sizes: Sequence[int], count: int) -> list[range]:
    """``count`` runs of what has these ``sizes``, none of them empty, of which the largest is as small as can
    be; the others then are as equal as can be."""
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    best: list[tuple[int, int, list[int]]] = [(0, 0, [0])]  # largest, squares and bounds, by the end
    best += [(sums[end], sums[end] ** 2, [0, end]) for end in range(1, len(sums))]
    for runs in range(2, count + 1):
        found = best.copy()
        for end in range(runs, len(sums)):
            ways = []
            for start in range(runs - 1, end):
                largest, squares, bounds = best[start]
                own = sums[end] - sums[start]
                ways.append((max(largest, own), squares + own**2, [*bounds, end]))
            found[end] = min(ways)
        best = found
    bounds = best[-1][2]
    return [range(*pair) for pair in pairwise(bounds)]


def _check(config: Config, spec: ModelSpec) -> None:
    obstacle = None
    if isinstance(spec, GenericSpec):
        obstacle = "that runs through transformers' module"
    elif config.pp > spec.layers:
        obstacle = f"of fewer layers ({spec.layers})"
    elif any(layer.reads is not None for layer in spec.attention):
        obstacle = "some of whose layers read what others keep"
    elif spec.per_layer is not None:
        obstacle = "whose layers have parts of the embedding"
    elif spec.pairs:
        obstacle = "two of whose layers share a mixture"
    elif spec.hyper is not None:
        obstacle = "whose residual stream is several wide"
    elif _follows(config, spec):
        obstacle = "whose layers read tokens that a layer before has picked"
    if obstacle:
        raise _refused(config, f"by a model {obstacle}")


def _follows(config: Config, spec: ModelSpec) -> bool:
    """Some layers read with the indexer of another one."""
    context = config.context_length or spec.context_len
    followers = (x for x in spec.attention if isinstance(x, IndexedSpec) and not x.picks)
    return any(context > layer.whole_until for layer in followers)


def _check_groups(config: Config, stages: Sequence[ModelSpec]) -> None:
    """All ranks must have the same cache groups, whose pages the scheduler counts once."""
    dtype, kinds = config.kv_dtype(_dtype(config)), []
    for stage in stages:
        context = config.context_length or stage.context_len
        groups = kv_groups(state_of(stage, config.heads_over), context, dtype)
        kinds.append([(group.window, group.unit_bytes > 0) for group in groups])
    if any(kind != kinds[0] for kind in kinds):
        raise _refused(
            config,
            "by this model: each stage must have layers of every kind (that attend to all tokens, to a "
            "window, that keep a state)",
        )


def _refused(config: Config, why: str) -> ConfigError:
    return ConfigError(f"--pp {config.pp} cannot be honoured {why}; use --tp", param="pp")
