"""Send dumped requests to a server again, at the pace they came in."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp

from sgla.bench.load import TIMEOUT, Target
from sgla.bench.report import percentile
from sgla.clock import now
from sgla.observe.requests import Dumped

FAILED = "no answer"


async def send(target: Target, requests: Sequence[Dumped], speed: float) -> dict[str, Any]:
    """Numbers of the run. ``speed``: 1 is the recording's pace, 0 all at once. Times in milliseconds."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as client:
        began, first = now(), requests[0].at if requests else 0.0
        delays = [(request.at - first) / speed if speed else 0.0 for request in requests]
        results = await asyncio.gather(
            *(_send(client, target, request, began + delay) for request, delay in zip(requests, delays))
        )
    statuses = Counter(status for status, _ in results)
    times = [1e3 * seconds for _, seconds in results]
    return {
        "requests": len(results),
        "statuses": dict(sorted(statuses.items())),
        "s": round(now() - began, 3),
        "e2e_ms": round(percentile(times, 0.5), 3),
        "e2e_p99_ms": round(percentile(times, 0.99), 3),
    }


async def _send(
    client: aiohttp.ClientSession, target: Target, request: Dumped, due: float
) -> tuple[str, float]:
    """Status and seconds of one request, its whole answer read."""
    await asyncio.sleep(max(0.0, due - now()))
    start = now()
    headers = target.headers | {"X-Request-Id": request.rid}
    try:
        async with client.request(
            request.method, target.url + request.path, data=bytes(request.body), headers=headers
        ) as response:
            await response.read()
            status = str(response.status)
    except (aiohttp.ClientError, TimeoutError, OSError):
        status = FAILED
    return status, now() - start
