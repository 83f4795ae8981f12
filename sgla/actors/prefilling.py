"""A prefill server's door: decode servers ask for prompts, which are requests of one token here."""

from __future__ import annotations

import asyncio
import itertools
import threading
from array import array
from typing import TYPE_CHECKING

from sgla.config import Config
from sgla.errors import ConfigError, SglaError
from sgla.messages import Event, Facts, Job, Rejected, SamplingParams
from sgla.peers import Ask, Beside, Channel, Done, Leave, Link, Listener, Message

if TYPE_CHECKING:
    from sgla.actors.ingress import Ingress

ID_BYTES = 4  # of a token
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Asker:
    """A decode server's connection, and its prompts that are open. But for ``take`` and ``gone`` all runs on
    the loop."""

    def __init__(self, door: Prefilling, channel: Channel, number: int) -> None:
        self._door, self._number = door, number
        self.link = Link(channel, self.take, self.gone)
        self._open: dict[str, int] = {}  # of each request, the number of its Ask

    def take(self, message: Message, beside: Beside) -> None:
        self._door.call(self._handle, message)

    def gone(self) -> None:
        self._door.call(self._end)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Leave):
            self._leave(self._rid(message.number))
        elif isinstance(message, Ask):
            rid = self._rid(message.number)
            if len(message.tokens) % ID_BYTES:
                self.link.post(Done(message.number, error="the prompt's bytes are no int32 ids"))
                return
            job = Job(
                rid=rid,
                sampling=ONE_TOKEN,
                token_ids=array("i", message.tokens).tolist(),
                namespace=message.namespace,
                client=f"peer-{self._number}",
            )
            self._open[rid] = message.number
            try:
                self._door.ingress.open(job, self)
            except SglaError as error:
                self._done(rid, Done(message.number, error=error.message))

    def _rid(self, number: int) -> str:
        return f"peer-{self._number}-{number}"

    def push(self, message: Event | Rejected) -> None:
        """See ``ingress.Sink``."""
        number = self._open.get(message.rid, 0)
        if isinstance(message, Rejected):
            self._done(message.rid, Done(number, error=message.message))
        elif message.finish is not None:
            done = message.finish != "abort"
            error = "" if done else "the prompt was not read to its end"
            self._done(message.rid, Done(number, message.usage.cached_tokens if done else 0, error))

    def _done(self, rid: str, told: Done) -> None:
        if self._open.pop(rid, None) is not None:
            self.link.post(told)

    def _leave(self, rid: str) -> None:
        if self._open.pop(rid, None) is not None:
            self._door.ingress.cancel(rid, "client")

    def _end(self) -> None:
        for rid in list(self._open):
            self._leave(rid)
        self._door.left(self)


class Prefilling:
    """Listens for decode servers. Raises ConfigError if the port cannot be had."""

    def __init__(self, config: Config, facts: Facts, ingress: Ingress) -> None:
        self.ingress = ingress
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._askers: set[Asker] = set()
        self._lock = threading.Lock()
        secret, port = config.kv_transfer_secret or "", config.kv_transfer_port
        try:
            self._listener = Listener(
                config.host, port, secret, facts.identity, self._joined, facts.peer_ports
            )
        except OSError as error:
            raise ConfigError(
                f"--kv-transfer-port {port}: {error.strerror or error}", param="kv_transfer_port"
            ) from error

    @property
    def port(self) -> int:
        return self._listener.port

    def _joined(self, channel: Channel) -> None:
        asker = Asker(self, channel, next(self._numbers))
        with self._lock:
            self._askers.add(asker)
        asker.link.begin()

    def left(self, asker: Asker) -> None:
        with self._lock:
            self._askers.discard(asker)

    def call(self, function: object, *args: object) -> None:
        """On the loop, unless that is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *args)  # type: ignore[arg-type]
        except RuntimeError:
            return

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            askers = list(self._askers)
        for asker in askers:
            asker.link.close()
