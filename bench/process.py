"""A server process under measurement: start, wait until it answers, peak memory of its process tree, stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

SAMPLE_SECONDS = 0.1


class Server:
    """Context manager. ``ready_s``: seconds from spawn to the first 200 of ``path``; ``peak_rss``: bytes, sum
    over processes."""

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        path: str,
        log: Path,
        timeout: float = 600,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``env``: beside this process's."""
        self.command, self.url, self.log = list(command), url, log
        self._env = {**os.environ, **(env or {})}
        self._began = 0.0
        self._path, self._timeout = path, timeout
        self.ready_s = 0.0
        self.peak_rss = 0
        self._stopped = threading.Event()

    def start(self) -> Server:
        """Begin, and do not wait: several start at once if each is entered behind that."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that close() is reached
        self._began = time.monotonic()
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                self.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self._env,
            )
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        return self

    def __enter__(self) -> Server:
        if not self._began:
            self.start()
        try:
            self._wait(self._began)
        except BaseException:
            self.close()
            raise
        self.ready_s = time.monotonic() - self._began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """SIGTERM, then SIGKILL to what is left of the session."""
        self._stopped.set()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._sampler.join()

    def _wait(self, began: float) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() - began < self._timeout:
            if self.process.poll() is not None:
                tail = self.log.read_text(errors="replace")[-2000:]
                raise SystemExit(f"the server ended with code {self.process.returncode}:\n{tail}")
            try:
                with opener.open(self.url + self._path, timeout=5) as response:
                    if response.status == 200:
                        return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass  # not listening yet, or 503 while it loads
            time.sleep(0.02)
        raise SystemExit(f"the server was not ready after {self._timeout} s; see {self.log}")

    def _sample(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            self.peak_rss = max(self.peak_rss, sum(map(resident, tree(self.process.pid))))


def tree(pid: int) -> list[int]:
    """``pid`` and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += tree(int(child))
    return found


def resident(pid: int) -> int:
    """Resident bytes of a process, 0 if it has gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def proportional(pid: int) -> int:
    """Resident bytes of a process, each page divided by the number of processes that share it (forked ones
    do); 0 if it has gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
