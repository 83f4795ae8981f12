"""The aiohttp application: one table of routes, one dispatcher that forgives slashes and answers in JSON."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from sgla import clock
from sgla.config import Config
from sgla.errors import NotFound, SglaError, Unauthorized, UnsupportedTask
from sgla.http import admin, control, forms, invocations, ollama, openapi, page, weights
from sgla.http.access import LINES, AccessLines, log_access, worth_telling
from sgla.http.anthropic import messages as anthropic
from sgla.http.batches import routes as batches
from sgla.http.batches import upload
from sgla.http.batches.runner import RUNNER, Runner, run_batches
from sgla.http.batches.store import BatchStore
from sgla.http.bodies import SHARE, Share
from sgla.http.clients import ADDRESS, CLIENT, Client, without_key
from sgla.http.connections import answer_begins, check_spare, has_gone, is_last, request_begins, why_cancelled
from sgla.http.conversations import routes as conversations
from sgla.http.errors import MethodNotAllowed, error_response
from sgla.http.middleware import (
    CLIENT_GONE,
    GATE,
    OPEN,
    PAGES,
    Gate,
    add_headers,
    check_expected,
    go_ahead,
    identify,
    preflight,
    wakes,
)
from sgla.http.models import MODELS, Handler, Lookup, Models, chosen
from sgla.http.native import generate as native
from sgla.http.native import parsing, sessions, tokens
from sgla.http.openai import audio, render
from sgla.http.openai import chat as openai_chat
from sgla.http.openai import text as openai_text
from sgla.http.operation import JSON, OPERATIONS
from sgla.http.pooling import classify, cohere, embeddings, moderations, pooling, rerank, score
from sgla.http.pooling import ollama as ollama_embed
from sgla.http.ports import Ingress
from sgla.http.realtime import session as realtime
from sgla.http.responses import compact
from sgla.http.responses import routes as responses
from sgla.http.server import ASKED, PATH_ID, RID, SERVER, TRACE, Server
from sgla.http.wire import in_pieces
from sgla.observe.metrics import Metrics

log = logging.getLogger(__name__)

LISTED = "/v1/models"
LIVE = "/health/live"
NAMES = "model", "name"  # fields that name the model; the second is Ollama's
ASSETS = "/page"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"})

ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/chat/completions": {"POST": openai_chat.chat_completions},
    "/v1/completions": {"POST": openai_text.completions},
    "/v1/chat/completions/render": {"POST": render.chat},
    "/v1/completions/render": {"POST": render.text},
    "/v1/audio/transcriptions": {"POST": audio.transcriptions},
    "/v1/audio/translations": {"POST": audio.translations},
    responses.PREFIX: {"POST": responses.create},
    f"{responses.PREFIX}/input_tokens": {"POST": compact.input_tokens},
    f"{responses.PREFIX}/compact": {"POST": compact.compact},
    f"{responses.PREFIX}/{{id}}": {"GET": responses.retrieve, "DELETE": responses.delete},
    f"{responses.PREFIX}/{{id}}/cancel": {"POST": responses.cancel},
    f"{responses.PREFIX}/{{id}}/input_items": {"GET": responses.input_list},
    conversations.PREFIX: {"POST": conversations.create},
    f"{conversations.PREFIX}/{{id}}": {
        "GET": conversations.retrieve,
        "POST": conversations.update,
        "DELETE": conversations.delete,
    },
    f"{conversations.PREFIX}/{{id}}/items": {
        "GET": conversations.list_items,
        "POST": conversations.add_items,
    },
    f"{conversations.PREFIX}/{{id}}/items/{{item}}": {
        "GET": conversations.retrieve_item,
        "DELETE": conversations.delete_item,
    },
    anthropic.PREFIX: {"POST": anthropic.messages},
    f"{anthropic.PREFIX}/count_tokens": {"POST": anthropic.count_tokens},
    batches.FILES: {"POST": upload.create, "GET": batches.file_list},
    f"{batches.FILES}/{{id}}": {"GET": batches.file, "DELETE": batches.file_delete},
    f"{batches.FILES}/{{id}}/content": {"GET": batches.file_content},
    batches.BATCHES: {"POST": batches.create, "GET": batches.batch_list},
    f"{batches.BATCHES}/{{id}}": {"GET": batches.batch},
    f"{batches.BATCHES}/{{id}}/cancel": {"POST": batches.cancel},
    "/v1/embeddings": {"POST": embeddings.embeddings},
    "/v2/embed": {"POST": cohere.embed},
    "/pooling": {"POST": pooling.pooling},
    "/v1/realtime": {"GET": realtime.realtime},
    "/v1/rerank": {"POST": rerank.rerank},
    "/v2/rerank": {"POST": rerank.rerank},
    "/rerank": {"POST": rerank.rerank},
    "/v1/score": {"POST": score.score},
    "/score": {"POST": score.score},
    "/generative_scoring": {"POST": score.generative_scoring},
    "/v1/classify": {"POST": classify.classify},
    "/classify": {"POST": classify.classify},
    "/v1/moderations": {"POST": moderations.moderations},
    "/encode": {"POST": embeddings.encode, "PUT": embeddings.encode},
    LISTED: {"GET": admin.models},
    f"{LISTED}/{{id}}": {"GET": admin.model},
    "/generate": {"POST": native.generate, "PUT": native.generate},
    f"{ollama.PREFIX}/chat": {"POST": ollama.chat},
    f"{ollama.PREFIX}/generate": {"POST": ollama.generate},
    f"{ollama.PREFIX}/embed": {"POST": ollama_embed.embed},
    f"{ollama.PREFIX}/embeddings": {"POST": ollama_embed.embeddings},
    f"{ollama.PREFIX}/tags": {"GET": ollama.tags},
    f"{ollama.PREFIX}/ps": {"GET": ollama.running},
    f"{ollama.PREFIX}/show": {"POST": ollama.show},
    f"{ollama.PREFIX}/version": {"GET": ollama.version},
    "/invocations": {"POST": invocations.invocations},
    "/open_session": {"POST": sessions.open_session},
    "/close_session": {"POST": sessions.close_session},
    "/tokenize": {"POST": tokens.tokenize},
    "/v1/tokenize": {"POST": tokens.tokenize},
    "/apply-template": {"POST": tokens.apply_template},
    "/detokenize": {"POST": tokens.detokenize},
    "/v1/detokenize": {"POST": tokens.detokenize},
    "/parse_function_call": {"POST": parsing.parse_function_call},
    "/separate_reasoning": {"POST": parsing.separate_reasoning},
    "/tokenizer_info": {"GET": admin.tokenizer_info},
    "/": {"GET": page.page},
    "/docs": {"GET": page.reference},
    f"{ASSETS}/{{id}}": {"GET": page.asset},
    "/health": {"GET": admin.ready},
    LIVE: {"GET": admin.live},
    "/health/ready": {"GET": admin.ready},
    "/health_generate": {"GET": admin.health_generate},
    "/ready": {"GET": admin.ready},
    "/readyz": {"GET": admin.ready},
    "/ping": {"GET": admin.ready},
    "/openapi.json": {"GET": openapi.openapi_json},
    "/version": {"GET": admin.version},
    "/get_model_info": {"GET": admin.model_info},
    "/model_info": {"GET": admin.model_info},
    "/get_server_info": {"GET": admin.server_info},
    "/server_info": {"GET": admin.server_info},
    "/metrics": {"GET": admin.metrics},
    "/load": {"GET": admin.load},
    "/get_load": {"GET": admin.get_load},
    "/flush_cache": {"POST": control.flush_cache, "GET": control.flush_cache},
    "/reset_prefix_cache": {"POST": control.flush_cache},
    "/abort_request": {"POST": control.abort_request},
    "/pause_generation": {"POST": control.pause},
    "/pause": {"POST": control.pause},
    "/continue_generation": {"POST": control.resume},
    "/resume": {"POST": control.resume},
    "/is_paused": {"GET": control.is_paused},
    "/sleep": {"POST": control.sleep},
    "/wake_up": {"POST": control.wake_up},
    "/is_sleeping": {"GET": control.is_sleeping},
    "/release_memory_occupation": {"POST": control.release_memory},
    "/resume_memory_occupation": {"POST": control.resume_memory},
    "/update_weights_from_disk": {"POST": weights.update_weights},
    "/update_weights_from_tensor": {"POST": weights.update_tensors},
    "/update_weights_from_ipc": {"POST": weights.update_from_servers},
    "/collective_rpc": {"POST": weights.call},
    "/init_weight_transfer_engine": {"POST": weights.begin_transfers},
    "/start_weight_update": {"POST": weights.start_transfer},
    "/update_weights": {"POST": weights.take_part},
    "/finish_weight_update": {"POST": weights.finish_transfer},
    "/get_world_size": {"GET": weights.world_size},
    "/init_weights_update_group": {"POST": weights.join_trainer},
    "/update_weights_from_distributed": {"POST": weights.update_from_trainer},
    "/destroy_weights_update_group": {"POST": weights.leave_trainer},
    "/get_weights_by_name": {"POST": weights.show_weights},
    "/get_weight_version": {"GET": admin.weight_version},
    "/weight_version": {"GET": admin.weight_version},
    "/update_weight_version": {"POST": weights.name_weights},
    "/post_process_weights": {"POST": weights.prepare_weights},
    "/weights_checker": {"POST": weights.check_weights},
    "/load_lora_adapter": {"POST": control.load_adapter},
    "/unload_lora_adapter": {"POST": control.unload_adapter},
    "/v1/load_lora_adapter": {"POST": control.load_adapter_text},
    "/v1/unload_lora_adapter": {"POST": control.unload_adapter_text},
    "/start_profile": {"POST": control.start_profile},
    "/stop_profile": {"POST": control.stop_profile},
    "/start_expert_distribution_record": {"POST": control.start_experts},
    "/stop_expert_distribution_record": {"POST": control.stop_experts},
    "/dump_expert_distribution_record": {"POST": control.dump_experts},
    "/rebalance_experts": {"POST": control.rebalance_experts},
    "/weights": {"GET": weights.links},
    "/weights/{id}": {"GET": weights.file},
    "/step_log": {"GET": control.step_log, "POST": control.step_log},
}


# Names of models and of the page's files may have slashes.
PATTERNS = [
    (
        re.compile(
            re.sub(
                r"\\{\w+\\}",
                "(.+)" if route.startswith((LISTED, ASSETS)) else "([^/]+)",
                re.escape(route),
            )
        ),
        route,
    )
    for route in ROUTES
    if "{id}" in route
]


def match(path: str) -> tuple[str, str]:
    """The route of a path and its ``{id}``, and its ``{item}`` behind a slash;
    the path itself if there is no route."""
    if path not in ROUTES:
        for pattern, route in PATTERNS:
            if found := pattern.fullmatch(path):
                return route, "/".join(found.groups())
    return path, ""


def make_app(
    ingress: Ingress,
    config: Config,
    metrics: Metrics,
    beside: Sequence[tuple[Ingress, Config, Metrics]] = (),
) -> web.Application:
    """The server's application, with the models ``beside`` the first one.
    It may listen before the model is loaded: requests get a typed 503 until then.

    Run it with ``connections.Runner``: its connections leave bodies compressed.
    """
    forms.ignore_warnings()
    app = web.Application(client_max_size=config.max_body_bytes)
    server = app[SERVER] = Server(ingress, config, metrics)
    app[MODELS] = Models([server, *(server.beside(*other) for other in beside)], lookups())
    app[openapi.TABLE] = ROUTES
    app[realtime.SOCKETS] = set()
    app[GATE] = Gate(config.api_key, config.admin_api_key, server.database.salt)
    route = app.router.add_route("*", r"/{path:[\s\S]*}", dispatch, expect_handler=go_ahead)

    async def resolve(request: web.Request) -> web.UrlMappingMatchInfo:
        """aiohttp's own takes a time that grows with the square of the slashes in a path."""
        return web.UrlMappingMatchInfo({}, route)

    app.router.resolve = resolve  # type: ignore[method-assign]
    app.on_response_prepare.extend((add_headers, answer_begins))
    app.on_shutdown.append(realtime.close_all)
    app[LINES] = AccessLines()
    app.on_cleanup.append(app[LINES].close)
    app[RUNNER] = Runner(app, BatchStore(server.database, server.files))
    server.shelves.append(app[RUNNER].store.shelf)
    app.cleanup_ctx.extend((keep_state, keep_media, keep_tools, run_batches))
    return app


