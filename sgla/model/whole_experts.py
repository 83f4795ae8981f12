"""Whether the experts of a mixture can be whole, each on one of several ranks. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

from sgla.config import Config
from sgla.device import Device
from sgla.errors import ConfigError
from sgla.model.encoder import EncoderSpec
from sgla.model.generic_spec import GenericSpec
from sgla.model.spec import ModelSpec

SOURCE = "https://github.com/deepseek-ai/DeepEP"
# Of DeepEP's kernels: values of a token that a warp reads at a time, 16 bytes a lane; its lanes, one for each
# of the token's experts; and threads, one for each rank of the host and each expert here, to count with.
WIDTH, LANES, COUNTING = 256, 32, 128


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
    if config.rebalance_interval:
        _check_rebalancing(config)
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


def way_of_tokens(config: Config) -> tuple[str, str]:
    """By which tokens reach experts, if nobody says so, and why."""
    if config.ep == 1 or not config.dp_attention:
        return "gather", "ranks have all tokens anyway"
    if config.local_ranks % config.tp:
        return "alltoall", "ranks that share experts out are on several hosts"
    return "gather", "ranks that share experts out are on one host"


def check_traffic(
    config: Config,
    device: str,
    dtype: str,
    spec: ModelSpec | EncoderSpec | None,
    cards: Sequence[Device],
) -> None:
    """Raise ConfigError for a ``--moe-a2a-backend`` that cannot be. ``cards``: the GPUs of this host that
    ranks have. ``spec``: None if the model is not known."""
    if not config.sends_tokens:
        return
    obstacle = None
    if config.ep == 1:
        obstacle = "without --ep, whose ranks have whole experts: give --ep as --tp"
    elif not config.dp_attention:
        obstacle = "without --dp-attention, where each rank has all tokens anyway: give it, or gather"
    elif config.moe_a2a_backend == "deepep":
        obstacle = _no_deepep(config, device, dtype, spec, cards)
    if obstacle:
        raise ConfigError(
            f"--moe-a2a-backend {config.moe_a2a_backend} cannot be honoured {obstacle}",
            param="moe_a2a_backend",
        )


def _no_deepep(
    config: Config,
    device: str,
    dtype: str,
    spec: ModelSpec | EncoderSpec | None,
    cards: Sequence[Device],
) -> str | None:
    """Why DeepEP cannot carry tokens, or None. Its limits are those of its README and its assertions, some of
    which fail only where it compiles a kernel, for the first step."""
    other = "; give alltoall"
    if device != "cuda":
        return f"on --device {device}{other}"
    if not all(card.tma for card in cards):
        return f"on GPUs older than Hopper (compute capability 9.0){other}"
    if dtype != "bfloat16":
        return f"with --dtype {dtype}: tokens travel in bfloat16{other}"
    if isinstance(spec, ModelSpec) and spec.moe is not None:
        top_k, ranks = spec.moe.routing.top_k, config.local_ranks
        each = -(-(spec.moe.experts + config.redundant_experts) // config.ep)
        if spec.hidden % WIDTH:
            return f"by a model of the width {spec.hidden}, which is no multiple of {WIDTH}{other}"
        if top_k > LANES:
            return f"by a model whose tokens have {top_k} experts, for {LANES} at most{other}"
        if ranks % config.tp and each + ranks > COUNTING:
            return (
                f"between hosts of {ranks} ranks with {each} experts each: these numbers make more than "
                f"{COUNTING} together; give a larger --ep, or alltoall"
            )
    if find_spec("deep_ep") is None:
        return f"without its package: build it as {SOURCE} says, beside the torch of this server{other}"
    return None


def with_copies(config: Config, spec: ModelSpec) -> ModelSpec:
    """As large as it is with ``--redundant-experts``."""
    if spec.moe is None or not config.redundant_experts:
        return spec
    return replace(spec, moe=replace(spec.moe, experts=spec.moe.experts + config.redundant_experts))


def _check_rebalancing(config: Config) -> None:
    """Experts that move are read again, beside what weights may change (``ChangingRunner.fixed``)."""
    same = "beside which weights are not read again; leave one out"
    beside = {
        "without --ep, whose ranks have whole experts; give --ep as --tp": config.ep == 1,
        "with --cp, beside which GPUs do not count experts; leave one out": config.cp > 1,
        f"with --speculative-algorithm, {same}": config.speculative_algorithm is not None,
        f"with --enable-lora, {same}": config.enable_lora,
        f"with --kv-cache-dtype fp8, {same}": config.kv_cache_dtype == "fp8",
    }
    if obstacle := next((what for what, there in beside.items() if there), None):
        raise ConfigError(
            f"--rebalance-interval {config.rebalance_interval:g} cannot be honoured {obstacle}",
            param="rebalance_interval",
        )


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
