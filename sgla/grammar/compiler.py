"""The server's side of compiling grammars: a cache, and the process that does it (``sandbox.py``)."""

from __future__ import annotations

import hashlib
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sgla.errors import BadRequest, InvalidField, Overloaded, SglaError, UnsupportedField
from sgla.grammar.protocol import LENGTH, Answer, Ask, Vocabulary
from sgla.messages import Control, Grammar

log = logging.getLogger(__name__)

ENTRIES = 256
ENTRY_BYTES = 32 << 20
TIMEOUT = 5.0  # seconds that one grammar may take
QUEUE = 30.0  # seconds to wait for the grammars before
START = 60.0
SLOW = 0.02  # seconds of compilation that a step may be kept waiting for

STOPPING = "the server is stopping"
CHECKED = ("json_object", "json_schema")
CHECKS = 256  # that may wait

Key = tuple[str, str, str | None]
T = TypeVar("T")


class Died(Exception):
    """The compiler's process ended, or was ended after ``TIMEOUT`` seconds (``late``)."""

    def __init__(self, late: bool) -> None:
        super().__init__("the grammar compiler's process ended")
        self.late = late


class Compiler:
    """Blocks, so it is called in threads; safe in any number of them. Starts nothing before its first use.

    ``vocabulary`` makes the model's; ``tell`` sends the workers a command and waits for rank 0's answer.
    """

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], tell: Callable[[Control], dict[str, Any]]
    ) -> None:
        self._vocabulary = vocabulary
        self._tell = tell
        self._cache: OrderedDict[Key, str | SglaError] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._cache_bytes = 0
        self._process_lock = threading.Lock()
        self._folder: Path | None = None
        self._told = False  # the workers have the vocabulary
        self._process: Process | None = None
        self._closed = False
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="check")
        self.numbers = {"waiting": 0, "checking": 0}  # calls and checks now
        self.counts: Counter[str] = (
            Counter()
        )  # compiled | cached | refused | late | valid | invalid | unchecked
        self._seconds: list[float] = []

    def __call__(self, grammar: Grammar) -> str:
        """The source for the workers. Raises InvalidField or UnsupportedField, which say why, or Overloaded."""
        found = self._look_up(grammar)
        if found is None:
            self._add("waiting", 1)
            try:
                found = self._in_turn(lambda: self._look_up(grammar) or self._make(grammar), QUEUE)
            finally:
                self._add("waiting", -1)
        if isinstance(found, SglaError):
            raise type(found)(f"{grammar.param}: {found.message}", param=grammar.param)
        return found

    def knows(self, grammar: Grammar) -> bool:
        """Whether a call would return or raise at once."""
        return _key(grammar) in self._cache

    def check(self, grammar: Grammar, output: str) -> None:
        """Count, at some time, whether a finished output is what ``grammar`` asks for. Does not block."""
        if grammar.kind not in CHECKED:
            return
        if grammar.after:
            output = answer_of(grammar, output)
        if not output or self.numbers["checking"] >= CHECKS or self._closed:
            return self._count("unchecked")
        self._add("checking", 1)
        self._checks.submit(self._check, grammar, output)

    def _check(self, grammar: Grammar, output: str) -> None:
        try:
            fits = self._in_turn(lambda: self._ask(Ask(grammar, output)).fits, TIMEOUT)
        except (SglaError, Died):
            fits = None
        self._add("checking", -1)
        self._count("unchecked" if fits is None else "valid" if fits else "invalid")
        if fits is False:
            log.warning("an output does not fit its %s: %.200s", grammar.kind, output)

    def drain_seconds(self) -> list[float]:
        """CPU seconds of the compilations since the last call."""
        seconds, self._seconds = self._seconds, []
        return seconds

    def close(self) -> None:
        """End the process and remove the files. A call under way fails."""
        self._closed = True
        self._checks.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # inside ------------------------------------------------------------------------------------------------------

    def _look_up(self, grammar: Grammar) -> str | SglaError | None:
        with self._cache_lock:
            found = self._cache.get(_key(grammar))
            if found is not None:
                self._cache.move_to_end(_key(grammar))
                self.counts["cached"] += 1
            return found

    def _keep(self, grammar: Grammar, found: str | SglaError) -> str | SglaError:
        with self._cache_lock:
            self._cache[_key(grammar)] = found
            self._cache_bytes += _size(grammar, found)
            while len(self._cache) > ENTRIES or self._cache_bytes > ENTRY_BYTES:
                (kind, text, whitespace), old = self._cache.popitem(last=False)
                self._cache_bytes -= _size(Grammar(kind=kind, text=text, whitespace=whitespace), old)
        return found

    def _in_turn(self, work: Callable[[], T], patience: float) -> T:
        if not self._process_lock.acquire(timeout=patience):
            raise Overloaded("too many grammars wait to be compiled; please retry later", retry_after=5.0)
        try:
            return work()
        finally:
            self._process_lock.release()

    def _make(self, grammar: Grammar) -> str | SglaError:
        try:
            answer = self._ask(Ask(grammar))
        except Died as died:
            self._count("late" if died.late else "refused")
            why = f"it takes more than {TIMEOUT:.0f} s to compile" if died.late else "it cannot be compiled"
            return self._keep(grammar, InvalidField(f"the grammar is too complex: {why}"))
        if answer.error is not None:
            self._count("refused")
            kind: type[BadRequest] = UnsupportedField if answer.unsupported else InvalidField
            return self._keep(grammar, kind(answer.error))
        self._count("compiled")
        self._seconds.append(answer.seconds)
        if answer.seconds > SLOW:
            try:
                self._forewarn(answer.source)
            except InvalidField as error:  # not kept: it compiled here, so it may yet compile there
                return error
        return self._keep(grammar, answer.source)

    def _forewarn(self, source: str) -> None:
        """Have the workers compile it beside their steps, and wait for that. Raises InvalidField if they cannot."""
        assert self._folder is not None
        path = self._folder / hashlib.blake2s(source.encode(), digest_size=16).hexdigest()
        path.write_text(source)
        end = time.monotonic() + TIMEOUT
        try:
            while not self._tell(Control(verb="grammar", args={"path": str(path)}))["ready"]:
                if self._closed:
                    raise SglaError(STOPPING)
                if time.monotonic() > end:
                    break
                time.sleep(0.01)
        finally:
            path.unlink(missing_ok=True)

    def _ask(self, ask: Ask) -> Answer:
        """Raises Died. A process that has served before may have died of that, so a fresh one gets a second try."""
        process = self._running()
        tries = 2 if process.served else 1
        while True:
            try:
                answer = process.ask(ask, TIMEOUT)
                process.served = True
                return answer
            except Died as died:
                process.kill()
                self._process = None
                tries -= 1
                if died.late or not tries:
                    raise
                process = self._running()

    def _running(self) -> Process:
        if self._closed:
            raise SglaError(STOPPING)
        if self._process is None:
            process = Process(self._vocabulary_file())
            try:
                process.answer(START)
            except Died as error:
                process.kill()
                raise SglaError("the grammar compiler does not start; see the server's log") from error
            self._process = process
        return self._process

    def _vocabulary_file(self) -> Path:
        if self._folder is None:
            vocabulary = self._vocabulary()
            folder = Path(tempfile.mkdtemp(prefix="sgla-"))
            vocabulary.write(folder / "vocabulary")
            self._folder = folder
        path = self._folder / "vocabulary"
        if not self._told:
            self._tell(Control(verb="vocabulary", args={"path": str(path)}))
            self._told = True
        return path

    def _count(self, outcome: str) -> None:
        with self._cache_lock:
            self.counts[outcome] += 1

    def _add(self, name: str, n: int) -> None:
        with self._cache_lock:
            self.numbers[name] += n


