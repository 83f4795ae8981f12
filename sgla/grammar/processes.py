"""The server's ends of the compiler's processes (``sandbox.py``)."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from sgla.grammar.protocol import LENGTH, Answer, Ask
from sgla.processes import cpu_seconds, deaf, python_path

# Times as long as its CPU time may a child take:
# one that stands back has a quarter of a core beside a busy thread.
BUSY = 5
MOMENT = 0.02  # seconds


class Died(Exception):
    """A process ended without an answer."""


class Sandbox:
    """The process that has the vocabulary, and forks a child for each grammar.
    It ends with the thread that makes this."""

    def __init__(self, vocabulary: Path) -> None:
        self._messages, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = (vocabulary, theirs.fileno(), os.getpid())
        with theirs, deaf():
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "sgla.grammar.sandbox", *map(str, argv)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": python_path(), "OPENBLAS_NUM_THREADS": "1"},
            )

    async def child(self, seconds: float) -> Child:
        """A new one. Raises Died, or TimeoutError after ``seconds``."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._messages, [b"fork"], [theirs.fileno()])
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except OSError as error:
            ours.close()
            raise Died from error
        child = Child(self, reader, writer)
        try:
            async with asyncio.timeout(seconds):
                child.pid = LENGTH.unpack(await child.read(LENGTH.size))[0]
        except BaseException:
            child.close()
            raise
        return child

    def kill(self, pid: int | None = None) -> None:
        """End one child, which may have ended by itself, or for None all, and the process with them."""
        if pid is not None:
            try:
                self._messages.send(b"%d" % pid)
            except OSError:
                pass  # they are all gone
            return
        self._messages.close()
        self._popen.kill()
        self._popen.wait()


class Child:
    def __init__(self, sandbox: Sandbox, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid: int | None = None
        self._sandbox = sandbox
        self._reader = reader
        self._writer = writer
        self._reading: asyncio.Future[Answer] | None = None

    def ask(self, ask: Ask) -> None:
        data = msgspec.msgpack.encode(ask)
        self._writer.write(LENGTH.pack(len(data)) + data)

    async def answer(self, seconds: float) -> Answer | None:
        """The next one; None if it has not come within ``seconds`` of CPU time, or on a busy machine ``BUSY``
        times as long, and may come later. Raises Died."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._record())
        end, last = self.cpu_seconds() + seconds, time.monotonic() + BUSY * seconds
        while not self._reading.done():
            left = min(end - self.cpu_seconds(), last - time.monotonic())
            if left <= 0:
                return None
            await asyncio.wait([self._reading], timeout=max(left, MOMENT))
        reading, self._reading = self._reading, None
        return reading.result()

    def cpu_seconds(self) -> float:
        """That it has used."""
        assert self.pid is not None
        try:
            return cpu_seconds(self.pid)
        except OSError as error:
            raise Died from error

    def stand_back(self) -> None:
        """From now on it has the time that others leave."""
        assert self.pid is not None
        with suppress(OSError):  # it died
            os.setpriority(os.PRIO_PROCESS, self.pid, 5)

    async def _record(self) -> Answer:
        size = LENGTH.unpack(await self.read(LENGTH.size))[0]
        return msgspec.msgpack.decode(await self.read(size), type=Answer)

    async def read(self, size: int) -> bytes:
        try:
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Died from error

    def close(self) -> None:
        """End it."""
        if self._reading is not None:
            self._reading.cancel()
        self._writer.close()
        if self.pid is not None:
            self._sandbox.kill(self.pid)
