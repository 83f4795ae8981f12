"""Tokens a second of one server, and of several of the same model behind one port (``sgla serve --dp N``):
one JSON line for each number of replicas.

    python bench/replicas.py --model bench/models/qwen3-8b --counts 1,2 --server-args "--device cuda"

Each replica has W1 of ``offline.py`` to do: 256 requests, 100-1024 tokens in and out, temperature 0.6, all
sent at once. Weights are random, prompts are token ids, and answers come whole: so one client is enough.
``times``: tokens a second against those of the first number.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
import lines
from process import Server, free_port

from sgla.observe.machine import detect

LOOK = 0.2  # seconds between looks whether all replicas are there


class Request(NamedTuple):
    prompt: list[int]
    max_tokens: int


def requests(count: int, shortest: int, longest: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    lengths = [(rng.randint(shortest, longest), rng.randint(shortest, longest)) for _ in range(count)]
    return [Request([rng.randint(0, 10000) for _ in range(n)], out) for n, out in lengths]


async def ask(client: aiohttp.ClientSession, request: Request) -> int:
    """Tokens of the answer."""
    body = {"prompt": request.prompt, "max_tokens": request.max_tokens}
    body |= {"temperature": 0.6, "ignore_eos": True}
    async with client.post("/v1/completions", json=body) as response:
        answer = await response.json(content_type=None)
    if response.status != 200:
        raise SystemExit(f"HTTP {response.status}: {answer}")
    return int(answer["usage"]["completion_tokens"])


async def timed(url: str, wanted: Sequence[Request]) -> float:
    """Seconds for all, sent at once."""
    limits = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=limits[0], timeout=limits[1]) as client:
        begun = time.perf_counter()
        got = await asyncio.gather(*(ask(client, request) for request in wanted))
        seconds = time.perf_counter() - begun
    assert got == [request.max_tokens for request in wanted]
    return seconds


async def gathered(url: str, count: int) -> None:
    """Wait until a router has so many replicas."""
    async with aiohttp.ClientSession(url) as client:
        while True:
            async with client.get("/health/ready") as response:
                told = await response.json(content_type=None)
            if told.get("up") == count:
                return
            await asyncio.sleep(LOOK)


def measure(args: argparse.Namespace, count: int) -> dict[str, object]:
    url, log = f"http://127.0.0.1:{free_port()}", Path(args.log)
    command = [sys.executable, "-m", "sgla", "serve", args.model, "--load-format", "dummy"]
    command += ["--port", url.rpartition(":")[2], *shlex.split(args.server_args)]
    command += ["--dp", str(count), "--dp-policy", "round_robin"] if count > 1 else []
    with Server(command, url, "/health/ready", log, args.timeout) as server:
        if count > 1:
            asyncio.run(asyncio.wait_for(gathered(url, count), args.timeout))
        ready = server.ready_s
        warm = requests(args.requests * count, args.shortest, args.longest, 999)
        asyncio.run(timed(url, [request._replace(max_tokens=8) for request in warm]))
        wanted = requests(args.requests * count, args.shortest, args.longest, 0)
        seconds = asyncio.run(timed(url, wanted))
    out = sum(request.max_tokens for request in wanted)
    return {
        "w": "W1",
        "replicas": count,
        "ready_s": round(ready, 1),
        "s": round(seconds, 3),
        "in_tok": sum(len(request.prompt) for request in wanted),
        "out_tok": out,
        "out_tok_s": round(out / seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--counts", default="1,2", help="of replicas, one after the other")
    parser.add_argument("--requests", type=int, default=256, help="of each replica")
    parser.add_argument("--shortest", type=int, default=100, help="tokens of a prompt, and of an answer")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--server-args", default="", help="more arguments for the server")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that all replicas have to start")
    parser.add_argument(
        "--log", default=os.path.join(tempfile.gettempdir(), "bench-replicas.log"), help="the server's output"
    )
    args = parser.parse_args()
    head = {"engine": "sgla", "machine": detect().label(), "model": Path(args.model).name}
    first = 0.0
    for count in map(int, args.counts.split(",")):
        found = measure(args, count)
        rate = float(str(found["out_tok_s"]))
        first = first or rate
        lines.emit(head | found | {"times": round(rate / first, 3), "args": args.server_args})


if __name__ == "__main__":
    main()