class Process:
    """One compiler's process. Raises Died wherever it turns out that it is gone."""

    def __init__(self, vocabulary: Path) -> None:
        self.served = False
        # What this process imports, and nothing from the current folder.
        command = [sys.executable, "-P", "-m", "sgla.grammar.sandbox", str(vocabulary)]
        path = os.pathsep.join(folder for folder in sys.path if folder)
        self._popen = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._asks, self._answers = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        self._readable = select.poll()
        self._readable.register(self._answers, select.POLLIN)

    def ask(self, ask: Ask, timeout: float) -> Answer:
        data = msgspec.msgpack.encode(ask)
        rest = memoryview(LENGTH.pack(len(data)) + data)
        try:
            while rest:
                rest = rest[os.write(self._asks, rest) :]
        except BrokenPipeError as error:
            raise Died(late=False) from error
        return self.answer(timeout)

    def answer(self, timeout: float) -> Answer:
        """The next one, within ``timeout`` seconds."""
        end = time.monotonic() + timeout
        size = LENGTH.unpack(self._read(LENGTH.size, end))[0]
        return msgspec.msgpack.decode(self._read(size, end), type=Answer)

    def _read(self, size: int, end: float) -> bytes:
        data = b""
        while len(data) < size:
            if not self._readable.poll(max(0.0, end - time.monotonic()) * 1000):
                raise Died(late=True)
            piece = os.read(self._answers, size - len(data))
            if not piece:
                raise Died(late=False)
            data += piece
        return data

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()


def answer_of(grammar: Grammar, output: str) -> str:
    """The part of an output that the grammar is about."""
    if grammar.opener and grammar.opener not in output and not any(end in output for end in grammar.after):
        return output
    ends = [(at, len(end)) for end in grammar.after if (at := output.find(end)) >= 0]
    return output[sum(min(ends)) :] if ends else ""


def _key(grammar: Grammar) -> Key:
    return grammar.kind, grammar.text, grammar.whitespace


def _size(grammar: Grammar, found: str | SglaError) -> int:
    return len(grammar.text) + len(found if isinstance(found, str) else found.message)
