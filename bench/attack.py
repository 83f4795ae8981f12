"""Hostile clients against a server of its own: how long does the loop stand still, what stays in memory, does
the process end?

    python bench/attack.py [--model demo] [--scale 1] [--only NAME ...] [--server-args "..."]

Each attack is one client, without care for what it gets; another process asks ``/health/live`` all the while,
which is open and costs nothing, so its slowest answer is how long one client held the loop. Prints a JSON
line for each attack and one for SIGTERM; the exit code is 1 if anything breaks the server's promises
(``faults``). ``--scale`` makes every attack smaller: ``tests/server/test_attacks.py`` runs them so. All
traffic is on the loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import batch_attacks
import lines
import near_limits
import stored
from hostile import (
    CHAT,
    KEY,
    OTHER,
    PATIENCE,
    RESPONSES,
    TEXT,
    Attack,
    Outcome,
    Target,
    exchange,
    head,
    listed,
    one,
    request,
    send,
    write,
)
from process import Server, free_port, proportional, tree

DESCRIPTORS = 1024  # the soft limit that the server is started with
SETTLE = 20.0  # seconds that memory may take to come back
BACK = 1.15  # times what a warm server takes
DRAIN = 3.0
LIMIT = 100.0  # milliseconds that a /health/live may take
OTHERS = 500  # and another client's look at what it has stored
# Seconds for another client's work: a small schema, batch or text to parse, three calls of tools.
OTHERS_WORK = 15.0

# Bodies


def bomb(target: Target, mebibytes: int) -> bytes:
    return gzip.compress(bytes(target.many(mebibytes) << 20), 9)


async def gzip_bomb(target: Target) -> Outcome:
    """To a route that takes bodies, to one that does not exist, and with a wrong key."""
    data = bomb(target, 1000)
    places = [(TEXT, KEY), ("/nowhere", KEY), (TEXT, "wrong")]
    packed = "Content-Encoding: gzip\r\n"
    return await send(target, *[head(path, len(data), key, more=packed) + data for path, key in places])


async def held_gzip(target: Target) -> Outcome:
    """Sixty bodies that inflate to 30 MiB each and lack their last byte."""
    data = bomb(target, 30)
    start = head(TEXT, len(data), KEY, more="Content-Encoding: gzip\r\n") + data[:-1]
    held = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", target.port) for _ in range(60)))
    for _, writer in held:
        await write(writer, [start])
    await asyncio.sleep(3)
    for _, writer in held:
        writer.close()
    return Outcome()


def ids(count: int, more: bytes = b"") -> Callable[[Target], bytes]:
    return lambda target: b'{"prompt":' + listed(target.many(count), b"7") + more + b"}"


def messages(target: Target) -> bytes:
    return b'{"messages":' + listed(target.many(700_000), b'{"role":"user","content":"a"}') + b"}"


def items(target: Target) -> bytes:
    return b'{"input":' + listed(target.many(300_000), b'{"role":"user","content":"a"}') + b"}"


async def deep_arguments(target: Target) -> Outcome:
    depth = target.many(100_000)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * depth}}
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]}
    nested = b'{"messages":' + b"[" * depth + b"]" * depth + b"}"
    return await send(target, request(CHAT, {**chat, "max_tokens": 1}), request(CHAT, nested))


# Work for one request


async def references(target: Target) -> Outcome:
    """3,000 references into a store that is full."""
    filled = []
    for _ in range(target.many(32)):
        stored = request(RESPONSES, {"input": "a", "max_output_tokens": 1})
        filled += await asyncio.gather(*(exchange(target, stored) for _ in range(32)))
    found = {"type": "item_reference", "id": "msg_missing"}
    for _, answer in filled:
        if b'"msg_' in answer:
            found["id"] = "msg_" + answer.split(b'"msg_')[1].split(b'"')[0].decode()
    body = {"input": [found] * target.many(3000), "max_output_tokens": 1}
    return await send(target, request(RESPONSES, body))


async def tool_calls(target: Target) -> Outcome:
    """A hostile text to parse, and another user's small /tokenize behind it."""
    text = "<tool_call>{" * target.many(100_000)
    body = {"text": text, "tool_call_parser": "hermes"}
    attacking = [
        asyncio.ensure_future(send(target, request("/parse_function_call", body))) for _ in range(12)
    ]
    await asyncio.sleep(0.2)
    began = time.monotonic()
    other = await send(target, request("/tokenize", {"prompt": "word " * 1000}, OTHER))
    waited = time.monotonic() - began
    outcome = Outcome(more={"other_s": round(waited, 2), "other": dict(other.statuses)})
    for found in await asyncio.gather(*attacking):
        outcome.statuses += found.statuses
    return outcome


