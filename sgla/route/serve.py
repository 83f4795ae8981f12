"""``sgla route``: the owner's process, the processes of the fronts, signals and drain."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import msgspec

from sgla import clock, processes
from sgla.errors import ConfigError
from sgla.http.connections import raise_file_limit
from sgla.http.tls import tls_context
from sgla.nodes import at
from sgla.route.balancer import Balancer
from sgla.route.config import RouteConfig, check
from sgla.route.discovery import Cluster, Discovery
from sgla.route.front import END_SECONDS, Front
from sgla.route.front_process import Start
from sgla.route.loop import runner
from sgla.route.owner import SIZE, Desk, LocalOwner
from sgla.route.replicas import MakeReplicas, end
from sgla.route.watch import Watch

log = logging.getLogger(__name__)

MOST_PROCESSES = 8  # that are started unasked
RESTART_SECONDS = 1.0  # between two starts of a front that ends


def run(config: RouteConfig, replicas: MakeReplicas | None = None) -> int:
    """Serve until a signal, or until no replica is left; returns the process's exit code. ``replicas``: the
    workers, which belong to this process. Raises ConfigError."""
    if replicas is None:
        check(config)
    raise_file_limit()
    tls_context(config)  # raises before anything is started
    cluster = Cluster(config) if config.service_discovery else None
    count = config.processes or max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) - 1))
    sockets = bind(config, count)
    with runner() as loop:
        return loop.run(serve(config, cluster, sockets, replicas))


def bind(config: RouteConfig, count: int) -> list[list[socket.socket]]:
    """For each of ``count`` processes its own sockets that listen on the same port; the kernel spreads
    connections over them (SO_REUSEPORT). The first is bound without that flag for a moment, so that another
    program on the port is noticed. Raises ConfigError."""
    try:
        infos = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        places = list(dict.fromkeys((info[0], info[4]) for info in infos))
        port = config.port
        for family, address in places:
            with listening(family, (address[0], port, *address[2:]), False) as tried:
                port = tried.getsockname()[1]
        return [
            [listening(family, (address[0], port, *address[2:]), True) for family, address in places]
            for _ in range(count)
        ]
    except OSError as error:
        flag = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        raise ConfigError(
            f"cannot listen on {at(config.host, config.port)}: {error.strerror}; choose another --{flag}"
        ) from error


def listening(family: int, address: tuple[object, ...], shared: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        made.bind(address)
        made.listen(1024)
    except OSError:
        made.close()
        raise
    made.setblocking(False)
    return made


async def serve(
    config: RouteConfig,
    cluster: Cluster | None,
    sockets: list[list[socket.socket]],
    replicas: MakeReplicas | None = None,
) -> int:
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    balancer = Balancer(config)
    watch = Watch(balancer)
    discovery = Discovery(balancer, cluster)
    fronts: LocalFront | Fronts = (
        LocalFront(config, balancer) if len(sockets) == 1 else Fronts(config, balancer)
    )
    await fronts.start(sockets)
    port = sockets[0][0].getsockname()[1]
    scheme, host = ("https" if config.ssl_certfile else "http"), config.host
    url = f"{scheme}://{at(host, port)}"
    if replicas is None:
        group = None
        print(f"routing on {url} by {config.policy}", flush=True)
        await stop.wait()
    else:
        group = replicas(balancer, url)
        print(f"listening on {url} (503 until a replica is ready)", flush=True)
        waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait()), group.over]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    balancer.draining = True
    deadline = clock.now() + config.drain_timeout
    draining, hurrying = asyncio.ensure_future(fronts.drain()), asyncio.ensure_future(hurry.wait())
    await asyncio.wait(
        [draining, hurrying],
        timeout=config.drain_timeout,
        return_when=asyncio.FIRST_COMPLETED,
    )
    draining.cancel()
    await fronts.end()
    discovery.close()
    await watch.close()
    if group is None:
        return 0
    closing = asyncio.ensure_future(group.close(max(0.0, deadline - clock.now())))
    return await end(group, closing, hurry)


class LocalFront:
    """The only front, in the owner's process."""

    def __init__(self, config: RouteConfig, balancer: Balancer) -> None:
        self._front = Front(config, LocalOwner(balancer))
        self._config = config

    async def start(self, sockets: list[list[socket.socket]]) -> None:
        await self._front.listen(sockets[0], tls_context(self._config))

    async def drain(self) -> None:
        await self._front.drain()

    async def end(self) -> None:
        await self._front.end()


class Fronts:
    """Fronts in processes of their own. One that ends is started anew, with the sockets that it had: the
    owner keeps them open, so connections that wait are not lost."""

    def __init__(self, config: RouteConfig, balancer: Balancer) -> None:
        self._config, self._balancer = config, balancer
        self._tasks: list[asyncio.Task[None]] = []
        self._desks: set[Desk] = set()
        self._running: set[subprocess.Popen[bytes]] = set()

    async def start(self, sockets: list[list[socket.socket]]) -> None:
        self._tasks = [asyncio.ensure_future(self._keep(each, len(sockets))) for each in sockets]

    async def drain(self) -> None:
        for desk in self._desks:
            desk.drain()
        await asyncio.wait(self._tasks)  # which goes on if this is cancelled

    async def end(self) -> None:
        for desk in self._desks:
            desk.drain(now=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * END_SECONDS)
        for task in self._tasks:
            task.cancel()
        for desk in list(self._desks):
            desk.close()
        for process in self._running:
            processes.end(process)

    async def _keep(self, sockets: list[socket.socket], share: int) -> None:
        while not self._balancer.draining:
            began = clock.now()
            lost = asyncio.Event()
            process, desk = await self._spawn(sockets, share, lost)
            await lost.wait()
            self._desks.discard(desk)
            self._running.discard(process)
            processes.end(process)
            if not self._balancer.draining:
                log.error("a process that passes requests on has ended; another one is started")
                await asyncio.sleep(max(0.0, began + RESTART_SECONDS - clock.now()))

    async def _spawn(
        self, sockets: list[socket.socket], share: int, lost: asyncio.Event
    ) -> tuple[subprocess.Popen[bytes], Desk]:
        ours, theirs = socket.socketpair()
        files = [theirs.fileno(), *(each.fileno() for each in sockets)]
        words = [str(files[0]), str(os.getpid()), *map(str, files[1:])]
        with processes.deaf():
            process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.front_process", *words],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": processes.python_path()},
            )
        theirs.close()
        start = msgspec.json.encode(Start(self._config, share))
        ours.sendall(len(start).to_bytes(SIZE, "big") + start)
        desk = Desk(self._balancer, lost.set)
        await desk.connect(ours)
        self._desks.add(desk)
        self._running.add(process)
        return process, desk
