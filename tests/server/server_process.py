"""A real ``sgla serve`` process for tests: start, wait for readiness, look at it, stop it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from sgla.processes import tied

SLACK = 10.0  # seconds that a busy machine may take beside what is promised, for ends that could take longer


class ServerProcess:
    """``args`` are the flags after ``sgla serve``; the port is picked by the server and read from its
    output. ``prefix``: a command that starts it; ``variables`` of its environment."""

    def __init__(
        self, *args: str, prefix: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "SGLA_DEMO": "packaged"}
        environment |= variables or {}
        self.process = subprocess.Popen(
            tied([*prefix, sys.executable, "-m", "sgla", "serve", "--port", "0", *args]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.port = 0
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if "listening on http://" in line:
                self.port = int(
                    line.split("listening on http://")[1].split("/")[0].split()[0].rsplit(":", 1)[1]
                )
                self._listening.set()
        self._listening.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_listening(self, timeout: float = 30) -> None:
        assert self._listening.wait(timeout), self.output
        assert self.port, self.output

    def wait_ready(self, timeout: float = 120) -> None:
        self.wait_listening()
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.output
            if self.get("/health/ready")[0] == 200:
                return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout} s:\n{self.output}")

    def get(self, path: str) -> tuple[int, Any]:
        return self.request("GET", path)

    def request(self, method: str, path: str, body: Any = None, timeout: float = 60) -> tuple[int, Any]:
        """One request on a fresh connection: status and decoded JSON (or text)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = json.dumps(body) if body is not None else None
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def workers(self) -> list[psutil.Process]:
        """The processes that run the model (not those that compile grammars, render templates and the
        like)."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "sgla.executor.child" in " ".join(_cmdline(child))]

    def family(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def stats(self) -> dict[str, Any]:
        """The scheduler's counters of this moment."""
        return dict(self.get("/get_server_info")[1]["internal_states"][0])

    def metric(self, name: str) -> float:
        """Sum of a metric's samples in /metrics, which may be some tenths of a second old."""
        total = 0.0
        for line in str(self.get("/metrics")[1]).splitlines():
            if line.startswith((name + "{", name + " ")):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 20) -> int:
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._reader.join(5)


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextmanager
def serving(*args: str, ready: bool = True) -> Iterator[ServerProcess]:
    server = ServerProcess(*args)
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        server.stop()
