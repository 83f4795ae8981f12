"""Ollama's API: chats and texts as lines of JSON, and what its clients ask before them.
Translated to chats and back."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from sgla import clock
from sgla.errors import InvalidField, SglaError
from sgla.http import answer_types as to
from sgla.http.access import Tally
from sgla.http.answer import sse
from sgla.http.answer.collect import Choice
from sgla.http.answer.encoder import Encoder
from sgla.http.answer.parts import PlainReader, Reader
from sgla.http.answer.reading import Reading, server_dialect
from sgla.http.answer.whole import answered
from sgla.http.errors import Aborted, error_headers
from sgla.http.media.parts import Source
from sgla.http.models import LATEST, MODELS, state_of
from sgla.http.openai.chat import chat_work
from sgla.http.openai.common import answer_size
from sgla.http.operation import LINES, operation
from sgla.http.request.chat import check_messages, check_parts, check_tool_list, checked_effort
from sgla.http.request.intake import intake
from sgla.http.request.sampling import sampling_params
from sgla.http.request.schema import (
    ChatRequest,
    RequestFields,
    SamplingFields,
    Schema,
    unsupported,
)
from sgla.http.request.work import make_work
from sgla.http.server import ABORTED, ASKED, Server, Work, raise_aborted
from sgla.http.wire import encode, json_response
from sgla.messages import Event, Rejected, Usage
from sgla.model.sizes import short_count
from sgla.text.tools.cursor import ARGUMENTS, CALL, CONTENT, REASONING, Piece
from sgla.version import __version__

PREFIX = "/api"
NEVER = "9999-12-31T23:59:59+00:00"  # when a model is unloaded


class Options(msgspec.Struct, kw_only=True):
    """Those of Ollama's options that have a meaning here; the others are about how it runs a model."""

    num_predict: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_thread: int | None = None
    repeat_last_n: int | None = None


class OllamaFields(msgspec.Struct, kw_only=True):
    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | str | None = None
    keep_alive: str | float | None = None


