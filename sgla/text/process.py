"""The server's side of the process for texts (``sandbox.py``): what it is asked, its limits, and its end."""

from __future__ import annotations

import math
import os
import pickle
import select
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from sgla.errors import BadRequest, ConfigError, InvalidField, UnsupportedField
from sgla.processes import cpu_seconds, deaf, python_path
from sgla.text.template import MAX_SOURCE, Message, is_source
from sgla.text.tools.generic import shows_tools

LENGTH = struct.Struct("<I")  # before each record on the pipes
SECONDS = 5.0  # of CPU time that one task may take
BUSY = 3  # times as long it may take on a busy machine
FIRST = 0.5  # seconds until it stands back behind all others
START = 60.0
MEMORY = 512 << 20  # bytes that the tasks of a process may need
MOST = 64 << 20  # bytes of an answer
KINDS = {kind.__name__: kind for kind in (BadRequest, InvalidField, UnsupportedField, ConfigError)}


class Render(NamedTuple):
    """What a chat template makes of ``messages``; None: whether it compiles."""

    source: tuple[tuple[str, str], ...]
    special_tokens: dict[str, str]
    messages: list[Message] | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 - pickled, never changed


class Parse(NamedTuple):
    """The pieces of an output. ``tools``, ``reasoning``: names of families, "" for none."""

    text: str
    tools: str = ""
    reasoning: str = ""
    functions: list[dict[str, Any]] | None = None
    opened: bool = False


class Answer(msgspec.Struct):
    """``kind``: the name of an error's class, whose message is ``text``."""

    text: str = ""
    pieces: list[tuple[str, str, str | None]] = []
    kind: str = ""
    param: str | None = None


class Died(Exception):
    """The process ended, or was ended because its task took too long (``late``)."""

    def __init__(self, late: bool) -> None:
        super().__init__("the process for texts ended")
        self.late = late


class Processes:
    """As many as there are threads that ask at a time, and one for the next. Whose task ends or slows one
    waits for another to start, so that others need not. Safe in any thread; blocks."""

    def __init__(self) -> None:
        self.idle: list[Process] = []

    def ask(self, data: list[bytes], fresh: bool = False) -> Answer:
        """``fresh``: of a process that has not been idle.
        Raises Died, and the errors that the answer tells of."""
        try:
            process = Process() if fresh else self.idle.pop()
        except IndexError:
            process, fresh = Process(), True
        if not self.idle:
            self.idle.append(Process())
        try:
            answer = process.ask(data)
        except Died as died:
            process.kill()
            if not fresh and not died.late:
                return self.ask(data, fresh=True)  # it may have been killed while it had nothing to do
            self._start()
            raise
        if process.stands_back:
            process.kill()
            self._start()
        else:
            self.idle.append(process)
        if answer.kind:
            raise KINDS[answer.kind](answer.text, param=answer.param)
        return answer

    def _start(self) -> None:
        process = Process()
        process.start()
        self.idle.append(process)


