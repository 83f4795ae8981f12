"""``sgla serve --dp N``: N servers of one model, each a process with its own GPUs or cores, behind a router
in the process that starts them. One that ends is started anew, and requests meanwhile go to the others."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from sgla import clock, processes
from sgla.actors.base import in_thread
from sgla.config import Config
from sgla.errors import ConfigError
from sgla.observe.machine import Machine
from sgla.route.balancer import Balancer
from sgla.route.config import RouteConfig

log = logging.getLogger(__name__)

RESTARTS, WITHIN = 5, 600.0  # so many of one replica in so many seconds
PAUSE = 1.0  # seconds before a restart
END = 2.0  # seconds that replicas have to end beside the time for their requests
EXIT_OK, EXIT_DIED, EXIT_CONFIG = 0, 1, 2
LOCAL = "127.0.0.1"


class Share(NamedTuple):
    """What a replica computes on: numbers of GPUs as the driver counts them, or of cores; neither where Ray
    finds it some."""

    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.gpus:
            return f"GPU{'s' * (len(self.gpus) > 1)} {', '.join(self.gpus)}"
        if not self.cores:
            return "what Ray has found for it"
        return f"core{'s' * (len(self.cores) > 1)} {', '.join(map(str, self.cores))}"


def shares(config: Config, device: str, machine: Machine) -> list[Share]:
    """Of each replica of this host. Raises ConfigError where there are too few GPUs."""
    count, ranks = config.dp // config.nnodes, config.ranks
    if config.executor == "ray":
        return [Share()] * count
    if device == "cuda":
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name.strip() for name in given.split(",") if name.strip()]
        names = names or [str(number) for number in range(len(machine.gpus))]
        if count * ranks > len(names):
            raise ConfigError(
                f"--dp {config.dp} with {ranks} GPUs each needs {count * ranks} GPUs"
                f"{f' on each of {config.nnodes} hosts' if config.nnodes > 1 else ''}, this machine shows "
                f"{len(names)}",
                param="dp",
            )
        return [Share(gpus=tuple(names[i * ranks : (i + 1) * ranks])) for i in range(count)]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // count
    return [Share(cores=tuple(cores[i * each : (i + 1) * each] if each else cores)) for i in range(count)]


def alone(config: Config) -> Config:
    """One of the servers, by itself."""
    if config.dp == 1:
        return config
    return msgspec.structs.replace(
        config,
        dp=1,
        nnodes=1,
        node_rank=0,
        dist_init_addr=None,
        dist_secret=None,
        dist_secret_file=None,
    )


def of_replica(config: Config, host: str = LOCAL, router: str = LOCAL) -> Config:
    """Settings of each: one server, which the router reaches at ``host``, and which believes the ``router``
    who its clients are."""
    return msgspec.structs.replace(
        alone(config),
        host=host,
        port=0,
        ssl_certfile=None,
        ssl_keyfile=None,
        ssl_ca_certs=None,
        forwarded_allow_ips=[router],
        served_model_name=config.served_model_name or [config.model],
    )


def of_router(config: Config) -> RouteConfig:
    keys = [*config.api_key, *config.admin_api_key]
    return RouteConfig(
        policy=config.dp_policy,
        host=config.host,
        port=config.port,
        api_key=config.api_key,
        admin_api_key=config.admin_api_key,
        worker_api_key=keys[0] if keys else None,
        max_body_bytes=config.max_body_bytes,
        request_memory_bytes=config.request_memory_bytes,
        forwarded_allow_ips=config.forwarded_allow_ips,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_ca_certs=config.ssl_ca_certs,
        drain_timeout=config.drain_timeout,
        log_level=config.log_level,
        max_connections=config.max_connections or RouteConfig().max_connections,
    )


class Start(msgspec.Struct):
    """What a replica's process is told."""

    number: int
    config: Config
    cores: tuple[int, ...]


