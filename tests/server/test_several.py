"""Several models in one server: a tiny chat model and a tiny embedder, each of which answers as alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sgla.actors.systems import Systems
from sgla.config import Config
from sgla.errors import ConfigError, OutOfMemory
from sgla.http.app import make_app
from sgla.http.connections import Runner
from sgla.ledger import Need

INLINE: dict[str, Any] = {
    "executor": "inline",
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "native_kernels": False,
    "kv_cache_bytes": 1 << 20,
    "log_interval": 0.0,
}
CHAT = {"model": "chat", "prompt": "hello there", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
EMBED = {"model": "embed", "input": ["w1 w2 w3", "w4"]}


class Site:
    def __init__(self, systems: Systems, client: aiohttp.ClientSession) -> None:
        self.systems = systems
        self.client = client
        self.headers: Any = {}

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(path) as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.client.post(path, json=body) as response:
            self.headers = response.headers
            return response.status, await response.json()

    async def text(self, **fields: Any) -> str:
        status, body = await self.post("/v1/completions", CHAT | fields)
        assert status == 200, body
        return str(body["choices"][0]["text"])

    async def vectors(self) -> list[list[float]]:
        status, body = await self.post("/v1/embeddings", EMBED)
        assert status == 200, body
        return [item["embedding"] for item in body["data"]]

    async def states(self) -> dict[str, str]:
        _, body = await self.get("/v1/models")
        return {card["id"]: card["state"] for card in body["data"]}


@contextlib.asynccontextmanager
async def serving(*configs: Config, **options: Any) -> AsyncIterator[Site]:
    systems = Systems(configs, **options)
    first, *others = [(system.ingress, system.config, system.metrics) for system in systems.all]
    runner = Runner(make_app(*first, others))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        await systems.start(lambda system, facts: None)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            yield Site(systems, client)
    finally:
        await systems.close()
        await runner.cleanup()


def named(name: str, model: Path, **settings: Any) -> Config:
    return Config(model=str(model), served_model_name=[name], **INLINE | settings)


@pytest.fixture
async def alone(tiny_model: Path, tiny_bert: Path) -> tuple[str, list[list[float]]]:
    """What each model answers in a server of its own."""
    async with serving(named("chat", tiny_model)) as site:
        text = await site.text()
        assert "x-model" not in site.headers
    async with serving(named("embed", tiny_bert)) as site:
        return text, await site.vectors()


async def test_each_model_answers_as_alone(
    tiny_model: Path, tiny_bert: Path, alone: tuple[str, list[list[float]]]
) -> None:
    async with serving(named("chat", tiny_model), named("embed", tiny_bert)) as site:
        found = await asyncio.gather(*(site.text() for _ in range(3)), site.vectors())
        assert found == [alone[0]] * 3 + [alone[1]]
        assert await site.states() == {"chat": "loaded", "embed": "loaded"}
        assert (await site.get("/v1/models/embed"))[1]["id"] == "embed"

        status, body = await site.post("/v1/completions", CHAT | {"model": "other"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert "chat, embed" in body["error"]["message"]
        status, body = await site.post("/v1/completions", CHAT | {"model": "embed"})
        assert (status, body["error"]["code"]) == (400, "unsupported_task")
        assert await site.text(model=None) == alone[0]
        assert site.headers["x-model"] == "chat"
        status, body = await site.post("/invocations", EMBED)
        assert [item["embedding"] for item in body["data"]] == alone[1]
        status, body = await site.post("/api/embed", EMBED | {"model": "embed:latest"})
        assert status == 200
        assert {card["name"] for card in (await site.get("/api/tags"))[1]["models"]} == {"chat", "embed"}

        _, text = await site.get("/metrics")
        lines = text.splitlines()
        assert lines.count("# TYPE sgla:steps counter") + lines.count("# TYPE sgla:steps_total counter") == 1
        done = [line for line in lines if line.startswith("sgla:num_requests_total{")]
        assert all(any(f'model_name="{name}"' in line for line in done) for name in ("chat", "embed"))
        assert 'sgla:generation_tokens_total{model_name="chat"} 32.0' in lines
        assert (await site.get("/health"))[0] == 200


async def test_idle_models_sleep_and_wake_for_a_request(
    tiny_model: Path, tiny_bert: Path, alone: tuple[str, list[list[float]]]
) -> None:
    models = named("chat", tiny_model), named("embed", tiny_bert)
    async with serving(*models, sleep_idle=0.05) as site:
        chat, embed = (system.ingress for system in site.systems.all)
        for _ in range(2):
            while not (chat.asleep and embed.asleep):
                await asyncio.sleep(0.01)
            assert chat.asleep == {"weights", "kv_cache"}
            assert await site.states() == {"chat": "sleeping", "embed": "sleeping"}
            assert (await site.get("/health"))[0] == 200
            assert (await site.get("/health_generate"))[0] == 200
            assert await site.vectors() == alone[1]
            assert chat.phase == "sleeping"
            assert await asyncio.gather(site.text(), site.text()) == [alone[0]] * 2
        while not chat.asleep:
            await asyncio.sleep(0.01)
        shown = {"model": "chat", "name": "model.norm.weight", "truncate_size": 2}
        assert (await site.post("/get_weights_by_name", shown))[0] == 200
        await site.post("/sleep?model=chat")
        status, body = await site.post("/v1/completions", CHAT)
        assert (status, body["error"]["code"]) == (503, "model_loading")
        assert (await site.get("/health"))[0] == 503
        assert (await site.get("/is_sleeping?model=chat"))[1] == {"is_sleeping": True}
        assert await site.vectors() == alone[1]
        await site.post("/wake_up?model=chat")
        assert await site.text() == alone[0]


@pytest.mark.parametrize("level", [1, 2])
async def test_an_encoder_sleeps_until_it_is_woken(
    tiny_bert: Path, alone: tuple[str, list[list[float]]], level: int
) -> None:
    async with serving(named("embed", tiny_bert)) as site:
        assert (await site.post(f"/sleep?level={level}"))[0] == 200
        assert (await site.post("/v1/embeddings", EMBED))[0] == 503
        assert (await site.post("/wake_up"))[0] == 200
        assert await site.vectors() == alone[1]


async def test_models_of_a_folder_are_loaded_on_demand_and_make_room(
    tiny_model: Path, alone: tuple[str, list[list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [named(name, tiny_model) for name in ("one", "two")]
    async with serving(*models, on_demand=True) as site:
        assert await site.states() == {"one": "unloaded", "two": "unloaded"}
        assert (await site.get("/health"))[0] == 200
        memory = site.systems._memory
        assert memory is not None
        answers = await asyncio.gather(*(site.text(model="one") for _ in range(2)))
        assert answers == [alone[0]] * 2
        assert await site.states() == {"one": "loaded", "two": "unloaded"}
        need = memory._needs[site.systems.first].bytes
        memory._room = {"cpu": need * 3 // 2}
        assert await site.text(model="two") == alone[0]
        assert await site.states() == {"one": "sleeping", "two": "loaded"}
        assert await site.text(model="one") == alone[0]
        assert await site.states() == {"one": "loaded", "two": "sleeping"}
        monkeypatch.setattr("sgla.actors.systems.LAST", 0.01)
        site.systems.first.ingress.enter()
        status, body = await site.post("/v1/completions", CHAT | {"model": "two"})
        assert (status, body["error"]["code"]) == (429, "overloaded")
        assert await site.text(model="one") == alone[0]
        site.systems.first.ingress.leave()
        memory._room = {"cpu": need // 2}
        status, body = await site.post("/v1/completions", CHAT | {"model": "two"})
        assert (status, body["error"]["code"]) == (500, "out_of_memory")
        assert await site.text(model="one") == alone[0]


async def test_a_model_that_has_come_stays_before_it_makes_room(
    tiny_model: Path, alone: tuple[str, list[list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks for two models in turns has to wait, and who wants the one that is there has not."""
    monkeypatch.setattr("sgla.actors.systems.STAY", 1e9)
    monkeypatch.setattr("sgla.actors.systems.LONGEST_STAY", 1e9)
    models = [named(name, tiny_model) for name in ("one", "two")]
    async with serving(*models, on_demand=True) as site:
        memory, one = site.systems._memory, site.systems.first
        assert memory is not None
        assert await site.text(model="one") == alone[0]
        memory._room = {"cpu": memory._needs[one].bytes * 3 // 2}
        other = asyncio.ensure_future(site.text(model="two"))
        assert [await site.text(model="one") for _ in range(2)] == [alone[0]] * 2
        assert not other.done()
        memory._stays.clear()
        assert await other == alone[0]
        assert await site.states() == {"one": "sleeping", "two": "loaded"}


async def test_a_model_in_use_all_the_time_makes_room_in_turn(
    tiny_model: Path, alone: tuple[str, list[list[float]]]
) -> None:
    """Its requests end, who comes meanwhile waits, and both go on by turns."""
    models = [named(name, tiny_model) for name in ("one", "two")]
    async with serving(*models, on_demand=True) as site:
        memory, one = site.systems._memory, site.systems.first
        assert memory is not None
        assert await site.text(model="one") == alone[0]
        memory._room = {"cpu": memory._needs[one].bytes * 3 // 2}
        over = asyncio.Event()

        async def keep_asking(name: str) -> int:
            count = 0
            while not over.is_set():
                assert await site.text(model=name) == alone[0]
                count += 1
            return count

        asking = [asyncio.ensure_future(keep_asking(name)) for name in ("one", "one", "two", "two")]
        for name in ("two", "one", "two"):
            while (await site.states())[name] != "loaded":
                await asyncio.sleep(0.01)
        over.set()
        assert all(await asyncio.gather(*asking))


async def test_models_that_do_not_fit_together_are_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgla.actors.systems.room_of", lambda machine: {"cpu": 3 << 19})
    with pytest.raises(OutOfMemory, match="of cpu memory are missing") as caught:
        async with serving(named("one", tiny_model), named("two", tiny_model)):
            pass
    assert "one" in caught.value.message
    assert Need("cpu", 1, 2).bytes == 3


async def test_a_model_that_cannot_be_loaded_is_named(tiny_model: Path) -> None:
    long = named("two", tiny_model, context_length=1 << 20)
    with pytest.raises(ConfigError) as caught:
        async with serving(named("one", tiny_model), long):
            pass
    assert caught.value.message.startswith("two: a context of 1048576 tokens needs ")


async def test_a_model_that_dies_leaves_the_others(tiny_model: Path) -> None:
    fake: dict[str, Any] = {"executor": "fake", "fake_step_ms": 20.0}
    models = named("one", tiny_model, **fake), named("two", tiny_model, **INLINE | {"executor": "fake"})
    async with serving(*models) as site:
        one, two = site.systems.all
        assert (await site.post("/v1/completions", CHAT | {"model": "one"}))[0] == 200
        asking = asyncio.ensure_future(
            site.post("/v1/completions", CHAT | {"model": "one", "max_tokens": 500})
        )
        while not asking.done() and not one.ingress.open_requests:
            await asyncio.sleep(0.01)
        os.kill(one._executor._ranks[0].process.pid, signal.SIGKILL)  # type: ignore[union-attr]
        status, body = await asking
        assert (status, body["error"]["code"]) == (503, "worker_died")
        status, body = await site.post("/v1/completions", CHAT | {"model": "one"})
        assert (status, body["error"]["code"]) == (503, "worker_died")
        assert (await site.post("/v1/completions", CHAT | {"model": "two"}))[0] == 200
        status, body = await site.get("/health/ready")
        assert (status, body["models"]) == (503, {"one": "dead", "two": "loaded"})
        assert body["message"].startswith("one: ")
        assert (await site.get("/health/live"))[0] == 503
        assert not site.systems.died.done()
        assert two.ingress.ready
