"""``sgla run-batch``: the requests of a file, in OpenAI's form for batches, without a server. They go through
the handlers of their routes, and are the lines of a batch in a state of its own, which is gone when the
command ends."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
from aiohttp import web

from sgla.actors.system import System
from sgla.cli.progress import ProgressPrinter
from sgla.cli.settings import load_config
from sgla.config import Config
from sgla.errors import ConfigError, SglaError
from sgla.executor.procs import spawn_early
from sgla.http.app import make_app
from sgla.http.batches.files import PIECE, PURPOSE, TTL, Files, file_object
from sgla.http.batches.routes import BatchRequest, batch_object
from sgla.http.batches.runner import RUNNER, Runner
from sgla.http.batches.store import Batch
from sgla.http.clients import Client
from sgla.memory import return_memory_early
from sgla.messages import Progress
from sgla.observe.log import setup_logging
from sgla.resolve import check, resolve

LOOK = 0.2  # seconds between looks how far it is
FOR_EVER = 1 << 40  # seconds
UNBOUNDED = 1 << 60  # bytes
CLIENT = Client("local")
INTERRUPTED = 130
PART = ".part"


def run(args: argparse.Namespace) -> int:
    """0 if all lines were answered, 1 if some failed; Ctrl-C ends it with what is done."""
    if "itl_target_ms" not in args.flags:
        args.flags["itl_target_ms"] = 0  # nobody watches single tokens
    config = load_config(args.flags, args.config)
    check(config)
    setup_logging(config.log_level, config.log_format)
    progress = ProgressPrinter()
    with opened(args.input_file, "rb", "--input-file") as given, written(args.output_file) as output:
        check_lines(given)
        if config.executor == "procs":
            spawn_early(msgspec.structs.replace(config, device=resolve(config).config.device))
        try:
            batch = asyncio.run(work(config, given, output, progress))
        finally:
            progress.close()
    errors = batch.seen["errors"]
    for error in errors["data"] if errors else ():
        place = "" if error["line"] is None else f"line {error['line']}: "
        print(f"sgla run-batch: {place}{error['message']}", file=sys.stderr)
    used = batch.usage
    print(
        f"{batch.completed} of {batch.total} requests answered, {batch.failed} failed; "
        f"{used['input_tokens']} tokens read, {used['output_tokens']} written: {args.output_file}",
        file=sys.stderr,
    )
    if batch.seen["status"] == "cancelled":
        return INTERRUPTED
    return int(batch.seen["status"] != "completed" or batch.failed > 0)


def opened(path: str, mode: str, flag: str, place: Path | None = None) -> BinaryIO:
    """``path``, or what becomes it at ``place``. Raises ConfigError."""
    try:
        return cast(BinaryIO, open(place or path, mode))
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error


def check_lines(given: BinaryIO) -> None:
    """Raises ConfigError for a file without a line, as far as one can tell without taking any of it."""
    if given.seekable():
        blank = all(piece.isspace() for piece in iter(partial(given.read, PIECE), b""))
        given.seek(0)
    else:
        blank = not cast(BufferedReader, given).peek(1)
    if blank:
        raise ConfigError(f"--input-file {given.name} has no lines; each line is a request as JSON")


@contextlib.contextmanager
def written(path: str) -> Iterator[BinaryIO]:
    """The output, which has its name once it is whole; what is no plain file, as a pipe, is written as it
    is. Raises ConfigError."""
    place = Path(os.path.realpath(path))
    folder = os.path.realpath(os.path.dirname(path))
    device = folder == "/dev" or folder.startswith("/proc/")  # though what it leads to be a file
    if device or (os.path.exists(path) and not os.path.isfile(path)):
        with opened(path, "ab", "--output-file") as file:
            yield file
        return
    with opened(path, "wb", "--output-file", place.with_name(place.name + PART)) as file:
        try:
            yield file
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    Path(file.name).replace(place)


async def work(config: Config, given: BinaryIO, output: BinaryIO, progress: ProgressPrinter) -> Batch:
    """The batch when it has ended. Raises SglaError."""
    return_memory_early()
    beside = Path(output.name).parent if Path(output.name).is_file() else None
    with tempfile.TemporaryDirectory(prefix=".sgla-", dir=beside) as folder:
        config = msgspec.structs.replace(config, state_path=folder, files_bytes=UNBOUNDED)
        system = System(config, progress)
        app = web.AppRunner(make_app(system.ingress, config, system.metrics))
        await app.setup()
        try:
            await system.start()
            runner = app.app[RUNNER]
            batch = await begun(runner, given, system.ingress.model_names[0])
            await followed(runner, batch, system, progress)
            await runner.store.database.run(CLIENT, partial(copy, batch, output))
        finally:
            await system.close()
            await app.cleanup()
    return batch


async def begun(runner: Runner, given: BinaryIO, model: str) -> Batch:
    now = int(time.time())
    fields = BatchRequest(
        input_file_id=await stored(runner.store.files, given, now), endpoint="", completion_window=""
    )
    batch = await runner.store.create(CLIENT, batch_object(fields, model, now, now + FOR_EVER), TTL)
    batch.local = True
    runner.add(batch)
    return batch


async def stored(files: Files, given: BinaryIO, now: int) -> str:
    """The id of the input as a file of the state."""
    number, size, count = await files.open(CLIENT), 0, 0
    while piece := given.read(PIECE):
        put = partial(files.put, number=number, piece=count, data=piece, client=CLIENT.name)
        await files.database.run(CLIENT, put)
        size, count = size + len(piece), count + 1
    seen = file_object(size, given.name, PURPOSE, now, now + TTL)
    json = await files.database.run(CLIENT, lambda tx: files.show(tx, number, CLIENT.owner, seen))
    return str(msgspec.json.decode(json)["id"])


async def followed(runner: Runner, batch: Batch, system: System, progress: ProgressPrinter) -> None:
    """Until it has ended. Raises what ended the engine."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, runner.end, batch, "cancelled")
    while batch.id in runner.batches:
        if system.died.done():
            raise system.died.result()
        checked = batch.seen["status"] != "validating"
        done = batch.completed + batch.failed if checked else 0
        progress(Progress(phase="run", message="requests", done=done, total=batch.total if checked else 0))
        await asyncio.wait([system.died], timeout=LOOK)
    progress(
        Progress(phase="run", message="requests", done=batch.completed + batch.failed, total=batch.total)
    )
    loop.remove_signal_handler(signal.SIGINT)
    if batch.seen["status"] not in ("completed", "failed", "cancelled"):
        raise SglaError("the state of the batch is out of reach; the log has the details")


def copy(batch: Batch, output: BinaryIO, tx: sqlite3.Connection) -> None:
    """What became of the lines, in their order."""
    files = (batch.output, batch.errors)
    for (line,) in tx.execute("SELECT data FROM pieces WHERE file IN (?, ?) ORDER BY number", files):
        output.write(line)
