"""Whose request it is:
what keeps the clients of one server apart, and what it shares out fairly among them."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from aiohttp import web

from sgla.errors import ConfigError


class Client(NamedTuple):
    """``name`` is equal for requests that share one part of what the server has: a digest of the API key, or
    without keys the address. ``owner``: who may see what the request stores; the digest, or "" where there
    are no keys: then whoever knows an id. ``admin``: it came with an admin key. ``group``: of whose requests
    all together share one part of what runs at a time.
    """

    name: str
    owner: str = ""
    admin: bool = False
    group: str = ""

    @property
    def runs_as(self) -> str:
        """Whose part of what runs at a time it takes."""
        return self.group or self.name


CLIENT = web.RequestKey("client", Client)
ADDRESS = web.RequestKey("address", str)  # of the client, as ``Proxies`` finds it; "" if it has none
HOPS = 32  # addresses of X-Forwarded-For that are looked at

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def with_key(key: bytes, admin: bool, salt: bytes) -> Client:
    """``salt``: a secret of the server,
    so that a digest that is seen somewhere tells nothing about the key."""
    digest = hashlib.blake2s(key, key=salt, digest_size=12).hexdigest()
    return Client(digest, digest, admin)


def without_key(address: str) -> Client:
    """A host has one address of IPv4, and as many as it likes of an IPv6 network of 64 bits."""
    host = address_of(address)
    if host is None:
        return Client(address or "unknown")
    return Client(str(host if host.version == 4 else ipaddress.IPv6Address(int(host) >> 64 << 64)))


def address_of(text: str) -> Address | None:
    """Of a host's address as proxies write it, maybe with a port; None if it is none."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if address.version == 6 else address


class Proxies:
    """Whose ``X-Forwarded-For`` is believed: ``trusted`` are addresses, networks, or "*" for all.
    Raises ConfigError."""

    def __init__(self, trusted: Iterable[str]) -> None:
        names = [name.strip() for text in trusted for name in text.split(",")]
        self._all = "*" in names
        try:
            self._networks = [ipaddress.ip_network(name) for name in names if name != "*"]
        except ValueError as error:
            raise ConfigError(
                f"--forwarded-allow-ips takes addresses, networks such as 10.0.0.0/8, or *: {error}",
                param="forwarded_allow_ips",
            ) from error

    def client(self, request: web.Request) -> str:
        """The address that the request comes from."""
        return self.address(request.remote or "", ",".join(request.headers.getall("X-Forwarded-For", ())))

    def address(self, client: str, forwarded: str) -> str:
        """The last address that no trusted proxy has: ``client`` is the connection's, ``forwarded`` what
        X-Forwarded-For says."""
        if (not self._networks and not self._all) or not self._trusts(address_of(client)):
            return client
        for hop in islice(reversed(forwarded.split(",")), HOPS):
            address = address_of(hop)
            if address is None:
                break
            client = str(address)
            if not self._trusts(address):
                break
        return client

    def _trusts(self, address: Address | None) -> bool:
        return self._all or any(address in network for network in self._networks if address is not None)
