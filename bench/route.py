"""The router in front of fake workers, which take a fixed time for each prompt token that is not cached.

    python bench/route.py speed --processes 2 --pin-router 0,1 --pin-rest 2-7
    python bench/route.py cache --policies cache_aware,round_robin [--serve demo]
    python bench/route.py kill

``speed``: tiny bodies, answered at once, first by a worker and then through the router: requests a second,
the median time that the router adds, and the CPU time that its processes take for a request, which a busy
machine changes least. ``cache``: conversations that begin with one of a few system prompts, on one worker
with all the memory, and on several behind the router: the share of prompt tokens that was cached, and
requests a second; with ``--serve`` workers are servers of that model on the CPU, with a thread each.
``kill``: one of several workers is killed while all have requests; how many of these their clients lose. A
token of fake workers is four bytes of a prompt. Workers, router and clients are processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lines
import uvloop
from process import Server, free_port

from sgla.processes import cpu_seconds

TOKEN = 4  # bytes
PAGE = 16  # tokens
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"


class Cache:
    """An exact prefix cache in pages, those used last."""

    def __init__(self, tokens: int) -> None:
        self._pages = tokens // PAGE
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def read(self, prompt: bytes) -> tuple[int, int]:
        """Tokens of the prompt, and those that were cached; all are cached afterwards."""
        state, keys = hashlib.blake2b(digest_size=8), []
        for at in range(0, len(prompt) - PAGE * TOKEN + 1, PAGE * TOKEN):
            state.update(prompt[at : at + PAGE * TOKEN])
            keys.append(state.copy().digest())
        cached = next((i for i, key in enumerate(keys) if key not in self._held), len(keys))
        for key in reversed(keys):
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > self._pages:
            self._held.popitem(last=False)
        return len(prompt) // TOKEN, cached * PAGE


class Worker(asyncio.Protocol):
    """One connection to a fake worker. Prompts are read one after the other."""

    def __init__(self, cache: Cache, seconds: float, turn: asyncio.Lock) -> None:
        self._cache, self._seconds, self._turn = cache, seconds, turn
        self._buffer = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            _, found, rest = head.partition(b"content-length:")
            size = int(rest.split(b"\r\n")[0]) if found else 0
            if len(self._buffer) < end + 4 + size:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + size], self._buffer[end + 4 + size :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get /v1/models"):
            self._send({"data": [{"id": "m"}]})
        elif not body or not self._seconds:
            self._send({"ok": True})
        else:
            self._task = asyncio.ensure_future(self._work(body))

    async def _work(self, body: bytes) -> None:
        prompt = body.partition(b'"messages":')[2]
        async with self._turn:
            tokens, cached = self._cache.read(prompt)
            await asyncio.sleep((tokens - cached) * self._seconds)
        self._send({"usage": {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}})

    def _send(self, fields: dict[str, Any]) -> None:
        body = json.dumps(fields).encode()
        self._transport.write(HEAD % (len(body), body))


def run_worker(port: int, tokens: int, seconds: float, cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)

    async def serve() -> None:
        cache, turn = Cache(tokens), asyncio.Lock()
        server = await asyncio.get_running_loop().create_server(
            lambda: Worker(cache, seconds, turn), "127.0.0.1", port
        )
        await server.serve_forever()

    uvloop.run(serve())


class Client(asyncio.Protocol):
    """Sends a request when the answer to the one before has come."""

    def __init__(self) -> None:
        self._buffer = b""
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    async def ask(self, body: bytes) -> bytes:
        self._answer = asyncio.get_running_loop().create_future()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nAccept: */*\r\n"
        head += b"Authorization: Bearer none\r\nContent-Type: application/json\r\n"
        self._transport.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return await self._answer

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            return
        self._buffer = b""
        assert self._answer is not None
        if head.startswith(b"HTTP/1.1 200"):
            self._answer.set_result(body)
        else:
            self._answer.set_exception(ConnectionError(head + body))


async def connect(port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def hammer(port: int, connections: int, seconds: float) -> dict[str, float]:
    """Requests a second with many connections, then the median time of one at a time, ms."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello!"}]}).encode()
    count = 0
    clients = [await connect(port) for _ in range(connections)]
    until = time.perf_counter() + seconds

    async def repeat(client: Client) -> None:
        nonlocal count
        while time.perf_counter() < until:
            await client.ask(body)
            count += 1

    began = time.perf_counter()
    await asyncio.gather(*map(repeat, clients))
    rate = count / (time.perf_counter() - began)
    times = []
    for _ in range(1000):
        began = time.perf_counter()
        await clients[0].ask(body)
        times.append(time.perf_counter() - began)
    return {"requests": count, "requests/s": round(rate), "p50_ms": statistics.median(times) * 1e3}


