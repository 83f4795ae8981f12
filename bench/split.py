"""Where the time of the main process goes, and when it saturates: chats in a closed loop, over a fake
executor.

    chrt -f 10 python bench/split.py --streams 256 --step-ms 6

Each stream sends its next chat when the one before has ended. The server runs once as it is
(``server_cpu_us_per_tok``, latencies) and once with timers around the parts that a token or a request passes
(``parts``: microseconds of the loop's thread a token, without those of the parts inside; ``loop`` is the rest
of its CPU time). Steps of 0.5 ms show what it can do at most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import types
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lines
import uvloop
from overhead import cpu_seconds
from process import Server, free_port

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "mix",
    "potions",
    "under",
    "some",
    "green",
    "lamp",
]


class Chat(asyncio.Protocol):
    """A connection that sends one chat after another and keeps the times of what comes back."""

    def __init__(self, load: Load, number: int) -> None:
        self._load, self._random, self._tail = load, random.Random(number), b""
        self._sent = self._last = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._sent, self._last = time.perf_counter(), 0.0
        self._transport.write(self._load.request(self._random))

    def data_received(self, data: bytes) -> None:
        now, load = time.perf_counter(), self._load
        data = self._tail + data
        count = data.count(b"data: {")
        self._tail = data[-6:]
        if count:
            load.chunks += count
            if self._last:
                load.gaps.append(now - self._last)
            else:
                load.firsts.append(now - self._sent)
            self._last = now
        if b"[DONE]" in data:
            self._tail = b""
            self._ask()


class Load:
    """What the streams have seen in the window that is measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._input, self._output = args.input_len, args.output_len
        self.clear()

    def clear(self) -> None:
        self.chunks = 0
        self.gaps: list[float] = []
        self.firsts: list[float] = []

    def request(self, rng: random.Random) -> bytes:
        text = " ".join(rng.choices(WORDS, k=self._input))
        length = rng.randint(self._output // 2, self._output * 3 // 2)
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": text}],
                "stream": True,
                "ignore_eos": True,
                "max_tokens": length,
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"  # noqa: E501
        return head.encode() + body


def quantile(values: list[float], part: float) -> float:
    """Milliseconds."""
    ordered = sorted(values)
    return round(1e3 * ordered[int(part * (len(ordered) - 1))], 2) if ordered else 0.0


async def drive(args: argparse.Namespace, port: int, pid: int, parts: Path | None) -> dict[str, Any]:
    loop, load = asyncio.get_running_loop(), Load(args)
    for number in range(args.streams):
        await loop.create_connection(lambda number=number: Chat(load, number), "127.0.0.1", port)
    await asyncio.sleep(args.settle)
    before = snapshot(pid, parts)
    load.clear()
    cpu, began, first = (
        cpu_seconds(pid),
        time.perf_counter(),
        await loop.run_in_executor(None, generated, port),
    )
    await asyncio.sleep(args.seconds)
    seconds, cpu = time.perf_counter() - began, cpu_seconds(pid) - cpu
    count = await loop.run_in_executor(None, generated, port) - first
    found: dict[str, Any] = {
        "out_tok_s": round(count / seconds),
        "tok_a_chunk": round(count / load.chunks, 2),
    }
    if parts is not None:
        after = snapshot(pid, parts)
        own = {name: after[name] - before.get(name, 0.0) for name in after}
        thread = own.pop("thread")
        own["loop"] = thread - sum(own.values()) + own.get("prepare (lane)", 0.0)
        shown = sorted(own.items(), key=lambda item: -item[1])
        return found | {
            "parts": {name: round(1e6 * s / count, 2) for name, s in shown},
            "thread_us_per_tok": round(1e6 * thread / count, 2),
        }
    return found | {
        "server_cpu_us_per_tok": round(1e6 * cpu / count, 2),
        "busy": round(cpu / seconds, 3),
        "requests_s": round(len(load.firsts) / seconds, 1),
        **{f"ttft_p{p}_ms": quantile(load.firsts, p / 100) for p in (50, 99)},
        **{f"itl_p{p}_ms": quantile(load.gaps, p / 100) for p in (50, 99)},
    }


def generated(port: int) -> float:
    """Tokens that the server has made."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    text = opener.open(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    return float(re.findall(r"^sgla:generation_tokens_total\{.*\} (\S+)$", text, re.M)[0])


def snapshot(pid: int, parts: Path | None) -> dict[str, float]:
    if parts is None:
        return {}
    parts.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR2)
    while not parts.exists():
        time.sleep(0.001)
    return json.loads(parts.read_text())


class Timers:
    """Seconds in each part, without those of the parts that it calls."""

    def __init__(self) -> None:
        self.own: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0
        self._around = self._cost()  # seconds of a timer that are counted around a part, not in it
        self.own.clear()

    def _cost(self) -> float:
        def nothing() -> None: ...

        self._around = 0.0
        timed = self.timed(nothing, "inner")
        self.enter("outer")
        for _ in range(100_000):
            timed()
        self.leave()
        return self.own["outer"] / 100_000

    def enter(self, name: str) -> None:
        now = time.perf_counter()
        if self._stack:
            self.own[self._stack[-1]] += now - self._since
            self.own[self._stack[-1]] -= self._around
            self.own["timers"] += self._around
        self._stack.append(name)
        self._since = now

    def leave(self) -> None:
        now = time.perf_counter()
        self.own[self._stack.pop()] += now - self._since
        self._since = now

    def around(self, owner: Any, name: str, part: str) -> None:
        """Time a function, or each turn of a coroutine."""
        fn = getattr(owner, name)

        async def turns(*args: Any, **kwargs: Any) -> Any:
            return await drive_turns(self, part, fn(*args, **kwargs))

        setattr(owner, name, turns if asyncio.iscoroutinefunction(fn) else self.timed(fn, part))

    def timed(self, fn: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return fn(*args, **kwargs)
            finally:
                self.leave()

        return timed


@types.coroutine
def drive_turns(timers: Timers, part: str, coroutine: Any) -> Any:
    step, value = coroutine.send, None
    while True:
        timers.enter(part)
        try:
            waits = step(value)
        except StopIteration as end:
            return end.value
        finally:
            timers.leave()
        try:
            step, value = coroutine.send, (yield waits)
        except BaseException as error:
            step, value = coroutine.throw, error


def serve(parts: Path, argv: list[str]) -> int:
    """``sgla serve`` with timers, which SIGUSR2 writes to ``parts``."""
    from sgla.actors.detokenize import Detokenize
    from sgla.actors.ingress import Ingress
    from sgla.actors.schedule import Schedule
    from sgla.actors.tokenize import Tokenize
    from sgla.cli import main
    from sgla.executor.procs import ProcsExecutor
    from sgla.http import app, connections
    from sgla.http.answer import sse
    from sgla.http.openai.chat import ChatStream
    from sgla.http.request import intake
    from sgla.observe.metrics import Metrics
    from sgla.sched.core import Core
    from sgla.text.output import OutputStream
    from sgla.text.prepare import Preparer

    timers = Timers()
    for owner, name, part in (
        (connections.Connection, "data_received", "http parse"),
        (app, "dispatch", "handler"),
        (intake, "_counted", "json in"),
        (Ingress, "open_all", "ingress"),
        (Tokenize, "handle", "tokenize"),
        (Tokenize, "_hand_on", "tokenize"),
        (Schedule, "handle", "schedule"),
        (Schedule, "_on_results", "schedule"),
        (Schedule, "_observe", "metrics"),
        (Core, "plan", "plan"),
        (Core, "offer", "plan"),
        (Core, "retire", "retire"),
        (ProcsExecutor, "submit", "executor"),
        (ProcsExecutor, "drain", "executor"),
        (Detokenize, "handle", "detokenize"),
        (Detokenize, "open", "detokenize"),
        (OutputStream, "feed", "text"),
        (Metrics, "inter_token", "metrics"),
        (Ingress, "deliver", "deliver"),
        (sse.SseSink, "push", "deliver"),
        (ChatStream, "encode", "json out"),
        (sse.SseSink, "_write", "sse write"),
    ):
        timers.around(owner, name, part)
    prepare, lane = Preparer.__call__, [0.0]

    def timed(self: Preparer, job: Any) -> Any:
        began = time.thread_time()
        try:
            return prepare(self, job)
        finally:
            lane[0] += time.thread_time() - began

    Preparer.__call__ = timed  # type: ignore[method-assign]

    def tell(*_: object) -> None:
        found = {**timers.own, "prepare (lane)": lane[0], "thread": time.thread_time()}
        whole = parts.with_suffix(".new")
        whole.write_text(json.dumps(found))
        whole.rename(parts)

    signal.signal(signal.SIGUSR2, tell)
    return main(argv)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=6.0)
    parser.add_argument("--input-len", type=int, default=200, help="words")
    parser.add_argument(
        "--output-len", type=int, default=256, help="tokens, from half to one and a half of it"
    )
    parser.add_argument("--settle", type=float, default=3.0, help="seconds before the window")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--model", default="demo", help="its tokenizer is used")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--server-args", nargs=argparse.REMAINDER, default=[])
    args = parser.parse_args()
    if args.serve is not None:
        sys.exit(serve(args.serve, args.server_args))
    numbers: dict[str, Any] = {}
    for timed in (False, True):
        port = free_port()
        server = [
            "serve",
            "--model",
            args.model,
            "--executor",
            "fake",
            "--fake-step-ms",
            str(args.step_ms),
            "--port",
            str(port),
            "--max-running-requests",
            str(args.streams),
            "--log-level",
            "warning",
            *args.server_args,
        ]
        folder = Path(tempfile.gettempdir())
        parts = folder / "split-parts.json"
        begin = [__file__, "--serve", str(parts), "--server-args"] if timed else ["-m", "sgla"]
        with Server(
            [sys.executable, *begin, *server],
            f"http://127.0.0.1:{port}",
            "/health/ready",
            folder / "split-server.log",
        ) as running:
            found = uvloop.run(drive(args, port, running.process.pid, parts if timed else None))
        numbers = {**found, **numbers}
    print(
        lines.line(
            {
                "engine": "sgla",
                "model": f"fake, {args.step_ms} ms a step",
                "w": f"split-{args.streams}",
                **numbers,
            }
        )
    )


if __name__ == "__main__":
    main()
