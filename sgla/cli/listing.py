"""``sgla list``: the models on this disk."""

from __future__ import annotations

import argparse
import json

from sgla.cli.settings import load_config
from sgla.cli.show import table
from sgla.hub.cache import Cached, cached_models
from sgla.hub.disk import bytes_text


def run(args: argparse.Namespace) -> int:
    config = load_config(args.flags, args.config)
    models = cached_models(config.download_dir)
    if args.json:
        print(json.dumps([fields(one) | {"path": str(one.path)} for one in models], indent=2))
    elif models:
        rows = [[one.name, one.revision[:12], bytes_text(one.size), one.format, one.source] for one in models]
        table(["NAME", "REVISION", "SIZE", "FORMAT", "FROM"], rows)
    else:
        print("no model is cached; 'sgla pull MODEL' or 'sgla serve MODEL' downloads one")
    return 0


def fields(one: Cached) -> dict[str, str | int]:
    return {
        "name": one.name,
        "revision": one.revision,
        "size": one.size,
        "format": one.format,
        "source": one.source,
    }
