"""Forms with sounds that are wrong, and models that transcribe none."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from http_fake import FakeIngress
from http_site import Serve, Site
from sound_files import TONE, hostile, wav

from sgla.http.forms import MAX_FIELDS, MAX_VALUE
from sgla.http.server import SERVER
from sgla.messages import Speech, Transcript

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def listening() -> FakeIngress:
    """A model that transcribes English."""
    ingress = FakeIngress()
    assert ingress.facts is not None
    ingress.facts.media = {"audio": ""}
    transcript = Transcript(suppressed=[], first_suppressed=[], untimed=505, end=500)
    ingress.facts.speech = Speech(
        begin=501, languages={}, tasks={}, previous=None, transcript=transcript, frames=3000, hop=160
    )
    return ingress


@pytest.fixture
async def site(serve: Serve) -> Site:
    return await serve(listening(), max_media_bytes=1 << 20, max_audio_seconds=20.0)


async def post(site: Site, form: Any, path: str = TRANSCRIPTIONS, **headers: str) -> tuple[int, Any]:
    async with site.http.post(path, data=form, headers=headers) as response:
        return response.status, await response.json()


def form(*fields: tuple[str, str], files: int = 1, data: bytes | None = None) -> aiohttp.FormData:
    made = aiohttp.FormData(default_to_multipart=True)
    for name, value in fields:
        made.add_field(name, value)
    for _ in range(files):
        made.add_field("file", wav() if data is None else data, filename="a.wav")
    return made


async def test_a_job_hears_the_sound(site: Site) -> None:
    status, answer = await post(site, form(("temperature", "0.5"), ("seed", "3")))
    assert status == 200, answer
    (job,) = site.ingress.jobs
    assert job.token_ids == [501, 505]
    assert (job.window.first, job.window.end) == (0, 3000)
    assert len(job.pictures[0].samples) == 4 * len(TONE)
    assert (job.sampling.temperature, job.sampling.seed) == (0.5, 3)
    assert site.app[SERVER].memory.used == 0


async def refused(site: Site, names: slice) -> None:
    cases = list(hostile())
    for name, data in cases[names]:
        status, answer = await post(site, form(data=data))
        assert 400 <= status < 500, (name, status, answer)
        assert answer["error"]["param"] == "file", (name, answer)
    assert site.app[SERVER].memory.used == 0
    assert not site.ingress.jobs


async def test_files_that_are_no_sounds(site: Site) -> None:
    await refused(site, slice(5, None, 7))


@pytest.mark.slow
async def test_all_files_that_are_no_sounds(site: Site) -> None:
    await refused(site, slice(None))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: form(files=0), "file is required"),
        (lambda: form(("model", ""), ("model", ""), files=0), "more than once"),
        (lambda: form(("prompt", ""), files=2), "more than one file"),
        (lambda: form(("prompt", "a" * (MAX_VALUE + 1))), f"more than {MAX_VALUE} bytes"),
        (lambda: form(*[("a", "b")] * MAX_FIELDS), f"more than {MAX_FIELDS} fields"),
        (lambda: form(("language", "de")), "none of the model's: en"),
        (lambda: form(("prompt", "a")), "this model takes none"),
        (lambda: form(("stream", "maybe")), "stream"),
        (lambda: form(("timestamp_granularities[]", "segment")), "needs response_format verbose_json"),
        (lambda: b"no form", "multipart/form-data"),
    ],
)
async def test_forms_that_are_wrong(site: Site, made: Any, why: str) -> None:
    status, answer = await post(site, made())
    assert 400 <= status < 500
    assert why in answer["error"]["message"]
    assert site.app[SERVER].memory.used == 0
    assert not site.ingress.jobs


async def test_a_form_without_a_file(site: Site) -> None:
    status, answer = await post(site, form(("model", ""), ("stream", "true"), files=0))
    assert status == 400
    assert answer["error"] | {"message": ""} == answer["error"] | {"message": "", "param": "file"}


async def test_a_client_that_goes_leaves_nothing(site: Site) -> None:
    site.ingress.manual = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await post(site, form(("stream", "true")))
    async with asyncio.timeout(5.0):
        while site.app[SERVER].memory.used or site.ingress.open_jobs:
            await asyncio.sleep(0.01)


async def test_a_model_that_does_not_translate(site: Site) -> None:
    status, answer = await post(site, form(), TRANSLATIONS)
    assert (status, answer["error"]["code"]) == (400, "unsupported_task")


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, TRANSLATIONS])
async def test_a_model_for_text_refuses_by_name(serve: Serve, path: str) -> None:
    site = await serve()
    status, answer = await post(site, form(), path)
    assert (status, answer["error"]["code"]) == (400, "unsupported_task")
    assert "needs one that does, such as Whisper" in answer["error"]["message"]
