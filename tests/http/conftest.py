"""Fixtures: the application on a real socket, in front of the fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from http_fake import FakeIngress
from http_site import Serve, Site

from sgla.config import Config
from sgla.http.app import make_app
from sgla.http.connections import Runner
from sgla.observe.metrics import Metrics


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """``await serve(ingress=FakeIngress(...), key=..., **config fields)``; every site is closed at the
    end."""
    closers: list[Callable[[], Awaitable[Any]]] = []

    async def start(ingress: FakeIngress | None = None, key: str = "none", **settings: Any) -> Site:
        ingress = ingress or FakeIngress()
        metrics = Metrics("fake")
        config = Config(**settings)
        app = make_app(ingress, config, metrics)
        limit = {"limit": config.max_connections} if config.max_connections else {}
        runner = Runner(app, shutdown_timeout=0.5, **limit)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        site = Site(ingress, app, metrics, runner.addresses[0][1], key, runner.cleanup)
        closers.extend((site.close, runner.cleanup))
        return site

    yield start
    for close in closers:
        await close()


@pytest.fixture
async def site(serve: Serve) -> Site:
    return await serve()
