"""Mooncake's store as a place for units: memory that servers give for it, behind a master
(https://github.com/kvcache-ai/Mooncake)."""

from __future__ import annotations

import os
import socket
from typing import Any
from urllib.parse import parse_qs, urlsplit

from sgla.errors import ConfigError
from sgla.validation import parse_bytes

SCHEME = "mooncake"
SEGMENT = 1 << 30  # bytes that a server gives, if nobody says how many
BUFFER = 256 << 20  # bytes of objects on their way
MASTER = 50051  # its port
PATIENCE = 5.0  # seconds in which the master has to answer at the start


class Mooncake:
    """The four methods that ``store.Objects`` wants of a file system. They raise OSError."""

    def __init__(self, client: Any) -> None:
        """``client``: a MooncakeDistributedStore."""
        self._client = client

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        found: bytes = self._client.get(path)
        if not found:
            raise FileNotFoundError(f"Mooncake has no {path}")
        return found[start:end]

    def pipe_file(self, path: str, data: bytes) -> None:
        """Also in the place of what is there."""
        if code := self._client.upsert(path, data):
            raise OSError(f"Mooncake's store gives error {code}")

    def exists(self, path: str) -> bool:
        found = self._client.is_exist(path)
        if found < 0:
            raise OSError(f"Mooncake's store gives error {found}")
        return bool(found)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are no folders."""


def open_mooncake(url: str, ranks: int) -> Mooncake:
    """``mooncake://MASTER[:PORT]``, with ``?segment=8G`` of memory that this server's ranks give together,
    ``host``, ``protocol``, ``device`` and ``metadata`` as Mooncake has them. Raises ConfigError."""

    def refused(why: str) -> ConfigError:
        return ConfigError(f"--kv-store {url}: {why}", param="kv_store")

    os.environ.setdefault("GLOG_minloglevel", "1")  # else it tells of each step
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise refused(
            f"{error}; pip install 'sgla[mooncake]', which wants libibverbs1, librdmacm1 and libnuma1 of the "
            "system"
        ) from error
    parts, given = urlsplit(url), {"segment": str(SEGMENT), "protocol": "tcp", "host": "127.0.0.1"}
    given |= {"device": "", "metadata": "P2PHANDSHAKE"}
    asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if unknown := asked.keys() - given.keys():
        raise refused(f"{', '.join(sorted(unknown))} is none of {', '.join(given)}")
    given |= asked
    try:
        master = parts.hostname or "", parts.port or MASTER
        segment = parse_bytes(given["segment"]) // ranks
    except ValueError as error:
        raise refused(str(error)) from error
    try:  # the client itself tries for a minute and more
        socket.create_connection(master, PATIENCE).close()
    except OSError as error:
        raise refused(f"no mooncake_master answers there: {error}") from error
    client = MooncakeDistributedStore()
    where = given["host"], given["metadata"], segment, BUFFER, given["protocol"], given["device"]
    if code := client.setup(*where, f"{master[0]}:{master[1]}"):
        raise refused(f"Mooncake's client gives error {code} at its start")
    return Mooncake(client)
