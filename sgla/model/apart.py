"""Settings that cannot be together. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping

from sgla.config import Config
from sgla.errors import ConfigError


def check_apart(config: Config, beside: str, refused: Mapping[str, str]) -> None:
    """Raise ConfigError for the first of the settings ``refused`` that is given ``beside`` a flag; each has
    why."""
    for name, why in refused.items():
        if getattr(config, name) != getattr(Config(), name):
            raise ConfigError(
                f"{_flag(name)} cannot be honoured with {beside}: {why}; leave one out", param=name
            )


def check_parted(config: Config, parts: str, refused: Mapping[str, str]) -> None:
    """``check_apart`` for the setting ``parts``, by which each rank of a stage has a part of each step."""
    more = dict(refused)
    if config.pp % config.nnodes:
        more["nnodes"] = "ranks of a stage are on one host"
    check_apart(config, _flag(parts), more)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
