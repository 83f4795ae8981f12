"""Which of the server's models a request is for: its ``model`` field, or ``?model=``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec
from aiohttp import web

from sgla import clock
from sgla.errors import ModelNotFound
from sgla.http.ports import Ingress
from sgla.http.request.intake import peeked
from sgla.http.server import ASKED, TAKEN, Server
from sgla.observe.metrics import text_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SCRAPES = 20  # so a twentieth of the loop's time goes to metrics at most
LATEST = ":latest"  # what Ollama's clients put behind a name
STATES = {"ready": "loaded", "updating": "loaded", "sleeping": "sleeping", "unloaded": "unloaded"} | {
    "dead": "dead",
    "draining": "draining",
}


class Lookup(NamedTuple):
    """How a handler comes by its model: by which fields of its body, if by any; and whether one that sleeps
    until somebody comes, or is not loaded yet, has to wake for it."""

    fields: Sequence[str] = ()
    wakes: bool = False


class Models:
    """The servers of all models, which share all but the model. The first is for requests that name none."""

    def __init__(self, servers: Sequence[Server], lookups: Mapping[Handler, Lookup]) -> None:
        self.servers = servers
        self.lookups = lookups
        self._metrics_text = b""
        self._metrics_hold = 0.0  # until then

    @property
    def several(self) -> bool:
        return len(self.servers) > 1

    def names(self) -> list[str]:
        """Of all models, and of their adapters."""
        return [name for server in self.servers for name in server.names()]

    def find(self, asked: str | None) -> Server:
        """The server of the model with this name, or of an adapter with it; without a name the first one.
        Raises ModelNotFound."""
        if not asked:
            return self.servers[0]
        for server in self.servers:
            if server.knows(asked):
                return server
        there = ", ".join(self.names()[:50])
        raise ModelNotFound(f"model {asked[:200]!r} does not exist; this server has {there}", param="model")

    def require_listed(self) -> None:
        """Raise the typed 503 of a single model that is not there; of several the list says how each is."""
        if not self.several:
            self.servers[0].ingress.require_ready(resting=True)

    def check(self, asked: str | None) -> str:
        """The name to answer with. Raises ModelNotFound."""
        return self.find(asked).model(asked)

    def metrics_text(self) -> bytes:
        """Prometheus' text. Open without a key, and some milliseconds of the loop:
        one that took t is shown for ``SCRAPES`` times t."""
        began = clock.now()
        if began >= self._metrics_hold:
            for server in self.servers:
                server.observe()
            self._metrics_text = text_of([server.metrics for server in self.servers])
            ended = clock.now()
            self._metrics_hold = ended + SCRAPES * (ended - began)
        return self._metrics_text


@asynccontextmanager
async def chosen(request: web.Request, handler: Handler) -> AsyncIterator[None]:
    """While ``handler`` answers: ``request[ASKED]`` is the server of the model that the request is for, awake
    if the handler needs it, and it does not fall asleep. Raises ModelNotFound, and what a body that cannot be
    read does."""
    models = request.app[MODELS]
    lookup = models.lookups.get(handler, Lookup())
    if models.several:
        await _choose(request, models, lookup.fields)
    async with used(request[ASKED].ingress, lookup.wakes):
        yield


@asynccontextmanager
async def named_later(request: web.Request, asked: str | None) -> AsyncIterator[Server]:
    """As ``chosen``, in a handler that learns the model's name while it reads the body."""
    models = request.app[MODELS]
    if models.several and "model" not in request.query:
        request[ASKED] = models.find(asked)
    async with used(request[ASKED].ingress, wakes=True):
        yield request[ASKED]


@asynccontextmanager
async def used(ingress: Ingress, wakes: bool) -> AsyncIterator[None]:
    """The model does not fall asleep meanwhile, and is awake where the handler ``wakes`` it."""
    ingress.enter()
    try:
        if wakes:
            await ingress.awake()
        yield
    finally:
        ingress.leave()


async def _choose(request: web.Request, models: Models, fields: Sequence[str]) -> None:
    asked = request.query.get("model")
    if asked is None and fields:
        asked = named(await peeked(request), fields)
    if asked and asked.endswith(LATEST) and asked not in models.names() and request.path.startswith("/api/"):
        asked = asked.removesuffix(LATEST)
    claude = asked and asked.startswith("claude") and request.path.startswith("/v1/messages")
    if claude and asked not in models.names():
        asked = None  # as anthropic.messages.served_model has it
    request[ASKED] = models.find(asked)
    if fields and not asked:
        request[TAKEN] = request[ASKED].ingress.model_names[0]


def named(body: Mapping[str, msgspec.Raw], fields: Sequence[str]) -> str | None:
    """The first of these fields that names a model; what is no name is the handler's to refuse."""
    for field in fields:
        if field in body:
            try:
                if name := msgspec.json.decode(body[field], type=str | None):
                    return name
            except msgspec.DecodeError:
                return None
    return None


def state_of(server: Server) -> str:
    """In a word: loaded, loading, sleeping, unloaded, draining or dead."""
    return STATES.get(server.ingress.phase, "loading")


MODELS: web.AppKey[Models] = web.AppKey("models", Models)
