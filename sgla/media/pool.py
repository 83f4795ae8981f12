"""The server's side of the processes for media (``worker.py``): what they are asked, and their limits."""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from sgla.errors import BadRequest, InvalidField, UnsupportedField
from sgla.media.crossing import Memory, Record, packed, unpacked
from sgla.processes import cpu_seconds, python_path

LENGTH = struct.Struct("<I")  # before each record on the pipes
BUSY = 3  # times as long as its CPU time a task may take on a busy machine
START = 60.0  # seconds
KINDS = {kind.__name__: kind for kind in (BadRequest, InvalidField, UnsupportedField)}

T = TypeVar("T")


def processes_of(asked: int | None) -> int:
    """As many as are ``asked`` for, or as the cores are for."""
    return asked or min(8, max(2, len(os.sched_getaffinity(0)) // 4))


class Answer(msgspec.Struct, array_like=True):
    """``kind``: the name of an error's class, whose message is ``text``; else ``value`` is the result."""

    kind: str = ""
    text: str = ""
    param: str | None = None
    value: Any = None


class Died(BadRequest):
    """A task's process ended, or was ended since its task took too long."""


class Pool:
    """At most ``processes``, each of which starts when tasks wait; who waits gets the first that is free, so
    tasks that are short do not wait for a start.

    A task may take ``seconds`` of CPU time, and ``memory`` bytes beyond what the process has once it has
    imported ``modules``. A task that is cancelled, or goes beyond, costs its process, which has ended when
    the caller hears of it, and nobody else.
    """

    def __init__(
        self, processes: int = 2, memory: int = 1 << 30, seconds: float = 10.0, modules: Sequence[str] = ()
    ) -> None:
        self.memory = memory
        self.seconds = seconds
        self._modules = tuple(modules)
        self._most = processes
        self._all: set[_Process] = set()
        self._idle: list[_Process] = []
        self._starts: set[asyncio.Task[None]] = set()
        self._waiting: deque[asyncio.Future[_Process]] = deque()

    async def run(self, function: str, *args: Any, result: type[T]) -> T:
        """What the ``function`` ("module:name") makes of ``args``, which it is given as its annotations say.
        Raises what it raises of BadRequests, and Died."""
        process = await self._taken()
        try:
            answer = await self._asked(process, (function, args))
        except BaseException:
            await asyncio.wait([self._end(process)])  # it may be about to open a file that the caller has
            raise
        self._free(process)
        return value_of(answer, result)

    async def _taken(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            self._end(process)
        place: asyncio.Future[_Process] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            self._start()
            return await place
        except BaseException:
            # Nobody waits there any more; who was given a process meanwhile does not take it.
            if not place.cancel() and not place.cancelled() and place.exception() is None:
                self._free(place.result())
            raise

    def _start(self) -> None:
        """One more process, if more wait than there are starts."""
        waiting = sum(not place.done() for place in self._waiting)
        if len(self._starts) < waiting and len(self._all) < self._most:
            process = _Process()
            self._all.add(process)
            start = asyncio.ensure_future(self._started(process))
            self._starts.add(start)
            start.add_done_callback(self._starts.discard)

    async def _started(self, process: _Process) -> None:
        """Who waits longest hears of a start that fails."""
        try:
            await process.start(self.memory, 2 * BUSY * self.seconds, self._modules)
        except BaseException as error:
            self._end(process)
            if not isinstance(error, Exception):
                raise
            if (place := self._longest()) is not None:
                place.set_exception(error if isinstance(error, BadRequest) else Died("its process ended"))
        else:
            self._free(process)

    def _free(self, process: _Process) -> None:
        if (place := self._longest()) is None:
            self._idle.append(process)
        else:
            place.set_result(process)

    def _longest(self) -> asyncio.Future[_Process] | None:
        """The place of who waits longest."""
        while self._waiting:
            if not (place := self._waiting.popleft()).done():  # else the task was cancelled
                return place
        return None

    def _end(self, process: _Process) -> asyncio.Future[None]:
        def ended(_: object) -> None:
            self._all.discard(process)
            self._start()

        end = asyncio.ensure_future(process.end())
        end.add_done_callback(ended)
        return end

    async def _asked(self, process: _Process, task: tuple[str, tuple[Any, ...]]) -> Answer:
        try:
            asked = asyncio.ensure_future(process.ask(task))
            try:
                await self._patience(process, asked)
                return await asked
            finally:
                asked.cancel()
        except (OSError, EOFError) as error:
            raise Died("its process ended") from error

    async def _patience(self, process: _Process, asked: asyncio.Future[Answer]) -> None:
        """Wait for an answer as long as a task may take."""
        begun, loop = process.cpu_seconds(), asyncio.get_running_loop()
        end = loop.time() + BUSY * self.seconds
        wait = self.seconds
        while not (await asyncio.wait([asked], timeout=wait))[0]:
            if loop.time() >= end or process.cpu_seconds() - begun >= self.seconds:
                raise Died(f"it takes more than {self.seconds:g} s")
            wait = self.seconds / 10

    async def close(self) -> None:
        while (place := self._longest()) is not None:
            place.set_exception(Died("the server ends"))
        for start in self._starts:
            start.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in self._all))
        self._all.clear()
        self._idle.clear()


def value_of(answer: Answer, kind: type[T]) -> T:
    if answer.kind:
        raise KINDS[answer.kind](answer.text, param=answer.param)
    return msgspec.convert(answer.value, kind, builtin_types=(bytes,))


class _Process:
    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._asks, self._answers = Memory(), Memory()

    async def start(self, memory: int, seconds: float, modules: Sequence[str]) -> None:
        """Wait until its imports are done. ``seconds``: after which a task of its ends it by itself."""
        if self._process is not None:
            return
        files = self._asks.descriptor, self._answers.descriptor
        given = [str(each) for each in (*files, memory, seconds)]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "sgla.media.worker", *given, *modules),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=files,
            env=os.environ | {"PYTHONPATH": python_path()},
        )
        try:
            async with asyncio.timeout(START):
                await self._read()
        except TimeoutError as error:
            raise Died(f"its process does not start within {START:.0f} s") from error

    async def ask(self, task: tuple[str, tuple[Any, ...]]) -> Answer:
        assert self._process is not None
        assert self._process.stdin is not None
        data, parts = packed(task)
        if parts:
            await asyncio.to_thread(self._asks.write, parts)
        self._process.stdin.write(LENGTH.pack(len(data)) + data)
        await self._process.stdin.drain()
        record = msgspec.msgpack.decode(await self._read(), type=Record)
        found = await asyncio.to_thread(self._answers.read, record.sizes) if record.sizes else []
        return unpacked(record, found, Answer)

    async def _read(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        size = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))[0]
        return await self._process.stdout.readexactly(size)

    def cpu_seconds(self) -> float:
        assert self._process is not None
        try:
            return cpu_seconds(self._process.pid)
        except OSError:  # it died
            return 0.0

    @property
    def alive(self) -> bool:
        """Whether it takes tasks, as far as is known."""
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.returncode is None and not self._process.stdin.is_closing()

    async def end(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
