"""Cost of everything but the model: the fake executor takes ``--step-ms`` a step, and the server counts
tokens, of which a chunk has several where it cannot keep up.

    python bench/overhead.py --streams 256 --step-ms 6

    python bench/overhead.py --alone 200   # requests of one token, one at a time; the worker takes no time
    python bench/overhead.py --against FOLDER --streams 64 --output-len 2   # and another checkout, by turns

Server and client are separate processes. ``idle`` is the share of its time that the worker waited for plans
while all streams were running, out of the server's own step metrics. ``--against``: both servers run, each
gets so many streams at once by turns, and what counts is the CPU time of its main thread: that differs less
than time does on a machine with other work.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import re
import resource
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import lines
import uvloop
from process import Server, free_port

from sgla import __version__
from sgla.bench.workloads import tokens
from sgla.observe.machine import detect

STALL_SECONDS = 20
LOOK = 0.1  # seconds between two looks at the server's metrics
GAP = 0.05  # seconds between requests that come alone
TURNS, WARM = 30, 3  # of each side with --against, and before that
ROOT = Path(__file__).parents[1]
TOKENS = "generation_tokens_total"


class Stream(asyncio.Protocol):
    """One streamed completion over a bare socket. Counts chunks; parses nothing."""

    def __init__(self, request: bytes, counter: list[int], done: asyncio.Future[None]) -> None:
        self._request, self._counter, self._done = request, counter, done
        self._tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._tail + data
        self._counter[0] += data.count(b"data: {")
        self._tail = data[-6:]  # shorter than what is counted, so that nothing counts twice

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


def request_bytes(port: int, model: str, prompt: list[int], output_len: int) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_len,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def scrape(url: str) -> dict[str, float]:
    """Sums and counts of the step histograms, and tokens."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    text = opener.open(f"{url}/metrics", timeout=30).read().decode()
    pattern = rf"^sgla:(step_seconds_sum|step_gap_ms_sum|step_seconds_count|{TOKENS})\{{.*\}} (\S+)$"
    return {name: float(value) for name, value in re.findall(pattern, text, re.M)}


