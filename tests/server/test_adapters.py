"""Adapters of requests, through the whole server: how they are named, loaded and unloaded."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from local_server import Local, local_server

from sgla import LLM, Engine, LoRARequest, SamplingParams
from sgla.errors import ConfigError, InvalidAdapter, ModelNotFound

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from adapters import save_adapter
from test_lora import BAD

BODY = {"prompt": "abcdefghijklmnopqrstuvwxyz", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the fake executor takes for adapters."""
    root = tmp_path_factory.mktemp("adapters")
    for name in ("one", "two", "three"):
        (root / name).mkdir()
        (root / name / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return root


async def completed(local: Local, **changes: Any) -> str:
    status, body = await local.post("/v1/completions", BODY | changes)
    assert status == 200, body
    text: str = json.loads(body)["choices"][0]["text"]
    return text


async def failed(local: Local, path: str, body: Any) -> tuple[int, str, str]:
    status, text = await local.post(path, body)
    error = json.loads(text)["error"]
    return status, error["code"], error["message"]


async def load(local: Local, folders: Path, name: str, **more: Any) -> None:
    body = {"lora_name": name, "lora_path": str(folders / name), **more}
    assert (await local.post("/load_lora_adapter", body))[0] == 200


async def test_an_adapter_is_chosen_by_each_of_its_names(tiny_model: Path, folders: Path) -> None:
    modules = [f"one={folders / 'one'}", f"two={folders / 'two'}", f"new:latest={folders / 'two'}"]
    async with local_server(
        model=str(tiny_model), served_model_name=["tiny", "org/tiny:v1"], lora_modules=modules
    ) as local:
        base, one = await completed(local), await completed(local, model="one")
        assert len({base, one, await completed(local, model="two")}) == 3
        assert await completed(local, model="tiny") == base
        for changes in ({"model": "tiny:one"}, {"model": "org/tiny:v1:one"}, {"lora_path": "one"}):
            assert await completed(local, **changes) == one
        assert await completed(local, model="one", lora_path="one") == one
        status, body = await local.post(
            "/generate",
            {
                "text": [BODY["prompt"]] * 3,
                "lora_path": ["one", None, "two"],
                "sampling_params": {"max_new_tokens": 5, "ignore_eos": True, "temperature": 0},
            },
        )
        assert status == 200, body
        texts = [result["text"] for result in json.loads(body)]
        assert texts[:2] == [one, base]
        answers = [await local.post("/v1/chat/completions", CHAT | {"model": m}) for m in ("tiny", "one")]
        assert [json.loads(body)["model"] for _, body in answers] == ["tiny", "one"]
        assert len({json.loads(body)["choices"][0]["message"]["content"] for _, body in answers}) == 2
        async with local.client.get("/v1/models") as response:
            cards = {card["id"]: card for card in (await response.json())["data"]}
        assert list(cards) == ["tiny", "org/tiny:v1", "one", "two", "new:latest"]
        assert (cards["one"]["parent"], cards["tiny"]["parent"]) == ("tiny", None)
        assert cards["one"]["root"] == str(folders / "one")
        async with local.client.get("/v1/models/one") as response:
            assert (await response.json())["parent"] == "tiny"
        async with local.client.get("/api/tags") as response:
            parents = {c["name"]: c["details"]["parent_model"] for c in (await response.json())["models"]}
        assert parents == {"tiny": "", "org/tiny:v1": ""} | dict.fromkeys(
            ("one", "two", "new:latest"), "tiny"
        )
        names = ("tiny", "one", "one:latest", "new:latest")
        told = {name: await local.post("/api/show", {"model": name}) for name in names}
        shown = [json.loads(body)["details"]["parent_model"] for _, body in told.values()]
        assert shown == ["", "tiny", "tiny", "tiny"]
        assert (await failed(local, "/v1/completions", BODY | {"model": "six"}))[:2] == (
            404,
            "model_not_found",
        )
        assert (await failed(local, "/generate", {"text": "x", "lora_path": "six"}))[0] == 404
        told = await failed(local, "/v1/completions", BODY | {"model": "one", "lora_path": "two"})
        assert told[:2] == (400, "invalid_value")


async def test_texts_of_two_adapters_share_no_page(tiny_model: Path, folders: Path) -> None:
    modules = [f"one={folders / 'one'}", f"two={folders / 'two'}"]
    long = {"prompt": "x" * 200, "max_tokens": 1}
    async with local_server(model=str(tiny_model), lora_modules=modules) as local:

        async def cached(**changes: Any) -> int:
            _, body = await local.post("/v1/completions", long | changes)
            count: int = json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]
            return count

        assert [await cached(), await cached(model="one"), await cached(model="two")] == [0, 0, 0]
        assert min(await cached(), await cached(model="one"), await cached(model="two")) > 100
        for salt in ("\x011\x01", "\x010\x01"):  # what begins the namespaces of adapters
            assert await cached(cache_salt=salt) == 0


