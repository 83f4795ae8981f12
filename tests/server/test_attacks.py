"""The attacks of ``bench/attack.py``, made small: each is answered or refused by name, and nobody else
notices."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, serving

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import attack
import batch_attacks
import near_limits
import stored

HELD = 2000.0  # milliseconds that a /health/live may take on a machine that does much else
SCALE, NEAR_SCALE = 0.2, 0.05
DEAR = {  # a quarter as large as the others
    *("gzip bomb", "held gzip bodies", "tool calls", "slow schemas", "everything", "batch of 200 MB"),
    *("56 schemas of 230 KB", "4,096 choices, 4,096 biases", "4,096 choices, 64 stops"),
}
ALIKE = {  # to others, and dear; .ci/full makes them at their whole size
    *("4,096 choices, 64 stops", "56 schemas of 230 KB", "1M logprobs, streamed", "n 128, patterns of 512"),
}
MADE = attack.BEYOND | near_limits.PLAIN | near_limits.FAKE | stored.STORED | batch_attacks.ATTACKS
MEMORY = 48 << 20  # bytes that may be left of all the attacks, beside 15 % of what a warm server takes
# Fewer descriptors, slots and places in the queue than the small attacks ask for.
DESCRIPTORS = 150
FLAGS = (
    *("--max-running-requests", "16", "--max-queued-requests", "64", "--kv-cache-bytes", "64M"),
    *("--drain-timeout", "1", "--api-key", attack.KEY, "--api-key", attack.OTHER),
)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    profiles = ("--profile-folder", str(tmp_path_factory.mktemp("profiles")))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))  # a process that starts inherits it
    try:
        process = ServerProcess("--model", str(tiny_model), *FLAGS, *profiles, *batch_attacks.SERVERS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        process.wait_ready()
        asyncio.run(attack.warm_up(attack.Target(process.port)))
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def before(server: ServerProcess) -> int:
    return attack.memory(server.process.pid)


@pytest.fixture(scope="module")
def probe(server: ServerProcess) -> Iterator[attack.Probe]:
    probing = attack.Probe(server.port)
    yield probing
    probing.close()


def made(name: str, server: ServerProcess) -> attack.Outcome:
    scale = (SCALE if name in attack.BEYOND else NEAR_SCALE) / (4 if name in DEAR else 1)
    return asyncio.run(attack.ATTACKS[name](attack.Target(server.port, scale, server.process.pid)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in MADE]
)
def test_an_attack_is_answered_and_costs_nobody_else(
    server: ServerProcess, before: int, probe: attack.Probe, name: str
) -> None:
    probe.slowest()
    said = len(server.output)
    outcome = made(name, server)
    assert probe.slowest() < HELD
    assert not {0, 500} & set(outcome.statuses), server.output[-3000:]
    assert outcome.more.get("broken", 0) == 0
    assert outcome.more.get("other", {200: 1}) == {200: 1}
    assert outcome.more.get("other_s", 0) < attack.OTHERS_WORK
    found = asyncio.run(
        attack.send(attack.Target(server.port), attack.request(attack.TEXT, ASKED, attack.OTHER))
    )
    assert found.statuses == {200: 1}
    most = attack.BACK * before + MEMORY
    assert attack.settled(server.process.pid, most) <= most
    assert "Traceback" not in server.output[said:]


def test_schemas_of_tools_are_not_multiplied(tiny_model: Path) -> None:
    """Where calls have an element for each argument. What does not fit is refused before it is made."""
    fake = ("--executor", "fake", *near_limits.WRITTEN)
    with serving("--model", str(tiny_model), *FLAGS, *fake) as server:
        server.wait_ready()
        probing, before = attack.Probe(server.port), attack.memory(server.process.pid)
        target = attack.Target(server.port, SCALE, server.process.pid)
        for name, attacking in near_limits.ELEMENTS.items():
            assert asyncio.run(attacking(target)).statuses.keys() == {400}, name
        assert probing.slowest() < HELD
        probing.close()
        most = attack.BACK * before + MEMORY
        assert attack.settled(server.process.pid, most) <= most


ASKED: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2}


@pytest.mark.parametrize("more", [pytest.param((), marks=pytest.mark.slow), ("--max-connections", "8")])
def test_a_terminate_ends_the_process_and_tells_every_stream(tiny_model: Path, more: tuple[str, ...]) -> None:
    """Streams longer than the drain, and a text that is being parsed. What does not fit is refused. Ends of
    workers are in ``test_shutdown.py``."""
    fake = ("--executor", "fake", "--fake-step-ms", "5")
    with serving("--model", str(tiny_model), *FLAGS, *fake, *more) as server:
        told, code = asyncio.run(terminated(server))
    assert told == [True] * 16
    assert code == 0


async def terminated(server: ServerProcess) -> tuple[list[bool], int]:
    target = attack.Target(server.port, SCALE)
    body = {**ASKED, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    streams = [
        asyncio.ensure_future(attack.exchange(target, attack.request(attack.TEXT, body))) for _ in range(16)
    ]
    text = {"text": "<tool_call>{" * 20_000, "tool_call_parser": "hermes"}
    parsing = asyncio.ensure_future(attack.send(target, attack.request("/parse_function_call", text)))
    await asyncio.sleep(0.5)
    server.signal(signal.SIGTERM)
    answers = await asyncio.gather(*streams)
    parsing.cancel()
    return [b'"error"' in answer for _, answer in answers], await asyncio.to_thread(server.wait)
