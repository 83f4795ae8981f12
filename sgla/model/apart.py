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


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