def lookups() -> dict[Handler, Lookup]:
    """How each handler comes by its model. Those about its rest do not wake one."""
    found: dict[Handler, Lookup] = {realtime.realtime: Lookup(wakes=True)}
    for route, methods in ROUTES.items():
        for handler in methods.values():
            operation = OPERATIONS.get(handler)
            if operation is not None and operation.body is not None and operation.accepts == JSON:
                names = NAMES if route.startswith(f"{ollama.PREFIX}/") else NAMES[:1]
                found[handler] = Lookup(
                    [name for name in names if name in operation.body.__struct_fields__], wakes(route)
                )
    return found


async def keep_state(app: web.Application) -> AsyncIterator[None]:
    """Trim what is stored now and then, until the application ends."""
    server = app[SERVER]
    server.database.tidy()
    sweeping = asyncio.ensure_future(server.sweep())
    yield
    sweeping.cancel()
    await server.database.close()


async def keep_media(app: web.Application) -> AsyncIterator[None]:
    """End the connections to where pictures come from."""
    yield
    await app[SERVER].media.close()


async def keep_tools(app: web.Application) -> AsyncIterator[None]:
    """Be connected to the MCP servers."""
    app[SERVER].tools.start()
    yield
    app[SERVER].tools.close()


async def dispatch(request: web.Request) -> web.StreamResponse:
    """Answer with JSON whatever happens; count and log it."""
    server = request[ASKED] = request.app[SERVER]
    began = clock.now()
    path = "/" + "/".join(filter(None, request.path.split("/")))
    route, request[PATH_ID] = match(path)
    identify(request)
    request[ADDRESS] = server.proxies.client(request)
    named = (
        request.method if request.method in METHODS else "other",
        route if route in ROUTES else "unknown",
    )
    server.metrics.http_started(*named)
    status, large = CLIENT_GONE, False
    try:
        response = await answer(request, path, route)
        status = response.status
        if not request.content.is_eof() or request.content.exception() is not None or is_last(request):
            response.force_close()  # what still comes of the body is thrown away
        large = in_pieces(response)
        return response
    finally:
        if SHARE in request and not large:  # that of a large answer is held until it is read
            request[SHARE].close()
        server.metrics.http_finished(*named, status)
        if TRACE in request and (tracing := request[ASKED].metrics.tracing) is not None:
            tracing.end(request[TRACE], status)
        loading = request[ASKED].ingress.facts is None
        if server.config.log_requests and worth_telling(route, status, loading):
            log_access(request, route, status, began, request[RID])