class OllamaChatRequest(OllamaFields, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """``raw``: the prompt is text for the model as it is, without the chat template."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


CHAT = Schema(OllamaChatRequest, nested={"options": Options})
GENERATE = Schema(OllamaGenerateRequest, nested={"options": Options})
SHOW = Schema(OllamaShowRequest)


@operation("Ollama: answer a chat", OllamaChatRequest, to.OllamaAnswer, stream=LINES, any_model=True)
async def chat(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
    fields = await intake(request, CHAT)
    check_tool_list(fields.tools)
    if not fields.messages:
        return json_response(loaded(server, fields, {"message": {"role": "assistant", "content": ""}}))
    check_messages(fields.messages)
    messages = [chat_message(message, i) for i, message in enumerate(fields.messages)]
    asked = ChatRequest(messages=messages, tools=fields.tools, **passed(server, fields))
    reading = Reading(server, asked)
    work = await chat_work(request, server, asked, reading, clip=True)
    return await answer(request, server, work, Lines(work, fields.model, reading.reader(), "message"), fields)


@operation(
    "Ollama: answer or continue a text", OllamaGenerateRequest, to.OllamaAnswer, stream=LINES, any_model=True
)
async def generate(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
    fields = await intake(request, GENERATE)
    raw = fields.raw or fields.suffix is not None
    if fields.images and raw:
        raise unsupported("images", " beside raw or suffix")
    if not (fields.prompt or raw):
        return json_response(loaded(server, fields, {"response": ""}))
    system = [{"role": "system", "content": fields.system}] if fields.system else []
    messages = (
        []
        if raw
        else [*system, {"role": "user", "content": with_pictures(fields.prompt, fields.images, "images")}]
    )
    asked = ChatRequest(messages=messages, **passed(server, fields))
    if not raw:
        reading = Reading(server, asked)
        work = await chat_work(request, server, asked, reading, clip=True)
        return await answer(
            request, server, work, Lines(work, fields.model, reading.reader(), "response"), fields
        )
    sampling = sampling_params(asked, server.sampling_defaults, max_tokens=asked.max_tokens)
    prompt = {"text": fields.prompt, "suffix": fields.suffix, "clip": True}
    work = await make_work(request, RequestFields(stream=asked.stream, model=asked.model), [prompt], sampling)
    return await answer(request, server, work, Lines(work, fields.model, PlainReader(), "response"), fields)


def loaded(server: Server, fields: OllamaFields, empty: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request without a prompt, which asks Ollama to load the model."""
    known(server, fields.model)
    return {"model": fields.model, "created_at": now(), **empty, "done": True, "done_reason": "load"}


async def answer(
    request: web.Request, server: Server, work: Work, lines: Lines, fields: OllamaFields
) -> web.StreamResponse:
    if fields.stream is not False:
        return await sse.stream(request, server, work, lines)
    choices = await server.collect(work)
    raise_aborted(choices)
    size = answer_size(choices, work)
    return await answered(request, size, lambda: lines.whole(choices[0]))


def passed(server: Server, fields: OllamaFields) -> dict[str, Any]:
    """The fields of a chat that ``fields`` means. A negative ``num_predict`` is no limit."""
    options = fields.options or Options()
    limit = options.num_predict
    names = SamplingFields.__struct_fields__
    same = {name: getattr(options, name) for name in Options.__struct_fields__ if name in names}
    more: dict[str, Any] = {}
    if fields.think is not None:
        more["chat_template_kwargs"] = {"enable_thinking": bool(fields.think), "thinking": bool(fields.think)}
        if isinstance(fields.think, str):
            more["reasoning_effort"] = checked_effort(fields.think, "think")
    if fields.format == "json":
        more["response_format"] = {"type": "json_object"}
    elif isinstance(fields.format, dict):
        more["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "format", "schema": fields.format},
        }
    elif fields.format:
        raise InvalidField("format must be json or a JSON Schema", param="format")
    return {
        **same,
        **more,
        "model": known(server, fields.model),
        "repetition_penalty": options.repeat_penalty,
        "max_tokens": limit if limit is not None and limit > 0 else None,
        "stream": fields.stream is not False,
    }


def known(server: Server, name: str) -> str:
    if name.endswith(LATEST) and not server.knows(name):
        name = name.removesuffix(LATEST)
    return server.model(name)


def chat_message(message: dict[str, Any], i: int) -> dict[str, Any]:
    """A message in OpenAI's shape: calls have ids there, and their arguments are texts."""
    result = {
        name: value for name, value in message.items() if name not in ("images", "tool_calls", "tool_name")
    }
    if message.get("images"):
        place = f"messages[{i}].images"
        result["content"] = with_pictures(result.get("content") or "", message["images"], place)
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
        result["tool_calls"] = [
            {"id": f"call_{i}_{n}", "type": "function", "function": written(function)}
            for n, function in enumerate(functions)
        ]
    if message.get("tool_name"):
        result["name"] = message["tool_name"]
    return result


def with_pictures(text: Any, images: Any, place: str) -> Any:
    """A message's content: its pictures, in base64, and then its text. Raises InvalidField."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(each, str) and each for each in images):
        raise InvalidField(f"{place} must be a list of base64 texts", param=place)
    check_parts(place, [images])
    parts: list[Any] = [Source(each, f"{place}[{i}]") for i, each in enumerate(images)]
    return [*parts, {"type": "text", "text": text}] if text else parts


def written(function: Any) -> Any:
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return function
    return {**function, "arguments": encode(function.get("arguments") or {}).decode()}


def error_response(error: SglaError) -> web.Response:
    return json_response({"error": error.message}, error.status, error_headers(error))


class Lines(Encoder):
    """Events -> lines of JSON. A call is one line, sent when its arguments are complete.
    ``kind``: message or response."""

    done = b""
    ping = b""
    headers = {"Content-Type": "application/x-ndjson", "Cache-Control": "no-cache"}  # noqa: RUF012 - never changed

    def __init__(self, work: Work, model: str, reader: Reader, kind: str) -> None:
        self._tally = work.tally = work.tally or Tally(work.n)
        self._model = model
        self._reader = reader
        self._kind = kind
        self._call: tuple[str, list[str]] | None = None  # the name and what there is of the arguments
        self._began = clock.now()

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The answer in one piece."""
        pieces = self._reader.read(choice)
        text, thought = ("".join(p.text for p in pieces if p.kind == kind) for kind in (CONTENT, REASONING))
        calls = [call for piece in pieces if (call := self._ended_call(piece))] + self._last_call()
        return self._line(text, thought, calls) | self._end(choice)

    def encode(self, event: Event) -> bytes:
        if event.finish == "abort":
            return self.error(Aborted(ABORTED))
        lines = [line for piece in self._reader.read(event) for line in self._lines(piece)]
        if event.finish is not None:
            lines += [self._line(calls=[call]) for call in self._last_call()]
            lines.append(self._line() | self._end(event))
        return b"".join(encode(line) + b"\n" for line in lines)

    def end(self, usage: Usage) -> bytes:
        return b""

    def error(self, error: Rejected | SglaError) -> bytes:
        return encode({"error": error.message}) + b"\n"

    def _lines(self, piece: Piece) -> list[dict[str, Any]]:
        lines = [self._line(calls=[call])] if (call := self._ended_call(piece)) else []
        if piece.kind == CONTENT:
            lines.append(self._line(text=piece.text))
        elif piece.kind == REASONING:
            lines.append(self._line(thought=piece.text))
        return lines

    def _ended_call(self, piece: Piece) -> dict[str, Any] | None:
        """The call that ``piece`` is behind of."""
        if piece.kind == ARGUMENTS:
            assert self._call is not None
            self._call[1].append(piece.text)
            return None
        ended = self._last_call()
        self._call = (piece.text, []) if piece.kind == CALL else None
        return ended[0] if ended else None

    def _last_call(self) -> list[dict[str, Any]]:
        if self._call is None:
            return []
        name, fragments = self._call
        self._call = None
        try:
            arguments = msgspec.json.decode("".join(fragments) or "{}")
        except (msgspec.DecodeError, RecursionError):  # the answer was cut off, or is wild
            arguments = {"INVALID_JSON": "".join(fragments)}
        return [{"function": {"name": name, "arguments": arguments}}]

    def _line(
        self, text: str = "", thought: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thought} if thought else {}
        if calls:
            more["tool_calls"] = calls
        shown: dict[str, Any] = {"message": {"role": "assistant", "content": text, **more}}
        if self._kind == "response":
            shown = {"response": text, **more}
        return {"model": self._model, "created_at": now(), **shown, "done": False}

    def _end(self, event: Event | Choice) -> dict[str, Any]:
        end = clock.now()
        first = self._tally.first or end
        return {
            "done": True,
            "done_reason": "length" if event.finish == "repetition" else event.finish,
            "total_duration": round((end - self._began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": event.usage.prompt_tokens,
            "prompt_eval_duration": round((first - self._began) * 1e9),
            "eval_count": event.usage.completion_tokens,
            "eval_duration": round((end - first) * 1e9) or 1,  # clients divide by it
        }


def now() -> str:
    return datetime.now(UTC).isoformat()


# what clients ask first


@operation("Ollama: the names of the model and of its adapters", answer=to.OllamaModels)
async def tags(request: web.Request) -> web.Response:
    models = request.app[MODELS]
    models.require_listed()
    cards = [card(server, name) for server in models.servers for name in server.names()]
    return json_response({"models": cards})


@operation("Ollama: the names of the model, as loaded", answer=to.OllamaModels)
async def running(request: web.Request) -> web.Response:
    """The same as loaded: for ever, with the bytes that the model takes of a GPU."""
    models = request.app[MODELS]
    models.require_listed()
    cards = []
    for server in models.servers:
        facts = server.ingress.facts
        if facts is None or state_of(server) != "loaded":
            continue
        more = {
            "expires_at": NEVER,
            "size_vram": sum(facts.ledger.values()) if facts.device != "cpu" else 0,
            "context_length": facts.context_len,
        }
        cards += [card(server, name) | more for name in server.ingress.model_names]
    return json_response({"models": cards})


def card(server: Server, name: str) -> dict[str, Any]:
    facts = server.ingress.facts
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(server.created, UTC).isoformat(),
        "size": facts.ledger.get("weights", 0) if facts else 0,
        "digest": server.fingerprint,
        "details": details(server, name),
    }


def details(server: Server, name: str) -> dict[str, Any]:
    facts, model, asked = server.ingress.facts, server.ingress.model, server.config.quantization
    names = server.ingress.model_names
    base = "" if name in names else names[0]  # of an adapter
    if facts is None or model is None:  # not loaded yet
        return {"parent_model": base, "format": "sgla", "family": "", "families": []}
    return {
        "parent_model": base,
        "format": "sgla",
        "family": model.family,
        "families": [model.family],
        "parameter_size": short_count(model.parameters),
        "quantization_level": model.quantization or asked or facts.dtype,
    }


@operation("Ollama: facts of the model", OllamaShowRequest, to.OllamaModel, any_model=True)
async def show(request: web.Request) -> web.Response:
    server = request[ASKED]
    fields = await intake(request, SHOW)
    server.ingress.require_ready()
    name = known(server, fields.model or fields.name or "")
    dialect, facts, model = server_dialect(server), server.ingress.facts, server.ingress.model
    assert facts is not None
    assert model is not None
    task = facts.pooling.task if facts.pooling else "transcribe" if facts.speech else "generate"
    able = {
        "completion": task == "generate",
        "embedding": task == "embed",
        "tools": task == "generate" and dialect.tools is not None,
        "thinking": task == "generate" and dialect.reasoning is not None,
        "vision": "image" in facts.media,
    }
    return json_response(
        {
            "details": details(server, name),
            "template": getattr(server.ingress.template, "source", ""),
            "parameters": "\n".join(
                f"{name} {value}" for name, value in server.sampling_defaults.values.items()
            ),
            "capabilities": [name for name, can in able.items() if can],
            "model_info": {
                "general.architecture": model.family,
                "general.parameter_count": model.parameters,
                f"{model.family}.block_count": model.layers,
                f"{model.family}.context_length": facts.context_len,
                f"{model.family}.embedding_length": model.hidden,
                f"{model.family}.vocab_size": model.vocab,
            },
            "modified_at": datetime.fromtimestamp(server.created, UTC).isoformat(),
        }
    )


@operation("Ollama: the server's version", answer=to.Version)
async def version(request: web.Request) -> web.Response:
    return json_response({"version": __version__})
