"""The ranks of a model on several hosts: those of this one, node 0, by ``procs``, and those of the others
by their agents, which come to --dist-init-addr. Agents bridge plans and results; inside the model the ranks
exchange data by themselves."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgla.config import Config
from sgla.errors import SglaError, UnsupportedField, WorkerDied
from sgla.executor import bridge
from sgla.executor.merging import Ends, Results, common_facts
from sgla.executor.parting import known_to
from sgla.executor.procs import ProcsExecutor
from sgla.messages import Control, Facts, Moved, Progress, StepPlan, StepResult
from sgla.nodes import (
    TIMEOUT,
    address,
    answering_nodes,
    common,
    meeting,
    not_there,
    ranks_of,
    secret_of,
    without_secrets,
)
from sgla.peers import Beat, Beside, Channel, Link, Listener

if TYPE_CHECKING:
    from sgla.hub.source import ModelSource

log = logging.getLogger(__name__)

CAUSE = 0.3  # seconds for the cause of a death to be told, which may not be the first that is heard of it
FILES = ("vocabulary", "grammar")  # commands whose ``path`` is a file of this host alone
IN_MEMORY = "weights_receive"  # whose files may be as large as the model
CLOSE = 2.0  # seconds for the local ranks


class Node:
    """Another host. ``ready``: its facts, once its ranks have loaded."""

    def __init__(self, number: int, there: str, store: int) -> None:
        self.number, self.there, self.store = number, there, store
        self.link: Link | None = None
        self.ready: asyncio.Future[Facts] = asyncio.get_running_loop().create_future()
        self.replies: dict[int, asyncio.Future[list[Any]]] = {}

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.there})"

    def post(self, message: Any) -> None:
        if self.link is not None:
            self.link.post(message)


class NodesExecutor:
    """See ``executor.base.Executor``. ``torch``: its version, which all nodes must have alike."""

    def __init__(
        self, config: Config, source: ModelSource | None = None, *, runner: str | None = None, torch: str = ""
    ) -> None:
        self._given, self._config, self._source, self._torch = config, config, source, torch
        self._local = ProcsExecutor(config, source, runner=runner)
        self._nodes: dict[int, Node] = {}
        self._listener: Listener | None = None
        self._store: socket.socket | None = None
        self._fd, self._told = -1, -1
        self._answer = answering_nodes(config)
        self._results = Results(len(self._answer))
        self._moved: list[Moved] = []
        self._ends = Ends(config.nnodes)
        self._commands = 0
        self._on_progress: Callable[[Progress], None] = lambda progress: None
        self._on_death: Callable[[WorkerDied], None] | None = None
        self._gone = False
        self._deaths: list[WorkerDied] = []
        self._obituary: asyncio.Task[None] | None = None
        self._started = False
        self._why = ""  # the start has failed

    def spawn(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._all: asyncio.Future[None] = self._loop.create_future()
        self._local.spawn()

    def assign(self, config: Config, source: ModelSource) -> None:
        self._config, self._source = config, source
        self._local.assign(config, source)

    async def start(self, on_progress: Callable[[Progress], None]) -> Facts:
        self._on_progress = on_progress
        self.spawn()
        self._local.on_death(self._lose)
        try:
            self._open()
            await self._wait_for_all()
            facts = await self._load()
        except BaseException as error:
            self._why = error.message if isinstance(error, SglaError) else ""
            await self.close()
            raise
        self._started = True
        return facts

    def _meeting(self) -> tuple[str, int]:
        return address(self._config)

    def _open(self) -> None:
        """Raises ConfigError."""
        given, port = self._meeting()
        try:
            host = socket.getaddrinfo(given, port, type=socket.SOCK_STREAM)[0][4][0]
            told = common(self._given, self._torch, self._source)
            self._listener = Listener(
                str(host), port, secret_of(self._config), told, self._greet, refused=self._refused
            )
            self._here = str(host)
            family = socket.AF_INET6 if ":" in self._here else socket.AF_INET
            self._store = socket.create_server((self._here, 0), family=family, backlog=1024)
        except OSError as error:
            raise not_there(given, port, error) from error
        self._told = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    async def _wait_for_all(self) -> None:
        wanted = self._config.nnodes - 1
        limit = self._config.dist_timeout or TIMEOUT
        assert self._listener is not None
        self._say(f"node 0 waits for {wanted} more on {self._here}:{self._listener.port}")
        waiting: list[asyncio.Future[Any]] = [self._all, self._local.ready]
        await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if self._local.ready.done():  # one has ended
            self._local.ready.result()
        if not self._all.done():
            missing = [n for n in range(1, wanted + 1) if n not in self._nodes]
            raise WorkerDied(
                f"node {', '.join(map(str, missing))} of {wanted + 1} has not come within {limit:.0f} s"
            )
        self._all.result()
        await asyncio.to_thread(self._listener.close)

    def _say(self, text: str) -> None:
        self._on_progress(Progress(phase="nodes", message=text))

    def _refused(self, why: str) -> None:
        log.warning("a node was sent away: %s", why)

    def _greet(self, channel: Channel) -> None:
        """In a thread of its own."""
        channel.trust(0, bridge.FromAgent, bridge.SILENCE)
        try:
            join, _ = channel.receive()
        except OSError:
            channel.close()
            return
        if isinstance(join, bridge.Join):
            self._loop.call_soon_threadsafe(self._take_in, channel, join)
        else:
            channel.close()

    def _take_in(self, channel: Channel, join: bridge.Join) -> None:
        node = Node(join.node, channel.there, join.store)

        def take(message: Any, beside: Beside) -> None:
            if not isinstance(message, Beat):
                self._loop.call_soon_threadsafe(self._hear, node, message)

        def gone() -> None:
            self._loop.call_soon_threadsafe(self._lost_node, node)

        link = Link(channel, take, gone, bridge.BEAT)
        link.begin()
        if self._gone or join.node in self._nodes or not 0 < join.node < self._config.nnodes:
            why = f"there is a node {join.node} already; give another --node-rank"
            link.post(bridge.Ended(bridge.Fault("ConfigError", why, "node_rank")))
            self._loop.run_in_executor(None, link.finish, bridge.PARTING)
            return
        node.link = link
        self._nodes[join.node] = node
        self._say(f"{node.name} has come")
        if len(self._nodes) == self._config.nnodes - 1 and not self._all.done():
            self._all.set_result(None)

    async def _load(self) -> Facts:
        assert self._store is not None
        port = self._store.getsockname()[1]
        config = without_secrets(self._config)
        for node in self._nodes.values():
            node.post(bridge.Setup(config, self._here, port))
        self._local.meet(meeting(self._here, port, self._here), self._store.fileno())
        own = asyncio.ensure_future(self._local.start(self._on_progress))
        others = [self._nodes[number].ready for number in sorted(self._nodes)]
        try:
            facts = await asyncio.gather(own, *others)
        except SglaError as error:
            raise await self._cause(error) from None
        finally:
            own.cancel()
            await asyncio.gather(own, return_exceptions=True)
        self._fd = self._both()
        found = common_facts(facts)
        names = ", ".join(node.there for _, node in sorted(self._nodes.items()))
        found.notes.append(f"{self._config.nnodes} nodes: {self._here}, {names}")
        if found.media:
            found.media = {}
            found.notes.append("pictures are not taken: they lie in the memory of one host")
        return found

    async def _cause(self, error: SglaError) -> SglaError:
        """Of what has ended the start: where one was killed, the others fail."""
        if not isinstance(error, WorkerDied) or error.killed:
            return error
        await asyncio.sleep(CAUSE)
        failed = [node.ready.exception() for node in self._nodes.values() if node.ready.done()]
        told = [each for each in [*failed, *self._deaths] if isinstance(each, WorkerDied) and each.killed]
        return told[0] if told else error

    def _both(self) -> int:
        """A descriptor that is readable while one of the two is."""
        both = self._epoll = select.epoll()
        both.register(self._told, select.EPOLLIN)
        both.register(self._local.results_fd(), select.EPOLLIN)
        return both.fileno()

    def _hear(self, node: Node, message: Any) -> None:
        match message:
            case bridge.Started():
                if not node.ready.done():
                    node.ready.set_result(message.facts)
            case bridge.Computed():
                if not self._gone:
                    self._take_results(node.number, [*message.results, *message.moved])
                    os.eventfd_write(self._told, 1)
            case bridge.Reply():
                future = node.replies.pop(message.number, None)
                if future is not None and not future.done():
                    if message.fault is None:
                        future.set_result(message.ranks)
                    else:
                        future.set_exception(message.fault.error())
            case bridge.Ended():
                self._end(node, message.fault.error(f"{node.name}: "))

    def _lost_node(self, node: Node) -> None:
        self._end(node, WorkerDied(f"{node.name} is lost: its agent has ended, or nothing comes from there"))

    def _end(self, node: Node, error: SglaError) -> None:
        if self._nodes.get(node.number) is not node:
            return
        if not self._all.done():
            del self._nodes[node.number]  # another may come
            self._say(f"{error.message}; it may come again")
        elif not node.ready.done():
            node.ready.set_exception(error)
            node.ready.exception()  # ``start`` may not look at it
        else:
            self._lose(error if isinstance(error, WorkerDied) else WorkerDied(error.message))

    def _lose(self, error: WorkerDied) -> None:
        """Ranks have ended, here or there."""
        self._deaths.append(error)
        if not self._gone and self._started:
            self._gone = True
            self._obituary = self._loop.create_task(self._lost())

    async def _lost(self) -> None:
        if not self._deaths[0].killed:
            await asyncio.sleep(CAUSE)
        error = next((each for each in self._deaths if each.killed), self._deaths[0])
        self._local.kill()
        self._fail_replies(error)
        for node in self._nodes.values():
            node.post(bridge.Leave(error.message))
        if self._on_death is not None:
            self._on_death(error)

    def _fail_replies(self, error: SglaError) -> None:
        for node in self._nodes.values():
            for number in list(node.replies):
                future = node.replies.pop(number)
                if not future.done():
                    future.set_exception(error)

    def submit(self, plan: StepPlan) -> None:
        if self._gone:
            return
        for node in self._nodes.values():
            node.post(bridge.Planned(known_to(plan, ranks_of(self._config, node.number))))
        self._local.submit(plan)

    def results_fd(self) -> int:
        return self._fd

    def drain(self) -> list[StepResult | Moved]:
        if self._gone:
            return []
        try:
            os.eventfd_read(self._told)
        except BlockingIOError:
            pass
        self._take_results(0, self._local.drain())
        results: list[StepResult | Moved] = [*self._results.whole(), *self._moved]
        self._moved.clear()
        return results

    def _take_results(self, node: int, found: Sequence[StepResult | Moved]) -> None:
        ends = [self._ends.add(each) for each in found if isinstance(each, Moved)]
        self._moved += [end for end in ends if end is not None]
        if node in self._answer:
            at = self._answer.index(node)
            self._results.add(at, (each for each in found if isinstance(each, StepResult)))

    async def control(self, command: Control) -> dict[str, Any]:
        """``{"ranks": [reply of each rank]}``. Raises the ranks' SglaError, or WorkerDied."""
        if self._gone:
            raise WorkerDied("the workers are gone")
        if command.verb == IN_MEMORY:
            raise UnsupportedField(
                "weights that come as tensors reach one host alone; with --nnodes name a folder that all "
                "hosts have, or a trainer's group"
            )
        file = None
        if command.verb in FILES:
            file = await asyncio.to_thread(Path(command.args["path"]).read_bytes)
        self._commands += 1
        there = [self._ask(node, bridge.Command(self._commands, command, file)) for node in self._in_order()]
        told = await asyncio.gather(self._local.control(command), *there)
        return {"ranks": [*told[0]["ranks"], *(rank for ranks in told[1:] for rank in ranks)]}

    def _in_order(self) -> list[Node]:
        return [self._nodes[number] for number in sorted(self._nodes)]

    def _ask(self, node: Node, command: bridge.Command) -> asyncio.Future[list[Any]]:
        future = node.replies[command.number] = self._loop.create_future()
        node.post(command)
        return future

    def on_death(self, callback: Callable[[WorkerDied], None]) -> None:
        self._on_death = callback

    async def close(self) -> None:
        self._gone = True
        if self._listener is not None:
            await asyncio.to_thread(self._listener.close)
        if self._obituary is not None:
            await self._obituary
        why = self._deaths[0].message if self._deaths else self._why
        self._fail_replies(WorkerDied("the workers are gone"))
        links = [node.link for node in self._nodes.values() if node.link is not None]
        for link in links:
            link.post(bridge.Leave(why))
        parting = [asyncio.to_thread(link.finish, bridge.PARTING) for link in links]
        await asyncio.gather(self._local.close(), *parting)
        self._nodes.clear()
        if self._store is not None:
            self._store.close()
        if self._fd >= 0:
            self._epoll.close()
            self._fd = -1
        if self._told >= 0:
            os.close(self._told)
            self._told = -1

    async def inquire(self) -> str:
        self._commands += 1
        asked = [
            self._ask(node, bridge.Command(self._commands, Control(verb=""), inquiry=True))
            for node in self._in_order()
        ]
        told = [await self._local.inquire()]
        if asked:
            await asyncio.wait(asked, timeout=1.0)
        told += [str(each.result()[0]) for each in asked if each.done() and not each.exception()]
        return "\n".join(told)

    def kill(self) -> None:
        self._gone = True
        self._local.kill()
        for node in self._nodes.values():
            if node.link is not None:
                node.link.close()
