"""How servers that hand KV to each other, and nodes of one server, talk: who may, and messages with keyed
hashes over TCP.

A frame is its sizes, a keyed hash, a message in msgpack, and bytes beside it. The key follows from the shared
secret and from what both sides have drawn for this connection; the hash covers the sizes, the message and the
number of the frame, so that nothing can be changed, left out or said again. Of the bytes beside it the
message tells a checksum, which whoever uses them compares: hashing is most of the work, and several threads
share it. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import numpy as np

from sgla import clock
from sgla.errors import ConfigError
from sgla.sockets import notice_loss
from sgla.version import __version__

PROTOCOL = 5
SUM = 32  # bytes of a hash
NONCE = 32
PATIENCE = 5.0  # seconds for a handshake
GREETING = 1 << 14  # bytes of what may be said before it is known who says it
MESSAGE = 64 << 20  # bytes: the token ids of a prompt
STRANGERS = 32  # that a listener talks to at a time; one more takes the place of the oldest
AGAIN = 1.0  # seconds between tries to connect to a server that was lost
BEAT = 2.0  # seconds between signs of life of a server that others ask
SILENCE = 10.0  # seconds without any after which it is taken for lost: it has stopped, though its host lives
RETRY = 0.1  # seconds after which a listener that lacks descriptors or threads goes on
_SIZES = struct.Struct("<IQ")


class PeerRefused(Exception):
    """The other side has said, or shown, that the two do not belong together."""


class Hello(msgspec.Struct, tag=True, array_like=True):
    """Both, first."""

    protocol: int
    version: str
    nonce: bytes


class Identity(msgspec.Struct, tag=True, array_like=True):
    """Who connects tells what its KV depends on, by names that people understand."""

    told: dict[str, str]


class Accepted(msgspec.Struct, tag=True, array_like=True):
    """``ports``: where each rank of a prefill server hands out its units."""

    ports: list[int]


class Refused(msgspec.Struct, tag=True, array_like=True):
    why: str


class Ask(msgspec.Struct, tag=True, array_like=True):
    """Decode -> prefill server: compute a prompt. ``tokens``: int32[*]."""

    number: int
    namespace: str
    tokens: bytes


class Leave(msgspec.Struct, tag=True, array_like=True):
    """Nobody waits for the prompt any more."""

    number: int


class Done(msgspec.Struct, tag=True, array_like=True):
    """Prefill -> decode server: the prompt has been computed, of which ``cached`` tokens were cached before;
    or it has not, since ``error``."""

    number: int
    cached: int = 0
    error: str = ""


class Want(msgspec.Struct, tag=True, array_like=True):
    """Decode -> a rank of the prefill server: send these units as soon as they are there, or not any more
    (``drop``). ``keys``: KEY bytes a unit, of each cache group."""

    keys: list[bytes]
    drop: bool = False


class Lent(msgspec.Struct, tag=True, array_like=True):
    """A rank of the prefill -> decode server: the memory in which its units are. ``fds``, ``units``: of each
    cache group; ``handles``: of each, if they lie in a GPU's memory."""

    pid: int
    token: bytes
    fds: list[int]
    units: list[int]
    handles: list[bytes] = []


class Exposed(msgspec.Struct, tag=True, array_like=True):
    """A rank of the prefill -> decode server: the same memory, for a transfer engine. ``engine``: metadata of
    its own; ``addresses``, ``units``: of each cache group."""

    engine: bytes
    addresses: list[int]
    units: list[int]


class Borrowed(msgspec.Struct, tag=True, array_like=True):
    """Decode -> a rank of the prefill server: it reads there, no unit need be sent."""


class Unit(msgspec.Struct, tag=True, array_like=True):
    """A rank of the prefill -> decode server: a unit, beside the message, with its checksum ``sum``
    (``tiers.checksum``); or in what was borrowed, at ``place`` as long as its mark there is ``mark``;
    there, too, with a checksum if others could write to it."""

    group: int
    key: bytes
    sum: bytes = b""
    place: int = -1
    mark: int = 0


