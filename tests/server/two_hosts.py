"""Two hosts for tests: network namespaces of this machine with an Ethernet cable between them, or, where
these cannot be made, its loopback addresses."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from server_process import ServerProcess

CLONE_NEWNET = 0x40000000
FAKE = ("--executor", "fake", "--fake-step-ms", "5")
SECRET = "between us"
SLOW = "tc qdisc add dev cable root tbf rate 20mbit burst 16kb latency 400ms"


class Host:
    """``name``: of its namespace; "" for this machine as it is."""

    def __init__(self, address: str, name: str = "") -> None:
        self.address, self.name = address, name

    def run(self, *command: str) -> str:
        prefix = ["ip", "netns", "exec", self.name] if self.name else []
        done = subprocess.run([*prefix, *command], capture_output=True, text=True, check=True)
        return done.stdout

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread opens meanwhile are this host's."""
        if not self.name:
            yield
            return
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            enter(f"/run/netns/{self.name}")
            yield
            enter(f"/proc/self/fd/{before}")
        finally:
            os.close(before)

    @property
    def pids(self) -> list[int]:
        """Of what runs there."""
        done = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(pid) for pid in done.stdout.split()]


def enter(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {path}")
    finally:
        os.close(fd)


class NodeProcess(ServerProcess):
    """A node of a server of two, on ``host``."""

    def __init__(self, host: Host, first: Host, node: int, port: int, *flags: str, secret: str = SECRET):
        self.host = host
        meet = ("--dist-init-addr", f"{first.address}:{port}", "--nnodes", "2", "--node-rank", str(node))
        prefix = ["ip", "netns", "exec", host.name] if host.name else []
        super().__init__(
            "--threads", "1", *meet, *flags, prefix=prefix, variables={"SGLA_DIST_SECRET": secret}
        )

    def request(self, method: str, path: str, body: Any = None, timeout: float = 60) -> tuple[int, Any]:
        with self.host.inside():
            return super().request(method, path, body, timeout)


class Network:
    """Two hosts; with a cable, ``cut`` takes it out, ``mend`` puts it in, and ``slow`` makes it slow."""

    def __init__(self, first: Host, second: Host) -> None:
        self.first, self.second = first, second
        self._made: list[NodeProcess] = []
        self._port = 29501

    def nodes(self, *flags: str) -> tuple[NodeProcess, NodeProcess]:
        return self.node(0, *flags), self.node(1, *flags)

    def node(self, number: int, *flags: str, **more: Any) -> NodeProcess:
        host = (self.first, self.second)[number]
        self._made.append(NodeProcess(host, self.first, number, self._port, *flags, **more))
        return self._made[-1]

    def cut(self) -> None:
        self.second.run("ip", "link", "set", "cable", "down")

    def mend(self) -> None:
        self.second.run("ip", "link", "set", "cable", "up")

    def slow(self) -> None:
        """20 Mbit/s, and up to 0.4 s for what waits."""
        for host in (self.first, self.second):
            host.run(*SLOW.split())

    def close(self) -> None:
        for process in self._made:
            process.stop()


def none_left(network: Network) -> bool:
    """Nothing runs in the namespaces any more, soon."""
    deadline = time.monotonic() + 10
    while network.first.pids or network.second.pids:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def loopback(port: int) -> Iterator[Network]:
    """Two addresses of this machine."""
    network = Network(Host("127.0.0.2"), Host("127.0.0.1"))
    network._port = port
    try:
        yield network
    finally:
        network.close()


@contextmanager
def namespaces() -> Iterator[Network]:
    """Skips the test where none can be made."""
    if shutil.which("ip") is None:
        pytest.skip("no iproute2")
    names = [f"sgla{os.getpid()}{end}" for end in "ab"]
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}")
    for i, name in enumerate(names):
        commands += [f"-n {name} address add 10.213.7.{i + 1}/24 dev cable"]
        commands += [f"-n {name} link set {device} up" for device in ("lo", "cable")]
    try:
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no network namespaces: ip {command}: {done.stderr.strip()}")
        network = Network(*(Host(f"10.213.7.{i + 1}", name) for i, name in enumerate(names)))
        try:
            yield network
        finally:
            network.close()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