async def answer(request: web.Request, path: str, route: str) -> web.StreamResponse:
    try:
        if request.method == "OPTIONS":
            await anonymous(request)
            return preflight(request)
        check_expected(request)
        check_spare(request, may=path.split("/")[1] in OPEN - PAGES)
        request[CLIENT] = await checked(request, path)
        request_begins(request, request[CLIENT].name)
        await request[ASKED].door.enter(LIVE if route == LIVE else request[CLIENT].name)
        request[SHARE] = Share(request[ASKED].memory, request[CLIENT].name)
        handler = find(request.method, route)
        async with chosen(request, handler):
            return await handler(request)
    except SglaError as error:
        return refusal(request, route, error)
    except asyncio.CancelledError:
        why, task = why_cancelled(request), asyncio.current_task()
        if why is None or task is None:
            raise
        task.uncancel()
        return refusal(request, route, why)
    except Exception as error:
        if isinstance(error, ConnectionError) and has_gone(request):
            raise
        log.exception("request %s failed", request[RID])
        return refusal(request, route, SglaError("internal error; the server's log has the details"))


async def checked(request: web.Request, path: str) -> Client:
    """Who asks. Raises Unauthorized: where thousands are refused at once, others have their turns, too."""
    try:
        return request.app[GATE].check(request.headers, request[ADDRESS], path)
    except Unauthorized:
        await anonymous(request)
        raise


