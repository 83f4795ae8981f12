"""A line in the log every few seconds while the engine is busy: what it does, and how much of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sgla import clock
from sgla.sched.stats import Stats

log = logging.getLogger(__name__)


class Throughput:
    """Asks ``stats`` every ``interval`` seconds on the running loop, until ``close``; 0: never.
    Nothing is told of idle times."""

    def __init__(self, stats: Callable[[], Stats | None], interval: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._stats = stats
        self._interval = interval
        self._last = (clock.now(), Stats())
        self._timer = self._loop.call_later(interval, self._tick) if interval > 0 else None

    def _tick(self) -> None:
        now, stats = clock.now(), self._stats()
        if stats is not None:
            since, before = self._last
            if stats.running or stats.queued or stats.steps > before.steps:
                line = throughput(before, stats, now - since)
                log.info(TEXT, *line.values(), extra={"fields": line})
            self._last = (now, stats)
        self._timer = self._loop.call_later(self._interval, self._tick)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


TEXT = (
    "running %d, waiting %d, prompts %.1f tok/s, output %.1f tok/s, "
    "prefix cache hits %.0f %%, KV cache used %.0f %%"
)


def throughput(before: Stats, stats: Stats, seconds: float) -> dict[str, float]:
    """The values of ``TEXT``, by name: rates and hits of the time between, the rest of now."""
    asked = stats.query_tokens - before.query_tokens
    used = stats.pages_total - stats.pages_free - stats.pages_evictable
    return {
        "running": stats.running,
        "waiting": stats.queued,
        "prompt_tokens_per_second": round((stats.prefilled_tokens - before.prefilled_tokens) / seconds, 1),
        "output_tokens_per_second": round((stats.output_tokens - before.output_tokens) / seconds, 1),
        "cache_hit_percent": round(100 * (stats.hit_tokens - before.hit_tokens) / max(1, asked)),
        "kv_used_percent": round(100 * used / max(1, stats.pages_total)),
    }
