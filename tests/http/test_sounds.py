"""Sounds of all APIs and from all sources become the same sounds of a job; what is none gets a 4xx."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_fake import FakeIngress
from http_site import Serve, Site, served
from sound_files import CODECS, RATE, TONE, encoded, floats, hostile, raw_wav, wav

from sgla.errors import InvalidField
from sgla.http.server import SERVER
from sgla.media.listen import decoded, sound
from sgla.media.sound import Hearable, Sound

ROUNDED = (TONE * 32768).astype("<i2").astype(np.float32) / 32768
FILE, OTHER = wav(), wav(TONE[::-1].copy())
SOUNDS = [Sound.of(ROUNDED.tobytes()), Sound.of(ROUNDED[::-1].tobytes())]
BASE64 = [base64.b64encode(data).decode() for data in (FILE, OTHER)]
DATA = [f"data:audio/wav;base64,{text}" for text in BASE64]
TEXT = {"type": "text", "text": "a"}


def hearing() -> FakeIngress:
    """A model that takes sounds."""
    ingress = FakeIngress()
    assert ingress.facts is not None
    ingress.facts.media = {"audio": "<sound>"}
    return ingress


@pytest.fixture
async def site(serve: Serve, tmp_path: Path) -> Site:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "tone.wav").write_bytes(FILE)
    return await serve(
        hearing(),
        allowed_media_path=str(tmp_path / "in"),
        allow_private_media=True,
        max_media_bytes=1 << 20,
        max_audio_seconds=20.0,
    )


PARTS: dict[str, list[dict[str, Any]]] = {
    "input_audio": [
        {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}} for text in BASE64
    ],
    "audio_url": [{"type": "audio_url", "audio_url": {"url": url}} for url in DATA],
    "audio_url as a text": [{"type": "audio_url", "audio_url": url} for url in DATA],
    "audio": [{"type": "audio", "audio": DATA[0]}, {"type": "audio", "url": DATA[1]}],
}


@pytest.mark.parametrize("name", PARTS)
async def test_parts_keep_their_order(site: Site, name: str) -> None:
    first, second = PARTS[name]
    messages: Any = [{"role": "user", "content": [first, TEXT, second]}]
    await site.client.chat.completions.create(model="fake", messages=messages, max_tokens=1)
    job = site.ingress.jobs[-1]
    assert job.messages is not None
    assert job.messages[0]["content"] == [{"type": "audio"}, TEXT, {"type": "audio"}]
    assert job.pictures == SOUNDS
    assert site.app[SERVER].memory.used == 0


async def test_responses(site: Site) -> None:
    content = [PARTS["input_audio"][0], {"type": "input_text", "text": "a"}]
    body = {"model": "fake", "input": [{"role": "user", "content": content}], "max_output_tokens": 16}
    status, answer = await site.post("/v1/responses", body)
    assert status == 200, answer
    job = site.ingress.jobs[-1]
    assert job.messages is not None
    assert job.messages[0]["content"] == [{"type": "audio"}, TEXT]
    assert job.pictures == SOUNDS[:1]


async def test_generate_and_sources(site: Site, tmp_path: Path) -> None:
    async with served({"tone.wav": FILE}) as address:
        sources = [
            *(DATA[0], BASE64[0], "tone.wav", str(tmp_path / "in" / "tone.wav")),
            f"{address}/tone.wav",
        ]
        body = {"text": "a", "audio_data": sources, "sampling_params": {"max_new_tokens": 1}}
        status, answer = await site.post("/generate", body)
    assert status == 200, answer
    assert site.ingress.jobs[-1].pictures == SOUNDS[:1] * len(sources)
    body = {"text": ["a", "b"], "audio_data": [DATA[0], [DATA[1]]], "sampling_params": {"max_new_tokens": 1}}
    assert (await site.post("/generate", body))[0] == 200
    assert [job.pictures for job in site.ingress.jobs[-2:]] == [SOUNDS[:1], SOUNDS[1:]]


@pytest.mark.parametrize("name", CODECS)
def test_kinds_of_files(name: str) -> None:
    """The same tone, as loud as it was, but for what the codec adds and loses around it."""
    heard = decoded(encoded(*CODECS[name]), 20)
    assert len(TONE) <= len(heard) < len(TONE) + RATE // 10
    assert np.sqrt((heard**2).sum() / len(TONE)) == pytest.approx(np.sqrt((TONE**2).mean()), rel=0.1)


@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000])
def test_rates_and_channels_become_one(rate: int) -> None:
    """A tone in the left channel alone is half as loud."""
    at = np.arange(rate // 2) / rate
    both = np.stack([np.sin(2 * np.pi * 440 * at) * 0.5, np.zeros_like(at)], 1)
    heard = decoded(wav(both.ravel(), rate, 2), 20)
    assert abs(len(heard) - RATE // 2) < 20
    expected = np.sin(2 * np.pi * 440 * np.arange(len(heard)) / RATE) * 0.25
    assert np.abs(heard - expected)[100:-100].max() < 0.01


def test_floats_and_heads_without_sizes() -> None:
    limits = Hearable(1 << 20, 20.0)
    assert sound(floats(ROUNDED), "file", limits) == SOUNDS[0]
    data = FILE[44:]
    for told in (0, 0xFFFFFFFF):  # as written to a pipe
        assert sound(raw_wav(1, 1, RATE, 16, data, told), "file", limits) == SOUNDS[0]


def test_ten_hours_of_silence_are_not_decoded_to_their_end() -> None:
    data = raw_wav(1, 1, 1000, 8, b"\x80" * 36_000_000)
    with pytest.raises(InvalidField, match="more than 60 s"):
        sound(data, "file", Hearable(len(data), 60.0))


async def refused(site: Site, name: str, text: Any) -> str:
    status, answer = await site.post("/generate", {"text": "a", "audio_data": [text]})
    assert 400 <= status < 500, (name, status, answer)
    assert answer["error"]["param"] == "audio_data[0]", (name, answer)
    return str(answer["error"]["message"])


async def test_files_that_are_no_sounds(site: Site) -> None:
    told = {}
    for name, data in hostile():
        told[name] = await refused(site, name, f"data:audio/wav;base64,{base64.b64encode(data).decode()}")
    assert len(told) > 40
    for name in ("too long", "minutes of silence in a small file"):
        assert "20 s (--max-audio-seconds)" in told[name], told[name]
    assert "(--max-media-bytes)" in told["too large a file"]
    assert "no numbers" in told["one NaN"]
    assert "is cut" in told["wav cut at 1000"]
    assert "its head tells of 1073741824 bytes" in told["a head that tells of more"]
    for name in ("a playlist", "a list of files", "a description"):
        assert "no sound of a kind that is read" in told[name]
    assert site.app[SERVER].memory.used == 0
    assert not site.ingress.jobs


async def test_sources_that_have_no_sounds(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    site = await serve(hearing(), allowed_media_path=str(tmp_path / "folder"))
    for text in (
        *("http://127.0.0.1:9/x.wav", "http://169.254.169.254/x.wav", "ftp://a/b.wav", "http://"),
        *("data:", "data:,", "data:audio/wav;base64,***", "data:text/plain;base64,AAAA", "data:image/png,x"),
        *("../x.wav", "/etc/passwd.wav", "file:///etc/passwd", "missing.wav", "A", "ä" * 8),
    ):
        await refused(site, text, text)
    assert site.app[SERVER].memory.used == 0


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": 5, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": BASE64[0], "format": "midi"}},
        {"type": "input_audio", "input_audio": {"data": BASE64[0], "format": 5}},
        {"type": "audio_url", "audio_url": None},
        {"type": "audio_url", "audio_url": ["x"]},
        {"type": "audio", "file_id": "file-1"},
        {"type": "audio_embeds", "audio_embeds": "AAAA"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ],
)
async def test_wrong_parts_are_refused_by_name(site: Site, part: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": [TEXT, part]}]}
    status, answer = await site.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[1]"), answer
    assert not site.ingress.jobs


async def test_counts(serve: Serve) -> None:
    site = await serve(hearing(), limit_mm_per_prompt={"audio": 1})
    content = PARTS["input_audio"]
    status, answer = await site.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}
    )
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[1]")
    assert "2 sounds; 1 (--limit-mm-per-prompt)" in answer["error"]["message"]
    body = {"messages": [{"role": "assistant", "content": content[:1]}]}
    assert (await site.post("/v1/chat/completions", body))[0] == 400


@pytest.mark.parametrize("without", ["tower", "library"])
async def test_who_takes_none_says_so(site: Site, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    assert site.ingress.facts is not None
    if without == "tower":
        site.ingress.facts.media = {"image": "<image>"}
    else:
        monkeypatch.setattr("sgla.media.readers.find_spec", lambda name: None)
    told = await refused(site, without, BASE64[0])
    assert ("takes no sounds" if without == "tower" else "lacks PyAV (pip install 'sgla[mm]')") in told
