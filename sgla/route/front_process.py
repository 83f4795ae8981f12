"""A process that passes requests on: ``python -m sgla.route.front_process CHANNEL PARENT SOCKET...`` with
descriptors of the channel to the owner and of sockets that listen. The owner sends the settings first."""

from __future__ import annotations

import asyncio
import socket
import sys

import msgspec

from sgla.http.connections import raise_file_limit
from sgla.http.tls import tls_context
from sgla.observe.log import setup_logging
from sgla.processes import die_with, leave_to_parent
from sgla.route.config import RouteConfig
from sgla.route.front import Front
from sgla.route.loop import runner
from sgla.route.owner import SIZE, RemoteOwner


class Start(msgspec.Struct):
    """``share``: how many such processes there are."""

    config: RouteConfig
    share: int


def main(channel: int, parent: int, sockets: list[int]) -> None:
    die_with(parent)
    leave_to_parent()
    end = socket.socket(fileno=channel)
    with end.makefile("rb", buffering=0) as file:
        size = int.from_bytes(read(file, SIZE), "big")
        start = msgspec.json.decode(read(file, size), type=Start)
    setup_logging(start.config.log_level, "text")
    raise_file_limit()
    with runner() as loop:
        loop.run(serve(start, end, [socket.socket(fileno=each) for each in sockets]))


def read(file: socket.SocketIO, size: int) -> bytes:
    """Raises EOFError if the owner is gone."""
    data = b""
    while len(data) < size:
        piece = file.read(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


async def serve(start: Start, end: socket.socket, sockets: list[socket.socket]) -> None:
    owner = RemoteOwner()
    await owner.connect(end)
    front = Front(start.config, owner, start.share)
    await front.listen(sockets, tls_context(start.config))
    draining, hurry, lost = (
        asyncio.ensure_future(each.wait()) for each in (owner.draining, owner.hurry, owner.lost)
    )
    await asyncio.wait([draining, lost], return_when=asyncio.FIRST_COMPLETED)
    if not owner.lost.is_set():
        drained = asyncio.ensure_future(front.drain())
        await asyncio.wait([drained, hurry, lost], return_when=asyncio.FIRST_COMPLETED)
    await front.end()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [int(word) for word in sys.argv[3:]])
