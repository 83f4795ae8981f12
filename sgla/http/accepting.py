"""How the server listens: connections are accepted a few at a time, so that a crowd leaves turns of the loop
to others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from functools import partial

from aiohttp import web

from sgla.http.connections import LINGER_SECONDS, Connection, Listener
from sgla.nodes import at

log = logging.getLogger(__name__)

AT_ONCE = 16  # connections that a turn of the loop accepts; their requests are read in the next one
SEND_BYTES = 256 << 10  # that the system may hold of an answer for a client that does not read
HANDSHAKE_SECONDS = 10  # of TLS
RETRY_SECONDS = 0.1  # after which a server that lacks descriptors accepts again


class Acceptor:
    """Accepts connections. Those of TLS have their places while they are greeted."""

    def __init__(
        self, listener: Listener, sockets: list[socket.socket], context: ssl.SSLContext | None
    ) -> None:
        self.sockets = sockets
        self._listener, self._context = listener, context
        self._loop = asyncio.get_running_loop()
        self._greetings: set[asyncio.Task[None]] = set()
        for each in sockets:
            self._loop.add_reader(each, self._accept, each)

    def close(self) -> None:
        for task in self._greetings:
            task.cancel()
        for each in self.sockets:
            self._loop.remove_reader(each)
            each.close()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # there are no descriptors
                log.warning("a connection cannot be accepted: %s", error)
                self._loop.remove_reader(listening)
                self._loop.call_later(RETRY_SECONDS, self._resume, listening)
                return
            accepted.setblocking(False)
            self._take(accepted, str(address[0]))

    def _resume(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening, self._accept, listening)

    def _take(self, accepted: socket.socket, address: str) -> None:
        connection = self._listener()
        task = self._loop.create_task(self._greet(connection, accepted))
        if self._context is not None:
            connection.handshake = task
            connection.accepted(address)
        self._greetings.add(task)
        task.add_done_callback(partial(self._greeted, connection, accepted))

    async def _greet(self, connection: Connection, accepted: socket.socket) -> None:
        tls = self._context is not None
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if tls else None,
                ssl_shutdown_timeout=LINGER_SECONDS if tls else None,
            )

    def _greeted(self, connection: Connection, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._greetings.discard(task)
        if connection.handshake is not None:  # it came to nothing
            accepted.close()
            connection.gone()


class Site(web.BaseSite):
    """As TCPSite, with an ``Acceptor``. ``ssl_context`` None: plain HTTP."""

    __slots__ = ("_host", "_port")

    def __init__(
        self, runner: web.AppRunner, host: str, port: int, ssl_context: ssl.SSLContext | None, backlog: int
    ) -> None:
        super().__init__(runner, ssl_context=ssl_context, backlog=backlog)
        self._host, self._port = host, port

    @property
    def name(self) -> str:
        return f"{'https' if self._ssl_context else 'http'}://{at(self._host, self._port)}"

    async def start(self) -> None:
        """Raises OSError."""
        await super().start()
        listener = self._runner.server
        assert isinstance(listener, Listener)
        infos = await asyncio.get_running_loop().getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with contextlib.ExitStack() as opened:
            sockets = []
            for family, address in dict.fromkeys((info[0], info[4]) for info in infos):
                listening = socket.create_server(address, family=family, backlog=self._backlog)
                sockets.append(opened.enter_context(listening))
                listening.setblocking(False)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)  # accepted ones, too
            opened.pop_all()
        self._server = Acceptor(listener, sockets, self._ssl_context)  # type: ignore[assignment]
