"""Pictures and videos of programs and of the Python API: the same on a server and on an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from PIL import Image
from video_files import clip

import sgla.lang as sgl
from sgla import LLM, Engine, SamplingParams
from sgla.errors import InvalidField, SglaError, UnsupportedField
from sgla.http.app import make_app
from sgla.http.connections import Runner
from sgla.lang.backends.base import Backend

WORDS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<|vision_start|>"
    "<|{{ p.type }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PICTURE, VIDEO = Image.new("RGB", (40, 30), "red"), clip(frames=8)
ASKED = "user: <|vision_start|><|{}_pad|><|vision_end|>What is it?\nassistant: "


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("tiny-qwen2-vl")
    tokenizer = json.loads((tiny_model / "tokenizer.json").read_text())
    text = json.loads((tiny_model / "config.json").read_text())
    first = text["vocab_size"]
    numbers = dict(zip(WORDS, range(first, first + 4)))
    made = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**made, "id": number, "content": word} for word, number in numbers.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((tiny_model / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    tower = {
        "depth": 1,
        "embed_dim": 32,
        "hidden_size": text["hidden_size"],
        "num_heads": 2,
        "patch_size": 14,
    }
    own = {"model_type": "qwen2_vl_text", "vocab_size": first + 4, "rope_parameters": rope}
    text = {name: value for name, value in text.items() if name not in ("architectures", "rope_theta")}
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vision_config": tower,
        "text_config": {**text, **own, "max_position_embeddings": 512},
        "image_token_id": numbers["<|image_pad|>"],
        "video_token_id": numbers["<|video_pad|>"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    images = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14}
    images["size"] = {"shortest_edge": 784, "longest_edge": 7840}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    how: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "executor": "inline", "device": "cpu"}
    with Engine(str(folder), threads=1, served_model_name=["tiny"], **how) as engine:
        yield engine


@pytest.fixture(scope="module")
def backends(engine: Engine) -> Iterator[dict[str, Backend]]:
    system: Any = engine._system

    async def begin() -> Runner:
        runner = Runner(make_app(system.ingress, engine.config, system.metrics))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = engine._call(begin())
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield {
        "engine": sgl.EngineBackend(engine),
        "server": sgl.RuntimeEndpoint(url),
        "openai": sgl.OpenAI("tiny", True, base_url=f"{url}/v1", api_key="none"),
    }
    engine._call(runner.cleanup())


def test_videos_of_all_calls_are_one(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "a.mp4"
    file.write_bytes(VIDEO)
    text = ASKED.format("video")
    whole = engine.generate(text, GREEDY, video_data=VIDEO)
    assert whole.tokens != engine.generate(text, GREEDY, video_data=clip(seed=1)).tokens
    chat = [
        {
            "role": "user",
            "content": [{"type": "video", "video": file}, {"type": "text", "text": "What is it?"}],
        }
    ]
    assert engine.chat(chat, GREEDY).tokens == whole.tokens
    events = engine.stream(text, GREEDY, video_data=str(file))
    assert [token for event in events for token in event.tokens] == whole.tokens

    async def awaited() -> Any:
        return await engine.agenerate([text, "no video"], GREEDY, video_data=[[VIDEO], None])

    first, second = asyncio.run(awaited())
    assert first.tokens == whole.tokens
    assert second.tokens == engine.generate("no video", GREEDY).tokens


def test_llm_takes_videos(engine: Engine, tmp_path: Path) -> None:
    """As vLLM's ``multi_modal_data``."""
    (tmp_path / "a.mp4").write_bytes(VIDEO)
    prompt = "<|vision_start|><|video_pad|><|vision_end|>What is it?"
    expected = engine.generate(prompt, GREEDY, video_data=VIDEO).tokens
    how: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "executor": "inline", "device": "cpu"}
    with LLM(engine.config.model, threads=1, **how) as llm:
        for video in (VIDEO, tmp_path / "a.mp4"):
            (found,) = llm.generate({"prompt": prompt, "multi_modal_data": {"video": video}}, GREEDY)
            assert list(found.outputs[0].token_ids) == expected
        with pytest.raises(UnsupportedField, match="'depth'"):
            llm.generate({"prompt": prompt, "multi_modal_data": {"depth": VIDEO}}, GREEDY)


def test_pictures_and_videos_stand_beside_each_other(engine: Engine) -> None:
    text = ASKED.format("video").replace("What", "<|vision_start|><|image_pad|><|vision_end|>What")
    both = engine.generate(text, GREEDY, image_data=PICTURE, video_data=VIDEO)
    shown = [{"type": "video_url", "video_url": {"url": VIDEO}}, {"type": "image", "image": PICTURE}]
    content = [*shown, {"type": "text", "text": "What is it?"}]
    assert engine.chat([{"role": "user", "content": content}], GREEDY).tokens == both.tokens


@pytest.mark.parametrize(
    ("field", "value", "kind", "why"),
    [
        ("audio_data", b"RIFF", UnsupportedField, "audio_data: this model takes no sounds"),
        ("video_data", b"no video", InvalidField, "video_data: it is no video"),
        ("video_data", "nowhere.mp4", InvalidField, "video_data: the video cannot be read"),
        ("video_data", PICTURE, InvalidField, "a video is a path, a URL, base64 or bytes"),
    ],
)
def test_what_is_no_video_is_refused(
    engine: Engine, field: str, value: Any, kind: type[SglaError], why: str
) -> None:
    with pytest.raises(kind, match=why):
        engine.generate(ASKED.format("video"), GREEDY, **{field: value})


@sgl.function
def seen(s: Any, shown: Any) -> None:
    s += sgl.user(shown + "What is it?")
    s += sgl.assistant(sgl.gen("a", max_tokens=5, ignore_eos=True))


@sgl.function
def begun(s: Any, shown: Any) -> None:
    s += sgl.user(shown + "What is it?")
    s += sgl.assistant("It is" + sgl.gen("a", max_tokens=5, ignore_eos=True))


@pytest.mark.parametrize("stream", [False, True])
def test_programs_see_the_same(backends: dict[str, Backend], engine: Engine, stream: bool) -> None:
    for kind, part, data in (("image", sgl.image(PICTURE), PICTURE), ("video", sgl.video(VIDEO), VIDEO)):
        expected = engine.generate(ASKED.format(kind), GREEDY, **{f"{kind}_data": data}).text
        for backend in backends.values():
            assert seen.run(shown=part, backend=backend, temperature=0, stream=stream)["a"] == expected


def test_an_answer_goes_on_and_frames_are_chosen(backends: dict[str, Backend], engine: Engine) -> None:
    shown = sgl.video(VIDEO, num_frames=2)
    found = [
        begun.run(shown=shown, backend=backends[name], temperature=0)["a"] for name in ("engine", "server")
    ]
    kwargs = {"num_frames": 2}
    text = ASKED.format("video") + "It is"
    (expected,) = engine.generate([text], GREEDY, video_data=[VIDEO], mm_processor_kwargs=[kwargs])
    assert found == [expected.text] * 2
    with pytest.raises(UnsupportedField, match="num_frames"):
        begun.run(shown=shown, backend=backends["openai"], temperature=0)


def test_choices_behind_pictures_are_refused(backends: dict[str, Backend]) -> None:
    @sgl.function
    def chosen(s: Any) -> None:
        s += sgl.user(sgl.image(PICTURE))
        s += sgl.assistant(sgl.select("a", ["red", "blue"]))

    for name in ("engine", "server"):
        with pytest.raises(UnsupportedField, match="behind pictures"):
            chosen.run(backend=backends[name])
