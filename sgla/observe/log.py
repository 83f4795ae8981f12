"""Logging set-up: one line an event on stderr, colours on a terminal only, and never a word of a prompt."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TextIO

COLOURS = {
    logging.DEBUG: "\x1b[2m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[31m",
}
RESET = "\x1b[0m"
# What a terminal or a reader of logs could take for a command or a line's end, and what is no text: controls,
# separators of lines and paragraphs, marks that turn the direction of text, lone surrogates.
CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
MARKS = (*range(0x2028, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000))
UNSAFE = {code: f"\\x{code:02x}" for code in CONTROLS} | {code: f"\\u{code:04x}" for code in MARKS}
UNSAFE |= {ord("\t"): "\t", ord("\n"): "\\n", ord("\r"): "\\r"}
JSON_UNSAFE = {code: f"\\u{code:04x}" for code in UNSAFE if code >= 0x7F}  # json escapes the others itself


def printable(text: str) -> str:
    """``text`` with escapes in place of control characters, whoever sent them."""
    return text if text.isprintable() else text.translate(UNSAFE)


class LineFormatter(logging.Formatter):
    """``2026-01-31 12:34:56.789 info http: message``;
    control characters are escaped, a traceback follows indented."""

    def __init__(self, colours: bool) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._colours = colours
        self._second, self._shown = 0, ""  # that the last line was of

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix("sgla.")
        if (second := int(record.created)) != self._second:
            self._second, self._shown = second, self.formatTime(record, self.datefmt)
        time = f"{self._shown}.{int(record.msecs):03d}"
        line = f"{time} {record.levelname.lower():7} {name}: {printable(record.getMessage())}"
        colour = COLOURS.get(record.levelno) if self._colours else None
        if colour:
            line = f"{colour}{line}{RESET}"
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line += "\n" + "\n".join("    " + printable(part) for part in trace)
        return line


class JsonFormatter(logging.Formatter):
    """One object a line:
    time (UTC), level, logger, message, what ``extra={"fields": {...}}`` adds, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str).translate(JSON_UNSAFE)


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes lines to ``stream``. Where it is a pipe or a terminal that is full, since nobody reads it, lines
    are left out rather than waited for; the next one says how many. Errors wait."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._left_out = 0
        self._full: Callable[[], bool] = lambda: False
        with contextlib.suppress(OSError):  # no file, which is never full
            room = select.poll()
            room.register(stream.fileno(), select.POLLOUT)
            self._full = lambda: not room.poll(0)

        self._gathered: list[str] | None = None  # lines that are written together

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR and self._gathered is not None:
            self._gathered.append(self.format(record) + self.terminator)
        elif record.levelno < logging.ERROR and self._full():
            self._left_out += 1
        else:
            self._tell_missing()
            super().emit(record)

    def _tell_missing(self) -> None:
        if self._left_out:
            text = f"{self._left_out} lines are missing here: nobody read the log"
            self._left_out = 0
            super().emit(logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None))

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """Write what is logged meanwhile in few pieces: to write takes longer than to make a line."""
        self._gathered = []
        try:
            yield
        finally:
            with self.lock or contextlib.nullcontext():
                lines, self._gathered = self._gathered, None
                while lines:
                    self._write(_piece(lines))

    def _write(self, lines: list[str]) -> None:
        if self._full():
            self._left_out += len(lines)
            return
        self._tell_missing()
        with contextlib.suppress(OSError, ValueError):  # nobody can be told
            self.stream.write("".join(lines))
            self.flush()


def _piece(lines: list[str]) -> list[str]:
    """Take the first of them away: as many as a pipe has room for if it has any."""
    size = count = 0
    while count < len(lines) and (not count or size + len(lines[count]) <= select.PIPE_BUF):
        size += len(lines[count])
        count += 1
    piece, lines[:] = lines[:count], lines[count:]
    return piece


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Lines that are logged meanwhile are written in few pieces."""
    with contextlib.ExitStack() as handlers:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, LineHandler):
                handlers.enter_context(handler.gathering())
        yield


def setup_logging(level: str = "info", form: str = "text", stream: TextIO | None = None) -> None:
    """Send the logs of the whole process to ``stream`` (default stderr).
    Other packages are heard from warning on."""
    # No line tells these, and to find them out takes longer than the line (Python's logging HOWTO).
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    stream = stream or sys.stderr
    handler = LineHandler(stream)
    colours = stream.isatty() and "NO_COLOR" not in os.environ
    handler.setFormatter(JsonFormatter() if form == "json" else LineFormatter(colours))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("sgla").setLevel(level.upper())
