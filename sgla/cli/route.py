"""``sgla route``: settings in; the router itself is ``sgla.route.serve``."""

from __future__ import annotations

import argparse

import msgspec

from sgla.errors import ConfigError
from sgla.observe.log import setup_logging
from sgla.route.config import RouteConfig, check


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    check(config)
    setup_logging(config.log_level, "text")
    from sgla.route.serve import run as serve

    return serve(config)


def config_of(args: argparse.Namespace) -> RouteConfig:
    """Raises ConfigError."""
    given = {name: getattr(args, name) for name in RouteConfig.__struct_fields__ if hasattr(args, name)}
    try:
        return msgspec.convert(given, RouteConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
