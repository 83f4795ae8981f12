"""The access log: one line a request, with what it brought and cost, and no word of it."""

from __future__ import annotations

import logging

from aiohttp import web

from sgla import clock
from sgla.actors.ingress import Sink
from sgla.http.answer.collect import total_usage
from sgla.http.clients import ADDRESS
from sgla.messages import Event, Rejected, Usage

log = logging.getLogger(__name__)

# Routes that are asked again and again, by the page and by whoever watches the server, and the page's files:
# only what goes wrong is told.
POLLED = {
    "/metrics",
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
        self._usages: dict[int, Usage] = {}
        self.first: float | None = None  # when its first token came

    def see(self, message: Event | Rejected) -> None:
        if isinstance(message, Event):
            self._usages[message.index] = message.usage
            if self.first is None and message.tokens:
                self.first = clock.now()

    def fields(self, began: float) -> dict[str, float]:
        usage = total_usage(self._usages.items(), self._n)
        counts: dict[str, float] = {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
        return counts if self.first is None else counts | {"ttft_ms": round(1000 * (self.first - began), 1)}


class Tallied:
    """A sink whose messages are counted on their way."""

    def __init__(self, sink: Sink, tally: Tally) -> None:
        self._sink = sink
        self._tally = tally

    def push(self, message: Event | Rejected) -> None:
        self._tally.see(message)
        self._sink.push(message)


TALLY: web.RequestKey[Tally | None] = web.RequestKey("tally", Tally)


def log_access(request: web.Request, route: str, status: int, began: float, rid: str) -> None:
    """``began``: on ``clock.now()``."""
    if route in POLLED and status < 400:
        return
    millis = round(1000 * (clock.now() - began), 1)
    line = (request[ADDRESS], request.method, route[:100], status, millis, rid)
    fields = dict(zip(("client", "method", "route", "status", "ms", "request_id"), line))
    tally = request.get(TALLY)
    counts = {} if tally is None else tally.fields(began)
    shown = "".join(f" {name}={value}" for name, value in counts.items())
    log.info("%s %s %s %d %.1f ms %s%s", *line, shown, extra={"fields": fields | counts})
