"""Pictures of the Python API are those of HTTP."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from sgla import LLM, BeamSearchParams, Engine, SamplingParams
from sgla.actors.shelf import Shelf
from sgla.errors import InvalidField, SglaError, UnsupportedField
from sgla.http.app import make_app
from sgla.http.connections import Runner
from sgla.worker.features import FeatureCache

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXT = "Look: <image> and <image>"


def image(color: str, turned: bool = False) -> Image.Image:
    made = Image.new("RGB", (20, 14), color)
    made.paste("white", (0, 0, 9, 5))
    if turned:
        made.getexif()[0x0112] = 6
    return made


def png(of: Image.Image) -> bytes:
    out = io.BytesIO()
    of.save(out, "PNG", exif=of.getexif())
    return out.getvalue()


SHOWN = [image("red"), image("blue", turned=True)]
FILES = [png(one) for one in SHOWN]
BASE64 = [base64.b64encode(data).decode() for data in FILES]


SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "executor": "inline",
    "device": "cpu",
    "threads": 1,
}


@pytest.fixture(scope="module")
def folder(tiny_llava: Path) -> Path:
    for name, data in zip(("red.png", "blue.png"), FILES):
        (tiny_llava / name).write_bytes(data)
    return tiny_llava


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), seed=1, allowed_media_path=str(folder), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(llm: LLM) -> Engine:
    return llm.engine


@pytest.fixture(scope="module")
def post(engine: Engine) -> Iterator[Any]:
    """To the server of the same engine."""
    with posting(engine) as post:
        yield post


@contextmanager
def posting(engine: Engine) -> Iterator[Any]:
    system: Any = engine._system

    async def begin() -> Runner:
        runner = Runner(make_app(system.ingress, engine.config, system.metrics))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = engine._call(begin())

    def post(path: str, body: Any) -> Any:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    yield post
    engine._call(runner.cleanup())


@pytest.fixture(scope="module")
def expected(post: Any) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    made = post("/generate", {"text": TEXT, "image_data": BASE64, "sampling_params": sampling})
    ids: list[int] = made["output_ids"]
    return ids


def test_pictures_from_all_sources_are_those_of_http(
    engine: Engine, expected: list[int], folder: Path
) -> None:
    serve = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    thread = Thread(target=serve.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{serve.server_port}"
        for first, second in (
            SHOWN,
            FILES,
            BASE64,
            [f"data:image/png;base64,{text}" for text in BASE64],
            [folder / "red.png", str(folder / "blue.png")],
            [f"file://{folder}/red.png", f"{url}/blue.png"],
        ):
            assert engine.generate(TEXT, GREEDY, image_data=[first, second]).tokens == expected
    finally:
        serve.shutdown()
        serve.server_close()
        thread.join()
    plain, other = engine.generate(["No picture", TEXT], GREEDY, image_data=[None, SHOWN[::-1]])
    assert plain.tokens == engine.generate("No picture", GREEDY).tokens
    assert other.tokens == engine.generate(TEXT, GREEDY, image_data=SHOWN[::-1]).tokens != expected


def test_streams_have_pictures(engine: Engine, expected: list[int]) -> None:
    events = list(engine.stream(TEXT, GREEDY, image_data=SHOWN))
    assert [token for event in events for token in event.tokens] == expected

    async def streamed() -> list[int]:
        return [t async for event in engine.astream(TEXT, GREEDY, image_data=SHOWN) for t in event.tokens]

    assert asyncio.run(streamed()) == expected


def test_vllms_class_takes_pictures(llm: LLM, expected: list[int], post: Any) -> None:
    asked = {"prompt": TEXT, "multi_modal_data": {"image": SHOWN}}
    made = llm.generate([asked, "No picture"], GREEDY)
    assert made[0].outputs[0].token_ids == expected
    assert made[0].prompt == TEXT
    text = {"type": "text", "text": "Look: "}
    content = [text, {"type": "image_pil", "image_pil": SHOWN[0]}, {"type": "text", "text": " and "}]
    content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64[1]}"}})
    [chat] = llm.chat([{"role": "user", "content": content}], GREEDY)
    assert chat.outputs[0].token_ids == expected
    sent = [{"type": "image_url", "image_url": f"data:image/png;base64,{text}"} for text in BASE64]
    content = [content[0], sent[0], content[2], sent[1]]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 6}
    name = llm.engine._ready().ingress.model_names[0]
    answer = post("/v1/chat/completions", {"model": name, "ignore_eos": True, **body})
    assert answer["choices"][0]["message"]["content"] == chat.outputs[0].text


@pytest.mark.parametrize(
    ("images", "why"),
    [
        ([b"no picture", SHOWN[0]], "image_data: it is no picture"),
        ([SHOWN[0]], "2 places for pictures"),
        ([3.5, SHOWN[0]], "a value of type float"),
        (["nowhere.png", SHOWN[0]], "image_data: the picture cannot be read"),
        (["ftp://a/b", SHOWN[0]], "begins with http://"),
        (SHOWN * 40, "a prompt has 80 pictures; 64"),
    ],
)
def test_what_is_no_picture_is_refused(engine: Engine, images: list[Any], why: str) -> None:
    with pytest.raises(SglaError, match=why):
        engine.generate(TEXT, GREEDY, image_data=images)


def test_settings_of_the_processor_go_through(llm: LLM, post: Any) -> None:
    """LLaVA 1.5 has no sizes, and says so wherever they come from."""
    why, asked = "'max_pixels' is not supported", {"max_pixels": 64}
    prompt = {"prompt": TEXT, "multi_modal_data": {"image": SHOWN}, "mm_processor_kwargs": asked}
    with pytest.raises(SglaError, match=why):
        llm.generate(prompt, GREEDY)
    chat = [{"role": "user", "content": [{"type": "image", "image": SHOWN[0]}]}]
    with pytest.raises(SglaError, match=why):
        llm.chat(chat, GREEDY, mm_processor_kwargs=asked)
    with pytest.raises(urllib.error.HTTPError) as found:
        post("/generate", {"text": TEXT, "image_data": BASE64, "mm_processor_kwargs": asked})
    assert found.value.code == 400
    assert why in found.value.read().decode()


def test_other_media_and_calls_are_refused_by_name(llm: LLM, tiny_model: Path) -> None:
    with pytest.raises(UnsupportedField, match="takes no videos"):
        llm.generate({"prompt": TEXT, "multi_modal_data": {"video": SHOWN}})
    with pytest.raises(InvalidField, match="keys such as 'image'"):
        llm.generate({"prompt": TEXT, "multi_modal_data": SHOWN})
    beams = BeamSearchParams(beam_width=2, max_tokens=4)
    with pytest.raises(UnsupportedField, match="multi_modal_data"):
        llm.beam_search({"prompt": TEXT, "multi_modal_data": {"image": SHOWN}}, beams)
    with pytest.raises(InvalidField, match="an assistant sends no pictures"):
        llm.chat([{"role": "assistant", "content": [{"type": "image", "image": SHOWN[0]}]}])
    with pytest.raises(InvalidField, match="has no picture"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}])
    with (
        Engine(str(tiny_model), executor="fake", device="cpu") as engine,
        pytest.raises(UnsupportedField, match="takes no images"),
    ):
        engine.generate("a", image_data=SHOWN)


@pytest.mark.parametrize(
    ("lacking", "setting", "why"),
    [("PIL", {}, "pip install 'sgla[mm]'"), ("", {"enable_lora": True}, "are taken: --enable-lora")],
)
def test_a_server_that_takes_none_says_what_would_help(
    tiny_llava: Path, monkeypatch: pytest.MonkeyPatch, lacking: str, setting: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr("sgla.model.vision.served.find_spec", lambda name: None if name == lacking else "")
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64[0]}"}}
    with Engine(str(tiny_llava), **SETTINGS, **setting) as engine, posting(engine) as post:
        for path, body in (
            ("/generate", {"text": TEXT, "image_data": BASE64}),
            ("/generate", {"text": "a", "mm_processor_kwargs": {"size": {"shortest_edge": 8}}}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [picture]}]}),
        ):
            with pytest.raises(urllib.error.HTTPError) as found:
                post(path, body)
            assert found.value.code == 400
            assert why in json.load(found.value)["error"]["message"]
        with pytest.raises(UnsupportedField, match="takes no sounds"):
            engine.generate("a", audio_data=b"x")
        with pytest.raises(UnsupportedField) as refused:
            engine.generate(TEXT, image_data=BASE64)
        assert why in refused.value.message


def forget_features() -> None:
    """Of all runners of this process."""
    for cache in [one for one in gc.get_objects() if isinstance(one, FeatureCache)]:
        cache._kept.clear()
        cache._bytes = 0


def test_what_was_prepared_is_used_again(
    engine: Engine, post: Any, expected: list[int], folder: Path
) -> None:
    """Neither decoded nor prepared, with the same answer; what has gone is made again, and so is what is at a
    path, which may have changed."""
    system: Any = engine._system
    room, runs = system._pictures, list[str]()

    def answer(data: list[str] = BASE64) -> list[int]:
        runs.clear()
        sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        made = post("/generate", {"text": TEXT, "image_data": data, "sampling_params": sampling})
        ids: list[int] = made["output_ids"]
        return ids

    def counted(pool: Any) -> Any:
        run = pool.run

        def counting(function: str, *args: Any, **more: Any) -> Any:
            runs.append(function.rpartition(":")[2])
            return run(function, *args, **more)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        for pool in (system.ingress.media, room._pool):
            patch.setattr(pool, "run", counted(pool))
        patch.setattr(room, "_shelf", Shelf(1 << 20))
        assert answer() == expected
        assert sorted(runs) == ["picture", "picture", "prepare", "prepare"]
        for forget in (lambda: None, engine.flush_cache, forget_features):
            forget()
            assert answer() == expected
            assert runs == []
        other = answer(BASE64[::-1])
        assert runs == []
        assert other != expected
        assert answer([str(folder / "red.png"), BASE64[1]]) == expected
        assert runs == ["picture"], "a file may have changed, but this one has not"
        runs.clear()
        (named,) = engine.generate([TEXT], GREEDY, image_data=[[FILES[0], BASE64[1]]])
        assert (named.tokens, runs) == (expected, ["picture"]), "a file by itself is not its base64"
        runs.clear()
        (named,) = engine.generate([TEXT], GREEDY, image_data=[[FILES[0], BASE64[1]]])
        assert (named.tokens, runs) == (expected, [])
        shown = list(system.metrics.collect())
        [hits] = [family for family in shown if family.name == "sgla:media_cache_hits"]
        assert hits.samples[0].value > 0
        # Room for one of the two.
        patch.setattr(room, "_shelf", Shelf(room._shelf.bytes // 2))
        assert answer() == expected
        assert sorted(runs) == ["picture", "picture", "prepare", "prepare"]
        assert answer() == expected
        assert "picture" in runs
