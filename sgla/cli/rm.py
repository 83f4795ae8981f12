"""``sgla rm``: delete models of ``sgla list`` from this disk."""

from __future__ import annotations

import argparse

from sgla.cli.settings import changing_files, load_config
from sgla.hub.cache import remove
from sgla.hub.disk import bytes_text


def run(args: argparse.Namespace) -> int:
    config = load_config(args.flags, args.config)
    for name in args.names:
        with changing_files():
            gone = remove(name, config.download_dir)
        print(f"removed {name}, {bytes_text(sum(one.size for one in gone))}")
    return 0