class Placed(msgspec.Struct, tag=True, array_like=True):
    """A rank of the prefill -> decode server: units of a cache group in what was borrowed, as ``Unit`` tells
    of one. ``keys``: KEY bytes each; ``places``: int32, ``marks``: int64."""

    group: int
    keys: bytes
    places: bytes
    marks: bytes


class Encode(msgspec.Struct, tag=True, array_like=True):
    """To a server with ``--role encode``: features of a picture, which ``digest`` names, of the ``arrays``
    (``media.arrays``) beside the message, with their checksum ``sum``."""

    number: int
    digest: bytes
    arrays: list[tuple[str, str, list[int], int]]
    sum: bytes


class Encoded(msgspec.Struct, tag=True, array_like=True):
    """Its answer: features in float32, or an ``error``."""

    number: int
    arrays: list[tuple[str, str, list[int], int]] = []
    sum: bytes = b""
    error: str = ""


class Beat(msgspec.Struct, tag=True, array_like=True):
    """Both, to show that they are there."""


Transfers = Ask | Leave | Done | Want | Lent | Exposed | Borrowed | Unit | Placed
Message = Hello | Identity | Accepted | Refused | Transfers | Encode | Encoded | Beat
Beside = bytes | memoryview
Frame = tuple[Message, Beside]


class Channel:
    """A connection. Without keys, as at first, frames have plain checksums."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._most, self._longest = sock, 0, GREETING
        self._keys = b"", b""  # of what is sent, and received
        self._sent = self._received = 0
        self._until: float | None = clock.now() + PATIENCE  # the greeting has to be over
        self._decode = msgspec.msgpack.Decoder(Message).decode
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_loss(sock)

    def use(self, secret: str, mine: bytes, theirs: bytes) -> None:
        """From here on each side shows with each frame that it knows the ``secret``."""
        key = blake2b(secret.encode(), digest_size=SUM).digest()
        self._keys = blake2b(mine + theirs, key=key).digest(), blake2b(theirs + mine, key=key).digest()

    def trust(self, most: int, kind: Any = Message, silence: float = 0.0) -> None:
        """The greeting is over: messages, of this ``kind`` now, may be long, and have ``most`` bytes beside
        them. ``silence``: seconds in which something must come, if that is so."""
        self._most, self._longest, self._until = most, MESSAGE, None
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._socket.settimeout(None)
        if silence:
            limit = struct.pack("ll", int(silence), int(silence % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    @property
    def here(self) -> str:
        """The address of this host on the way to the other side."""
        return str(self._socket.getsockname()[0])

    @property
    def there(self) -> str:
        return str(self._socket.getpeername()[0])

    def send(self, message: Any, beside: Beside = b"") -> None:
        """Raises OSError."""
        body = msgspec.msgpack.encode(message)
        sizes = _SIZES.pack(len(body), len(beside))
        made = self._sum(self._keys[0], self._sent, sizes, body)
        self._sent += 1
        self._socket.sendall(sizes + made + body)
        if beside:
            self._socket.sendall(beside)

    def receive(self) -> tuple[Any, Beside]:
        """A message and what is beside it. Raises OSError, also where something is not what was sent."""
        head = self._read(_SIZES.size + SUM)
        length, more = _SIZES.unpack_from(head)
        if length > self._longest or more > self._most:
            raise OSError(f"a message of {length} and {more} bytes is too long")
        body, beside = self._read(length), self._read(more)
        made = self._sum(self._keys[1], self._received, head[: _SIZES.size], body)
        if not hmac.compare_digest(made, bytes(head[_SIZES.size :])):
            raise WrongSum("a message is not what was sent, or the secret is another")
        self._received += 1
        try:
            return self._decode(body), beside
        except msgspec.MsgspecError as error:
            raise OSError(f"a message that nobody knows: {error}") from error

    def _sum(self, key: bytes, number: int, *parts: Beside) -> bytes:
        made = blake2b(number.to_bytes(8, "little"), key=key, digest_size=SUM)
        for part in parts:
            made.update(part)
        return made.digest()

    def _read(self, count: int) -> memoryview:
        view = np.empty(count, np.uint8).data
        at = 0
        while at < count:
            if self._until is not None:
                self._socket.settimeout(max(0.001, self._until - clock.now()))
            got = self._socket.recv_into(view[at:])
            if not got:
                raise ConnectionResetError("the other side has closed the connection")
            at += got
        return view

    def close(self) -> None:
        """Whoever sends or receives now gets an OSError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class WrongSum(OSError):
    """Of a frame."""