async def drive(args: argparse.Namespace, url: str, pid: int) -> dict[str, Any]:
    """All streams at once; the middle of the run, when every stream decodes, is what counts."""
    loop, counter, port = asyncio.get_running_loop(), [0], int(url.rpartition(":")[2])
    rng = random.Random(0)
    ends = []
    for _ in range(args.streams):
        end: asyncio.Future[None] = loop.create_future()
        data = request_bytes(port, args.model, tokens(rng, args.input_len), args.output_len)
        await loop.create_connection(lambda data=data, end=end: Stream(data, counter, end), "127.0.0.1", port)
        ends.append(end)
    total = args.streams * args.output_len
    everything = asyncio.gather(*ends)
    before = await reach(url, total // 4, everything)
    own, cpu, began = time.process_time(), cpu_seconds(pid), time.monotonic()
    after = await reach(url, total * 3 // 4, everything)
    seconds, busy_cpu, own = time.monotonic() - began, cpu_seconds(pid) - cpu, time.process_time() - own
    await everything
    change = {name: after[name] - before[name] for name in before}
    count = change[TOKENS]
    gap = change["step_gap_ms_sum"] / 1e3
    return {
        "out_tok_s": round(count / seconds, 1),
        "steps": int(change["step_seconds_count"]),
        "step_ms": round(1e3 * change["step_seconds_sum"] / change["step_seconds_count"], 3),
        "gap_ms": round(1e3 * gap / change["step_seconds_count"], 4),
        "idle": round(gap / (gap + change["step_seconds_sum"]), 5),
        "server_cpu_us_per_tok": round(1e6 * busy_cpu / count, 2),
        "client_cpu_us_per_tok": round(1e6 * own / count, 2),
        "chunks": counter[0],
        "tokens": total,
    }


async def reach(url: str, tokens: int, everything: asyncio.Future[Any]) -> dict[str, float]:
    """Wait until so many have been made. Ends the program if they never will."""
    loop, seen, since = asyncio.get_running_loop(), 0.0, time.monotonic()
    while (found := await loop.run_in_executor(None, scrape, url))[TOKENS] < tokens:
        if found[TOKENS] > seen:
            seen, since = found[TOKENS], time.monotonic()
        if everything.done() or time.monotonic() - since > STALL_SECONDS:
            raise SystemExit(f"only {seen:.0f} of {tokens} tokens came; the server refused the rest")
        await asyncio.sleep(LOOK)
    return found


def alone(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """Milliseconds from a POST to the whole answer of one token, each some time after the one before."""
    rng, found = random.Random(0), []
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    for _ in range(args.alone):
        body = {"model": args.model, "prompt": tokens(rng, args.input_len), "max_tokens": 1}
        time.sleep(GAP)
        begun = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        found.append(1e3 * (time.perf_counter() - begun))
        if answer.status != 200:
            raise SystemExit(f"the server answered {answer.status}")
    found.sort()
    return {f"{name}ms": round(found[int(q * (len(found) - 1))], 2)
            for name, q in (("q1_", 0.25), ("", 0.5), ("p99_", 0.99))}  # fmt: skip


async def crowd(args: argparse.Namespace, port: int, rng: random.Random) -> None:
    """All streams at once, to their end."""
    loop, ends = asyncio.get_running_loop(), []
    for _ in range(args.streams):
        end: asyncio.Future[None] = loop.create_future()
        data = request_bytes(port, args.model, tokens(rng, args.input_len), args.output_len)
        await loop.create_connection(lambda data=data, end=end: Stream(data, [0], end), "127.0.0.1", port)
        ends.append(end)
    await asyncio.gather(*ends)


async def by_turns(args: argparse.Namespace, sides: list[tuple[int, int]]) -> list[list[float]]:
    """Microseconds of CPU a request, of each turn of each side. ``sides``: port and process."""
    rng, found = random.Random(0), [[] for _ in sides]  # type: list[list[float]]
    for turn in range(WARM + TURNS):
        for i in (0, 1) if turn % 2 else (1, 0):
            port, pid = sides[i]
            before = main_thread_us(pid)
            await crowd(args, port, rng)
            await asyncio.sleep(LOOK)
            if turn >= WARM:
                found[i].append((main_thread_us(pid) - before) / args.streams)
    return found


def compared(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """``ratio``: of this checkout to the other, turn by turn: median, and quartiles."""
    ratios = sorted(mine / other for mine, other in zip(ours, theirs))
    quartiles = [ratios[int(q * (len(ratios) - 1))] for q in (0.5, 0.25, 0.75)]
    return {
        "cpu_us": round(statistics.median(ours), 1),
        "other_cpu_us": round(statistics.median(theirs), 1),
        "ratio": [round(ratio, 3) for ratio in quartiles],
    }


def main_thread_us(pid: int) -> float:
    """CPU time so far."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e3


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def server_of(args: argparse.Namespace, folder: Path) -> Server:
    """That of a checkout."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        sys.executable, "-m", "sgla", "serve", "--model", args.model, "--served-model-name", args.model,
        "--executor", "fake", "--fake-step-ms", str(args.step_ms), "--port", url.rpartition(":")[2],
        "--max-running-requests", str(args.streams), "--log-level", "warning", *args.server_args,
    ]  # fmt: skip
    log = Path(tempfile.gettempdir()) / f"overhead-server-{url.rpartition(':')[2]}.log"
    where = {"PYTHONPATH": str(folder.resolve()), "PYTHONSAFEPATH": "1"}  # and not the folder of this process
    return Server(command, url, "/health/ready", log, env=where)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, help="default: 6, with --alone 0")
    parser.add_argument("--alone", type=int, default=0, metavar="N", help="N requests one at a time instead")
    parser.add_argument("--input-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--model", default="demo", help="its tokenizer is used")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument(
        "--server-args", nargs=argparse.REMAINDER, default=[], help="last: more arguments for the server"
    )
    args = parser.parse_args()
    if args.step_ms is None:
        args.step_ms = 0.0 if args.alone else 6.0
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if args.against:
        with server_of(args, ROOT) as ours, server_of(args, args.against) as theirs:
            sides = [(int(each.url.rpartition(":")[2]), each.process.pid) for each in (ours, theirs)]
            numbers = compared(*uvloop.run(by_turns(args, sides)))
    else:
        with server_of(args, ROOT) as server:
            pid = server.process.pid
            numbers = alone(args, server.url) if args.alone else uvloop.run(drive(args, server.url, pid))
    head = {
        "engine": "sgla",
        "version": __version__,
        "machine": detect().label(),
        "model": f"fake, {args.step_ms} ms a step",
        "w": "overhead-alone" if args.alone else f"overhead-{args.streams}x{args.output_len}",
        **({"against": lines.commit_of(args.against)} if args.against else {}),
        "args": " ".join(args.server_args),
    }
    print(lines.line(head | numbers))


if __name__ == "__main__":
    main()
