"""The ``openai`` client has a tiny random Whisper transcribe: what transformers writes."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
from aiohttp import web
from hearing_models import EXTRACTOR, sound, special, whisper, write_tokenizer

from sgla.actors.system import System
from sgla.config import Config
from sgla.http.app import make_app
from sgla.http.connections import Runner
from sgla.http.server import SERVER
from sgla.media.by_name import processor_of
from sgla.media.sound import RATE, Sound
from sgla.text.tokenizer import Tokenizer
from sgla.text.words_said import words_of
from sgla.worker.features import threads

SOUNDS = [sound(0.7, 1), sound(2.0, 2), sound(5.3, 3)]
pytestmark = pytest.mark.asyncio(loop_scope="module")


def wav(heard: Sound) -> bytes:
    """Of float32."""
    head = struct.pack("<HHIIHH", 3, 1, RATE, 4 * RATE, 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head
    body += b"data" + struct.pack("<I", heard.size) + heard.samples
    return b"RIFF" + struct.pack("<I", len(body)) + body


class Serving(NamedTuple):
    module: Any
    system: System
    app: web.Application
    client: openai.AsyncOpenAI

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.system.ingress.tokenizer is not None
        return self.system.ingress.tokenizer

    def expected(self, heard: Sound, timed: bool, **asked: Any) -> list[Any]:
        """Segments of transformers."""
        extractor = processor_of("WhisperFeatureExtractor", json.dumps(EXTRACTOR))
        samples = np.frombuffer(heard.samples, np.float32)
        long = heard.seconds > 2
        made = extractor(
            samples,
            sampling_rate=RATE,
            padding="longest" if long else "max_length",
            truncation=False,
            return_tensors="pt",
        )
        asked = {"return_timestamps": timed or long, "return_segments": True, "do_sample": False} | asked
        with threads(1):
            found: list[Any] = self.module.generate(made.input_features, **asked)["segments"][0]
        return found

    def text(self, segments: list[Any]) -> str:
        tokens = [token for segment in segments for token in segment["tokens"].tolist()]
        return self.tokenizer.decode([t for t in tokens if t <= special("notimestamps")]).strip()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(tmp_path_factory: Any) -> AsyncIterator[Serving]:
    folder: Path = tmp_path_factory.mktemp("whisper")
    _, module = whisper(folder)
    write_tokenizer(folder)
    settings: dict[str, Any] = {"executor": "inline", "device": "cpu", "dtype": "float32", "threads": 1}
    settings |= {"kv_cache_bytes": 1 << 20, "max_running_requests": 4, "max_audio_seconds": 20.0}
    config = Config(model=str(folder), max_media_bytes=1 << 20, **settings)
    system = System(config)
    await system.start()
    app = make_app(system.ingress, config, system.metrics)
    runner = Runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        yield Serving(module, system, app, client)
    assert app[SERVER].memory.used == 0
    await system.close()
    await runner.cleanup()


@pytest.mark.parametrize("heard", SOUNDS, ids=["short", "a window", "long"])
async def test_equal_to_transformers(serving: Serving, heard: Sound) -> None:
    """The language is found out; with timestamps, and streamed, too."""
    audio, file = serving.client.audio.transcriptions, ("a.wav", wav(heard))
    found = await audio.create(model="", file=file)
    assert found.text == serving.text(serving.expected(heard, False, task="transcribe"))
    assert found.usage.seconds == np.ceil(heard.seconds)
    verbose = await audio.create(model="", file=file, response_format="verbose_json")
    expected = serving.expected(heard, True, task="transcribe")
    assert verbose.text == serving.text(expected)
    assert [segment.tokens for segment in verbose.segments] == [s["tokens"].tolist() for s in expected]
    for segment, theirs in zip(verbose.segments, expected):
        assert segment.start == pytest.approx(float(theirs["start"]))
        assert segment.end == pytest.approx(float(theirs["end"]))
    events = [event async for event in await audio.create(model="", file=file, stream=True)]
    assert "".join(event.delta for event in events[:-1]).strip() == events[-1].text == found.text


async def test_prompt_language_and_task(serving: Serving) -> None:
    audio, heard = serving.client.audio, SOUNDS[2]
    prompt = [special("startofprev"), *serving.tokenizer.encode(" said before", add_special_tokens=False)]
    for task, create, language in (
        ("translate", audio.translations.create, None),
        ("transcribe", audio.transcriptions.create, "German"),
    ):
        given = {} if language is None else {"language": language}
        found = await create(
            model="",
            file=("a.wav", wav(heard)),
            prompt="said before ",
            response_format="verbose_json",
            **given,
        )
        asked = {"language": "de"} if language else {}
        ids = torch.tensor(prompt)
        expected = serving.expected(heard, True, task=task, prompt_ids=ids, max_length=None, **asked)
        assert found.text == serving.text(expected), task
        assert found.language == "german" if language else found.language in ("english", "german", "french")
        assert found.duration == heard.seconds


async def test_forms_of_answers(serving: Serving) -> None:
    audio, file = serving.client.audio.transcriptions, ("a.wav", wav(SOUNDS[2]))
    forms = ("verbose_json", "json", "text", "srt", "vtt")
    verbose, plain, text, srt, vtt = [
        await audio.create(model="", file=file, response_format=form, timestamp_granularities=granularities)
        for form, granularities in zip(forms, [["segment"], *[openai.omit] * 4])
    ]
    assert text == f"{plain.text}\n" == f"{verbose.text}\n"
    assert [segment.id for segment in verbose.segments] == list(range(len(verbose.segments)))
    for segment in verbose.segments:
        assert segment.avg_logprob < 0 < segment.no_speech_prob < 1
    assert vtt.startswith("WEBVTT\n\n00:00:00.800 --> ")
    assert srt.startswith("1\n00:00:00,800 --> ")
    assert srt.count(" --> ") == vtt.count(" --> ") == len(verbose.segments)


@pytest.mark.parametrize("heard", SOUNDS, ids=["short", "a window", "long"])
async def test_times_of_words_equal_transformers(serving: Serving, heard: Sound) -> None:
    speech = serving.system.ingress.facts.speech
    assert speech is not None
    extractor = processor_of("WhisperFeatureExtractor", json.dumps(EXTRACTOR))
    mask = extractor(
        np.frombuffer(heard.samples, np.float32),
        sampling_rate=RATE,
        padding="longest" if heard.seconds > 2 else "max_length",
        truncation=False,
        return_attention_mask=True,
        return_tensors="pt",
    ).attention_mask
    segments = serving.expected(
        heard, True, task="transcribe", return_token_timestamps=True, attention_mask=mask
    )
    tokens = [token for segment in segments for token in segment["tokens"].tolist()]
    times = [time for segment in segments for time in segment["token_timestamps"].tolist()]
    expected = words_of(tokens, times, speech.transcript, serving.tokenizer.decode, "en")
    found = await serving.client.audio.transcriptions.create(
        model="",
        file=("a.wav", wav(heard)),
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    assert found.segments is None
    assert [word.word for word in found.words] == [word.text for word in expected]
    within = [word.start for word in expected if word.start < heard.seconds]  # it writes of silence, too
    assert [word.start for word in found.words][: len(within)] == pytest.approx(within, abs=0.011)
    assert all(word.start <= word.end for word in found.words)
    assert len(within) > 1


async def test_sampled_by_seed_alone_and_together(serving: Serving) -> None:
    audio = serving.client.audio.transcriptions

    async def text(heard: Sound, seed: int, temperature: float = 0.8) -> str:
        made = await audio.create(
            model="", file=("a.wav", wav(heard)), temperature=temperature, extra_body={"seed": seed}
        )
        return made.text

    alone = [await text(heard, seed) for heard in SOUNDS for seed in (1, 2)]
    together = await asyncio.gather(*(text(heard, seed) for heard in SOUNDS for seed in (1, 2)))
    assert alone == list(together)
    assert len(set(alone)) == 6


WRONG: dict[str, dict[str, Any]] = {
    "language": {"language": "klingon"},
    "response_format": {"response_format": "midi"},
    "timestamp_granularities": {"timestamp_granularities": ["line"], "response_format": "verbose_json"},
    "include": {"include": ["logprobs"]},
    "chunking_strategy": {"chunking_strategy": {"type": "server_vad"}},
    "known_speaker_names": {"known_speaker_names": ["Ada"]},
    "temperature": {"temperature": -1},
    "stream": {"stream": True, "response_format": "srt"},
    "prompt": {"prompt": "<|nospeech|>"},
    "model": {"model": "another"},
    "file": {"file": ("a.wav", b"no sound")},
}


@pytest.mark.parametrize("param", WRONG)
async def test_what_is_not_honoured_is_refused_by_name(serving: Serving, param: str) -> None:
    asked = {"model": "", "file": ("a.wav", wav(SOUNDS[0]))} | WRONG[param]
    with pytest.raises(openai.APIStatusError) as refused:
        await serving.client.audio.transcriptions.create(**asked)
    assert 400 <= refused.value.status_code < 500
    assert refused.value.param == param
    assert param in refused.value.message or param == "model"


async def test_other_routes_are_refused_by_name(serving: Serving) -> None:
    messages: Any = [{"role": "user", "content": "a"}]
    for asked in (
        serving.client.chat.completions.create(model="", messages=messages),
        serving.client.completions.create(model="", prompt="a"),
        serving.client.responses.create(model="", input="a"),
    ):
        with pytest.raises(openai.BadRequestError, match="/v1/audio/transcriptions"):
            await asked
    assert (await serving.client.models.list()).data
    await serving.app[SERVER].probe.check()
