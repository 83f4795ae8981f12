"""GET /openapi.json:
the API's description, made of the table of routes and the structs that bodies are decoded into."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from sgla.defaults import Range
from sgla.http import admin, control, invocations, ollama, page
from sgla.http import answer_types as to
from sgla.http.anthropic import messages as anthropic
from sgla.http.anthropic.input import CountTokensRequest, MessagesRequest
from sgla.http.batches import routes as batches
from sgla.http.batches import upload
from sgla.http.batches.routes import BatchRequest
from sgla.http.batches.upload import FileForm
from sgla.http.conversations import routes as conversations
from sgla.http.conversations.routes import ConversationCreate, ConversationItems, ConversationUpdate
from sgla.http.invocations import InvocationRequest
from sgla.http.middleware import OPEN
from sgla.http.native import generate as native
from sgla.http.native import parsing, sessions, tokens
from sgla.http.native.parsing import ParseCallRequest, SeparateRequest
from sgla.http.native.session_store import CloseSessionRequest, OpenSessionRequest
from sgla.http.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from sgla.http.openai import chat as openai_chat
from sgla.http.openai import render
from sgla.http.openai import text as openai_text
from sgla.http.pooling import classify, cohere, embeddings, moderations, pooling, rerank, score
from sgla.http.pooling import ollama as ollama_embed
from sgla.http.pooling.classify import ClassifyRequest
from sgla.http.pooling.cohere import CohereEmbedRequest
from sgla.http.pooling.embeddings import EmbeddingRequest, EncodeRequest
from sgla.http.pooling.moderations import ModerationRequest
from sgla.http.pooling.ollama import OllamaEmbeddingsRequest, OllamaEmbedRequest
from sgla.http.pooling.pooling import PoolingRequest
from sgla.http.pooling.rerank import RerankRequest
from sgla.http.pooling.score import GenerativeScoringRequest, ScoreRequest
from sgla.http.realtime import session as realtime
from sgla.http.request.chat import ROLES
from sgla.http.request.schema import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    JoinTrainerRequest,
    LeaveTrainerRequest,
    LoadAdapterRequest,
    MemoryRequest,
    PauseRequest,
    ProfileRequest,
    ShowWeightsRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
    UpdateFromTrainerRequest,
    UpdateTensorsRequest,
    UpdateWeightsRequest,
    range_of,
)
from sgla.http.responses import compact
from sgla.http.responses import routes as responses
from sgla.http.responses.input import ResponsesRequest
from sgla.http.server import ASKED
from sgla.http.wire import encode
from sgla.text.template import TEXT_PARTS
from sgla.version import __version__

JSON, EVENTS, TEXT, HTML = "application/json", "text/event-stream", "text/plain", "text/html"
LINES = "application/x-ndjson"
BINARY = "application/octet-stream"
FORM = "multipart/form-data"
REF = "#/components/schemas/{name}"
# Structs whose ``model`` may be any name, or one in another form.
ANY_MODEL = frozenset(
    kind.__name__
    for kind in (
        MessagesRequest,
        CountTokensRequest,
        OllamaChatRequest,
        OllamaGenerateRequest,
        OllamaShowRequest,
        OllamaEmbedRequest,
        OllamaEmbeddingsRequest,
    )
)
OPTIONAL = (PauseRequest, MemoryRequest, ProfileRequest, ConversationCreate)  # bodies that may be left out


class Operation(msgspec.Struct, frozen=True):
    """What one handler does. ``answer``: the type of what it answers with, or a tuple of types. ``stream``:
    the media type that it answers in instead where the body has ``stream: true``. ``query``: names of
    parameters."""

    summary: str
    body: type[msgspec.Struct] | None = None
    answer: Any = Any
    stream: str = ""
    query: tuple[str, ...] = ()
    media: str = JSON
    form: bool = False  # the body is one, not JSON


OPERATIONS: dict[Any, Operation] = {
    openai_chat.chat_completions: Operation(
        "OpenAI: answer a chat", ChatRequest, to.ChatCompletion, stream=EVENTS
    ),
    openai_text.completions: Operation(
        "OpenAI: continue a text", CompletionRequest, to.TextCompletion, stream=EVENTS
    ),
    render.chat: Operation("vLLM: a chat's prompt in token ids", ChatRequest, to.Rendered),
    render.text: Operation("vLLM: prompts in token ids", CompletionRequest, list[to.Rendered]),
    compact.input_tokens: Operation(
        "OpenAI: the size of a response's prompt", ResponsesRequest, to.InputTokens
    ),
    compact.compact: Operation(
        "OpenAI: a summary in place of a conversation", ResponsesRequest, to.Compaction
    ),
    responses.create: Operation(
        "OpenAI: answer items, and keep the response", ResponsesRequest, to.Response, stream=EVENTS
    ),
    responses.retrieve: Operation(
        "OpenAI: a response that is kept",
        answer=to.Response,
        stream=EVENTS,
        query=("stream", "starting_after"),
    ),
    responses.delete: Operation("OpenAI: forget a response", answer=to.DeletedResponse),
    responses.cancel: Operation("OpenAI: end a response in progress", answer=to.Response),
    responses.input_list: Operation(
        "OpenAI: what a response was asked", answer=to.Items, query=("limit", "after", "order")
    ),
    conversations.create: Operation("OpenAI: begin a conversation", ConversationCreate, to.Conversation),
    conversations.retrieve: Operation("OpenAI: a conversation", answer=to.Conversation),
    conversations.update: Operation(
        "OpenAI: a conversation's metadata anew", ConversationUpdate, to.Conversation
    ),
    conversations.delete: Operation("OpenAI: forget a conversation", answer=to.DeletedConversation),
    conversations.list_items: Operation(
        "OpenAI: what a conversation has", answer=to.Items, query=("limit", "after", "order", "include")
    ),
    conversations.add_items: Operation(
        "OpenAI: more items for a conversation", ConversationItems, to.Items, query=("include",)
    ),
    conversations.retrieve_item: Operation(
        "OpenAI: an item of a conversation", answer=to.Object, query=("include",)
    ),
    conversations.delete_item: Operation("OpenAI: forget an item of a conversation", answer=to.Conversation),
    upload.create: Operation("OpenAI: upload the input of a batch", FileForm, to.File, form=True),
    batches.file_list: Operation(
        "OpenAI: files", answer=to.FileList, query=("purpose", "limit", "order", "after")
    ),
    batches.file: Operation("OpenAI: a file", answer=to.File),
    batches.file_delete: Operation("OpenAI: forget a file", answer=to.DeletedFile),
    batches.file_content: Operation("OpenAI: what a file has", media=BINARY),
    batches.create: Operation(
        "OpenAI: run the requests of a file, behind all others", BatchRequest, to.Batch
    ),
    batches.batch_list: Operation("OpenAI: batches", answer=to.BatchList, query=("limit", "after")),
    batches.batch: Operation("OpenAI: a batch", answer=to.Batch),
    batches.cancel: Operation("OpenAI: end a batch with what is done", answer=to.Batch),
    anthropic.messages: Operation("Anthropic: answer messages", MessagesRequest, to.Message, stream=EVENTS),
    anthropic.count_tokens: Operation("Anthropic: the size of a prompt", CountTokensRequest, to.TokenCount),
    admin.models: Operation(
        "OpenAI, Anthropic: the names of the model",
        answer=(to.Models, to.AnthropicModels),
        query=("limit", "after_id", "before_id"),
    ),
    admin.model: Operation("OpenAI, Anthropic: one name of the model", answer=(to.Model, to.AnthropicModel)),
    native.generate: Operation(
        "SGLang: continue texts or token ids",
        GenerateRequest,
        to.Generated | list[to.Generated],
        stream=EVENTS,
    ),
    embeddings.embeddings: Operation("OpenAI: vectors of texts", EmbeddingRequest, to.Embeddings),
    embeddings.encode: Operation(
        "SGLang: vectors of texts or token ids", EncodeRequest, to.Encoded | list[to.Encoded]
    ),
    cohere.embed: Operation(
        "Cohere: vectors of texts in several forms", CohereEmbedRequest, to.CohereEmbeddings
    ),
    pooling.pooling: Operation("vLLM: vectors of texts, or their classes", PoolingRequest, to.Classes),
    score.generative_scoring: Operation(
        "vLLM: how probable a label is behind items", GenerativeScoringRequest, to.Classes
    ),
    invocations.invocations: Operation(
        "SageMaker: what the fields of the body ask for", InvocationRequest, stream=EVENTS
    ),
    realtime.realtime: Operation(
        "OpenAI: a conversation in text over a WebSocket", media=TEXT, query=("model",)
    ),
    rerank.rerank: Operation("Cohere, Jina: documents by relevance", RerankRequest, to.Ranking),
    score.score: Operation(
        "vLLM, SGLang: scores of pairs of texts, or of labels behind items", ScoreRequest, to.Scores
    ),
    classify.classify: Operation(
        "vLLM, SGLang: classes of texts", ClassifyRequest, (to.Classes, to.Encoded, list[to.Encoded])
    ),
    moderations.moderations: Operation(
        "OpenAI: what of a text is harmful", ModerationRequest, to.Moderations
    ),
    ollama.chat: Operation("Ollama: answer a chat", OllamaChatRequest, to.OllamaAnswer, stream=LINES),
    ollama.generate: Operation(
        "Ollama: answer or continue a text", OllamaGenerateRequest, to.OllamaAnswer, stream=LINES
    ),
    ollama_embed.embed: Operation("Ollama: vectors of texts", OllamaEmbedRequest, to.OllamaEmbeddings),
    ollama_embed.embeddings: Operation(
        "Ollama: the vector of a text", OllamaEmbeddingsRequest, to.OllamaEmbedding
    ),
    ollama.tags: Operation("Ollama: the names of the model", answer=to.OllamaModels),
    ollama.running: Operation("Ollama: the names of the model, as loaded", answer=to.OllamaModels),
    ollama.show: Operation("Ollama: facts of the model", OllamaShowRequest, to.OllamaModel),
    ollama.version: Operation("Ollama: the server's version", answer=to.Version),
    sessions.open_session: Operation("SGLang: begin a session of turns", OpenSessionRequest, str),
    sessions.close_session: Operation("SGLang: end a session", CloseSessionRequest, to.Done),
    tokens.tokenize: Operation("vLLM: text or messages to token ids", TokenizeRequest, to.Tokens),
    tokens.apply_template: Operation("llama.cpp: messages to the prompt's text", TokenizeRequest, to.Prompt),
    tokens.detokenize: Operation("vLLM: token ids to text", DetokenizeRequest, to.Text),
    parsing.parse_function_call: Operation(
        "SGLang: the tool calls in a text", ParseCallRequest, to.ParsedCalls
    ),
    parsing.separate_reasoning: Operation(
        "SGLang: the reasoning in a text", SeparateRequest, to.SeparatedReasoning
    ),
    admin.tokenizer_info: Operation("vLLM: special tokens and chat template", answer=to.TokenizerInfo),
    admin.live: Operation("Whether the process should be left alone", answer=to.Status),
    admin.ready: Operation("Whether requests are accepted", answer=to.Status),
    admin.health_generate: Operation("SGLang: whether a token comes out of the engine", answer=to.Status),
    page.page: Operation("A page to chat with the model and to watch the server", media=HTML),
    page.reference: Operation("A page that shows this description", media=HTML),
    page.asset: Operation("A file of these pages", media=BINARY),
    admin.version: Operation("The server's version", answer=to.Version),
    admin.model_info: Operation("SGLang: facts of the model", answer=to.ModelInfo),
    admin.server_info: Operation(
        "SGLang: settings, facts and the scheduler's counters", answer=dict[str, Any]
    ),
    admin.metrics: Operation("Prometheus metrics", media=TEXT),
    admin.load: Operation("vLLM: how busy the server is", answer=to.Load),
    admin.get_load: Operation("SGLang: how busy the server is", answer=list[to.RankLoad]),
    control.flush_cache: Operation("SGLang, vLLM: empty the prefix cache", answer=to.Done),
    control.abort_request: Operation("SGLang: end requests", AbortRequest, to.Aborted),
    control.pause: Operation("SGLang, vLLM: stop generating", PauseRequest, to.Aborted, query=("mode",)),
    control.resume: Operation("SGLang, vLLM: go on generating", answer=to.Done),
    control.load_adapter: Operation("SGLang: load a LoRA adapter", LoadAdapterRequest, to.LoadedAdapters),
    control.unload_adapter: Operation(
        "SGLang: forget a LoRA adapter", UnloadAdapterRequest, to.LoadedAdapters
    ),
    control.load_adapter_text: Operation("vLLM: load a LoRA adapter", LoadAdapterRequest, media=TEXT),
    control.unload_adapter_text: Operation("vLLM: forget a LoRA adapter", UnloadAdapterRequest, media=TEXT),
    control.is_paused: Operation("vLLM: whether generating is stopped", answer=to.Paused),
    control.sleep: Operation("vLLM: give memory back", answer=to.Done, query=("level",)),
    control.wake_up: Operation("vLLM: have it again", answer=to.Done, query=("tags",)),
    control.is_sleeping: Operation("vLLM: whether memory is given back", answer=to.Sleeping),
    control.release_memory: Operation("SGLang: give memory back", MemoryRequest, to.Done),
    control.resume_memory: Operation("SGLang: have it again", MemoryRequest, to.Done),
    control.update_weights: Operation(
        "SGLang: take other weights of the same model", UpdateWeightsRequest, to.Updated
    ),
    control.update_tensors: Operation(
        "SGLang: take tensors in place of weights", UpdateTensorsRequest, to.Updated
    ),
    control.join_trainer: Operation("SGLang: join a trainer", JoinTrainerRequest, to.Told),
    control.update_from_trainer: Operation(
        "SGLang: take what the trainer sends in place of weights", UpdateFromTrainerRequest, to.Updated
    ),
    control.leave_trainer: Operation("SGLang: leave a trainer", LeaveTrainerRequest, to.Told),
    control.show_weights: Operation("SGLang: rows of a tensor", ShowWeightsRequest, list[Any]),
    control.start_profile: Operation("SGLang, vLLM: record what the workers do", ProfileRequest),
    control.step_log: Operation("The scheduler's last steps, for 'sgla replay'", media=BINARY),
    control.weights: Operation("Links to the model's files, for a server that copies them", media=HTML),
    control.weight_file: Operation("One of these files", media=BINARY),
    control.stop_profile: Operation("SGLang, vLLM: write the recording"),
}


TABLE: web.AppKey[Any] = web.AppKey("routes", dict)


async def openapi_json(request: web.Request) -> web.Response:
    """Made once, beside the loop, since that takes 0.2 s; nothing in it changes."""
    server = request[ASKED]
    if server.openapi is None:
        table, names = request.app[TABLE], server.ingress.model_names
        server.openapi = asyncio.ensure_future(asyncio.to_thread(lambda: encode(document(table, names))))
    return web.Response(body=await asyncio.shield(server.openapi), content_type="application/json")


OPERATIONS[openapi_json] = Operation("The description of the API")


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct):
    """OpenAI's shape, on every route but Anthropic's and Ollama's."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    type: str
    error: AnthropicErrorDetail
    request_id: str


