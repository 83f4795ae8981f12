"""A server of ``sgla serve --dp``: ``python -m sgla.cli.replica CHANNEL PARENT``. The parent says over the
channel what to serve (``route.replicas.Start``), and hears there when and where it is ready."""

from __future__ import annotations

import json
import os
import socket
import sys

import msgspec

from sgla.cli.serve import others, ready_text
from sgla.config import Config
from sgla.defaults import Defaults
from sgla.errors import ConfigError
from sgla.executor.procs import spawn_early
from sgla.hub.fetch import find_local
from sgla.messages import Facts
from sgla.observe.log import setup_logging
from sgla.processes import die_with
from sgla.resolve import resolve
from sgla.route.replicas import EXIT_CONFIG, Start


def main(channel: int, parent: int) -> int:
    """The exit code."""
    die_with(parent)
    end = socket.socket(fileno=channel)
    end.set_inheritable(False)
    with end.makefile("rb") as file:
        start = msgspec.json.decode(file.read(), type=Start)
    if start.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, start.cores)
    try:
        return serve(start, end)
    except ConfigError as error:
        print(f"sgla: {error.message}", file=sys.stderr)
        return EXIT_CONFIG


def serve(start: Start, end: socket.socket) -> int:
    """Raises ConfigError."""
    config = start.config
    setup_logging(config.log_level, config.log_format)
    if config.executor == "procs":
        spawn_early(msgspec.structs.replace(config, device=resolve(config).config.device))
    from sgla.cli.progress import ProgressPrinter
    from sgla.http.serve import run

    progress = ProgressPrinter() if start.number == 0 else None

    def ready(config: Config, facts: Facts, defaults: Defaults, url: str, seconds: float) -> None:
        if progress is not None:
            progress.close()
        text = ready_text(config, facts, defaults, url, seconds, find_local(config))
        end.sendall(json.dumps({"url": url, "text": text}).encode() + b"\n")

    return run(config, progress, ready, beside=others(config))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