def conversations(args: argparse.Namespace) -> list[list[bytes]]:
    """The bodies of each: a system prompt that others have too, and in each turn all that was said before."""
    rng = random.Random(args.seed)
    systems = [text(rng, args.system_tokens) for _ in range(args.systems)]
    found = []
    for number in range(args.conversations):
        said = [{"role": "system", "content": systems[number % args.systems]}]
        bodies = []
        for _ in range(args.turns):
            said.append({"role": "user", "content": text(rng, args.turn_tokens)})
            bodies.append(json.dumps({"model": "m", "max_tokens": 2, "messages": said}).encode())
            said.append({"role": "assistant", "content": text(rng, args.turn_tokens)})
        found.append(bodies)
    rng.shuffle(found)
    return found


def text(rng: random.Random, tokens: int) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=tokens * TOKEN))


async def talk(port: int, talks: list[list[bytes]], concurrency: int) -> dict[str, float]:
    """All conversations, so many at a time."""
    tokens = cached = 0
    waiting = list(reversed(talks))

    async def follow(client: Client) -> None:
        nonlocal tokens, cached
        while waiting:
            for body in waiting.pop():
                usage = json.loads(await client.ask(body))["usage"]
                tokens += usage["prompt_tokens"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]

    clients = [await connect(port) for _ in range(concurrency)]
    began = time.perf_counter()
    await asyncio.gather(*map(follow, clients))
    seconds = time.perf_counter() - began
    rate = sum(map(len, talks)) / seconds
    return {"hit_rate": round(cached / tokens, 4), "requests/s": round(rate, 2), "seconds": round(seconds, 2)}


async def lose(port: int, connections: int, seconds: float, kill: Callable[[], None]) -> dict[str, float]:
    """``kill`` in the middle; answers, what broke, and the longest answer, seconds."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 400}]}).encode()
    until, count, lost, longest = time.perf_counter() + seconds, 0, 0, 0.0

    async def repeat() -> None:
        nonlocal count, lost, longest
        client = await connect(port)
        while (began := time.perf_counter()) < until:
            try:
                await asyncio.wait_for(client.ask(body + b" " * (count % 7)), 10)
                count += 1
            except OSError:
                lost += 1
                client = await connect(port)
            longest = max(longest, time.perf_counter() - began)

    asyncio.get_running_loop().call_later(seconds / 2, kill)
    await asyncio.gather(*(repeat() for _ in range(connections)))
    return {"requests": count, "lost": lost, "longest_s": round(longest, 3)}


class Workers:
    """Fake workers in processes of their own."""

    def __init__(self, count: int, tokens: int, seconds: float, cores: set[int]) -> None:
        self.ports = [free_port() for _ in range(count)]
        start = multiprocessing.get_context("spawn").Process
        self._processes = [
            start(target=run_worker, args=(port, tokens, seconds, cores), daemon=True) for port in self.ports
        ]
        for process in self._processes:
            process.start()
        for port in self.ports:
            wait(port)

    def kill_one(self) -> None:
        self._processes[0].kill()

    def __enter__(self) -> list[int]:
        return self.ports

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()


@contextmanager
def servers(model: str, count: int, nbytes: int, more: str) -> Iterator[list[int]]:
    """Ports of so many servers of a model on the CPU, each with ``nbytes`` of KV cache."""
    ports = [free_port() for _ in range(count)]
    words = [sys.executable, "-m", "sgla", "serve", model, "--device", "cpu", "--threads", "1"]
    words += ["--kv-cache-bytes", str(nbytes), "--served-model-name", "m", *shlex.split(more)]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for port in ports:
            log = Path(folder, str(port))
            command = [*words, "--port", str(port), "--log-level", "warning", "--no-log-requests"]
            stack.enter_context(Server(command, f"http://127.0.0.1:{port}", "/health", log))
        yield ports


class Router:
    """``sgla route`` in front of them."""

    def __init__(self, ports: list[int], policy: str, processes: int, cores: set[int]) -> None:
        self.port = free_port()
        self._folder = tempfile.TemporaryDirectory()
        words = [sys.executable, "-m", "sgla", "route", "--policy", policy, "--port", str(self.port)]
        words += ["--processes", str(processes), "--worker", *(f"http://127.0.0.1:{port}" for port in ports)]
        with (Path(self._folder.name) / "log").open("w") as log:
            self._process = subprocess.Popen(
                words, stdout=log, stderr=log, preexec_fn=lambda: os.sched_setaffinity(0, cores)
            )
        wait(self.port)

    def cpu(self) -> float:
        """Seconds that its processes have used."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return sum(map(cpu_seconds, [self._process.pid, *map(int, children)]))

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def wait(port: int) -> None:
    """Until the server answers."""
    for _ in range(300):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"nothing listens on {port}")