class OllamaError(msgspec.Struct):
    error: str


PART = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": kind}, name: {"type": "string"}},
            "required": ["type", name],
        }
        for kind, name in TEXT_PARTS.items()
    ]
}
CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": PART}]}
# What the lists of plain objects hold, where their struct does not say it.
ITEMS: dict[str, dict[str, Any]] = {
    "messages": {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "role": {"enum": [role for role in ROLES if role != "assistant"]},
                    "content": CONTENT,
                },
                "required": ["role", "content"],
            },
            {
                "type": "object",
                "properties": {
                    "role": {"const": "assistant"},
                    "content": {"anyOf": [CONTENT, {"type": "null"}]},
                },
                "required": ["role"],
            },
        ]
    },
    "tools": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 1},
                    "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                },
                "required": ["name"],
            },
        },
        "required": ["function"],
    },
}


def document(routes: Mapping[str, Mapping[str, Any]], models: Sequence[str] = ()) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server of ``models``.
    A handler of ``routes`` that ``OPERATIONS`` does not describe raises KeyError."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "sgla",
            "version": __version__,
            "description": "Unknown fields of a body are ignored and listed in the x-ignored-fields header.",
        },
        "paths": {
            route: {
                method.lower(): operation(route, method, OPERATIONS[handler])
                for method, handler in methods.items()
            }
            for route, methods in routes.items()
        },
        "components": {
            "schemas": schemas(OPERATIONS.values(), models),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def tags(summary: str) -> list[str]:
    """Whose API it is."""
    whose, colon, _ = summary.partition(": ")
    return whose.split(", ") if colon else ["Server"]


def operation(route: str, method: str, entry: Operation) -> dict[str, Any]:
    names = [("id", "path"), ("item", "path"), *((name, "query") for name in entry.query)]
    result: dict[str, Any] = {
        "operationId": f"{method.lower()}{route}".replace("/", "_").replace("{", "").replace("}", ""),
        "summary": entry.summary,
        "tags": tags(entry.summary),
        "parameters": [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for name, place in names
            if place == "query" or f"{{{name}}}" in route
        ],
        "responses": answers(route, entry),
        "security": security(route),
    }
    if entry.body is not None:
        content = {FORM if entry.form else JSON: {"schema": reference(entry.body)}}
        result["requestBody"] = {"required": entry.body not in OPTIONAL, "content": content}
    return result


def answers(route: str, entry: Operation) -> dict[str, Any]:
    shape: dict[str, Any] = {"type": "string"}
    if entry.media == JSON:
        first, *others = shapes(kinds(entry))[0]
        shape = {"anyOf": [first, *others]} if others else first
    content: dict[str, Any] = {entry.media: {"schema": shape}}
    if entry.stream:
        content[entry.stream] = {"schema": {}}
    errors: dict[str, type[msgspec.Struct]] = {
        anthropic.PREFIX: AnthropicError,
        f"{ollama.PREFIX}/": OllamaError,
    }
    error = reference(next((kind for prefix, kind in errors.items() if route.startswith(prefix)), Error))
    health = entry in (OPERATIONS[admin.ready], OPERATIONS[admin.live])
    failed = {"description": "not accepting requests", "content": {JSON: {"schema": {}}}}
    return {
        "200": {"description": "done", "content": content},
        **({"503": failed} if health else {}),
        "default": {"description": "an error", "content": {JSON: {"schema": error}}},
    }


def security(route: str) -> list[dict[str, list[str]]]:
    """Keys are needed only where the server was given some, hence the empty alternative."""
    first = route.split("/")[1]
    keyed: list[dict[str, list[str]]] = [{"bearer": []}, {"x-api-key": []}]
    if first in OPEN:
        return []
    return [*keyed, {}]


def reference(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": REF.format(name=struct.__name__)}


def kinds(entry: Operation) -> tuple[Any, ...]:
    return entry.answer if isinstance(entry.answer, tuple) else (entry.answer,)


def shapes(types: Iterable[Any]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """The JSON schema of each type, and the components that they refer to."""
    return msgspec.json.schema_components(types, ref_template=REF)


def schemas(entries: Iterable[Operation], models: Sequence[str]) -> dict[str, Any]:
    """What all operations refer to."""
    entries = list(entries)
    _, components = shapes(
        [*(kind for entry in entries for kind in kinds(entry)), Error, AnthropicError, OllamaError]
    )
    _, bodies = shapes(entry.body for entry in entries if entry.body is not None)
    for owner, component in bodies.items():
        for name, shape in component.get("properties", {}).items():
            for branch in shape.get("anyOf", [shape]):
                narrow(branch, owner, name, models)
    return components | bodies


def narrow(shape: dict[str, Any], owner: str, name: str, models: Sequence[str]) -> None:
    """Write what is checked beside its type into the schema of the field ``name`` of the struct ``owner``."""
    if allowed := range_of(owner, name):
        limit(shape, allowed)
    if name in ITEMS and shape.get("items") == {"type": "object"} and owner != ResponsesRequest.__name__:
        shape["items"] = ITEMS[name]
    if name == "model" and models and shape.get("type") == "string" and owner not in ANY_MODEL:
        shape["enum"] = [*models, ""]


def limit(shape: dict[str, Any], allowed: Range) -> None:
    """Write the range of a number, or of a list's numbers, into its schema."""
    if shape.get("type") == "array":
        limit(shape["items"], allowed)
    elif shape.get("type") in ("integer", "number"):
        shape["exclusiveMinimum" if allowed.open_low else "minimum"] = allowed.low
        if allowed.high is not None:
            shape["maximum"] = allowed.high
