"""Routes that are open without a key cost the users with keys nothing to speak of."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from local_server import Local, local_server

from sgla.http import probe
from sgla.observe.metrics import Metrics

ENDLESS = {"prompt": [1], "max_tokens": 4000, "ignore_eos": True, "stream": True}
SHORT = {"prompt": [1], "max_tokens": 1}
ONE_PLACE = {"max_running_requests": 1, "max_queued_requests": 0, "api_key": ["key"]}
KEY = {"Authorization": "Bearer key"}


async def health(local: Local) -> int:
    async with local.client.get("/health_generate") as response:
        return response.status


async def test_many_who_ask_for_the_health_share_one_token(tiny_model: Path) -> None:
    async with local_server(model=str(tiny_model), **ONE_PLACE) as local:
        assert set(await asyncio.gather(*(health(local) for _ in range(50)))) == {200}
        assert local.system.metrics.requests.total() == 1


async def test_the_health_of_a_full_server_is_that_of_its_steps(tiny_model: Path) -> None:
    async with local_server(model=str(tiny_model), **ONE_PLACE) as local:
        async with local.client.post("/v1/completions", json=ENDLESS, headers=KEY) as stream:
            await stream.content.readany()
            assert await health(local) == 200
            assert (await local.post("/v1/completions", SHORT, **KEY))[0] == 429
        assert local.system.metrics.requests.total() <= 1  # the stream


async def test_a_look_at_the_health_takes_no_place(tiny_model: Path) -> None:
    async with local_server(model=str(tiny_model), **ONE_PLACE) as local:
        ingress = local.system.ingress
        ingress.pause(True)  # so the look goes on
        looks = [asyncio.ensure_future(health(local)) for _ in range(3)]
        while not ingress.open_requests:
            await asyncio.sleep(0.01)
        user = asyncio.ensure_future(local.post("/v1/completions", SHORT, **KEY))
        while ingress.open_requests < 2:
            await asyncio.sleep(0.01)
        assert (await local.post("/v1/completions", SHORT, **KEY))[0] == 429
        ingress.pause(False)
        assert (await user)[0] == 200
        assert [await look for look in looks] == [200] * 3
        assert (await local.post("/v1/completions", SHORT, **KEY))[0] == 200


async def test_an_engine_from_which_nothing_comes_is_not_healthy(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PATIENCE", 0.2)
    async with local_server(model=str(tiny_model)) as local:
        local.system.ingress.pause(True)
        assert await health(local) == 503
        assert local.system.ingress.open_requests == 0


async def test_scraping_takes_a_part_of_the_time_however_often(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def text(self: Metrics) -> bytes:
        time.sleep(0.05)
        made.append(b"x %d\n" % len(made))
        return made[-1]

    async with local_server(model=str(tiny_model)) as local:
        monkeypatch.setattr(Metrics, "text", text)
        began = time.monotonic()
        for _ in range(100):
            async with local.client.get("/metrics") as response:
                assert await response.read() == made[-1]
        assert len(made) <= 1 + (time.monotonic() - began) / (20 * 0.05)


async def test_methods_that_no_route_takes_share_a_label(tiny_model: Path) -> None:
    async with local_server(model=str(tiny_model)) as local:
        for method in ("PROPFIND", "LOCK", "REPORT"):
            async with local.client.request(method, "/health") as response:
                assert response.status == 405
        assert {method for method, _ in local.system.metrics.http_requests} == {"other"}
