"""Replicas on several hosts (``--dp`` with ``--nnodes``): node 0 has the router, and every other host an
agent that runs the replicas there and says at what addresses they are. A host that is lost takes no other
along, and its replicas come back with its agent."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from sgla.config import Config
from sgla.errors import ConfigError, SglaError, WorkerDied
from sgla.executor.agent import reach
from sgla.executor.bridge import BEAT, PARTING, SILENCE, Ended, Fault, Join, Leave
from sgla.nodes import address, common, not_there, secret_of
from sgla.peers import Beat, Beside, Channel, Link, Listener
from sgla.route.balancer import Balancer
from sgla.route.replicas import EXIT_CONFIG, EXIT_DIED, EXIT_OK, Replicas, Share, end, of_replica

log = logging.getLogger(__name__)


class Came(msgspec.Struct, tag=True, array_like=True):
    """Agent: a replica takes requests."""

    url: str
    name: str


class Went(msgspec.Struct, tag=True, array_like=True):
    """Agent: a replica has ended."""

    url: str


class LeftOut(msgspec.Struct, tag=True, array_like=True):
    """Agent: a replica has ended too often to be started anew."""


FromAgent = Join | Came | Went | LeftOut | Beat
ToAgent = Ended | Leave | Beat


def told_of(config: Config, torch: str) -> dict[str, str]:
    """What all hosts must have alike."""
    name = (config.served_model_name or [config.model])[0]
    return common(config, torch, None) | {"model": name}


class Nodes:
    """Node 0: its own replicas, and the agents. ``over`` is set with an exit code when no replica is left, or
    its own have wrong settings."""

    def __init__(self, balancer: Balancer, local: Replicas, config: Config, torch: str) -> None:
        """Raises ConfigError."""
        self._balancer, self._local, self._count = balancer, local, config.nnodes
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[int] = self._loop.create_future()
        self._links: dict[int, Link] = {}
        self._urls: dict[int, set[str]] = {}
        self._left_out = Counter[int]()  # replicas, by node
        given, port = address(config)
        try:
            host = str(socket.getaddrinfo(given, port, type=socket.SOCK_STREAM)[0][4][0])
            self._listener = Listener(
                host,
                port,
                secret_of(config),
                told_of(config, torch),
                self._greet,
                refused=lambda why: log.warning("a node was sent away: %s", why),
            )
        except OSError as error:
            raise not_there(given, port, error) from error
        balancer.replicas = config.dp
        local.over.add_done_callback(self._own_are_over)

    def _own_are_over(self, over: asyncio.Future[int]) -> None:
        if over.cancelled():
            return
        if over.result() == EXIT_CONFIG or not self._links:
            self._end(over.result())

    def _end(self, code: int) -> None:
        if not self.over.done():
            self.over.set_result(code)

    def _greet(self, channel: Channel) -> None:
        """In a thread of its own."""
        channel.trust(0, FromAgent, SILENCE)
        try:
            join, _ = channel.receive()
        except OSError:
            channel.close()
            return
        if isinstance(join, Join):
            self._loop.call_soon_threadsafe(self._take_in, channel, join.node)
        else:
            channel.close()

    def _take_in(self, channel: Channel, node: int) -> None:
        def take(message: Any, beside: Beside) -> None:
            if not isinstance(message, Beat):
                self._loop.call_soon_threadsafe(self._hear, node, link, message)

        def gone() -> None:
            self._loop.call_soon_threadsafe(self._lost, node, link)

        link = Link(channel, take, gone, BEAT)
        link.begin()
        if node in self._links or not 0 < node < self._count or self.over.done():
            why = f"there is a node {node} already; give another --node-rank"
            link.post(Ended(Fault("ConfigError", why, "node_rank")))
            self._loop.run_in_executor(None, link.finish, PARTING)
            return
        self._links[node], self._urls[node] = link, set()
        print(f"node {node} ({channel.there}) has come", flush=True)

    def _hear(self, node: int, link: Link, message: Any) -> None:
        if self._links.get(node) is not link:
            return
        if isinstance(message, Came):
            self._urls[node].add(message.url)
            self._balancer.add(message.url, message.name)
            print(f"replica {message.name} is ready on node {node}, {message.url}", flush=True)
        elif isinstance(message, Went):
            self._remove(node, message.url, "it has ended")
        elif isinstance(message, LeftOut):
            self._left_out[node] += 1
            self._balancer.leave_out()

    def _remove(self, node: int, url: str, why: str) -> None:
        self._urls[node].discard(url)
        self._balancer.lose(url, why)

    def _lost(self, node: int, link: Link) -> None:
        if self._links.get(node) is not link:
            return
        del self._links[node]
        for url in list(self._urls[node]):
            self._remove(node, url, "its host is lost")
        self._balancer.replicas += self._left_out.pop(node, 0)
        if not self.over.done():
            log.error("node %d is lost; its replicas come back with its agent", node)
        if self._local.over.done() and not self._links:
            self._end(self._local.over.result())

    async def close(self, saving: float = 0.0) -> int:
        self._end(EXIT_OK)
        await asyncio.to_thread(self._listener.close)
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            link.post(Leave(saving=saving))
        parting = [asyncio.to_thread(link.finish, PARTING) for link in links]
        code, *_ = await asyncio.gather(self._local.close(saving), *parting)
        return code or self.over.result()


class Away:
    """What ``Replicas`` needs of a balancer that is on node 0."""

    def __init__(self, post: Callable[[Came | Went | LeftOut], None]) -> None:
        self._post = post
        self.replicas = 0
        self.workers: set[str] = set()

    def add(self, url: str, name: str) -> None:
        self.workers.add(url)
        self._post(Came(url, name))

    def remove(self, url: str) -> None:
        self.workers.discard(url)
        self._post(Went(url))

    def leave_out(self) -> None:
        self._post(LeftOut())


class ReplicaAgent:
    """The replicas of a host other than node 0. ``over``: as ``executor.agent.Agent`` has it."""

    def __init__(self, config: Config, shares: list[Share], torch: str, say: Callable[[str], None]) -> None:
        self._config, self._shares, self._torch, self._say = config, shares, torch, say
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[SglaError | None] = self._loop.create_future()
        self._replicas: Replicas | None = None
        self._link: Link | None = None
        self._saving = self._serving = 0.0
        self._hurry = asyncio.Event()

    async def join(self) -> None:
        """Raises ConfigError where node 0 does not want this node, or is not there in time."""
        told = told_of(self._config, self._torch)
        channel = await asyncio.to_thread(reach, self._config, told, self._say, self.over.done)
        channel.trust(0, ToAgent, SILENCE)
        link = self._link = Link(channel, self._take, self._gone, BEAT)
        link.post(Join(self._config.node_rank))
        link.begin()
        own = of_replica(self._config, channel.here, channel.there)
        first = self._config.node_rank * len(self._shares)
        self._replicas = Replicas(Away(link.post), "", own, self._shares, first)
        self._replicas.over.add_done_callback(self._own_are_over)

    def _own_are_over(self, over: asyncio.Future[int]) -> None:
        if not over.cancelled() and over.result() == EXIT_CONFIG:
            self._finish(ConfigError("a replica ended because of its settings; see above"))
        elif not over.cancelled() and over.result() == EXIT_DIED:
            self._finish(WorkerDied("no replica of this host is left"))

    def _take(self, message: Any, beside: Beside) -> None:
        """In the link's thread."""
        if isinstance(message, Leave):
            self._loop.call_soon_threadsafe(self._leave, message.saving)
        elif isinstance(message, Ended):
            self._loop.call_soon_threadsafe(self._finish, message.fault.error())

    def _gone(self) -> None:
        lost = WorkerDied("node 0 is lost: it has ended, or nothing comes from there")
        self._loop.call_soon_threadsafe(self._finish, lost)

    def _finish(self, outcome: SglaError | None) -> None:
        if not self.over.done():
            self.over.set_result(outcome)

    def _leave(self, saving: float) -> None:
        self._saving = saving
        self._finish(None)

    def stop(self) -> None:
        """What the replicas have begun goes on for ``drain_timeout``, or until this is called again."""
        if self.over.done():
            self._hurry.set()
        self._saving = self._serving = self._config.drain_timeout
        self._finish(None)

    async def close(self) -> None:
        self._finish(None)
        if self._replicas is not None:
            closing = asyncio.ensure_future(self._replicas.close(self._saving, self._serving))
            await end(self._replicas, closing, self._hurry)
        if self._link is not None:
            await asyncio.to_thread(self._link.finish, PARTING)