async def anonymous(request: web.Request) -> None:
    """Through the door as one of those who come from the same address."""
    await request[ASKED].door.enter(without_key(request[ADDRESS]).name)


def refusal(request: web.Request, route: str, error: SglaError) -> web.Response:
    """The error in the shape of the route's API."""
    lists = route.startswith(LISTED) and admin.ANTHROPIC_VERSION in request.headers
    if route.startswith(anthropic.PREFIX) or lists:
        return anthropic.error_response(error, request[RID])
    if route.startswith(f"{ollama.PREFIX}/"):
        return ollama.error_response(error)
    return error_response(error)


# Routes of OpenAI's API -> what they make, which no model here does.
ELSEWHERE = {
    "/v1/images/generations": "pictures",
    "/v1/images/edits": "pictures",
    "/v1/images/variations": "pictures",
    "/v1/videos": "videos",
    "/v1/audio/speech": "speech",
}


def find(method: str, route: str) -> Handler:
    methods = ROUTES.get(route)
    if methods is None and (made := ELSEWHERE.get(route)):
        raise UnsupportedTask(f"{route} makes {made}, and this server makes text and vectors alone")
    if methods is None:
        raise NotFound(f"there is no route {route[:200]}")
    handler = methods.get("GET" if method == "HEAD" else method)
    if handler is None:
        raise MethodNotAllowed(f"{route} does not take {method[:20]}; use {' or '.join(methods)}", methods)
    return handler
