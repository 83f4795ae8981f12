"""How the server ends: in time whatever runs, and with a last word to every client."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_server import local_server
from server_process import SLACK, ServerProcess, serving

ENDLESS = {"prompt": [1, 2, 3], "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
SLOW = ("--executor", "fake", "--fake-step-ms", "20", "--context-length", "8192")
STREAMS = 20


def asked(server: ServerProcess, answers: list[Any], stream: bool) -> threading.Thread:
    def run() -> None:
        with contextlib.suppress(OSError):
            answers.append(server.request("POST", "/v1/completions", {**ENDLESS, "stream": stream}))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@contextlib.contextmanager
def busy(model: Path, *flags: str) -> Iterator[tuple[ServerProcess, list[Any], list[threading.Thread]]]:
    """A server with ``STREAMS`` streams and two requests for whole answers, none of which ends soon."""
    with serving("--model", str(model), *SLOW, *flags) as server:
        answers: list[Any] = []
        threads = [asked(server, answers, stream=i >= 2) for i in range(STREAMS + 2)]
        deadline = time.monotonic() + 20
        while server.metric("sgla:num_running_reqs") < STREAMS + 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield server, answers, threads
        for thread in threads:
            thread.join(20)


def check(answers: list[Any]) -> None:
    """Reading a chunked answer without its terminator would have raised, and brought none."""
    whole = [body for status, body in answers if status == 503]
    assert [body["error"]["code"] for body in whole] == ["draining"] * 2
    streams = [body for status, body in answers if status == 200]
    assert len(streams) == STREAMS
    for body in streams:
        assert '"code":"draining"' in body
        assert body.endswith("data: [DONE]\n\n")


def test_the_end_of_the_drain_is_told_to_every_client(tiny_model: Path) -> None:
    with busy(tiny_model, "--drain-timeout", "1") as (server, answers, threads):
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - began < 1 + SLACK
        for thread in threads:
            thread.join(20)
        check(answers)


def test_the_second_signal_is_told_to_every_client(tiny_model: Path) -> None:
    """It may be another one than the first."""
    with busy(tiny_model) as (server, answers, threads):
        family = server.family()
        server.signal(signal.SIGINT)
        while server.get("/health/ready")[0] != 503:
            time.sleep(0.02)
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - began < SLACK
        for thread in threads:
            thread.join(20)
        check(answers)
        assert psutil.wait_procs(family, 5)[1] == []


async def test_a_response_in_the_background_fails_with_the_server(tiny_model: Path) -> None:
    async with local_server(model=str(tiny_model), sampling_defaults="openai") as local:
        local.system.ingress.pause(True)
        body = {"input": "hi", "background": True}
        ids = []
        for stream in (False, True):
            async with local.client.post("/v1/responses", json={**body, "stream": stream}) as response:
                text = await response.content.readany() if stream else await response.read()
                ids.append(text.decode().split('"id":"')[1].split('"')[0])
        local.system.end_requests()
        for uid in ids:
            async with local.client.get(f"/v1/responses/{uid}") as response:
                answer = await response.json()
            assert answer["status"] == "failed"
            assert "shut down" in answer["error"]["message"]


NEVER = {
    "threads": "threading.Thread(target=stuck).start(), ThreadPoolExecutor().submit(stuck)",
    "a thread of the loop": "loop.run_in_executor(None, stuck)",
    "the loop": "loop.call_later(0.5, stuck)",
    "the loop, in C": "loop.call_later(0.5, re.match, '(a*)*b', 'a' * 60)",
    "a thread, in C": "loop.call_later(0.5, loop.run_in_executor, None, re.match, '(a*)*b', 'a' * 60)",
    "a task that takes no end": "tasks.append(asyncio.ensure_future(stubborn()))",
}
HANGING_START = "system.find_model = lambda config, report: stuck()"
PROGRAM = """
import asyncio, re, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from sgla.actors import system
from sgla.cli import entry

tasks = []
start = system.System.start

def stuck():
    while True:
        time.sleep(0.01)

async def stubborn():
    while True:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            pass

async def start_and_hang(self):
    facts = await start(self)
    loop = asyncio.get_running_loop()
    {never}
    return facts

system.System.start = start_and_hang
{hanging_start}
sys.argv = ["sgla", "serve", "--port", "0", "--model", {model!r}, "--executor", "fake", "--drain-timeout", "1"]
entry()
"""  # noqa: E501


@contextlib.contextmanager
def hanging(line: bytes, **parts: str) -> Iterator[subprocess.Popen[bytes]]:
    """The program, once it has printed ``line``."""
    program = PROGRAM.format(**{"never": "pass", "hanging_start": "", **parts})
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        while line not in process.stdout.readline():
            assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()


ALIKE = "a thread of the loop", "a thread, in C"  # what the others show, but for where it hangs


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] * (what in ALIKE)) for what in NEVER]
)
def test_nothing_keeps_the_process_from_ending(tiny_model: Path, what: str) -> None:
    with hanging(b"ready in", never=NEVER[what], model=str(tiny_model)) as process:
        if "call_later" in NEVER[what]:
            time.sleep(1)  # it hangs when the signal comes
        began = time.monotonic()
        process.terminate()
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - began < 1 + SLACK, errors
        assert process.returncode == (-signal.SIGALRM if "in C" in what else 0), errors


def test_a_start_that_never_ends_ends(tiny_model: Path) -> None:
    """As that of a download may not."""
    with hanging(b"listening", hanging_start=HANGING_START, model=str(tiny_model)) as process:
        began = time.monotonic()
        process.terminate()
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - began < SLACK, errors
        assert process.returncode == 0, errors
