"""POST /v1/audio/transcriptions and /v1/audio/translations: a file with a sound becomes a text."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from typing import Any, Literal, get_type_hints

from aiohttp import web

from sgla.errors import BadRequest, InvalidField, SglaError, UnsupportedField, UnsupportedTask
from sgla.http import answer_types as to
from sgla.http.answer.encoder import DONE, HEADERS, PING
from sgla.http.bodies import BODY_SECONDS, SHARE
from sgla.http.errors import error_body
from sgla.http.forms import parts, pieces, reading, text_of
from sgla.http.media.parts import Source
from sgla.http.models import MODELS, named_later
from sgla.http.openai.dictation import Dictated
from sgla.http.openai.hearing import Asked, Rated, Transcription, check_prompt, compression
from sgla.http.operation import EVENTS, FORM, operation
from sgla.http.request.intake import decoded
from sgla.http.request.schema import RequestFields, Schema
from sgla.http.server import ASKED, Server
from sgla.http.wire import encode, json_response
from sgla.media.sound import Sound
from sgla.messages import Dictation, Speech
from sgla.text.languages import CODES, NAMES
from sgla.text.transcript import clock_time
from sgla.text.words_said import Word

PIECE = 64 << 10  # bytes of a file that are read at once
Format = Literal["json", "text", "srt", "verbose_json", "vtt"]


class TranslationForm(RequestFields, kw_only=True):
    """The fields of the form; ``file`` has the sound."""

    file: str
    language: str | None = None
    prompt: str | None = None
    response_format: Format | None = None
    temperature: float | None = None
    seed: int | None = None
    timestamp_granularities: list[str] | None = None


class TranscriptionForm(TranslationForm, kw_only=True):
    include: list[str] | None = None
    chunking_strategy: str | None = None
    known_speaker_names: list[str] | None = None
    known_speaker_references: list[str] | None = None


SCHEMAS: dict[str, Schema[Any]] = {
    "transcribe": Schema(TranscriptionForm),
    "translate": Schema(TranslationForm),
}


@operation(
    "OpenAI: write down what a sound says",
    TranscriptionForm,
    (to.Transcription, to.VerboseTranscription),
    stream=EVENTS,
    accepts=FORM,
)
async def transcriptions(request: web.Request) -> web.StreamResponse:
    return await heard(request, "transcribe")


@operation(
    "OpenAI: write down in English what a sound says",
    TranslationForm,
    (to.Transcription, to.VerboseTranscription),
    stream=EVENTS,
    accepts=FORM,
)
async def translations(request: web.Request) -> web.StreamResponse:
    return await heard(request, "translate")


async def heard(request: web.Request, task: str) -> web.StreamResponse:
    request[ASKED].ingress.require_ready()
    if not request.app[MODELS].several:
        check_hears(request[ASKED])
    body, data = await form_of(request)
    share = request[SHARE]
    fields: TranslationForm = await decoded(request, SCHEMAS[task], body, share)
    if data is None:
        raise InvalidField("file is required", param="file")
    async with named_later(request, fields.model) as server:
        server.ingress.require_ready()
        fields.model = server.model(fields.model)
        check_hears(server)
        form = fields.response_format or "json"
        check_fields(fields, form)
        dictation = dictation_of(server)
        asked = None if dictation is not None else asked_of(server, speech_of(server), fields, task)
        prompt = "" if dictation is None else dictated_prompt(dictation, fields, task, form)
        sound = await decoded_sound(server, data, share.client)
        share.take(sound.size)
        share.give(len(data))
        del data
        made: Transcription | Dictated
        if asked is None:
            made = Dictated(request, server, fields, sound, prompt)
        else:
            made = Transcription(request, server, fields, sound, asked)
        if fields.stream:
            return await streamed(request, made, server.config.sse_keepalive)
        async for _ in made.write():
            pass
        if isinstance(made, Transcription) and asked is not None:
            return answer(made, sound, form, asked, fields.timestamp_granularities or ["segment"])
        return plain_answer(made, sound, form)


async def form_of(request: web.Request) -> tuple[bytes, bytes | None]:
    """The form's fields as JSON, and the file. Raises BadRequest kinds."""
    most, share = request[ASKED].config.max_media_bytes, request[SHARE]
    values: dict[str, list[str]] = {}
    data: bytearray | None = None
    async with reading(request, "file and model", BODY_SECONDS):
        async for part in parts(request):
            if part.name != "file":
                name = (part.name or "").partition("[")[0]  # clients write name[] and name[key], too
                values.setdefault(name, []).append(await text_of(part))
                continue
            if data is not None:
                raise BadRequest("the form has more than one file; send them one by one")
            data = bytearray()
            async for piece in pieces(part, PIECE):
                if len(data) + len(piece) > most:
                    raise InvalidField(
                        f"file: it has more than {most} bytes (--max-media-bytes)", param="file"
                    )
                share.take(len(piece))
                data += piece
    found = encode({"file": "", **{name: value_of(name, given) for name, given in values.items()}})
    share.take(len(found))
    return found, None if data is None else bytes(data)


