"""The MCP servers that the operator has named (``--tool-server``). Each has a process of its own
(``process.py``), which is started with the server, and again when it is lost and somebody needs it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from sgla import clock
from sgla.config import SECRETS
from sgla.errors import ConfigError
from sgla.http.mcp.address import Address, addresses
from sgla.http.mcp.protocol import GONE, LATE, LENGTH, NO_ANSWER, RECORD, TRANSPORT, Ask, Failure, Reply
from sgla.per_client import PerClient
from sgla.processes import end, python_path

log = logging.getLogger(__name__)

START = 30.0  # seconds that a process may take to connect and to list the tools
AGE = 60.0  # seconds after which the list is asked for again
AGAIN = 5.0  # seconds after which one that failed is
GRACE = 2.0  # seconds that a cancelled call may take to end before its process does
SILENT = 30.0  # seconds that an MCP server which was late may take to answer a ping
AT_ONCE = 16  # calls of one client to one MCP server; others wait, which is part of their time


class ToolError(Exception):
    """What a call or a list failed with."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Lost(ToolError):
    """The session ended before the answer came."""


def failed(code: int, message: str) -> ToolError:
    return ToolError(Failure(TRANSPORT, code, message))


class Session:
    """One process. ``over``: it has ended, or is about to."""

    def __init__(self, address: Address) -> None:
        ours, theirs = socket.socketpair()
        variables = {f"SGLA_{name.upper()}" for name in SECRETS}
        environ = {name: value for name, value in os.environ.items() if name not in variables}
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "sgla.http.mcp.process", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                env=environ | {"PYTHONPATH": python_path()},
            )
        self.over = False
        self._why: Failure | None = None  # it ended
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Reply]] = {}
        self._unsent = [msgspec.msgpack.encode(address)]
        self._writer: asyncio.StreamWriter | None = None
        self._reading = asyncio.ensure_future(self._read(ours))

    async def ask(self, verb: str, seconds: float, name: str = "", arguments: str = "") -> Reply:
        """Raises ToolError.
        What takes longer than ``seconds`` is cancelled; where that does not help, the process ends."""
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(msgspec.msgpack.encode(Ask(number, verb, name, arguments)))
        try:
            async with asyncio.timeout(seconds):
                reply = await asyncio.shield(future)
        except TimeoutError as error:
            self._cancel(number)
            raise failed(LATE, f"it gave no answer within {seconds:.3g} s") from error
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        if reply.failure is not None:
            raise (Lost if reply.failure is self._why else ToolError)(reply.failure)
        return reply

    def _cancel(self, number: int) -> None:
        self._send(msgspec.msgpack.encode(Ask(number, "cancel")))

        def insist() -> None:
            if number in self._asked:
                self.close()

        asyncio.get_running_loop().call_later(GRACE, insist)

    def _send(self, data: bytes) -> None:
        if self._writer is None:
            self._unsent.append(data)
        elif not self.over:
            self._writer.write(LENGTH.pack(len(data)) + data)

    async def _read(self, ours: socket.socket) -> None:
        last = Failure(TRANSPORT, NO_ANSWER, "the connection to it was lost")
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            unsent, self._unsent = self._unsent, []
            for data in unsent:
                self._send(data)
            while True:
                size = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
                if size > RECORD:
                    break
                reply = msgspec.msgpack.decode(await reader.readexactly(size), type=Reply)
                if reply.number == 0:
                    last = reply.failure or last
                    break
                if (future := self._asked.pop(reply.number, None)) is not None and not future.done():
                    future.set_result(reply)
                if reply.failure is not None and reply.failure.code == GONE:
                    self.over = True
        except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError):
            pass
        finally:
            self._end(last)

    def close(self) -> None:
        self._reading.cancel()
        self._end(Failure(TRANSPORT, NO_ANSWER, "the connection to it was closed"))

    def _end(self, why: Failure) -> None:
        """No effect the second time."""
        self.over, self._why = True, self._why or why
        end(self._popen)
        if self._writer is not None:
            self._writer.close()
        asked, self._asked = self._asked, {}
        for number, future in asked.items():
            if not future.done():
                future.set_result(Reply(number, failure=self._why))


