"""The process that has Ray for a server with ``--executor ray`` (``executor/ray.py``): it joins the cluster,
or starts one, has room made for all nodes, and runs the agents of those from 1 on as actors. It ends, and
gives all back, when the server closes the channel or is gone."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from sgla.cli.agent import EXIT_OK
from sgla.cli.agent import run as run_agent
from sgla.config import Config
from sgla.errors import ConfigError, SglaError, WorkerDied
from sgla.executor.bridge import Fault
from sgla.executor.ray import Begin, Over, Placed, Wanted

LEAVE = 10.0  # seconds to give all back
CONNECT = 5.0  # seconds
SHARE = 0.001  # of the resource that Ray gives each host, which says that a bundle is there


class Node:
    """The actor of a node, in a process of its own, whose ranks end with it."""

    def run(self, config: bytes, variables: dict[str, str]) -> bytes:
        """``config``: JSON of a Config. Returns JSON of a Fault, or of None when the server has ended in
        order. Nothing of ours is raised: the driver could not unpickle it."""
        os.environ.update(variables)
        try:
            given = msgspec.json.decode(config, type=Config)
            code = run_agent(given)
            fault = (
                None
                if code == EXIT_OK
                else Fault("WorkerDied", f"node {given.node_rank} has ended; see above")
            )
        except SglaError as error:
            fault = Fault.of(error)
        return msgspec.json.encode(fault)


class Seat:
    """Holds the GPUs of node 0, whose ranks are the server's."""

    def gpus(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


class Job:
    """``events``: messages of the server, None when it is gone, and ends of what Ray does, in their order."""

    def __init__(self, end: socket.socket, wanted: Wanted, events: SimpleQueue[Any]) -> None:
        self._end, self._wanted, self._events = end, wanted, events

    def run(self) -> None:
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            self._join()
            with self._group() as group:
                self._serve(group)
        except SglaError as error:
            self._tell(Over(Fault.of(error)))
        finally:
            ray.shutdown()

    def _tell(self, message: Placed | Over) -> None:
        try:
            self._end.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:
            pass  # it is gone, which the next event says

    def _join(self) -> None:
        """Join the cluster that there is, or start one here. Raises ConfigError."""
        import ray

        address = None
        if left := left_behind():
            print(f"no Ray cluster is at {left} any more; starts another one", flush=True)
            address = "local"
        where = os.environ.get("RAY_ADDRESS") or "the cluster of this host, or a new one"
        late = ConfigError(
            f"--executor ray: Ray has not reached {where} for {self._wanted.timeout:.0f} s", param="executor"
        )
        timer = threading.Timer(self._wanted.timeout, self._tell, [Over(Fault.of(late))])
        timer.start()
        try:
            ray.init(address, include_dashboard=False, logging_level=logging.WARNING)
        except Exception as error:  # of many kinds
            raise ConfigError(
                f"--executor ray: Ray cannot use {where}: {error}. A cluster that was started with a token "
                "wants RAY_AUTH_MODE=token here, too",
                param="executor",
            ) from error
        finally:
            timer.cancel()

    @contextmanager
    def _group(self) -> Iterator[Any]:
        from ray.util.placement_group import placement_group, remove_placement_group

        each = self._wanted.resources
        first = each | {f"node:{_here()}": SHARE}
        group = placement_group([first, *[each] * (self._wanted.nodes - 1)], strategy="PACK")
        try:
            yield group
        finally:
            remove_placement_group(group)

    def _serve(self, group: Any) -> None:
        """Until the server closes the channel. Raises ConfigError."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In

        def actor(kind: type, node: int) -> Any:
            each = self._wanted.resources
            place = In(group, placement_group_bundle_index=node)
            options = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0), "scheduling_strategy": place}
            made = ray.remote(kind).options(**options).remote()
            actors.append(made)
            return made

        actors: list[Any] = []
        try:
            if not self._wait(group.ready()):
                return
            gpus = ray.get(actor(Seat, 0).gpus.remote()) if "GPU" in self._wanted.resources else None
            self._tell(Placed(_here(), gpus))
            begin = self._events.get()
            if begin is None:
                return
            for config in begin.nodes:
                node = config.node_rank
                run = actor(Node, node).run.remote(msgspec.json.encode(config), begin.variables)
                run.future().add_done_callback(partial(self._ended, node))
            while self._events.get() is not None:
                pass
        finally:
            for each in actors:
                ray.kill(each)

    def _wait(self, ready: Any) -> bool:
        """Whether there is room now; False if the server is gone. Raises ConfigError."""
        timer = threading.Timer(self._wanted.timeout, self._events.put, ["late"])
        timer.start()
        ready.future().add_done_callback(lambda future: self._events.put("placed"))
        event = self._events.get()
        timer.cancel()
        if event == "late":
            raise _no_room(self._wanted)
        return event is not None

    def _ended(self, node: int, future: Any) -> None:
        """In a thread of Ray's."""
        try:
            fault = msgspec.json.decode(future.result(), type=Fault | None)
        except Exception as error:  # as Ray tells of actors that are gone, or could not be made
            fault = Fault.of(WorkerDied(f"the actor of node {node}: {error}"))
        if fault is not None:
            self._tell(Over(fault))


def left_behind() -> str:
    """The address of a cluster of this host that has ended without saying so, as when it was killed; "" if
    there is none. Ray would look for it for minutes."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        left = Path(folder, "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        return ""
    host, _, port = left.rpartition(":")
    if os.environ.get("RAY_ADDRESS") or not port.isdecimal():
        return ""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT):
            return ""
    except OSError:
        return left


def _here() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def _no_room(wanted: Wanted) -> ConfigError:
    import ray

    def text(resources: dict[str, float]) -> str:
        return ", ".join(f"{resources.get(name, 0):g} {name}" for name in wanted.resources)

    return ConfigError(
        f"--executor ray: the cluster has had no room for {wanted.nodes} nodes of {text(wanted.resources)} "
        f"for {wanted.timeout:.0f} s, one of them on this host; it has {text(ray.cluster_resources())}, of "
        f"which {text(ray.available_resources())} are free",
        param="executor",
    )


def main(channel: int) -> None:
    end = socket.socket(fileno=channel)
    end.set_inheritable(False)
    file = end.makefile("rb")
    events: SimpleQueue[Any] = SimpleQueue()
    wanted = msgspec.json.decode(file.readline(), type=Wanted)

    def read() -> None:
        with suppress(OSError):  # where the server was killed
            while line := file.readline():
                events.put(msgspec.json.decode(line, type=Begin))
        events.put(None)
        threading.Timer(LEAVE, os._exit, [1]).start()

    threading.Thread(target=read, daemon=True).start()
    Job(end, wanted, events).run()
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads
