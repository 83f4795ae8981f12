"""The access log: one line a request, with what it brought and cost, and no word of it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from itertools import chain
from typing import Any

from aiohttp import web

from sgla import clock
from sgla.actors.ingress import Sink
from sgla.http.answer.collect import total_usage
from sgla.http.clients import ADDRESS
from sgla.messages import Event, Rejected, Usage
from sgla.observe.log import together

log = logging.getLogger(__name__)
AT_ONCE = 64  # lines of one turn of the loop: a millisecond

# Routes that are asked again and again, by the page, a router and whoever watches the server, and the page's
# files.
POLLED = {
    "/metrics",
    "/v1/models",
    "/health",
    "/health/live",
    "/health/ready",
    "/ready",
    "/readyz",
    "/ping",
    "/load",
    "/get_load",
    "/page/{id}",
}


class Tally:
    """What the engine has made for one HTTP request with ``n`` choices a prompt."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._turns: list[dict[int, Usage]] = []  # by choice; a request that goes on has several
        self.first: float | None = None  # when its first token came

    def begin(self) -> dict[int, Usage]:
        """For the usages of what is opened now."""
        self._turns.append({})
        return self._turns[-1]

    def settle(self, usages: dict[int, Usage], n: int) -> None:
        """The request had these usages, whatever was opened for it."""
        self._turns, self._n = [usages], n

    def fields(self, began: float) -> dict[str, float]:
        """Nothing for a request that had no output."""
        if not any(self._turns):
            return {}
        usage = total_usage(chain.from_iterable(turn.items() for turn in self._turns), self._n)
        counts: dict[str, float] = {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
        return counts if self.first is None else counts | {"ttft_ms": round(1000 * (self.first - began), 1)}


class Tallied:
    """A sink whose messages are counted on their way, in ``usages``: one call a token, so all of it stands in
    ``push``."""

    def __init__(self, sink: Sink, tally: Tally, usages: dict[int, Usage]) -> None:
        self._push = sink.push
        self._tally = tally
        self._usages = usages

    def push(self, message: Event | Rejected) -> None:
        if type(message) is Event:
            self._usages[message.index] = message.usage
            if message.tokens and self._tally.first is None:
                self._tally.first = clock.now()
        self._push(message)


TALLY: web.RequestKey[Tally | None] = web.RequestKey("tally", Tally)


def worth_telling(route: str, status: int, loading: bool) -> bool:
    """Of what is polled only errors are; that a model which is being loaded is not ready is none."""
    return route not in POLLED or (status >= 400 and not (loading and status == 503))


class AccessLines:
    """Lines that wait until the answers are written; thousands of requests may end at once."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[tuple[Any, ...], dict[str, float]]] = deque()

    def add(self, line: tuple[Any, ...], counts: dict[str, float]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._write_some)
        self._waiting.append((line, counts))

    def _write_some(self) -> None:
        with together():
            for _ in range(min(AT_ONCE, len(self._waiting))):
                _write(*self._waiting.popleft())
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._write_some)

    async def close(self, app: web.Application) -> None:
        """Write the rest."""
        while self._waiting:
            self._write_some()


LINES: web.AppKey[AccessLines] = web.AppKey("access", AccessLines)


def log_access(request: web.Request, route: str, status: int, began: float, rid: str) -> None:
    """``began``: on ``clock.now()``."""
    millis = round(1000 * (clock.now() - began), 1)
    line = (request[ADDRESS], request.method, route[:100], status, millis, rid)
    tally = request.get(TALLY)
    counts = {} if tally is None else tally.fields(began)
    request.app[LINES].add(line, counts)


def _write(line: tuple[Any, ...], counts: dict[str, float]) -> None:
    fields = dict(zip(("client", "method", "route", "status", "ms", "request_id"), line))
    shown = "".join(f" {name}={value}" for name, value in counts.items())
    log.info("%s %s %s %d %.1f ms %s%s", *line, shown, extra={"fields": fields | counts})
