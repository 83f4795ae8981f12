"""A prefill server's door: decode servers ask for prompts, which are requests of one token here."""

from __future__ import annotations

import asyncio
import itertools
import threading
from array import array
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sgla.config import Config
from sgla.errors import ConfigError, SglaError
from sgla.messages import Event, Facts, Job, Rejected, SamplingParams
from sgla.peers import BEAT, Ask, Beside, Channel, Done, Leave, Link, Listener, Message

if TYPE_CHECKING:
    from sgla.actors.ingress import Ingress

ID_BYTES = 4  # of a token
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Reading:
    """A prompt that is being read, for all who have asked for it meanwhile: ``askers``, each with the number
    of its ``Ask``. All ranks of a decode server ask, and what one of them computed is nothing that another
    one found."""

    def __init__(self, rid: str, end: Callable[[Reading], object]) -> None:
        """``end``: nobody else may join."""
        self.rid, self.askers = rid, list[tuple[Asker, int]]()
        self._end = end

    def push(self, message: Event | Rejected) -> None:
        """See ``ingress.Sink``."""
        if isinstance(message, Rejected):
            self.done(error=message.message)
        elif message.finish == "abort":
            self.done(error="the prompt was not read to its end")
        elif message.finish is not None:
            self.done(message.usage.cached_tokens)

    def done(self, cached: int = 0, error: str = "") -> None:
        self._end(self)
        askers, self.askers = self.askers, []
        for asker, number in askers:
            asker.done(Done(number, cached, error))


class Asker:
    """A decode server's connection, and its prompts that are open. But for ``take`` and ``gone`` all runs on
    the loop."""

    def __init__(self, door: Prefilling, channel: Channel, number: int) -> None:
        self._door, self.number = door, number
        self.link = Link(channel, self.take, self.gone, BEAT)
        self._open: dict[int, Reading] = {}

    def take(self, message: Message, beside: Beside) -> None:
        self._door.call(self._handle, message)

    def gone(self) -> None:
        self._door.call(self._end)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Leave):
            self._leave(message.number)
        elif isinstance(message, Ask):
            if len(message.tokens) % ID_BYTES:
                self.link.post(Done(message.number, error="the prompt's bytes are no int32 ids"))
                return
            try:
                self._open[message.number] = self._door.read(self, message)
            except SglaError as error:
                self.link.post(Done(message.number, error=error.message))

    def done(self, told: Done) -> None:
        if self._open.pop(told.number, None) is not None:
            self.link.post(told)

    def _leave(self, number: int) -> None:
        if (reading := self._open.pop(number, None)) is not None:
            reading.askers.remove((self, number))
            if not reading.askers:
                self._door.leave(reading)

    def _end(self) -> None:
        for number in list(self._open):
            self._leave(number)
        self._door.left(self)


class Prefilling:
    """Listens for decode servers. Raises ConfigError if the port cannot be had."""

    def __init__(self, config: Config, facts: Facts, ingress: Ingress) -> None:
        self._ingress = ingress
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._askers: set[Asker] = set()
        self._readings: dict[tuple[str, bytes], Reading] = {}  # by namespace and tokens
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

    def read(self, asker: Asker, ask: Ask) -> Reading:
        """Raises SglaError."""
        name = ask.namespace, ask.tokens
        reading = self._readings.get(name)
        if reading is None:
            rid = f"peer-{asker.number}-{ask.number}"
            reading = Reading(rid, partial(self._over, name))
            job = Job(
                rid=rid,
                sampling=ONE_TOKEN,
                token_ids=array("i", ask.tokens).tolist(),
                namespace=ask.namespace,
                adapter=self._ingress.adapters.of(ask.namespace),
                client=f"peer-{asker.number}",
            )
            self._ingress.open(job, reading)
            self._readings[name] = reading
        reading.askers.append((asker, ask.number))
        return reading

    def _over(self, name: tuple[str, bytes], reading: Reading) -> None:
        if self._readings.get(name) is reading:
            del self._readings[name]

    def leave(self, reading: Reading) -> None:
        """Nobody waits for it any more."""
        reading.done()
        self._ingress.cancel(reading.rid, "client")

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
