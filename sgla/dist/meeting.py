"""How ranks find each other: by a file of one host, or over TCP (``nodes.meeting``)."""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

TIMEOUT = 300.0  # seconds that a collective may take
_LISTED, _ENTRY = 0x8912, 40  # SIOCGIFCONF of netdevice(7), and bytes of its entries


def is_far(store: str) -> bool:
    """Whether ranks of several hosts meet there."""
    return store.startswith("tcp://")


def store_of(rendezvous: str) -> str:
    """The store of ranks that were told of a meeting place, or of a folder of their own."""
    return rendezvous if is_far(rendezvous) else str(Path(rendezvous) / "store")


def open_store(store: str, size: int, timeout: float) -> dist.Store:
    """``store``: a path that does not exist yet, the same for all ranks and never used before, so that no
    port has to be agreed on; or a meeting place of several hosts. Waits for it for ``timeout`` seconds."""
    if not is_far(store):
        return dist.FileStore(store, size)
    parts = urlsplit(store)
    assert parts.hostname is not None
    assert parts.port is not None
    listen = parse_qs(parts.query).get("listen")
    return dist.TCPStore(
        parts.hostname,
        parts.port,
        is_master=listen is not None,
        master_listen_fd=int(listen[0]) if listen else None,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )


def use_interface(store: str) -> None:
    """Have gloo exchange data by the interface on the way to where the ranks meet; where all are on one
    host, by the loopback one: without that it wants to resolve the host's name, which containers often
    cannot. GLOO_SOCKET_IFNAME goes before that."""
    here = parse_qs(urlsplit(store).query)["here"][0] if is_far(store) else "127.0.0.1"
    name = interface_of(here)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interface_of(address: str) -> str | None:
    """The network interface that has an address of this host."""
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback:
        return "lo"
    if wanted.version == 6:
        entries = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
        return next((name for digits, *_, name in entries if int(digits, 16) == int(wanted)), None)
    room = bytearray(_ENTRY * 256)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        place = ctypes.addressof(ctypes.c_char.from_buffer(room))
        told = fcntl.ioctl(sock, _LISTED, struct.pack("iL", len(room), place))
    length = struct.unpack("iL", told)[0]
    for at in range(0, length, _ENTRY):
        if room[at + 20 : at + 24] == wanted.packed:
            return room[at : at + 16].split(b"\0")[0].decode().split(":")[0]
    return None
