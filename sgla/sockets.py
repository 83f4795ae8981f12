"""What connections to other hosts have in common."""

from __future__ import annotations

import socket

# A host that is gone without a word is found out within 11 s.
ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}


def notice_loss(sock: socket.socket) -> None:
    """Have what reads and writes there fail when the other host is gone."""
    for option, value in ALIVE.items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
