"""Whether the experts of a mixture can be whole, each on one of several ranks. Loads no torch."""

from __future__ import annotations

from dataclasses import replace

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.model.encoder import EncoderSpec
from sgla.model.generic_spec import GenericSpec
from sgla.model.spec import ModelSpec


def check_routed(config: Config, spec: ModelSpec | EncoderSpec | None) -> None:
    """Raise ConfigError where nobody can tell to which experts tokens go."""
    if spec is None or isinstance(spec, GenericSpec) or not config.enable_return_routed_experts:
        return
    what = f"--ep {config.ep}, where a rank knows its own alone" if config.ep > 1 else ""
    if isinstance(spec, EncoderSpec) or spec.moe is None:
        what = "a model without experts"
    if what:
        raise ConfigError(
            f"--enable-return-routed-experts cannot be honoured with {what}; leave it out",
            param="enable_return_routed_experts",
        )


def check_experts(config: Config, device: str, spec: ModelSpec | EncoderSpec | None) -> None:
    """Raise ConfigError for an ``--ep`` that cannot be. ``spec``: None if the model is not known."""
    if config.redundant_experts:
        _check_redundant(config, spec)
    if config.rebalance_interval and (config.ep == 1 or config.cp > 1):
        why = "without --ep, whose ranks have whole experts" if config.ep == 1 else "with --cp"
        raise ConfigError(
            f"--rebalance-interval {config.rebalance_interval:g} cannot be honoured {why}",
            param="rebalance_interval",
        )
    if config.ep == 1:
        return
    if config.ep != config.tp:
        raise ConfigError(
            f"--ep {config.ep} must be as large as --tp, whose ranks share the experts out, or 1", param="ep"
        )
    obstacle = None
    if device not in ("cpu", "cuda"):
        obstacle = f"on --device {device}"
    elif isinstance(spec, EncoderSpec | GenericSpec) or (spec is not None and spec.moe is None):
        obstacle = "by a model without experts, or through transformers' module"
    elif spec is not None and spec.moe is not None and spec.moe.experts < config.ep:
        obstacle = f"by a model with {spec.moe.experts} experts"
    elif spec is not None and spec.moe is not None and spec.moe.idle:
        obstacle = "by a model some of whose experts do nothing"
    if obstacle:
        raise ConfigError(f"--ep {config.ep} cannot be honoured {obstacle}; leave it out", param="ep")


def with_copies(config: Config, spec: ModelSpec) -> ModelSpec:
    """As large as it is with ``--redundant-experts``."""
    if spec.moe is None or not config.redundant_experts:
        return spec
    return replace(spec, moe=replace(spec.moe, experts=spec.moe.experts + config.redundant_experts))


def _check_redundant(config: Config, spec: ModelSpec | EncoderSpec | None) -> None:
    count, obstacle = config.redundant_experts, None
    if config.ep == 1:
        obstacle = "without --ep, whose ranks have whole experts"
    elif isinstance(spec, ModelSpec) and spec.moe is not None:
        total = spec.moe.experts + count
        if total % config.ep:
            fit = config.ep - spec.moe.experts % config.ep
            obstacle = f"with {spec.moe.experts} experts on {config.ep} ranks, which then differ; give {fit}"
        elif count > spec.moe.experts * (config.ep - 1):
            obstacle = "where each rank has all experts already"
    if obstacle:
        raise ConfigError(
            f"--redundant-experts {count} cannot be honoured {obstacle}", param="redundant_experts"
        )
