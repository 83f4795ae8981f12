"""Cost of a streamed token in the HTTP layer: 256 SSE streams over loopback, no engine.

    python bench/sse.py [--streams 256] [--steps 300] [--step-ms 6]

Events go straight into the sinks, as the detokenizer pushes them; the clients live in another process. Prints one JSON line:
``us_per_tok`` is the CPU time of the server's thread, ``push_us`` the part inside ``push`` (encoding and the ``send`` call).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

BODY = json.dumps(
    {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 10_000}
).encode()
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


class Sinks:
    """An ingress that admits everything and only keeps the sinks."""

    phase, ready, model_names, facts, tokenizer, template = "ready", True, ["bench"], None, None, None
    architecture = ""
    progress = SimpleNamespace(message="", done=0, total=0)

    def __init__(self) -> None:
        self.default_sampling: dict[str, Any] = {}
        self.open_sinks: dict[str, Any] = {}

    def require_ready(self) -> None: ...

    def open(self, job: Any, sink: Any) -> None:
        self.open_sinks[job.rid] = sink

    def cancel(self, rid: str, reason: str) -> bool:
        return self.open_sinks.pop(rid, None) is not None

    def stats(self) -> None: ...


async def clients(port: int, count: int) -> None:
    """Read ``count`` streams to their end and throw everything away."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        tail = b""
        while data := await reader.read(1 << 16):
            tail = (tail + data)[-32:]
            if b"[DONE]" in tail:
                break
        writer.close()

    await asyncio.gather(*(one() for _ in range(count)))


async def bench(streams: int, steps: int, step: float) -> dict[str, Any]:
    from aiohttp import web

    from sgla.config import Config
    from sgla.http.app import make_app
    from sgla.http.connections import Runner
    from sgla.messages import Event, Usage
    from sgla.observe.metrics import Metrics

    ingress = Sinks()
    runner = Runner(make_app(ingress, Config(), Metrics("bench")))  # type: ignore[arg-type]
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    port = runner.addresses[0][1]
    client = subprocess.Popen([sys.executable, __file__, "--client", str(port), "--streams", str(streams)])
    while len(ingress.open_sinks) < streams:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    sinks = list(ingress.open_sinks.items())
    pushing, cpu, wall = 0.0, time.thread_time(), time.perf_counter()
    for i in range(steps):
        finish = "length" if i == steps - 1 else None
        events = [
            Event(rid=rid, index=0, text=" token", tokens=[i], finish=finish, usage=Usage(9, i + 1, 0))
            for rid, _ in sinks
        ]
        began = time.thread_time()
        for (_, sink), event in zip(sinks, events):
            sink.push(event)
        pushing += time.thread_time() - began
        await asyncio.sleep(max(0.0, wall + (i + 1) * step - time.perf_counter()))
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    client.wait(30)
    await runner.cleanup()
    tokens = streams * steps
    return {
        "push_us": round(1e6 * pushing / tokens, 2),
        "us_per_tok": round(1e6 * cpu / tokens, 2),
        "out_tok_s": round(tokens / wall),
        "s": round(wall, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=6.0)
    parser.add_argument("--client", type=int, default=0, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        if args.client:
            runner.run(clients(args.client, args.streams))
            return
        result = runner.run(bench(args.streams, args.steps, args.step_ms / 1000))
    import lines

    from sgla import __version__

    machine = f"{platform.machine()} {platform.system()} {platform.python_version()}"
    head = {"engine": "sgla", "version": __version__, "machine": machine, "model": "none", "w": "sse"}
    print(lines.line(head | {"streams": args.streams, "step_ms": args.step_ms} | result))


if __name__ == "__main__":
    main()