async def test_adapters_come_and_go_while_others_run(tiny_model: Path, folders: Path) -> None:
    async with local_server(
        model=str(tiny_model), enable_lora=True, max_loras=2, lora_folders=[str(folders)]
    ) as local:
        assert (await failed(local, "/v1/completions", BODY | {"model": "one"}))[0] == 404
        status, body = await local.post(
            "/load_lora_adapter", {"lora_name": "one", "lora_path": str(folders / "one")}
        )
        assert (status, json.loads(body)["loaded_adapters"]) == (200, {"one": str(folders / "one")})
        first = await completed(local, model="one")
        status, body = await local.post(
            "/v1/load_lora_adapter", {"lora_name": "two", "lora_path": str(folders / "two")}
        )
        assert (status, body) == (200, "Success: LoRA adapter 'two' added successfully.")
        local.system.ingress.pause(True)
        running = asyncio.ensure_future(completed(local, model="one"))
        while not local.system.ingress.open_requests:
            await asyncio.sleep(0.005)
        leaving = asyncio.ensure_future(local.post("/v1/unload_lora_adapter", {"lora_name": "one"}))
        while "one" in local.system.ingress.adapters.loaded:
            await asyncio.sleep(0.005)
        assert (await failed(local, "/v1/completions", BODY | {"model": "one"}))[0] == 404
        assert not leaving.done()
        local.system.ingress.pause(False)
        assert await running == first
        assert (await leaving)[1] == "Success: LoRA adapter 'one' removed successfully."
        await load(local, folders, "one")
        assert await completed(local, model="one") != first, "another load is another adapter to the fake"
        for _ in range(3):  # more than there are places
            await load(local, folders, "three")
            await completed(local, model="three")
            await local.post("/unload_lora_adapter", {"lora_name": "three"})
        async with local.client.get("/metrics") as response:
            text = await response.text()
        assert "sgla:lora_pool_slots_total{model_name=" in text
        loads = next(line for line in text.splitlines() if line.startswith("sgla:lora_loads_total"))
        assert float(loads.split()[-1]) == 5
        assert local.system.ingress.open_requests == 0
        assert local.system._core is not None
        local.system._core.check()


async def test_what_cannot_be_loaded_is_refused(tiny_model: Path, folders: Path, tmp_path: Path) -> None:
    path = "/load_lora_adapter"
    async with local_server(
        model=str(tiny_model),
        served_model_name=["tiny"],
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=2,
        lora_folders=[str(folders)],
    ) as local:
        for outside in ("/etc", str(tmp_path), str(folders / ".."), f"{folders}-more", "one", ""):
            body = {"lora_name": "x", "lora_path": outside}
            assert (await failed(local, path, body))[:2] == (400, "invalid_adapter"), outside
        (folders / "link").symlink_to("/etc")
        assert (await failed(local, path, {"lora_name": "x", "lora_path": f"{folders}/link"}))[0] == 400
        (folders / "loop").symlink_to("loop")
        for name in ("a\0b", f"{folders}/loop"):
            assert (await failed(local, path, {"lora_name": "x", "lora_path": name}))[0] == 400
        body = {"lora_name": "x", "lora_path": str(folders)}
        assert (await failed(local, path, body))[:2] == (400, "invalid_adapter")
        for name in ("tiny", "", "a\nb", "x" * 300):
            body = {"lora_name": name, "lora_path": str(folders / "one")}
            assert (await failed(local, path, body))[:2] == (400, "invalid_value")
        await load(local, folders, "one", pinned=True)
        again = {"lora_name": "one", "lora_path": str(folders / "one")}
        assert "loaded already" in (await failed(local, path, again))[2]
        pinned = {"lora_name": "two", "lora_path": str(folders / "two"), "pinned": True}
        assert "must stay for others" in (await failed(local, path, pinned))[2]
        await load(local, folders, "two")
        third = {"lora_name": "three", "lora_path": str(folders / "three")}
        assert "--max-cpu-loras" in (await failed(local, path, third))[2]
        assert (await failed(local, "/unload_lora_adapter", {"lora_name": "six"}))[0] == 404
        assert await completed(local, model="one") != await completed(local)
    async with local_server(model=str(tiny_model)) as local:
        for changes in ({"lora_path": "one"}, {"model": "one"}):
            status, *_ = await failed(local, "/v1/completions", BODY | changes)
            assert status in (400, 404)