class Process:
    """``stands_back``: it has the time that others leave, which cannot be taken back."""

    def __init__(self) -> None:
        self.stands_back = False
        command = [sys.executable, "-P", "-m", "sgla.text.sandbox"]
        with deaf():
            self._popen = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": python_path()},
            )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._asks, self._answers = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        os.set_blocking(self._asks, False)
        self._writable, self._readable = select.poll(), select.poll()
        self._writable.register(self._asks, select.POLLOUT)
        self._readable.register(self._answers, select.POLLIN)
        self._started = False
        self._enough = math.inf  # seconds of CPU time until it is ended

    def start(self) -> None:
        """Wait until its imports are done."""
        if not self._started:
            self._ask(NOTHING, time.monotonic() + START, START)
            self._started = True

    def ask(self, data: list[bytes]) -> Answer:
        self.start()
        begun = time.monotonic()
        self._enough = self._cpu_seconds() + SECONDS
        try:
            return self._ask(data, begun + BUSY * SECONDS, FIRST)
        except Died as died:  # where nobody ends it, it ends itself
            raise Died(died.late or time.monotonic() > begun + SECONDS) from died

    def _ask(self, data: list[bytes], end: float, first: float) -> Answer:
        self._write(LENGTH.pack(sum(map(len, data))), end)
        for part in data:
            self._write(part, end)
        if not self._readable.poll(first * 1000):
            self._stand_back()
        size = LENGTH.unpack(self._read(LENGTH.size, end))[0]
        if size > MOST:
            raise Died(late=False)
        return msgspec.msgpack.decode(self._read(size, end), type=Answer)

    def _write(self, data: bytes, end: float) -> None:
        rest = memoryview(data)
        while rest:
            self._wait(self._writable, end)
            try:
                rest = rest[os.write(self._asks, rest) :]
            except OSError as error:
                raise Died(late=False) from error

    def _read(self, size: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(self._readable, end)
            piece = os.read(self._answers, min(1 << 20, size - len(data)))
            if not piece:
                raise Died(late=False)
            data += piece
        return bytes(data)

    def _wait(self, poll: select.poll, end: float) -> None:
        patience = SECONDS
        while not poll.poll(max(0.0, min(patience, end - time.monotonic())) * 1000):
            if time.monotonic() >= end or self._cpu_seconds() >= self._enough:
                raise Died(late=True)
            patience = SECONDS / 10

    def _cpu_seconds(self) -> float:
        try:
            return cpu_seconds(self._popen.pid)
        except OSError:  # it died
            return 0.0

    def _stand_back(self) -> None:
        self.stands_back = True
        with suppress(OSError):  # it died
            os.setpriority(os.PRIO_PROCESS, self._popen.pid, 5)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            pipe.close()


class _Parts(list[bytes]):
    """A file for pickle. Its method is Python's, so that other threads get their turn between parts."""

    def write(self, part: Any) -> None:
        self.append(bytes(part))


def pickled(task: Render | Parse) -> list[bytes]:
    parts = _Parts()
    pickle.Pickler(parts, protocol=5).dump(task)
    return parts


NOTHING = pickled(Parse(""))
_models, _foreign = Processes(), Processes()  # what requests bring to run has processes of its own


def ask(task: Render | Parse, foreign: bool = False) -> Answer:
    """Have ``task`` done within the limits. Blocks. Raises SglaErrors; Died where the limits end it."""
    try:
        parts = pickled(task)
    except (RecursionError, TypeError, AttributeError, pickle.PicklingError) as error:
        raise BadRequest("the request has values that no template can be given") from error
    return (_foreign if foreign else _models).ask(parts)


class BoundedTemplate:
    """A model's chat template, as ``template.ChatTemplate``, but rendered where its time and memory have
    limits. Thread-safe; blocks. ``defaults``: variables where a request does not set them.

    Raises ConfigError for a source that does not compile or goes on for ever.
    """

    def __init__(
        self,
        source: str | dict[str, str],
        special_tokens: dict[str, str] | None = None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        sources = {"default": source} if isinstance(source, str) else source
        self.source = "\n".join(sources.values())  # what the model's output looks like can be told from it
        self._sources = tuple(sources.items())
        self._special_tokens = special_tokens or {}
        self._defaults = defaults
        try:
            ask(Render(self._sources, self._special_tokens))
        except Died as died:
            raise ConfigError(
                f"the chat template cannot be used: {reason(died)}", param="chat_template"
            ) from died
        except BadRequest as error:
            raise ConfigError(
                f"the chat template cannot be used: {error.message}", param="chat_template"
            ) from error

    def knows_tools(self) -> bool:
        """Whether one of the model's templates shows tools."""
        return shows_tools(self.source)

    def shows_tools(self, name: str | None) -> bool:
        """Whether the template does that a request with tools names; None: that it gets.
        A name may be a template's text."""
        if name is not None and is_source(name):
            return shows_tools(name)
        sources = dict(self._sources)
        return shows_tools(sources.get(name or "tool_use") or sources.get("default") or self.source)

    def render(
        self,
        messages: list[Message],
        /,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """As ``ChatTemplate.render``. Raises BadRequest where a limit ends it, too."""
        options = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **self._defaults,
            **kwargs,
        }
        name: str = kwargs.get("chat_template") or ""
        foreign = is_source(name)
        if foreign and len(name) > MAX_SOURCE:
            raise InvalidField(f"chat_template may have {MAX_SOURCE} characters", param="chat_template")
        try:
            return ask(Render(self._sources, self._special_tokens, messages, options), foreign).text
        except Died as died:
            raise BadRequest(
                f"the chat template cannot show the messages: {reason(died)}; send fewer or shorter ones",
                param="messages",
            ) from died


def parse(task: Parse) -> list[tuple[str, str, str | None]]:
    """Blocks. Raises BadRequest for a text that takes too long."""
    try:
        return ask(task).pieces
    except Died as died:
        raise BadRequest(
            f"the text cannot be parsed: {reason(died)}; send a shorter one", param="text"
        ) from died


def reason(died: Died) -> str:
    return f"it takes more than {SECONDS:.0f} s" if died.late else "its process ended"
