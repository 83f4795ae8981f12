"""``--executor ray``: the nodes of a model are bundles of one of Ray's placement groups. This process is node
0, as with ``--nnodes``; the agents of the others are actors. A process of its own (``cli/ray_job.py``) is
Ray's driver, so that nothing of Ray runs here; when the channel to it is closed, it gives all back."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec

from sgla.config import Config
from sgla.errors import ConfigError, WorkerDied
from sgla.executor.bridge import Fault
from sgla.executor.nodes import NodesExecutor
from sgla.messages import Facts, Progress
from sgla.nodes import TIMEOUT, address, at
from sgla.processes import python_path

if TYPE_CHECKING:
    from sgla.hub.source import ModelSource

ENTRY = "import sys; from sgla.cli.ray_job import main; main(int(sys.argv[1]))"
PASSED = ("NCCL_", "GLOO_")  # variables that the actors get, too


class Wanted(msgspec.Struct, tag=True):
    """To the job, first: so many ``nodes``, each with such ``resources``. ``timeout``: seconds to find them
    within."""

    nodes: int
    resources: dict[str, float]
    timeout: float


class Placed(msgspec.Struct, tag=True):
    """From the job: the address of this host, and which GPUs are node 0's, if it asked for some."""

    here: str
    gpus: str | None = None


class Begin(msgspec.Struct, tag=True):
    """To the job: settings of the nodes from 1 on, and ``variables`` of their environment."""

    nodes: list[Config]
    variables: dict[str, str]


class Over(msgspec.Struct, tag=True):
    """From the job: a node has ended, or there is no place for them."""

    fault: Fault


def require() -> None:
    """Raise ConfigError without Ray, or where it would be reached from outside of its cluster."""
    if find_spec("ray") is None:
        raise ConfigError(
            "--executor ray needs Ray; install it with: pip install 'sgla[ray]'", param="executor"
        )
    if (given := os.environ.get("RAY_ADDRESS", "")).startswith("ray://"):
        raise ConfigError(
            f"--executor ray cannot use Ray's client (RAY_ADDRESS={given}): start the server on a host of "
            "the cluster, with RAY_ADDRESS=HOST:6379 or auto",
            param="executor",
        )


def needs(config: Config) -> dict[str, float]:
    """Of a node, in Ray's names."""
    ranks = float(config.local_ranks)
    return {"CPU": ranks, "GPU": ranks} if config.device == "cuda" else {"CPU": ranks * (config.threads or 1)}


class RayExecutor(NodesExecutor):
    """See ``executor.base.Executor``."""

    def __init__(
        self, config: Config, source: ModelSource | None = None, *, runner: str | None = None, torch: str = ""
    ) -> None:
        """Raises ConfigError."""
        require()
        super().__init__(config, source, runner=runner, torch=torch)
        self._job: subprocess.Popen[bytes] | None = None
        self._placed: asyncio.Future[Placed] | None = None

    def spawn(self) -> None:
        """At first the job; the ranks of this host when it has said which GPUs are theirs."""
        if self._job is None:
            self._channel, theirs = socket.socketpair()
            with theirs:
                self._job = subprocess.Popen(
                    [sys.executable, "-P", "-c", ENTRY, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": python_path()},
                    start_new_session=True,  # ctrl-C is for this process
                )
            loop = asyncio.get_running_loop()
            self._placed = loop.create_future()
            self._reading = loop.create_task(self._read())
            limit = self._config.dist_timeout or TIMEOUT
            self._tell(Wanted(self._config.nnodes, needs(self._config), limit))
        elif self._is_placed:
            super().spawn()

    @property
    def _is_placed(self) -> bool:
        return self._placed is not None and self._placed.done() and self._placed.exception() is None

    def _tell(self, message: Wanted | Begin) -> None:
        try:
            self._channel.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:
            pass  # it has ended, which the other end of the channel says

    async def _read(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._channel.dup())
        try:
            while line := await reader.readline():
                message = msgspec.json.decode(line, type=Placed | Over)
                if isinstance(message, Over):
                    self._fail(message.fault)
                elif self._placed is not None:
                    self._placed.set_result(message)
        except OSError:  # it was killed
            pass
        finally:
            writer.close()
        self._fail(Fault("WorkerDied", "the process that speaks with Ray has ended; see above"))

    def _fail(self, fault: Fault) -> None:
        """Before all nodes have come nobody else would notice."""
        assert self._placed is not None
        waiting = self._all if self._is_placed and hasattr(self, "_all") else self._placed
        error = fault.error()
        if not waiting.done():
            waiting.set_exception(error)
            waiting.exception()  # it may be that nobody looks
        else:
            self._lose(error if isinstance(error, WorkerDied) else WorkerDied(error.message))

    async def start(self, on_progress: Callable[[Progress], None]) -> Facts:
        self.spawn()
        assert self._placed is not None
        on_progress(Progress(phase="nodes", message=f"waits for Ray to place {self._config.nnodes} nodes"))
        try:
            placed = await self._placed
        except BaseException:
            await self.close()
            raise
        if placed.gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = placed.gpus
        if not (self._config.dist_secret or self._config.dist_secret_file):
            self._config = msgspec.structs.replace(self._config, dist_secret=secrets.token_hex(32))
        return await super().start(on_progress)

    def _meeting(self) -> tuple[str, int]:
        assert self._placed is not None
        return address(self._config) if self._config.dist_init_addr else (self._placed.result().here, 0)

    def _open(self) -> None:
        super()._open()
        assert self._listener is not None
        common = msgspec.structs.replace(
            self._given,
            api_key=[],
            admin_api_key=[],
            kv_transfer_secret=None,
            executor="procs",
            dist_init_addr=at(self._here, self._listener.port),
            dist_secret=self._config.dist_secret,
        )
        nodes = [msgspec.structs.replace(common, node_rank=n) for n in range(1, self._config.nnodes)]
        self._tell(Begin(nodes, {k: v for k, v in os.environ.items() if k.startswith(PASSED)}))

    async def close(self) -> None:
        await super().close()
        if self._job is None:
            return
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._channel.close()
        threading.Thread(target=self._job.wait, name="reap", daemon=True).start()
