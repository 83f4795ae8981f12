"""What connections to other hosts have in common."""

from __future__ import annotations

import socket

# A host that is gone without a word is found out within 11 s.
ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
READS = {"TCP_USER_TIMEOUT": 11_000}


def notice_loss(sock: socket.socket, reads: bool = True) -> None:
    """Have what reads there fail when the other host is gone, and what writes there, too, if that ``reads``
    at all times: else it may live, and read nothing for as long."""
    for option, value in (ALIVE | READS if reads else ALIVE).items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
