"""How what carries bytes asks the one owner of what is known: by calls in the same process, or by messages
over a socket pair from another one. Messages of a turn of the loop are written at once."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import msgspec

from sgla.errors import NotReady, SglaError
from sgla.messages import Rejected
from sgla.route.asked import Asked
from sgla.route.balancer import Balancer, Ticket
from sgla.route.reply import Reply
from sgla.route.routes import reply


class Placed(NamedTuple):
    """A request has a worker. ``ticket``: how the owner knows it."""

    url: str
    ticket: Any


class Owner(Protocol):
    """``on_down`` is called with the URL of a worker that went down, and whether it is lost."""

    on_down: Callable[[str, bool], None]

    async def place(self, asked: Asked, key: str, tried: Sequence[str]) -> Placed:
        """Raises SglaError. Whoever has it calls ``close``."""
        ...

    def began(self, placed: Placed) -> None: ...

    def close(self, placed: Placed, status: int, fault: bool) -> None: ...

    async def reply(self, method: str, target: str, body: bytes) -> Reply: ...


class LocalOwner:
    """In the same process."""

    def __init__(self, balancer: Balancer) -> None:
        self.on_down: Callable[[str, bool], None] = lambda url, lost: None
        self._balancer = balancer
        balancer.on_down.append(lambda url, lost: self.on_down(url, lost))

    async def place(self, asked: Asked, key: str, tried: Sequence[str]) -> Placed:
        waiting: asyncio.Future[SglaError | None] = asyncio.get_running_loop().create_future()

        def done(error: SglaError | None) -> None:
            if not waiting.done():
                waiting.set_result(error)

        ticket = self._balancer.place(asked, key, tried, done)
        if ticket.worker is None:
            try:
                error = await waiting
            except asyncio.CancelledError:
                self._balancer.close(ticket, 0, False)
                raise
            if error is not None:
                raise error
        assert ticket.worker is not None
        return Placed(ticket.worker.url, ticket)

    def began(self, placed: Placed) -> None:
        self._balancer.began(placed.ticket)

    def close(self, placed: Placed, status: int, fault: bool) -> None:
        self._balancer.close(placed.ticket, status, fault)

    async def reply(self, method: str, target: str, body: bytes) -> Reply:
        return reply(self._balancer, method, target, body)


class Ask(msgspec.Struct, tag=True):
    number: int
    asked: Asked
    key: str
    tried: Sequence[str]


class Began(msgspec.Struct, tag=True):
    number: int


class Ended(msgspec.Struct, tag=True):
    number: int
    status: int
    fault: bool


class Question(msgspec.Struct, tag=True):
    number: int
    method: str
    target: str
    body: bytes


class Sent(msgspec.Struct, tag=True):
    """The request ``number`` has a worker."""

    number: int
    url: str


class Refused(msgspec.Struct, tag=True):
    number: int
    why: Rejected


class Replied(msgspec.Struct, tag=True):
    number: int
    reply: Reply


class Down(msgspec.Struct, tag=True):
    url: str
    lost: bool = False


class Drain(msgspec.Struct, tag=True):
    """Take nothing new, and end: behind the last answer, or ``now``."""

    now: bool


Message = Ask | Began | Ended | Question | Sent | Refused | Replied | Down | Drain
_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Message).decode
SIZE = 4  # bytes in front of each message


class Channel(asyncio.Protocol):
    """Messages both ways over a stream socket. ``lost`` is called when the other side is gone."""

    def __init__(self, take: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._take, self._lost = take, lost
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._out: list[bytes] = []

    @classmethod
    async def open(cls, end: socket.socket, take: Callable[[Any], None], lost: Callable[[], None]) -> Channel:
        loop = asyncio.get_running_loop()
        end.setblocking(False)
        _, channel = await loop.create_connection(lambda: cls(take, lost), sock=end)
        return channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, message: Message) -> None:
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        data = _encode(message)
        self._out += (len(data).to_bytes(SIZE, "big"), data)

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at = 0
        while len(self._buffer) >= at + SIZE:
            size = int.from_bytes(self._buffer[at : at + SIZE], "big")
            if len(self._buffer) < at + SIZE + size:
                break
            self._take(_decode(self._buffer[at + SIZE : at + SIZE + size]))
            at += SIZE + size
        self._buffer = self._buffer[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class RemoteOwner:
    """The owner in another process, as a front has it."""

    def __init__(self) -> None:
        self.on_down: Callable[[str, bool], None] = lambda url, lost: None
        self.lost = asyncio.Event()  # the owner is gone
        self.draining, self.hurry = asyncio.Event(), asyncio.Event()
        self._channel: Channel | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def connect(self, end: socket.socket) -> None:
        self._channel = await Channel.open(end, self._take, self._gone)

    async def place(self, asked: Asked, key: str, tried: Sequence[str]) -> Placed:
        number = next(self._numbers)
        try:
            url = await self._ask(number, Ask(number, asked, key, tried))
        except asyncio.CancelledError:
            self._send(Ended(number, 0, False))
            raise
        return Placed(url, number)

    def began(self, placed: Placed) -> None:
        self._send(Began(placed.ticket))

    def close(self, placed: Placed, status: int, fault: bool) -> None:
        self._send(Ended(placed.ticket, status, fault))

    async def reply(self, method: str, target: str, body: bytes) -> Reply:
        number = next(self._numbers)
        found: Reply = await self._ask(number, Question(number, method, target, body))
        return found

    async def _ask(self, number: int, message: Message) -> Any:
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(message)
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    def _send(self, message: Message) -> None:
        if self._channel is not None and not self.lost.is_set():
            self._channel.send(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, Down):
            self.on_down(message.url, message.lost)
            return
        if isinstance(message, Drain):
            self.draining.set()
            if message.now:
                self.hurry.set()
            return
        assert isinstance(message, Sent | Refused | Replied)
        future = self._waiting.get(message.number)
        if future is None or future.done():
            return
        if isinstance(message, Refused):
            future.set_exception(SglaError.from_rejected(message.why))
        else:
            future.set_result(message.url if isinstance(message, Sent) else message.reply)

    def _gone(self) -> None:
        self.lost.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(NotReady("the router is shutting down", retry_after=1.0))


class Desk:
    """The owner's end of a front in another process. What it had is given back when it is gone."""

    def __init__(self, balancer: Balancer, lost: Callable[[], None]) -> None:
        self._balancer = balancer
        self._on_lost = lost
        self._tickets: dict[int, Ticket] = {}
        self._channel: Channel | None = None

    async def connect(self, end: socket.socket) -> None:
        self._channel = await Channel.open(end, self._take, self._lost)
        self._balancer.on_down.append(self._tell_down)

    def drain(self, now: bool = False) -> None:
        self._send(Drain(now))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _take(self, message: Message) -> None:
        if isinstance(message, Ask):
            self._place(message)
        elif isinstance(message, Began):
            if message.number in self._tickets:
                self._balancer.began(self._tickets[message.number])
        elif isinstance(message, Ended):
            ticket = self._tickets.pop(message.number, None)
            if ticket is not None:
                self._balancer.close(ticket, message.status, message.fault)
        elif isinstance(message, Question):
            found = reply(self._balancer, message.method, message.target, message.body)
            self._send(Replied(message.number, found))

    def _place(self, ask: Ask) -> None:
        def done(error: SglaError | None) -> None:
            if error is not None:
                self._tickets.pop(ask.number, None)
                self._send(Refused(ask.number, error.rejected(str(ask.number))))
            elif ask.number in self._tickets:  # it has waited
                self._tell_sent(ask.number)

        try:
            ticket = self._balancer.place(ask.asked, ask.key, ask.tried, done)
        except SglaError as error:
            done(error)
            return
        self._tickets[ask.number] = ticket
        if ticket.worker is not None:
            self._tell_sent(ask.number)

    def _tell_sent(self, number: int) -> None:
        worker = self._tickets[number].worker
        assert worker is not None
        self._send(Sent(number, worker.url))

    def _tell_down(self, url: str, lost: bool) -> None:
        self._send(Down(url, lost))

    def _send(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _lost(self) -> None:
        self._channel = None
        self._balancer.on_down.remove(self._tell_down)
        for ticket in self._tickets.values():
            self._balancer.close(ticket, 0, False)
        self._tickets.clear()
        self._on_lost()