class ToolServer:
    """One MCP server, as requests use it."""

    def __init__(self, address: Address, seconds: float) -> None:
        self.label = address.label
        self.url = address.url
        self._address = address
        self._seconds = seconds
        self._session: Session | None = None
        self._listing: asyncio.Task[None] | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._listed: Reply | ToolError | None = None
        self._fresh = 0.0  # until then
        self._places = PerClient(AT_ONCE)

    async def tools(self) -> Reply:
        """Its tools, and those that cannot be used by name. Raises ToolError."""
        if clock.now() >= self._fresh:
            if self._listing is None:
                self._listing = asyncio.ensure_future(self._list())
            await asyncio.shield(self._listing)
        if isinstance(self._listed, ToolError):
            raise ToolError(self._listed.failure)
        assert self._listed is not None
        return self._listed

    async def _list(self) -> None:
        try:
            self._listed = await self._open().ask("list", START)
            self._fresh = clock.now() + AGE
        except ToolError as error:
            self._listed = error
            self._fresh = clock.now() + AGAIN
        finally:
            self._listing = None

    async def call(self, name: str, arguments: str, client: str, seconds: float | None = None) -> str:
        """What the tool answers. Raises ToolError."""
        seconds = self._seconds if seconds is None else max(0.0, min(self._seconds, seconds))
        place = self._places.of(client)
        until = clock.now() + seconds
        try:
            async with asyncio.timeout(seconds):
                await place.acquire()
        except TimeoutError as error:
            raise failed(LATE, f"{AT_ONCE} calls of this client ran for {seconds:g} s") from error
        try:
            return await self._call(name, arguments, until)
        except ToolError as error:
            # The old session's end was before the call, or what ended it may have been another call.
            if error.failure.code != GONE and not (isinstance(error, Lost) and self._only_reads(name)):
                raise
            return await self._call(name, arguments, until)
        finally:
            place.release()

    async def _call(self, name: str, arguments: str, until: float) -> str:
        session = self._open()
        try:
            return (await session.ask("call", max(0.0, until - clock.now()), name, arguments)).text
        except ToolError as error:
            if error.failure.code == LATE and self._pinging is None:
                self._pinging = asyncio.ensure_future(self._ping(session))
            raise

    async def _ping(self, session: Session) -> None:
        """End a session in which nothing is answered any more."""
        try:
            await session.ask("ping", SILENT)
        except ToolError as error:
            if error.failure.code == LATE:
                session.close()
        finally:
            self._pinging = None

    def _only_reads(self, name: str) -> bool:
        """Whether the MCP server says that the tool changes nothing, so that it may be called twice."""
        return isinstance(self._listed, Reply) and any(
            tool.name == name and tool.read_only for tool in self._listed.tools
        )

    def _open(self) -> Session:
        if self._session is None or self._session.over:
            self._session = Session(self._address)
        return self._session

    async def ready(self) -> None:
        """Connect, and say if that fails."""
        try:
            listed = await self.tools()
        except ToolError as error:
            log.warning("MCP server %s: %s", self.label, error)
        else:
            log.info(
                "MCP server %s has %d tools%s",
                self.label,
                len(listed.tools),
                listed.wrong and f"; {listed.wrong}",
            )

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


class ToolServers:
    """All of them. Raises ConfigError for addresses that are wrong, and without the package."""

    def __init__(self, texts: Sequence[str], seconds: float) -> None:
        self._servers = [ToolServer(address, seconds) for address in addresses(texts)]
        self._starting: list[asyncio.Future[None]] = []
        if self._servers:
            check_package()

    def __bool__(self) -> bool:
        return bool(self._servers)

    @property
    def labels(self) -> list[str]:
        return [server.label for server in self._servers]

    def find(self, label: str, url: str | None) -> ToolServer | None:
        """By its URL, if that is given."""
        for server in self._servers:
            if server.label == label if url is None else (server.url and same(server.url, url)):
                return server
        return None

    def start(self) -> None:
        """Connect, so that no request waits for that."""
        self._starting = [asyncio.ensure_future(server.ready()) for server in self._servers]

    def close(self) -> None:
        for server in self._servers:
            server.close()


def same(a: str, b: str) -> bool:
    return a.rstrip("/") == b.rstrip("/")


def check_package() -> None:
    try:
        version = importlib.metadata.version("mcp")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            "--tool-server needs the package mcp; install it with: pip install 'sgla[mcp]'",
            param="tool_server",
        ) from error
    if int(version.split(".")[0]) < 2:
        raise ConfigError(
            f"--tool-server needs version 2 of the package mcp, not {version}; "
            "install it with: pip install 'sgla[mcp]'",
            param="tool_server",
        )
