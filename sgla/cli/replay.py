"""``sgla replay``: the scheduler's recorded steps through a scheduler again,
or recorded requests to a server again."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import msgspec

from sgla.bench.load import Target
from sgla.bench.replay import send
from sgla.errors import ConfigError
from sgla.observe import steplog
from sgla.observe.requests import read_dump


def run(args: argparse.Namespace) -> int:
    return play(args.file) if args.url is None else resend(args)


def play(path: str) -> int:
    """Print what each chapter of a step log brings; 1 if anything is different from the record."""
    try:
        log = steplog.read(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    head = {
        "version": log.version,
        "time": log.time,
        "why": log.why,
        "limits": msgspec.to_builtins(log.limits),
    }
    print(json.dumps(head))
    replays = [steplog.replay(chapter) for chapter in log.chapters]
    for replay in replays:
        print(json.dumps({"equal": replay.difference is None} | msgspec.to_builtins(replay)))
    return int(any(replay.difference is not None for replay in replays))


def resend(args: argparse.Namespace) -> int:
    """Print the numbers of the run; 1 if a request got no answer or a 5xx."""
    target = Target(url=args.url, key=args.api_key)
    numbers = asyncio.run(send(target, read_dump(args.file), args.speed))
    print(json.dumps(numbers))
    return int(any(not status.isdigit() or status >= "500" for status in numbers["statuses"]))
