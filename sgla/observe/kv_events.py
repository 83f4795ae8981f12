"""Publishes KV events by ZeroMQ, as vLLM and SGLang do: what routers (llm-d, Dynamo) subscribe to.

A message has three parts: the topic, its number (8 bytes, big-endian), and in msgpack ``[time, events,
rank]``. Who asks the replay socket for a number gets all messages from that on which are still kept, then one
with the number -1.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import msgspec

from sgla.cache.events import KvEvent
from sgla.errors import ConfigError

PARAM = "kv_events_config"
POLL_MS = 100  # between looks whether the server ends
END = (-1).to_bytes(8, "big", signed=True)


class KvEventsConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Keys of vLLM's and SGLang's ``--kv-events-config``. ``max_queue_size``: of vLLM's thread, which is not
    needed here. ``format``: of SGLang's hashes; those of this server always depend on salt and adapter, as
    ``dynamo`` asks for. ``bind``: SGLang's, which may connect instead."""

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    bind: bool | None = None
    format: Literal["default", "dynamo"] = "default"


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


def read(config: dict[str, Any]) -> KvEventsConfig | None:
    """None: nothing is to be published. Raises ConfigError."""
    if not config:
        return None
    try:
        found = msgspec.convert(config, KvEventsConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--kv-events-config: {error}", param=PARAM) from error
    if found.bind is False:
        raise ConfigError("--kv-events-config: this server binds its endpoint; leave bind out", param=PARAM)
    for name in ("buffer_steps", "hwm"):
        if getattr(found, name) < 1:
            raise ConfigError(f"--kv-events-config: {name} must be at least 1", param=PARAM)
    if not found.enable_kv_cache_events or found.publisher == "null":
        return None
    zmq()
    return found


def zmq() -> Any:
    """The library. Raises ConfigError."""
    try:
        import zmq as found
    except ImportError:
        raise ConfigError("--kv-events-config needs pyzmq: pip install 'sgla[events]'", param=PARAM) from None
    return found


class Publisher:
    """``publish`` never waits: who reads too slowly loses messages, and may ask for them again."""

    def __init__(self, config: KvEventsConfig) -> None:
        """Raises ConfigError if an endpoint cannot be had."""
        self._zmq = zmq()
        self._context = self._zmq.Context()
        self._topic, self._next = config.topic.encode(), 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._encode = msgspec.msgpack.Encoder().encode
        self._thread: threading.Thread | None = None
        try:
            self._socket = self._bound(self._zmq.PUB, config.endpoint, config.hwm)
            if config.replay_endpoint is not None:
                replay = self._bound(self._zmq.ROUTER, config.replay_endpoint, config.hwm)
                self._thread = threading.Thread(
                    target=self._replay, args=(replay,), name="kv-replay", daemon=True
                )
                self._thread.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _bound(self, kind: int, endpoint: str, hwm: int) -> Any:
        made = self._context.socket(kind)
        made.set_hwm(hwm)
        try:
            made.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise ConfigError(f"--kv-events-config: {endpoint}: {error}", param=PARAM) from error
        return made

    def publish(self, drain: Callable[[], list[KvEvent]]) -> None:
        """What there is."""
        events = drain()
        if not events:
            return
        number = self._next.to_bytes(8, "big")
        payload = self._encode(Batch(time.time(), events))
        self._next += 1
        with self._lock:
            self._kept.append((number, payload))
        with suppress(self._zmq.Again):
            self._socket.send_multipart((self._topic, number, payload), self._zmq.NOBLOCK)

    def _replay(self, socket: Any) -> None:
        while not self._closing.is_set():
            if not socket.poll(POLL_MS):
                continue
            who, *asked = socket.recv_multipart()
            with self._lock:
                kept = list(self._kept)
            first = asked[-1] if asked else b""
            for number, payload in kept if len(first) == len(END) else ():
                if number >= first:
                    socket.send_multipart((who, b"", number, payload))
            socket.send_multipart((who, b"", END, b""))
        socket.close(linger=0)

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(linger=0)