def detokenized(target: Target) -> bytes:
    return b'{"tokens":' + listed(target.many(10_000_000), b"7") + b"}"


def long_text(target: Target) -> dict[str, Any]:
    return {"prompt": "word " * target.many(2_000_000), "return_token_strs": True}


async def prompt_logprobs(target: Target) -> Outcome:
    prompt = [[5 + i % 1000 for i in range(target.many(2000))]] * 32
    body = {"prompt": prompt, "prompt_logprobs": 20, "max_tokens": 1, "temperature": 0}
    return await send(target, request(TEXT, body))


def whole_vocabulary(target: Target) -> dict[str, Any]:
    """The longest answer that there may be: hundreds of MB."""
    prompt = [5 + i for i in range(target.many(150))]
    return {"prompt": prompt, "prompt_logprobs": -1, "max_tokens": 1, "temperature": 0}


def many_regexes(target: Target) -> dict[str, Any]:
    return {"prompt": "a", "n": 128, "max_tokens": 2, "stop_regex": [f"(a?){{{target.many(250)}}}b"]}


async def slow_schemas(target: Target) -> Outcome:
    """Ten schemas that cannot be compiled in time, and another user's small one behind them."""

    def asking(schema: dict[str, Any], key: str = KEY) -> bytes:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        return request(TEXT, {"prompt": "a", "max_tokens": 4, "response_format": form}, key)

    await send(target, asking({"const": "the compiler starts"}, OTHER))
    # Automata with that many states.
    dear = [{"type": "integer", "multipleOf": 99999989 + i} for i in range(target.many(10))]
    attacking = [asyncio.ensure_future(send(target, asking(schema))) for schema in dear]
    await asyncio.sleep(0.5)
    began = time.monotonic()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    other = await send(target, asking(schema, OTHER))
    outcome = Outcome(more={"other_s": round(time.monotonic() - began, 2), "other": dict(other.statuses)})
    for found in await asyncio.gather(*attacking):
        outcome.statuses += found.statuses
    return outcome


# Connections and admission


async def silent_connections(target: Target) -> Outcome:
    """More than the descriptors the server was started with; then one that asks."""
    silent = []
    for _ in range(target.many(1100)):
        try:
            silent.append(await asyncio.open_connection("127.0.0.1", target.port))
        except OSError:
            break
    outcome = await send(target, head("/health", 0, KEY, "GET"))
    for _, writer in silent:
        writer.close()
    outcome.more["connections"] = len(silent)
    return outcome


async def long_headers(target: Target) -> Outcome:
    """Of many connections, none of which ends; then a request of another client."""
    data = head("/version", 0, KEY, "GET", "".join(f"x-{i}: {'a' * 8000}\r\n" for i in range(7)))[:-2]
    held = []
    for _ in range(target.many(4000)):
        try:
            held.append(await asyncio.open_connection("127.0.0.1", target.port))
        except OSError:
            break
        await write(held[-1][1], [data])
    outcome = await send(target, head("/version", 0, OTHER, "GET"))
    for _, writer in held:
        writer.close()
    return outcome


async def open_health(target: Target) -> Outcome:
    """A flood of /health_generate without a key must not cost a user with one a place."""
    flood = [
        asyncio.ensure_future(exchange(target, head("/health_generate", 0, "wrong", "GET")))
        for _ in range(target.many(2000))
    ]
    await asyncio.sleep(0.2)
    other = await send(target, request(TEXT, {"prompt": "a", "max_tokens": 2}, OTHER))
    answers = await asyncio.gather(*flood)
    return Outcome(Counter(status for status, _ in answers), {"other": dict(other.statuses)})


