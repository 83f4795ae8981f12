"""Whose request it is: what keeps the clients of one server apart, and what it shares out fairly among them."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from typing import NamedTuple

from aiohttp import web

_SALT = secrets.token_bytes(16)  # so that a digest that is seen somewhere tells nothing about the key


class Client(NamedTuple):
    """``name`` is equal for requests that share one part of what the server has: a digest of the API key, or without keys the
    address. ``owner``: who may see what the request stores; the digest, or "" where there are no keys: then whoever knows an id.
    ``admin``: it came with an admin key.
    """

    name: str
    owner: str = ""
    admin: bool = False


CLIENT = web.RequestKey("client", Client)


def with_key(key: bytes, admin: bool) -> Client:
    digest = hashlib.blake2s(key, key=_SALT, digest_size=12).hexdigest()
    return Client(digest, digest, admin)


def without_key(address: str | None) -> Client:
    """A host has one address of IPv4, and as many as it likes of an IPv6 network of 64 bits."""
    if address is None or ":" not in address:
        return Client(address or "unknown")
    try:
        host = ipaddress.IPv6Address(address)
    except ValueError:
        return Client(address)
    return Client(str(host.ipv4_mapped or ipaddress.IPv6Address(int(host) >> 64 << 64)))
