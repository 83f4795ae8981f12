"""``--parallel auto``, in the commands that have it: the model is looked up before anything else."""

from __future__ import annotations

from collections.abc import Callable

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.hub.fetch import find_local, resolve_model
from sgla.loading.source import configured_source
from sgla.observe.machine import Machine, detect, network_rate, nvlink_rate
from sgla.resolve import check
from sgla.strategy import choose


def settled(
    config: Config, say: Callable[[str], None], machine: Machine | None = None, download: bool = True
) -> Config:
    """``config`` with its axes chosen, if that is asked for; ``say`` is told why. Raises ConfigError."""
    check(config)
    if config.parallel != "auto":
        return config
    if config.models:
        raise ConfigError("--parallel auto is for one model; leave it or --models out", param="parallel")
    path = resolve_model(config) if download else find_local(config)
    if path is None:
        raise ConfigError(
            "--parallel auto needs the model's files: 'sgla pull' brings them", param="parallel"
        )
    model = configured_source(path, config).config
    chosen = choose(config, machine or detect(), model, nvlink_rate(), network_rate())
    for line in chosen.why:
        say(line)
    return chosen.config
