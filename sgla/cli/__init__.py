"""The ``sgla`` command. Commands are imported when they run, so that ``sgla --help`` is quick."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import threading
from collections.abc import Sequence

from sgla.cli.args import parse
from sgla.errors import ConfigError, SglaError
from sgla.leaving import leave

MODULES = {"list": "listing", "run-batch": "run_batch"}  # of commands that are not named as their modules
# What the system says of a stream that takes no more.
UNWRITABLE = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF
EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130


def entry() -> None:
    """``main`` as a process.
    Threads that Python would wait for, and that may never end, are not waited for."""
    code = main()
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        leave(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: wrong flags, files or settings)."""
    if sys.stderr is None:  # closed; print would take stdout instead
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stdout is None:
        print("sgla: standard output is closed; give it a file, or /dev/null", file=sys.stderr)
        return EXIT_FAILED
    try:
        try:
            return _run(sys.argv[1:] if argv is None else list(argv))
        finally:  # what is still buffered is written here, where a reader that has left is no news
            _flush()
    except OSError as error:
        left = isinstance(error, BrokenPipeError)
        if not left and (error.filename is not None or error.errno not in UNWRITABLE):
            raise
        _discard()
        if not left:
            print(f"sgla: the output cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED


def _run(argv: list[str]) -> int:
    try:
        args = parse(argv)
        for hint in getattr(args, "hints", ()):
            print(f"sgla: {hint}", file=sys.stderr)
        return importlib.import_module(f"sgla.cli.{MODULES.get(args.command, args.command)}").run(args)
    except SglaError as error:
        print(f"sgla: {error.message}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _discard() -> None:
    """Send the streams that cannot be written, as those whose readers have left, to nowhere, so that the
    interpreter's last flush succeeds."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