class Replica:
    """The process of one."""

    def __init__(self, number: int, config: Config, share: Share) -> None:
        self.number = number
        self.url = ""
        self._ours, theirs = socket.socketpair()
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(share.gpus)} if share.gpus else {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sgla.cli.replica", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": processes.python_path()} | gpus,
            start_new_session=True,  # a terminal's ctrl-C is for the router, which ends its replicas
        )
        theirs.close()
        self._ours.sendall(msgspec.json.encode(Start(number, config, share.cores)))
        self._ours.shutdown(socket.SHUT_WR)

    async def ready(self) -> str:
        """What it says when it takes requests, at ``url`` from then on; "" if it ended before."""
        reader, writer = await asyncio.open_connection(sock=self._ours)
        try:
            line = await reader.readline()
        finally:
            writer.close()
        if not line:
            return ""
        told = json.loads(line)
        self.url = told["url"]
        return str(told["text"])

    async def ended(self) -> int:
        """Its exit code."""
        return await in_thread(self.process.wait)

    def stop(self) -> None:
        """It ends its requests, in the time that they have."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)


class Places(Protocol):
    """What is told of replicas that take requests, by their URLs and names."""

    replicas: int

    @property
    def workers(self) -> Container[str]: ...
    def add(self, url: str, name: str) -> None: ...
    def remove(self, url: str) -> None: ...
    def leave_out(self) -> None: ...


class Group(Protocol):
    """Replicas of this host, or of several. ``over`` and ``close``: see ``Replicas``."""

    over: asyncio.Future[int]

    async def close(self, saving: float = 0.0) -> int: ...


async def end(group: Group, closing: asyncio.Future[int], hurry: asyncio.Event) -> int:
    """The exit code of the ``group``, which is ``closing``, and closes at once where there is ``hurry``."""
    hurrying = asyncio.ensure_future(hurry.wait())
    waiting: list[asyncio.Future[Any]] = [closing, hurrying]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not closing.done():
        closing.cancel()
        closing = asyncio.ensure_future(group.close())
    return await closing


class Replicas:
    """All of this host, and their places in the balancer; ``url``: the router's, if it is here.
    ``config``: of each; ``first``: the number of the first. ``over`` is set with an exit code when none is
    left."""

    def __init__(
        self, balancer: Places, url: str, config: Config, shares: Sequence[Share], first: int = 0
    ) -> None:
        self._balancer, self._config, self._shares = balancer, config, shares
        self._url, self._offset = url, first
        balancer.replicas = len(shares)
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._running: dict[int, Replica] = {}
        self._first = asyncio.Event()  # a replica is ready: the files that all need are there
        self._ending = False
        self._tasks = [asyncio.ensure_future(self._keep(i)) for i in range(len(shares))]
        for task in self._tasks:
            task.add_done_callback(self._lost)

    async def close(self, saving: float = 0.0, serving: float = 0.0) -> int:
        """End all; the exit code. ``serving``: seconds that requests may take; ``saving``: that a store may,
        for what they have left. A second call, when the first is cancelled, ends them at once."""
        self._ending = True
        for replica in self._running.values():
            replica.stop()
        for task in self._tasks:
            if not self._first.is_set():
                task.cancel()
        await asyncio.wait(self._tasks, timeout=END + max(serving, saving if self._config.kv_store else 0.0))
        for replica in self._running.values():
            processes.end(replica.process)
        for task in self._tasks:
            task.cancel()
        return self.over.result() if self.over.done() else EXIT_OK

    def _lost(self, task: asyncio.Task[None]) -> None:
        if all(each.done() for each in self._tasks) and not self._ending and not self.over.done():
            self.over.set_result(EXIT_DIED)

    async def _keep(self, number: int) -> None:
        """Run one replica, and anew when it ends, as often as may be. The first goes before the others."""
        ends: deque[float] = deque(maxlen=RESTARTS)
        if number:
            await self._first.wait()
        while not self._ending:
            code = await self._run(number)
            if self._ending:
                return
            if code == EXIT_CONFIG and not self.over.done():
                self.over.set_result(EXIT_CONFIG)
                return
            now = clock.now()
            if len(ends) == RESTARTS and now - ends[0] < WITHIN:
                log.error("replica %d has ended %d times in a row; it is left out", number, RESTARTS + 1)
                self._balancer.leave_out()
                return
            ends.append(now)
            log.error("replica %d has ended with code %d; it is started anew", number, code)
            await asyncio.sleep(PAUSE)

    async def _run(self, number: int) -> int:
        """The exit code of a replica, whose place in the balancer is its own meanwhile."""
        replica = self._running[number] = Replica(number, self._config, self._shares[number])
        try:
            text = await replica.ready()
            if text and not self._ending:
                self._balancer.add(replica.url, str(self._offset + number))
                self._tell(number, text.replace(replica.url, self._url))
                self._first.set()
            return await replica.ended()
        finally:
            del self._running[number]
            processes.end(replica.process)
            if replica.url in self._balancer.workers:
                self._balancer.remove(replica.url)

    def _tell(self, number: int, text: str) -> None:
        where, name = str(self._shares[number]), self._offset + number
        if self._first.is_set() or not self._url:
            print(f"replica {name} is ready on {where}", flush=True)
        else:
            print(f"{text}\nreplica {name} of {len(self._shares)} is ready on {where}", flush=True)


MakeReplicas = Callable[[Balancer, str], Group]
