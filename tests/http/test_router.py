"""The server behind the router: what clients get is what the server says."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from http_site import Serve

from sgla.route.balancer import Balancer
from sgla.route.config import RouteConfig
from sgla.route.front import Front
from sgla.route.owner import LocalOwner
from sgla.route.watch import Watch

MESSAGES = [{"role": "user", "content": "Hello!"}]


@pytest.fixture
async def urls(serve: Serve) -> AsyncIterator[tuple[str, str]]:
    """Of a server, and of a router in front of it."""
    site = await serve(api_key=["none"])
    server = f"http://127.0.0.1:{site.port}"
    config = RouteConfig(worker=[server], worker_api_key="none")
    balancer = Balancer(config)
    front = Front(config, LocalOwner(balancer))
    balancer.add(server)
    watch = Watch(balancer)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    await front.listen([listening], None)
    while balancer.workers[server].trouble:
        await asyncio.sleep(0.005)
    yield server, f"http://127.0.0.1:{listening.getsockname()[1]}"
    front.close()
    await watch.close()


async def ask(url: str, method: str, path: str, **more: Any) -> tuple[int, str, dict[str, str]]:
    headers = {"Authorization": "Bearer none", "X-Request-Id": "r"}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url + path, headers=headers, **more) as response,
    ):
        kept = {name.lower(): value for name, value in response.headers.items() if name != "Date"}
        return response.status, await response.text(), kept


@pytest.mark.parametrize(
    ("method", "path", "fields"),
    [
        ("POST", "/v1/chat/completions", {"model": "fake", "messages": MESSAGES, "stream": True}),
        ("POST", "/v1/completions", {"model": "fake", "prompt": "a"}),
        ("POST", "/v1/messages", {"model": "fake", "messages": MESSAGES, "max_tokens": 4}),
        ("POST", "/v1/chat/completions", {"messages": 1}),
        ("GET", "/v1/models", None),
        ("GET", "/nothing", None),
        ("OPTIONS", "/v1/completions", None),
    ],
)
async def test_answers_are_the_servers(
    urls: tuple[str, str], method: str, path: str, fields: dict[str, Any] | None
) -> None:
    direct, routed = [await ask(url, method, path, json=fields) for url in urls]
    assert (routed[0], without_ids(routed[1])) == (direct[0], without_ids(direct[1]))
    if path != "/v1/models":  # the router's own
        assert {**routed[2], "content-length": ""} == {**direct[2], "content-length": ""}


def without_ids(text: str) -> str:
    """Times and random ids differ."""
    return re.sub(r'("(?:id|created)": ?)("[^"]*"|\d+)', r"\1", text)
