"""A newcomer's way, timed: a fresh virtual environment and an empty home, from the README's first command to
the first sensible answer. One JSON line.

    python bench/newcomer.py                                              # a fresh clone, installed as the README says
    python bench/newcomer.py --no-compiler                                # the same where there is no compiler: slow kernels
    python bench/newcomer.py --no-compiler --wheel dist/sgla-0.1.0-py3-none-linux_x86_64.whl   # which brings its kernels

A wheel with kernels: ``SGLA_WHEEL_KERNELS=avx2,avx512,generic python -m build --wheel``. Nothing of this
user's home is read, neither pip's cache nor a model; settings of pip in the environment and in /etc hold. The
answer is sensible if it names Paris.
"""  # noqa: E501

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lines import emit

COMPILERS = re.compile(
    r"(.*-)?(cc|c\+\+|c89|c99|gcc|g\+\+|cpp|clang|clang\+\+|clang-cpp|nvcc|icx|icpx)(-[\d.]+)?"
)
QUESTION = "What is the capital of France?"
PATIENCE = 1800.0  # seconds
POLL = 0.05


class Clock:
    """``seconds``: what each stage took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - began, 2)


def without_compilers(folder: Path) -> str:
    """A PATH of links to all that this PATH has, but for compilers."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = folder / program.name
            if not COMPILERS.fullmatch(program.name) and not os.path.lexists(link):
                link.symlink_to(program.absolute())
    return str(folder)


def environment(folder: Path, compiler: bool) -> dict[str, str]:
    """Of a user with an empty home."""
    home = folder / "home"
    home.mkdir()
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SGLA_", "XDG_", "PYTHON", "VIRTUAL_ENV", "HF_", "CXX", "CC"))
    }
    path = os.environ["PATH"] if compiler else without_compilers(folder / "programs")
    return kept | {"HOME": str(home), "PATH": os.pathsep.join([str(folder / "venv" / "bin"), path])}


def install(clock: Clock, folder: Path, wheel: str | None, env: Mapping[str, str]) -> None:
    with clock.stage("venv"):
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, env=env)
    target = [wheel]
    if wheel is None:
        source, clone = Path(__file__).parents[1], folder / "sgla"
        subprocess.run(["git", "clone", "-q", "--depth", "1", source.as_uri(), str(clone)], check=True)
        target = ["-e", str(clone)]
    with clock.stage("install"):
        pip = [str(folder / "venv" / "bin" / "pip"), "install", "-q", *filter(None, target)]
        subprocess.run(pip, check=True, env=env, cwd=folder)


def phase(port: int) -> str:
    """What the server says that it does; "start" before it listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health/live")
        return str(json.loads(connection.getresponse().read())["phase"])
    except (OSError, http.client.HTTPException):
        return "start"
    finally:
        connection.close()


def wait(clock: Clock, server: subprocess.Popen[bytes], port: int) -> None:
    """Until the model is ready; each phase is a stage."""
    end = time.monotonic() + PATIENCE
    now = "start"
    while now != "ready":
        before = now
        with clock.stage(before):
            while now == before:
                if server.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the server is not ready; it was at {now}")
                time.sleep(POLL)
                now = phase(port)


def ask(clock: Clock, port: int) -> dict[str, Any]:
    """The answer, streamed, and its tokens a second."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 64,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    times: list[float] = []
    with clock.stage("first token"):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        pieces = filter(None, map(delta, connection.getresponse()))
        text = next(pieces)
    for piece in pieces:
        text += piece
        times.append(time.monotonic())
    connection.close()
    speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 2 else None
    return {"answer": text, "sensible": "paris" in text.lower(), "pieces_per_s": speed and round(speed, 1)}


def delta(line: bytes) -> str:
    """The text of an event's line."""
    if not line.startswith(b"data: {"):
        return ""
    choices = json.loads(line[len(b"data: ") :]).get("choices")
    return (choices[0]["delta"].get("content") or "") if choices else ""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", help="install this instead of a clone of the working tree's last commit")
    parser.add_argument("--no-compiler", action="store_true")
    parser.add_argument("--keep", action="store_true", help="leave the folder with environment, home and log")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="newcomer-"))
    clock = Clock()
    env = environment(folder, not args.no_compiler)
    wheel = args.wheel and str(Path(args.wheel).resolve())
    try:
        install(clock, folder, wheel, env)
        port = free_port()
        command = [str(folder / "venv" / "bin" / "sgla"), "serve", "--port", str(port)]
        with (folder / "serve.log").open("wb") as log:
            server = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)
            try:
                wait(clock, server, port)
                answer = ask(clock, port)
            finally:
                server.terminate()
                server.wait()
        stages = clock.seconds
        emit(
            {
                "bench": "newcomer",
                "compiler": not args.no_compiler,
                "installed": Path(wheel).name if wheel else "-e .",
                "seconds": stages | {"all": round(sum(stages.values()), 2)},
                **answer,
            }
        )
    finally:
        if args.keep:
            print(folder, file=sys.stderr)
        else:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