async def test_an_adapter_of_the_settings_must_be_one(
    tiny_model: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is found out before the model is loaded."""
    monkeypatch.setattr("sgla.actors.system.make_local", None)
    for folder in (folders, "x" * 300):  # and one whose name no file has
        with pytest.raises(ConfigError, match="--lora-modules x: .* has no adapter_config"):
            async with local_server(model=str(tiny_model), lora_modules=[f"x={folder}"]):
                pass


@pytest.mark.parametrize(
    ("said", "names", "message"),
    [
        ({"peft_type": "LORA", "use_dora": True}, ["x"], "--lora-modules x: .* DoRA is not supported"),
        ({"peft_type": "LORA", "r": 32}, ["x"], "--lora-modules x: .* start the server with --max-lora-rank"),
        ({"peft_type": "LORA"}, ["x", "y", "x"], "--lora-modules x: two adapters have this name"),
        ({"peft_type": "LORA"}, ["tiny"], "--lora-modules tiny: this is the model's name"),
        ({"peft_type": "LORA"}, list("abc"), "--lora-modules: 3 are more than --max-cpu-loras 2"),
    ],
)
async def test_what_the_settings_say_of_adapters_is_refused_before_the_model_is_loaded(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: dict[str, Any],
    names: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("sgla.actors.system.make_local", None)
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    settings = {"served_model_name": ["tiny"], "max_loras": 2, "max_cpu_loras": 2}
    with pytest.raises(ConfigError, match=message):
        async with local_server(
            model=str(tiny_model), lora_modules=[f"{name}={tmp_path}" for name in names], **settings
        ):
            pass


def test_the_python_api_has_adapters(tiny_model: Path, folders: Path) -> None:
    prompt, sampling = BODY["prompt"], {"max_tokens": 5, "ignore_eos": True, "temperature": 0}
    with Engine(str(tiny_model), executor="fake", enable_lora=True) as engine:
        engine.load_lora_adapter("one", str(folders / "one"))
        engine.load_lora_adapter("two", str(folders / "two"), pinned=True)
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        both = engine.generate([prompt] * 2, params, lora_path=[None, "one"])
        base, one = (output.tokens for output in both)
        assert base != one
        assert engine.generate(prompt, params, lora_path="one").tokens == one
        streamed = [t for event in engine.stream(prompt, params, lora_path="one") for t in event.tokens]
        assert streamed == one
        chat = [{"role": "user", "content": "abc"}]
        answers = [engine.chat(chat, params, lora_path=name).tokens for name in (None, "one", "two")]
        assert len({tuple(tokens) for tokens in answers}) == 3
        engine.unload_lora_adapter("one")
        assert engine.adapters == ["two"]
        with pytest.raises(ModelNotFound, match="adapter 'one' is not loaded; there are two"):
            engine.generate(prompt, params, lora_path="one")
    with LLM(str(tiny_model), executor="fake", enable_lora=True) as llm:
        two = LoRARequest("two", 1, str(folders / "two"))
        outputs = llm.generate([prompt] * 2, params, lora_request=[None, two])
        assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids
        assert llm.generate(prompt, params, lora_request=two)[0].outputs[0] == outputs[1].outputs[0]


def test_adapters_come_and_go_in_workers_while_a_text_is_written(tiny_model: Path, tmp_path: Path) -> None:
    """In worker processes of two ranks. Files that are no adapters are refused, and nobody else notices."""
    save_adapter(tmp_path / "good", tiny_model)
    for kind, (spoil, _) in list(BAD.items())[::5]:
        save_adapter(tmp_path / kind, tiny_model)
        spoil(tmp_path / kind)
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_lora_rank": 8, "max_loras": 1}
    with Engine(str(tiny_model), enable_lora=True, tp=2, **settings) as engine:
        expected = engine.generate("abc", params).tokens
        found, adapted = [], []
        for event in engine.stream("abc", params):
            found += event.tokens
            if len(found) == 20:
                for kind in list(BAD)[::5]:
                    with pytest.raises(InvalidAdapter):
                        engine.load_lora_adapter(kind, str(tmp_path / kind))
                for name in ("one", "two"):
                    engine.load_lora_adapter(name, str(tmp_path / "good"))
                adapted = engine.generate(["abc"] * 2, params, lora_path=["one", "two"])
                engine.unload_lora_adapter("one")
        assert found == expected
        assert engine.adapters == ["two"]
        one, two = (output.tokens for output in adapted)
        assert one == two != expected
        assert engine.stats().adapter_loads == 2