async def streams(target: Target, count: int, tokens: int = 8) -> Counter[str]:
    """So many at once: how many came whole, were refused before the first byte with a time to retry, or
    broke."""
    body = {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "stream": True}

    async def stream() -> str:
        status, answer = await exchange(target, request(TEXT, body))
        if status == 200:
            return "whole" if b"data: [DONE]" in answer and b'"error"' not in answer else "broken"
        return "refused" if status == 429 and b"retry-after:" in answer.lower() else "broken"

    return Counter(await asyncio.gather(*(stream() for _ in range(count))))


async def burst(target: Target) -> Outcome:
    return Outcome(more=dict(await streams(target, target.many(2000))))


async def everything(target: Target) -> Outcome:
    """A burst on top of a gzip bomb, readers that do not read, and a fleet of clients that is killed."""
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True}
    slow, fleet = [], []
    for group, count in ((slow, 20), (fleet, 200)):
        for _ in range(target.many(count)):
            _, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1024)
            writer.write(request(TEXT, body))
            group.append(writer)
    bombing = asyncio.ensure_future(gzip_bomb(target))
    bursting = asyncio.ensure_future(streams(target, target.many(1000)))
    await asyncio.sleep(0.5)
    for writer in fleet:
        writer.transport.abort()
    found = await bursting
    outcome = await bombing
    for writer in slow:
        writer.close()
    return Outcome(outcome.statuses, dict(found))


BEYOND: dict[str, Attack] = {
    "gzip bomb": gzip_bomb,
    "held gzip bodies": held_gzip,
    "10M ids, max_tokens 1.0": one(TEXT, ids(10_000_000, b',"max_tokens":1.0')),
    "5M empty prompts": one(
        TEXT, lambda target: b'{"prompt":' + listed(target.many(5_000_000), b'""') + b"}"
    ),
    "700k messages": one(CHAT, messages),
    "300k items": one(RESPONSES, items),
    "deep arguments": deep_arguments,
    "item references": references,
    "tool calls": tool_calls,
    "detokenize 10M ids": one("/detokenize", detokenized),
    "tokenize 10 MB": one("/tokenize", long_text, copies=3),
    "prompt logprobs": prompt_logprobs,
    "whole vocabulary": one(TEXT, whole_vocabulary),
    "stop_regex, n 128": one(TEXT, many_regexes),
    "slow schemas": slow_schemas,
    "silent connections": silent_connections,
    "long headers": long_headers,
    "open health": open_health,
    "burst": burst,
    "everything": everything,
}
# More arguments of ``sgla serve``, in which FOLDER is one of its own, and the attacks on such a server.
SERVERS: list[tuple[list[str], dict[str, Attack]]] = [
    ([], BEYOND | near_limits.PLAIN),
    (
        ["--executor", "fake", "--fake-step-ms", "1", "--max-queued-requests", "4096"],
        near_limits.FAKE | stored.STORED,
    ),
    (near_limits.WRITTEN, near_limits.ELEMENTS),
    (["--max-connections", "8"], near_limits.FEW),
    (["--model", "minilm"], near_limits.VECTORS),
    (["--state-path", "FOLDER/state", *batch_attacks.SERVERS], batch_attacks.ATTACKS),
]
ATTACKS = {name: attack for _, attacks in SERVERS for name, attack in attacks.items()}


# Measuring