def cores_of(text: str | None) -> set[int]:
    """Of ``0,2-5``; all for None."""
    if text is None:
        return os.sched_getaffinity(0)
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def speed(args: argparse.Namespace, cores: set[int], rest: set[int]) -> None:
    with (
        Workers(args.workers, 0, 0.0, rest) as ports,
        Router(ports, args.policies, args.processes, cores) as router,
    ):
        direct = uvloop.run(hammer(ports[0], args.connections, args.seconds))
        before = router.cpu()
        routed = uvloop.run(hammer(router.port, args.connections, args.seconds))
        used = router.cpu() - before
    lines.emit(
        {
            "bench": "route-speed",
            "policy": args.policies,
            "processes": args.processes,
            "connections": args.connections,
            "router_cores": sorted(cores),
            "load_before": round(args.load, 2),
            "direct/s": direct["requests/s"],
            "routed/s": routed["requests/s"],
            "added_p50_ms": round(routed["p50_ms"] - direct["p50_ms"], 3),
            "router_cpu_us_a_request": round(used / (routed["requests"] + 1000) * 1e6),
        }
    )


def cache(args: argparse.Namespace, cores: set[int], rest: set[int]) -> None:
    talks = conversations(args)
    who = f"servers of {args.serve}" if args.serve else f"{args.token_us} us a token"
    common = {
        "bench": "route-cache",
        "trace": f"{args.conversations}x{args.turns} turns of {args.turn_tokens}, {args.systems} systems of "
        f"{args.system_tokens}, {args.concurrency} at a time, {who}",
        "load_before": round(args.load, 2),
    }

    def workers(count: int) -> AbstractContextManager[list[int]]:
        """They have the memory of ``--workers`` of them."""
        share = args.workers // count
        if args.serve:
            return servers(args.serve, count, share * args.cache_bytes, args.server_args)
        return Workers(count, share * args.cache_tokens, args.token_us / 1e6, rest)

    with workers(1) as ports:
        single = uvloop.run(talk(ports[0], talks, args.concurrency))
    lines.emit(common | {"workers": 1} | single)
    for policy in args.policies.split(","):
        with workers(args.workers) as ports, Router(ports, policy, args.processes, cores) as router:
            found = uvloop.run(talk(router.port, talks, args.concurrency))
        share = round(found["hit_rate"] / single["hit_rate"], 4)
        lines.emit(
            common | {"policy": policy, "workers": args.workers} | found | {"hit_rate_of_single": share}
        )


def kill(args: argparse.Namespace, cores: set[int], rest: set[int]) -> None:
    workers = Workers(args.workers, 0, args.token_us / 1e6, rest)
    with workers as ports, Router(ports, args.policies, args.processes, cores) as router:
        found = uvloop.run(lose(router.port, args.connections, args.seconds, workers.kill_one))
    what = {"bench": "route-kill", "policy": args.policies, "workers": args.workers}
    lines.emit(what | {"load_before": round(args.load, 2)} | found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("what", choices=("speed", "cache", "kill"))
    add("--processes", type=int, default=2, help="of the router")
    add("--workers", type=int, default=4)
    add("--policies", default="cache_aware")
    add("--pin-router", metavar="CORES", help="such as 0,2-5")
    add("--pin-rest", metavar="CORES", help="of workers and clients")
    add("--connections", type=int, default=32, help="speed")
    add("--seconds", type=float, default=5.0, help="speed")
    add("--concurrency", type=int, default=16, help="cache: conversations at a time")
    add("--conversations", type=int, default=64)
    add("--turns", type=int, default=6)
    add("--turn-tokens", type=int, default=100, help="of each message")
    add("--systems", type=int, default=8)
    add("--system-tokens", type=int, default=1000)
    add("--token-us", type=float, default=200.0, help="time of a token that is not cached")
    add("--cache-tokens", type=int, default=200_000, help="of each worker")
    add("--serve", metavar="MODEL", help="cache: servers of it, on the CPU, in place of fake workers")
    add("--server-args", default="", help="more flags of these servers")
    add("--cache-bytes", type=int, default=256 << 20, help="KV cache of each of these servers")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    args.load = os.getloadavg()[0]
    cores, rest = cores_of(args.pin_router), cores_of(args.pin_rest)
    os.sched_setaffinity(0, rest)
    {"speed": speed, "cache": cache, "kill": kill}[args.what](args, cores, rest)


if __name__ == "__main__":
    main()