def value_of(name: str, given: list[str]) -> Any:
    """What a form says in texts. Raises InvalidField."""
    kind = HINTS.get(name)
    if kind == list[str] | None:
        return given
    if len(given) > 1:
        raise InvalidField(f"{name[:100]} stands in the form more than once", param=name[:100])
    if kind is None or kind in (str, str | None, Format | None):
        return given[0]
    try:
        return json.loads(given[0])
    except ValueError:
        return given[0]  # whose type the schema tells of


HINTS: dict[str, Any] = get_type_hints(TranscriptionForm)


def speech_of(server: Server) -> Speech:
    """Of a model that hears. Raises UnsupportedTask."""
    facts = server.ingress.facts
    speech = facts.speech if facts is not None else None
    if speech is None:
        raise UnsupportedTask(
            "this server's model does not transcribe; this route needs one that does, such as Whisper; a "
            "model for chats that takes sounds has them in /v1/chat/completions",
            param="model",
        )
    return speech


def check_hears(server: Server) -> None:
    """Raises UnsupportedTask."""
    if dictation_of(server) is None:
        speech_of(server)


def dictation_of(server: Server) -> Dictation | None:
    """Of a model for chats that is able to write down what it hears."""
    facts = server.ingress.facts
    return None if facts is None or "audio" not in facts.media else facts.dictation


def dictated_prompt(dictation: Dictation, fields: TranslationForm, task: str, form: str) -> str:
    """Raises InvalidField, UnsupportedField, UnsupportedTask."""
    if task == "translate":
        raise UnsupportedTask("this server's model does not translate", param="model")
    if form not in ("json", "text"):
        raise UnsupportedField(
            f"response_format: this model tells no times; json and text are possible, {form} is not",
            param="response_format",
        )
    code = None
    if fields.language:
        code = CODES.get(fields.language.lower(), fields.language.lower())
        known = dictation.languages or NAMES
        if code not in known:
            there = ", ".join(sorted(known))
            raise InvalidField(f"language: {code[:40]!r} is none of the model's: {there}", param="language")
    said = (fields.prompt or "").strip()
    if said and "{said}" not in dictation.text:
        raise InvalidField("prompt: this model takes none", param="prompt")
    if "<|" in said:
        raise InvalidField("prompt: it has special tokens", param="prompt")
    name = dictation.languages.get(code or "", "")
    named = "" if code is None else dictation.named.format(code=code, name=name)
    return dictation.text.format(said=said, language=named)


def asked_of(server: Server, speech: Speech, fields: TranslationForm, task: str) -> Asked:
    """Raises InvalidField, UnsupportedField, UnsupportedTask."""
    form = fields.response_format or "json"
    if task == "translate" and task not in speech.tasks:
        raise UnsupportedTask("this server's model does not translate", param="model")
    before: list[int] = []
    if fields.prompt and (said := fields.prompt.strip()):
        before = server.ingress.tokenizer.encode(f" {said}", add_special_tokens=False)
    facts = server.ingress.facts
    assert facts is not None
    worded = "word" in (fields.timestamp_granularities or [])
    if worded and not speech.aligned:
        raise UnsupportedField(
            "timestamp_granularities: this model's files do not say which heads tell when a word was said "
            "(alignment_heads), or several ranks share them out; leave word out",
            param="timestamp_granularities",
        )
    return Asked(
        task=task,
        language=language_of(fields.language, speech),
        before=check_prompt(before, speech, facts.context_len),
        timed=form not in ("json", "text"),
        rated=form == "verbose_json",
        worded=worded,
        temperature=fields.temperature or 0.0,
        seed=fields.seed,
    )


def check_fields(fields: TranslationForm, form: str) -> None:
    """Raise UnsupportedField for what is not honoured."""
    for name in ("include", "known_speaker_names", "known_speaker_references"):
        if getattr(fields, name, None):
            raise UnsupportedField(f"{name} is not supported by this server; leave it out", param=name)
    if getattr(fields, "chunking_strategy", None) not in (None, "", "auto"):
        raise UnsupportedField(
            "chunking_strategy: this server cuts sounds where the model's timestamps are (auto)",
            param="chunking_strategy",
        )
    name = "timestamp_granularities"
    for granularity in fields.timestamp_granularities or []:
        if granularity not in ("segment", "word"):
            raise InvalidField(f"{name} must be segment or word", param=name)
        if form != "verbose_json":
            raise InvalidField(f"{name} needs response_format verbose_json", param=name)
    if fields.stream and form not in ("json", "text"):
        raise UnsupportedField(f"stream: {form} is not streamed; json is", param="stream")