class Probe:
    """Another process asks /health/live every 10 ms."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, __file__, "--probe", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.slowest()  # it has begun

    def slowest(self) -> float:
        """The longest that it waited since this was asked last, in milliseconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def probe(port: int) -> None:
    """Until stdin ends; prints the longest time since the last line of it for each line, failures as the time
    they took."""
    ended, asked, slowest = threading.Event(), threading.Event(), 0.0

    def listen() -> None:
        for _ in sys.stdin:
            asked.set()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    connection: socket.socket | None = None
    failing: float | None = None  # since when nothing is answered
    while not ended.wait(0.01):
        if asked.is_set():
            asked.clear()
            print(1000 * max(slowest, time.monotonic() - failing if failing is not None else 0.0), flush=True)
            slowest = 0.0
        began = time.monotonic()
        try:
            if connection is None:
                connection = socket.create_connection(("127.0.0.1", port), PATIENCE)
            connection.sendall(head("/health/live", 0, "none", "GET"))
            answered = connection.recv(65536).startswith(b"HTTP/1.1 200")
        except OSError:
            answered = False
        if answered:
            slowest, failing = max(slowest, time.monotonic() - (failing or began)), None
        else:
            connection, failing = None, failing or began


def memory(pid: int) -> int:
    """Resident bytes of the server and its helpers; what forked helpers share counts once. Model workers are
    left out: they touch their KV pool little by little; and the commands of MCP servers, whose memory is
    their own."""
    others = (b"sgla.executor.child", b"mcp_hostile")
    return sum(
        proportional(child)
        for child in tree(pid)
        if child == pid or not any(name in command_line(child) for name in others)
    )


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def settled(pid: int, bound: float) -> int:
    """Resident bytes of the server once they are below ``bound``, or after ``SETTLE`` seconds."""
    end = time.monotonic() + SETTLE
    while (now := memory(pid)) > bound and time.monotonic() < end:
        time.sleep(0.2)
    return now


def measure(name: str, attack: Attack, target: Target, baseline: int) -> dict[str, Any]:
    """One attack: seconds, answers, the slowest /health/live in ms, and resident MB (``memory``): the
    ``baseline`` of the server when it was warm, at most, and after."""
    peak, over = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not over.wait(0.2):
            peak = max(peak, memory(target.pid))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    probing = Probe(target.port)
    time.sleep(0.3)
    began = time.monotonic()
    outcome = asyncio.run(attack(target))
    seconds = time.monotonic() - began
    time.sleep(0.3)
    slowest = probing.slowest()
    probing.close()
    over.set()
    sampler.join()
    after = settled(target.pid, BACK * baseline)
    return {
        "attack": name,
        "seconds": round(seconds, 1),
        "statuses": {str(status): count for status, count in sorted(outcome.statuses.items())},
        **outcome.more,
        "slowest_live_ms": round(slowest, 1),
        "rss_mb": [baseline >> 20, peak >> 20, after >> 20],
        "back": after <= BACK * baseline,
    }


async def warm_up(target: Target) -> None:
    """Have the server start all its helpers and the loop's threads, and fill what it keeps of every token it
    has seen."""
    await streams(target, 64)
    seen = [list(range(20 * i, 20 * i + 20)) for i in range(256)]
    await send(target, request(TEXT, {"prompt": seen, "max_tokens": 4, "logprobs": 20}))
    text = "<tool_call>{" * 1000
    own = {
        "chat_template": "{% for i in range(99999) %}{% endfor %}a"
    }  # rendered in other processes than the model's
    long = [{"role": "user", "content": "word " * 200}] * 300
    await send(
        target,
        *(request(CHAT, {"messages": long, "max_tokens": 2, **more}) for more in ({}, {}, own, own)),
    )
    await send(
        target,
        request(CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        request(TEXT, {"prompt": "a", "max_tokens": 2, "regex": "a"}),
        request("/tokenize", {"prompt": "word " * 10_000}),
        *(
            request("/parse_function_call", {"text": text * size, "tool_call_parser": "hermes"})
            for size in (1, 8)
        ),
    )


async def crowd(target: Target) -> None:
    """As many streams at once as the server admits. Python keeps the room of so many small objects for the
    next crowd."""
    await streams(target, target.many(1000), 1)


def ended(status: int, answer: bytes) -> str:
    """How a stream did: it had an end, which may be a typed error, or broke off; or it was refused before its
    first byte."""
    if status != 200:
        return "refused" if b'"error"' in answer else "cut"
    return "told" if b'"error"' in answer or b"[DONE]" in answer else "cut"


def ends(server: Server, target: Target) -> dict[str, Any]:
    """SIGTERM under a text that is being parsed and streams that are longer than the drain: seconds until the
    process is gone."""

    async def attack() -> tuple[float, Counter[str]]:
        text = "<tool_call>{" * target.many(100_000)
        parsing = asyncio.ensure_future(
            send(target, request("/parse_function_call", {"text": text, "tool_call_parser": "hermes"}))
        )
        body = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": True}
        running = [
            asyncio.ensure_future(exchange(target, request(TEXT, body))) for _ in range(target.many(50))
        ]
        await asyncio.sleep(1)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.process.wait, 120)
        took = time.monotonic() - began
        answers = await asyncio.gather(*running)
        parsing.cancel()
        return took, Counter(ended(status, answer) for status, answer in answers)

    seconds, told = asyncio.run(attack())
    return {
        "attack": "SIGTERM",
        "drain_s": DRAIN,
        "seconds": round(seconds, 2),
        **told,
        "exit": server.process.returncode,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", nargs="*", choices=list(ATTACKS), default=None)
    parser.add_argument("--server-args", default="")
    parser.add_argument("--probe", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe is not None:
        probe(args.probe)
        return 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))  # for the clients
    measured = []
    for more, attacks in SERVERS:
        names = [name for name in attacks if args.only is None or name in args.only]
        if names:
            measured += attacked(
                ["--model", args.model, *more, *shlex.split(args.server_args)], names, args.scale
            )
    found = worst(measured)
    print(lines.line(found), flush=True)
    return int(bool(found["faults"]))