def connect(
    host: str,
    port: int,
    secret: str,
    told: Mapping[str, str],
    most: int = 0,
    flag: str = "--kv-transfer-secret",
) -> tuple[Channel, list[int]]:
    """A channel to a prefill server, and ``Accepted.ports``. ``told``: ``Identity``; ``flag`` has the secret.
    Raises PeerRefused, or OSError if nobody is there."""
    channel = Channel(socket.create_connection((host, port), PATIENCE))
    try:
        nonce = os.urandom(NONCE)
        channel.send(Hello(PROTOCOL, __version__, nonce))
        hello = _expect(channel, Hello)
        if len(hello.nonce) != NONCE:
            raise PeerRefused("its greeting is malformed")
        channel.use(secret, nonce, hello.nonce)
        channel.send(Identity(dict(told)))
        try:
            accepted = _expect(channel, Accepted)
        except WrongSum:
            raise PeerRefused(f"it has another secret ({flag})") from None
        channel.trust(most)
        return channel, accepted.ports
    except BaseException:
        channel.close()
        raise


def _expect(channel: Channel, kind: type[Any]) -> Any:
    message, _ = channel.receive()
    if isinstance(message, Refused):
        raise PeerRefused(message.why)
    if not isinstance(message, kind):
        raise PeerRefused("it answers with something else")
    return message


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What two peers have not in common; "" if they belong together."""
    other = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name}: {ours.get(name)} here, {theirs.get(name)} there" for name in other)


class Link:
    """A channel with a thread for each direction. ``take`` gets what comes, in one thread; ``gone`` is called
    once, when nothing comes any more. ``beat``: seconds after which something is said in any case."""

    def __init__(
        self,
        channel: Channel,
        take: Callable[[Any, Beside], None],
        gone: Callable[[], None],
        beat: float | None = None,
    ):
        self._channel, self._take, self._gone, self._every = channel, take, gone, beat
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._write)]

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def post(self, message: Any) -> None:
        """Send it when what was posted before has been sent; a function makes it then, or nothing."""
        self._outbox.put(message)

    def _read(self) -> None:
        try:
            while True:
                self._take(*self._channel.receive())
        except OSError:
            pass
        finally:
            self.close()
            self._gone()

    def _write(self) -> None:
        try:
            while (message := self._next()) is not None:
                frame = message() if callable(message) else (message, b"")
                if frame is not None:
                    self._channel.send(*frame)
        except OSError:
            pass
        finally:
            self._channel.close()

    def _next(self) -> Any:
        try:
            return self._outbox.get(timeout=self._every)
        except Empty:
            return Beat()

    def finish(self, seconds: float) -> None:
        """Close it when what was posted has been sent, or after so long. Blocks."""
        self._outbox.put(None)
        self._threads[1].join(seconds)
        self.close()

    def close(self) -> None:
        self._outbox.put(None)
        self._channel.close()


class Reconnecting:
    """Connects to the server at ``url``, which the ``flag`` names, at the start and whenever it is lost.
    ``connect``, in any thread, raises OSError if nobody is there and PeerRefused; ``meanwhile``: what happens
    without the server, for ``log``."""

    def __init__(
        self, flag: str, url: str, meanwhile: str, connect: Callable[[], None], log: logging.Logger, name: str
    ) -> None:
        self._said, self._meanwhile, self._connect, self._log = f"{flag} {url}", meanwhile, connect, log
        self._param = flag.strip("-").replace("-", "_")
        self._closing, self._lost = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)

    def begin(self) -> None:
        """Raises ConfigError if another server is there."""
        try:
            self._connect()
        except OSError as error:
            self._log.warning("%s: %s; %s until it answers", self._said, error, self._meanwhile)
            self._lost.set()
        except PeerRefused as error:
            raise ConfigError(f"{self._said}: {error}", param=self._param) from error
        self._thread.start()

    def lost(self) -> None:
        """The connection has gone."""
        if not self._closing.is_set():
            self._log.warning("%s is gone; %s until it answers", self._said, self._meanwhile)
        self._lost.set()

    def _keep(self) -> None:
        refused = ""
        while not self._closing.is_set():
            self._lost.wait()
            if self._closing.wait(AGAIN):
                return
            self._lost.clear()  # before there is a connection that could go
            try:
                self._connect()
                self._log.warning("%s answers", self._said)
                continue
            except OSError:
                pass
            except PeerRefused as error:
                if str(error) != refused:
                    refused = str(error)
                    self._log.error("%s: %s; %s", self._said, refused, self._meanwhile)
            self._lost.set()

    def close(self) -> None:
        """Connect no more. Blocks."""
        self._closing.set()
        self._lost.set()
        if self._thread.is_alive():
            self._thread.join()


class Listener:
    """Lets those in that know the secret and have the same identity: ``joined`` gets their channels, in a
    thread of each. ``ports``: what they are told; ``refused`` hears why somebody was sent away."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: str,
        told: Mapping[str, str],
        joined: Callable[[Channel], None],
        ports: list[int] | None = None,
        refused: Callable[[str], None] | None = None,
        most: int = 0,
    ) -> None:
        """``most``: bytes beside a message. Raises OSError if the port cannot be had."""
        self._secret, self._told, self._joined, self._ports = secret, told, joined, ports or []
        self._refused, self._most = refused, most
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.port: int = self._socket.getsockname()[1]
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="kv-listen", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._socket.accept()
            except ConnectionAbortedError:
                continue
            except OSError:  # it is closed, or there are no descriptors
                time.sleep(0 if self._closed else RETRY)
                continue
            self._make_room(sock)
            try:
                threading.Thread(target=self._greet, args=(sock,), name="kv-greet", daemon=True).start()
            except RuntimeError:  # there are no threads
                self._forget(sock)
                sock.close()
                time.sleep(RETRY)

    def _make_room(self, sock: socket.socket) -> None:
        with self._lock:
            if len(self._strangers) >= STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._strangers[sock] = None

    def _forget(self, sock: socket.socket) -> bool:
        """Whether it was still a stranger."""
        with self._lock:
            known = sock in self._strangers
            self._strangers.pop(sock, None)
        return known

    def _greet(self, sock: socket.socket) -> None:
        try:
            channel = Channel(sock)
            self._welcome(channel)
            channel.trust(self._most)
        except (OSError, RecursionError):
            self._forget(sock)
            sock.close()
            return
        if self._forget(sock):
            self._joined(channel)
        else:
            channel.close()

    def _welcome(self, channel: Channel) -> None:
        """Raises OSError if it does not belong to us."""
        hello, _ = channel.receive()
        if not isinstance(hello, Hello) or len(hello.nonce) != NONCE:
            raise OSError("no greeting")
        if (hello.protocol, hello.version) != (PROTOCOL, __version__):
            self._refuse(channel, f"it is sgla {__version__}, and this is {hello.version}; install the same")
        nonce = os.urandom(NONCE)
        channel.send(Hello(PROTOCOL, __version__, nonce))
        channel.use(self._secret, nonce, hello.nonce)
        try:
            identity, _ = channel.receive()
        except WrongSum:
            self._refuse(channel, "", "it has another secret")
        if not isinstance(identity, Identity):
            raise OSError("no identity")
        if other := differences(identity.told, self._told):
            self._refuse(channel, other)
        channel.send(Accepted(self._ports))

    def _refuse(self, channel: Channel, why: str, known: str = "") -> None:
        """``known``: what is said here alone."""
        if self._refused is not None:
            self._refused(f"{channel.there}: {known or why}")
        channel.send(Refused(why[: GREETING // 2]))
        raise OSError(why)

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
