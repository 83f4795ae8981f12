"""Many streaming clients, of which some leave: are the others' streams whole, and does the main loop stay on
time?

    python bench/storm.py MODEL_FOLDER [--clients 512] [--rounds 4] [--leave 0.3] [--step-ms 25]

The model is not computed: a worker process answers each step after ``step-ms``. The clients are in this
process. Prints one JSON line; lags come from the server's own histogram, as upper bounds of its buckets.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import lines

sys.path.insert(0, str(Path(__file__).parent))

from process import Server

TOKENS = (100, 300)  # of an answer
PORT = 30917
BODY = {"prompt": [*range(5, 69)], "ignore_eos": True, "stream": True, "seed": 1}


async def client(session: aiohttp.ClientSession, rng: random.Random, leave: float) -> int | None:
    """Chunks of a whole stream; None if it was left."""
    tokens = rng.randrange(*TOKENS)
    leave_after = rng.randrange(1, tokens) if rng.random() < leave else None
    chunks = 0
    async with session.post("/v1/completions", json={**BODY, "max_tokens": tokens}) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            chunks += line.startswith(b"data: {")
            if line == b"data: [DONE]\n":
                return chunks
            if chunks == leave_after:
                answer.close()
                return None
    raise AssertionError("a stream ended without [DONE]")


async def storm(url: str, clients: int, rounds: int, leave: float) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0)
    rng = random.Random(0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:

        async def again() -> list[int | None]:
            own = random.Random(rng.random())
            return [await client(session, own, leave) for _ in range(rounds)]

        before = await lags(session)
        began = time.monotonic()
        ended = [
            count for counts in await asyncio.gather(*(again() for _ in range(clients))) for count in counts
        ]
        seconds = time.monotonic() - began
        after = await lags(session)
        await asyncio.sleep(1)
        async with session.get("/get_server_info") as answer:
            stats = (await answer.json())["internal_states"][0]
    whole = [count for count in ended if count is not None]
    return {
        "whole": len(whole),
        "left": len(ended) - len(whole),
        "chunks_per_s": round(sum(whole) / seconds),
        "p50_lag_ms_at_most": quantile(before, after, 0.5),
        "p99_lag_ms_at_most": quantile(before, after, 0.99),
        "pages_lost": stats["pages_total"] - stats["pages_free"] - stats["pages_cached"],
    }


async def lags(session: aiohttp.ClientSession) -> dict[float, float]:
    """Upper bound of a bucket in seconds -> how many lags were at most that."""
    async with session.get("/metrics") as answer:
        text = await answer.text()
    found = re.findall(r'loop_lag_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} ([0-9.e+]+)', text)
    return {float(bound): float(count) for bound, count in found}


def quantile(before: dict[float, float], after: dict[float, float], q: float) -> float:
    total = after[float("inf")] - before[float("inf")]
    return 1000 * next(le for le in sorted(after) if after[le] - before[le] >= q * total)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--leave", type=float, default=0.3)
    parser.add_argument("--step-ms", type=float, default=25)
    parser.add_argument(
        "--nice", type=int, default=0, help="of the server; negative where other work shares the machine"
    )
    args = parser.parse_args()
    flags = ["--executor", "fake", "--fake-step-ms", str(args.step_ms), "--kv-cache-bytes", "256M"]
    flags += ["--max-running-requests", str(args.clients), "--port", str(PORT), "--model", args.model]
    url = f"http://127.0.0.1:{PORT}"
    log = Path(tempfile.gettempdir()) / "storm.log"
    command = ["nice", "-n", str(args.nice), sys.executable, "-m", "sgla", "serve", *flags]
    with Server(command, url, "/health/ready", log):
        found = asyncio.run(storm(url, args.clients, args.rounds, args.leave))
    print(
        lines.line(
            {
                "bench": "storm",
                "machine": platform.processor() or platform.machine(),
                "python": platform.python_version(),
                "clients": args.clients,
                "rounds": args.rounds,
                "leave": args.leave,
                "step_ms": args.step_ms,
                "nice": args.nice,
                **found,
            }
        )
    )


if __name__ == "__main__":
    main()
