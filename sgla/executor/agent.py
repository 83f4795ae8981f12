"""A node other than node 0: it owns the ranks of its host, gives them the plans of node 0, and their results
to it. It ends when node 0 ends, or one of its ranks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from sgla import clock
from sgla.config import Config
from sgla.errors import ConfigError, SglaError, WorkerDied
from sgla.executor import bridge
from sgla.executor.procs import ProcsExecutor
from sgla.messages import Control, Moved, Progress, StepResult
from sgla.nodes import TIMEOUT, address, common, meeting, of_node, secret_of
from sgla.peers import Beat, Beside, Channel, Link, PeerRefused, connect

if TYPE_CHECKING:
    from sgla.hub.source import ModelSource

RETRY = 0.2  # seconds between tries to reach node 0
FLAG = "--dist-secret"


def reach(
    config: Config, told: Mapping[str, str], say: Callable[[str], None], over: Callable[[], bool]
) -> Channel:
    """A channel to node 0. ``told``: what both must have alike; ``over``: whether to give up. Raises
    ConfigError where node 0 does not want this node, or is not there in time."""
    host, port = address(config)
    secret, limit = secret_of(config), config.dist_timeout or TIMEOUT
    end, said = clock.now() + limit, False
    while not over():
        try:
            return connect(host, port, secret, told, flag=FLAG)[0]
        except PeerRefused as error:
            raise ConfigError(f"node 0 ({host}:{port}) refuses this node: {error}") from error
        except OSError as error:
            if clock.now() > end:
                why = error.strerror or str(error)
                raise ConfigError(
                    f"node 0 has not answered on {host}:{port} for {limit:.0f} s ({why}); check "
                    "--dist-init-addr",
                    param="dist_init_addr",
                ) from error
        if not said:
            say(f"waits for node 0 on {host}:{port}")
            said = True
        time.sleep(RETRY)
    raise ConfigError("this node was told to end")


class Agent:
    """``own``: this host's settings; ``given``: those that all hosts have alike. ``over`` resolves to None
    when node 0 has said that all is over, or to an error."""

    def __init__(
        self,
        own: Config,
        given: Config,
        source: ModelSource | None,
        executor: ProcsExecutor,
        say: Callable[[str], None],
        torch: str = "",
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._own, self._source, self._executor, self._say = own, source, executor, say
        self._on_progress = on_progress
        self._told = common(given, torch, source)
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[SglaError | None] = self._loop.create_future()
        self._link: Link | None = None
        self._here = ""
        self._work: set[asyncio.Task[None]] = set()
        executor.on_death(self._died)

    async def join(self) -> None:
        """Go to node 0. Raises ConfigError where it does not want this node, or is not there in time."""
        channel = await asyncio.to_thread(reach, self._own, self._told, self._say, self.over.done)
        channel.trust(0, bridge.ToAgent, bridge.SILENCE)
        self._here = channel.here
        self._link = Link(channel, self._take, self._gone, bridge.BEAT)
        self._link.post(bridge.Join(self._own.node_rank))
        self._link.begin()

    def _take(self, message: Any, beside: Beside) -> None:
        """In the link's thread."""
        if not isinstance(message, Beat):
            self._loop.call_soon_threadsafe(self._hear, message)

    def _gone(self) -> None:
        lost = WorkerDied("node 0 is lost: it has ended, or nothing comes from there")
        self._loop.call_soon_threadsafe(self._finish, lost)

    def _finish(self, outcome: SglaError | None) -> None:
        if not self.over.done():
            self.over.set_result(outcome)

    def _hear(self, message: Any) -> None:
        match message:
            case bridge.Setup():
                self._begin(self._load(message))
            case bridge.Planned():
                self._executor.submit(message.plan)
            case bridge.Command():
                self._begin(self._answer(message))
            case bridge.Leave():
                self._finish(WorkerDied(f"the server ends: {message.why}") if message.why else None)
            case bridge.Ended():
                self._finish(message.fault.error())

    def _begin(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _load(self, setup: bridge.Setup) -> None:
        assert self._link is not None
        self._executor.assign(of_node(setup.config, self._own), self._source)  # type: ignore[arg-type]
        self._executor.meet(meeting(setup.host, setup.port, self._here))
        try:
            facts = await self._executor.start(self._on_progress)
        except SglaError as error:
            self._died(error)
            return
        self._loop.add_reader(self._executor.results_fd(), self._pass_on)
        self._link.post(bridge.Started(facts))
        self._say("is ready")

    def _pass_on(self) -> None:
        assert self._link is not None
        found = self._executor.drain()
        results = [each for each in found if isinstance(each, StepResult)]
        moved = [each for each in found if isinstance(each, Moved)]
        if found:
            self._link.post(bridge.Computed(results, moved))

    async def _answer(self, asked: bridge.Command) -> None:
        assert self._link is not None
        if asked.inquiry:
            self._link.post(bridge.Reply(asked.number, [await self._executor.inquire()]))
            return
        with ExitStack() as files:
            command = asked.command
            if asked.file is not None:
                path = files.enter_context(_Nameless(asked.file)).path
                command = Control(verb=command.verb, args=command.args | {"path": path})
            try:
                ranks = (await self._executor.control(command))["ranks"]
                self._link.post(bridge.Reply(asked.number, ranks))
            except SglaError as error:
                self._link.post(bridge.Reply(asked.number, [], bridge.Fault.of(error)))

    def _died(self, error: SglaError) -> None:
        if self._link is not None:
            self._link.post(bridge.Ended(bridge.Fault.of(error)))
        self._finish(error)

    def stop(self) -> None:
        """This node is told to end, so all do."""
        if self._link is not None:
            self._link.post(bridge.Ended(bridge.Fault("WorkerDied", "it was told to end")))
        self._finish(None)

    async def close(self) -> None:
        self._finish(None)
        for task in self._work:
            task.cancel()
        if (fd := self._executor.results_fd()) >= 0:
            self._loop.remove_reader(fd)
        if self._link is not None:
            await asyncio.to_thread(self._link.finish, bridge.PARTING)
        await self._executor.close()


class _Nameless:
    """A file in memory that workers of this host find at ``path``."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __enter__(self) -> _Nameless:
        self._fd = os.memfd_create("sgla", os.MFD_CLOEXEC)
        with open(self._fd, "wb", closefd=False) as file:
            file.write(self._content)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return self

    def __exit__(self, *what: object) -> None:
        os.close(self._fd)