def attacked(arguments: list[str], names: list[str], scale: float) -> list[dict[str, Any]]:
    """The results of attacks on a server of their own, in turn."""
    port, folder = free_port(), tempfile.mkdtemp()
    command = [
        *("sh", "-c", f'ulimit -S -n {DESCRIPTORS}; exec "$@"', "sh"),
        *(sys.executable, "-m", "sgla", "serve", "--port", str(port), "--drain-timeout", str(DRAIN)),
        *("--api-key", KEY, "--api-key", OTHER),
        *(word.replace("FOLDER", folder) for word in arguments),
    ]
    log = Path(folder) / "server.log"
    results = []
    with Server(command, f"http://127.0.0.1:{port}", "/health/ready", log) as server:
        target = Target(port, scale, server.process.pid)
        asyncio.run(warm_up(target))
        asyncio.run(crowd(target))
        time.sleep(SETTLE)
        baseline = memory(target.pid)
        for name in names:
            if server.process.poll() is not None:
                raise SystemExit(f"the server ended before '{name}'; see {log}")
            results.append(measure(name, ATTACKS[name], target, baseline))
            print(lines.line(results[-1]), flush=True)
        results.append(ends(server, target))
        print(lines.line(results[-1]), flush=True)
    return results


def faults(result: dict[str, Any]) -> list[str]:
    """What of a result the server promises not to do."""
    if result["attack"] == "SIGTERM":
        found = {
            "ends late": result["seconds"] > DRAIN + 2,
            "exit code": result["exit"] != 0,
            "cut streams": result.get("cut", 0) > 0,
        }
    else:
        found = {
            "slow": result["slowest_live_ms"] > LIMIT,
            "keeps memory": not result["back"],
            "500": "500" in result["statuses"],
            "no answer": "0" in result["statuses"],
            "broken streams": result.get("broken", 0) > 0,
            "others suffer": result.get("other", {200: 1}) != {200: 1}
            or result.get("other_ms", 0) > OTHERS
            or result.get("other_s", 0) > OTHERS_WORK,
        }
    return [name for name, so in found.items() if so]


def worst(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """The attack that held the loop for the longest time, and the faults of all."""
    slowest = max(measured, key=lambda result: result.get("slowest_live_ms", 0.0))
    return {
        "worst": slowest["attack"],
        "slowest_live_ms": slowest["slowest_live_ms"],
        "faults": {result["attack"]: found for result in measured if (found := faults(result))},
    }


if __name__ == "__main__":
    sys.exit(main())