def language_of(name: str | None, speech: Speech) -> str | None:
    """Its code. Raises InvalidField."""
    if not name:
        return None
    code = CODES.get(name.lower(), name.lower())
    if code not in (speech.languages or {"en": 0}):
        there = ", ".join(sorted(speech.languages)) or "en"
        raise InvalidField(f"language: {name[:40]!r} is none of the model's: {there}", param="language")
    return code


async def decoded_sound(server: Server, data: bytes, client: str) -> Sound:
    """Raises BadRequest kinds."""
    server.media.check([Source("", "file", "audio")], server.ingress)
    try:
        sound = await server.media.decoded("audio", data, "file", server.ingress, client)
    except BadRequest as error:
        error.message, error.param = f"file: {error.message}", "file"
        raise
    assert isinstance(sound, Sound)
    return sound


def plain_answer(made: Transcription | Dictated, sound: Sound, form: Format) -> web.Response:
    if form == "text":
        return web.Response(text=f"{made.text}\n")
    return json_response({"text": made.text, "usage": duration(sound)})


def duration(sound: Sound) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(sound.seconds)}


def answer(
    made: Transcription, sound: Sound, form: Format, asked: Asked, granularities: list[str]
) -> web.Response:
    if form in ("json", "text"):
        return plain_answer(made, sound, form)
    if form in ("srt", "vtt"):
        return web.Response(text=subtitles(made, form))
    text, usage = made.text, duration(sound)
    shown = [segment_object(i, rated, made, asked) for i, rated in enumerate(made.segments)]
    return json_response(
        {
            "task": asked.task,
            "language": NAMES.get(made.language or "en", made.language),
            "duration": sound.seconds,
            "text": text,
            **({"segments": shown} if "segment" in granularities else {}),
            **({"words": list(map(word_object, made.said))} if asked.worded else {}),
            "usage": usage,
        }
    )


def word_object(word: Word) -> dict[str, Any]:
    return {"word": word.text, "start": round(word.start, 2), "end": round(word.end, 2)}


def segment_object(number: int, rated: Rated, made: Transcription, asked: Asked) -> dict[str, Any]:
    segment, text = rated.segment, made.words(rated.segment.tokens)
    return {
        "id": number,
        "seek": segment.seek,
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": text,
        "tokens": segment.tokens,
        "temperature": asked.temperature,
        "avg_logprob": rated.logprob,
        "compression_ratio": compression(text),
        "no_speech_prob": rated.silence,
    }


def subtitles(made: Transcription, form: str) -> str:
    """SubRip, or WebVTT."""
    point, found = ("," if form == "srt" else "."), ["WEBVTT\n\n"] if form == "vtt" else []
    for number, rated in enumerate(made.segments, 1):
        start, end = (clock_time(at, point) for at in (rated.segment.start, rated.segment.end))
        text = made.words(rated.segment.tokens).strip().replace("-->", "->")
        head = f"{number}\n" if form == "srt" else ""
        found.append(f"{head}{start} --> {end}\n{text}\n\n")
    return "".join(found)


async def streamed(
    request: web.Request, made: Transcription | Dictated, keepalive: float
) -> web.StreamResponse:
    """What refuses the request before anything goes out has its status. ``keepalive``: seconds after which a
    comment goes out, if nothing else does; 0: none."""
    events = blocks(made)
    waiting = asyncio.ensure_future(anext(events, None))
    response = web.StreamResponse(headers=HEADERS)
    try:
        if not (await asyncio.wait([waiting], timeout=keepalive or None))[0]:
            await response.prepare(request)
            await response.write(PING)
        else:
            waiting.result()
            await response.prepare(request)
        while True:
            if not (await asyncio.wait([waiting], timeout=keepalive or None))[0]:
                await response.write(PING)
                continue
            if (block := waiting.result()) is None:
                break
            waiting = asyncio.ensure_future(anext(events, None))
            await response.write(block)
    except SglaError as error:
        if not response.prepared:
            raise
        await response.write(event(error_body(error)))
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])
        await events.aclose()
    await response.write(DONE)
    return response


async def blocks(made: Transcription | Dictated) -> AsyncGenerator[bytes, None]:
    begun = False
    async for text in made.write():
        delta = text if begun else text.lstrip()
        if delta:
            begun = True
            yield event({"type": "transcript.text.delta", "delta": delta})
    usage = {
        "type": "tokens",
        "input_tokens": made.prompt_tokens + made.heard,
        "input_token_details": {"text_tokens": made.prompt_tokens, "audio_tokens": made.heard},
        "output_tokens": made.completion_tokens,
        "total_tokens": made.prompt_tokens + made.heard + made.completion_tokens,
    }
    yield event({"type": "transcript.text.done", "text": made.text, "usage": usage})


def event(body: Any) -> bytes:
    return b"data: %b\n\n" % encode(body)
