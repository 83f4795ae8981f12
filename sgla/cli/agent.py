"""``sgla serve --node-rank N``, N above 0: the agent of this host's ranks. It has no HTTP."""

from __future__ import annotations

import asyncio
import signal
import sys
from functools import partial
from typing import Any

from sgla.actors.base import in_thread
from sgla.actors.setup import look_up, settle_device
from sgla.cli.progress import ProgressPrinter
from sgla.config import Config
from sgla.errors import ConfigError, SglaError
from sgla.executor.agent import Agent
from sgla.executor.procs import ProcsExecutor, runner_for
from sgla.nodes import ranks_of
from sgla.observe.machine import detect
from sgla.resolve import resolve
from sgla.route.nodes import ReplicaAgent
from sgla.route.replicas import of_replica, shares

EXIT_OK, EXIT_DIED, EXIT_CONFIG = 0, 1, 2


def run(config: Config) -> int:
    """The exit code: 0 when the server has ended in order, or a signal has ended this. Raises ConfigError."""
    progress = ProgressPrinter()
    try:
        return asyncio.run(_replicas(config) if config.dp > 1 else _run(config, progress))
    finally:
        progress.close()


async def _run(config: Config, progress: ProgressPrinter) -> int:
    given = await in_thread(settle_device, config)
    executor = ProcsExecutor(given, runner=runner_for(given))
    executor.spawn()
    agent = None
    try:
        resolved, source = await in_thread(look_up, config, progress)
        if resolved.config.device != given.device:
            await executor.close()
            given = resolved.config
            executor = ProcsExecutor(given, runner=runner_for(given))
            executor.spawn()
        say = partial(_say, config)
        ranks = ranks_of(config)
        say(f"has rank{f' {ranks.start}' if len(ranks) == 1 else f's {ranks.start} to {ranks.stop - 1}'}")
        agent = Agent(resolved.config, given, source, executor, say, detect().torch or "", progress)
        return await _until_over(agent)
    finally:
        await (agent.close() if agent is not None else executor.close())


def _say(config: Config, text: str) -> None:
    print(f"node {config.node_rank} of {config.nnodes} {text}", flush=True)


async def _replicas(config: Config) -> int:
    """Whole servers, behind the router of node 0."""
    machine = detect()
    device = resolve(of_replica(config), machine).config.device
    agent = ReplicaAgent(config, shares(config, device, machine), machine.torch or "", partial(_say, config))
    try:
        return await _until_over(agent)
    finally:
        await agent.close()


async def _until_over(agent: Agent | ReplicaAgent) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, agent.stop)
    joining = asyncio.ensure_future(agent.join())
    waiting: list[asyncio.Future[Any]] = [joining, agent.over]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if joining.done():
        joining.result()
    error: SglaError | None = await agent.over
    if isinstance(error, ConfigError):
        raise error
    if error is not None:
        print(f"sgla: {error.message}", file=sys.stderr)
        return EXIT_DIED
    return EXIT_OK
