"""Routes that tell about the server: models, health, load, facts, metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from sgla.config import SECRETS
from sgla.errors import InvalidField
from sgla.http import answer_types as to
from sgla.http.clients import CLIENT
from sgla.http.models import MODELS, Models, state_of
from sgla.http.operation import TEXT, operation
from sgla.http.server import ASKED, PATH_ID, Server
from sgla.http.wire import json_response
from sgla.hub.demo import about
from sgla.sched.stats import Stats
from sgla.version import __version__

ANTHROPIC_VERSION = "anthropic-version"  # a header
MAX_PAGE = 1000  # models
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@operation(
    "OpenAI, Anthropic: the names of the model",
    answer=(to.Models, to.AnthropicModels),
    query=("limit", "after_id", "before_id"),
)
async def models(request: web.Request) -> web.Response:
    """In Anthropic's shape for its clients, which send the version of its API."""
    models = request.app[MODELS]
    models.require_listed()
    if ANTHROPIC_VERSION in request.headers:
        return json_response(model_page(models, request.query))
    cards = [card(server, name) for server in models.servers for name in server.names()]
    return json_response({"object": "list", "data": cards})


@operation("OpenAI, Anthropic: one name of the model", answer=(to.Model, to.AnthropicModel))
async def model(request: web.Request) -> web.Response:
    models = request.app[MODELS]
    models.require_listed()
    server = models.find(request[PATH_ID])
    shape = anthropic_card if ANTHROPIC_VERSION in request.headers else card
    return json_response(shape(server, server.model(request[PATH_ID])))


def model_page(models: Models, query: Mapping[str, str]) -> dict[str, Any]:
    """A page of Anthropic's list: ``limit`` models behind ``after_id``, or before ``before_id``.
    Raises InvalidField."""
    names, limit = models.names(), query.get("limit", "20")
    if not re.fullmatch(r"[0-9]{1,4}", limit) or not 1 <= int(limit) <= MAX_PAGE:
        raise InvalidField(f"limit must be from 1 to {MAX_PAGE}", param="limit")
    for name in ("after_id", "before_id"):
        if name in query and query[name] not in names:
            raise InvalidField(f"{name} must be the id of a model", param=name)
    if "before_id" in query:
        rest = names[: names.index(query["before_id"])]
        page = rest[-int(limit) :]
    else:
        rest = names[names.index(query["after_id"]) + 1 :] if "after_id" in query else names
        page = rest[: int(limit)]
    return {
        "data": [anthropic_card(models.find(name), name) for name in page],
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
        "has_more": len(rest) > len(page),
    }


def anthropic_card(server: Server, name: str) -> dict[str, Any]:
    facts = server.ingress.facts
    context = facts.context_len if facts is not None else None
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(server.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def card(server: Server, name: str) -> dict[str, Any]:
    facts, names = server.ingress.facts, server.ingress.model_names
    adapter = None if name in names else server.ingress.adapters.find(name, names)
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "sgla",
        "root": server.config.model if adapter is None else adapter.folder,
        "parent": None if adapter is None else names[0],
        "max_model_len": facts.context_len if facts is not None else None,
        "state": state_of(server),
    }


@operation("Whether the process should be left alone", answer=to.Status, health=True)
async def live(request: web.Request) -> web.Response:
    """200 while the process can recover by itself; 503 once the engine of a model is dead."""
    servers = request.app[MODELS].servers
    dead = any(server.ingress.phase == "dead" for server in servers)
    phase = "dead" if dead else servers[0].ingress.phase
    return json_response({"status": "dead" if dead else "alive", "phase": phase}, 503 if dead else 200)


@operation("Whether requests are accepted", answer=to.Status, health=True)
async def ready(request: web.Request) -> web.Response:
    """200 while requests are accepted, of every model; else the typed 503 with the phase of the first that
    accepts none, and the state of each of several."""
    models = request.app[MODELS]
    several = {"models": {server.names()[0]: state_of(server) for server in models.servers}}
    more: dict[str, Any] = several if models.several else {}
    away = [server for server in models.servers if not server.ingress.ready]
    if not away:
        return json_response({"status": "ready", "phase": "ready", **more})
    ingress = away[0].ingress
    named = [f"{server.names()[0]}: {server.ingress.trouble}" for server in away]
    body = {
        "status": "not_ready",
        "phase": ingress.phase,
        "message": "; ".join(named) if models.several else ingress.trouble,
        "done": ingress.progress.done,
        "total": ingress.progress.total,
        **more,
    }
    return json_response(body, 503, {"Retry-After": "1"})


@operation("SGLang: whether a token comes out of the engine", answer=to.Status)
async def health_generate(request: web.Request) -> web.Response:
    """200 if one token, or one vector, comes out of the engine."""
    server = request[ASKED]
    try:
        for each in request.app[MODELS].servers:
            await each.probe.check()
    finally:  # thousands may have waited for the same answer
        await server.door.enter(request[CLIENT].name)
    return json_response({"status": "ready"})


@operation("The server's version", answer=to.Version)
async def version(request: web.Request) -> web.Response:
    return json_response({"version": __version__})


@operation("SGLang: facts of the model", answer=to.ModelInfo)
async def model_info(request: web.Request) -> web.Response:
    request.app[MODELS].require_listed()
    server = request[ASKED]
    config, facts = server.config, server.ingress.facts
    return json_response(
        {
            "model_path": config.model,
            "tokenizer_path": config.tokenizer or config.model,
            "served_model_name": server.ingress.model_names[0],
            "about": about(config.model),
            "is_generation": facts is None or (facts.pooling is None and facts.speech is None),
            "has_image_understanding": facts is not None and "image" in facts.media,
            "has_video_understanding": facts is not None and "video" in facts.media,
            "has_audio_understanding": facts is not None and "audio" in facts.media,
            "preferred_sampling_params": server.sampling_defaults.values,
            "chat_params": server.sampling_defaults.talk(facts.context_len if facts is not None else 0),
            "sampling_sources": server.sampling_defaults.sources,
            "weight_version": server.ingress.weight_version,
            "max_model_len": facts.context_len if facts is not None else None,
            "vocab_size": facts.vocab_size if facts is not None else None,
        }
    )


@operation("SGLang: whose weights answers are of", answer=to.WeightVersion)
async def weight_version(request: web.Request) -> web.Response:
    """What the last update called them, or its folder; ``default`` before."""
    return json_response({"weight_version": request[ASKED].ingress.weight_version})


@operation("SGLang: settings, facts and the scheduler's counters", answer=dict[str, Any])
async def server_info(request: web.Request) -> web.Response:
    """Settings (no secrets), what the workers have,
    and the scheduler's counters as ``internal_states[0]``."""
    server = request[ASKED]
    settings = msgspec.to_builtins(server.config)
    settings |= dict.fromkeys(SECRETS)
    stats = server.ingress.stats()
    return json_response(
        {
            **settings,
            "version": __version__,
            "phase": server.ingress.phase,
            "facts": server.ingress.facts,
            "internal_states": [] if stats is None else [stats],
        }
    )


@operation("vLLM: special tokens and chat template", answer=to.TokenizerInfo)
async def tokenizer_info(request: web.Request) -> web.Response:
    """What lm-eval's remote tokenizer needs, in vLLM's shape."""
    server = request[ASKED]
    server.ingress.require_ready()
    tokenizer, facts = server.ingress.tokenizer, server.ingress.facts
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            "unk_token": None,
            **tokenizer.special_tokens,
            "chat_template": tokenizer.chat_template,
            "model_max_length": facts.context_len if facts is not None else None,
            "vocab_size": tokenizer.vocab_size,
            "add_bos_token": tokenizer.adds_bos,
        }
    )


@operation("vLLM: how busy the server is", answer=to.Load)
async def load(request: web.Request) -> web.Response:
    """What a router compares servers by, cheaply: vLLM's ``server_load`` and what it consists of."""
    stats = current(request[ASKED])
    used = stats.pages_total - stats.pages_free - stats.pages_evictable
    return json_response(
        {
            "server_load": stats.running + stats.queued,
            "running": stats.running,
            "waiting": stats.queued,
            "kv_usage": used / max(1, stats.pages_total),
        }
    )


@operation("SGLang: how busy the server is", answer=list[to.RankLoad])
async def get_load(request: web.Request) -> web.Response:
    """SGLang's list, with one entry for each data-parallel rank."""
    server = request[ASKED]
    stats, facts = current(server), server.ingress.facts
    used = stats.pages_total - stats.pages_free - stats.pages_evictable
    entry = {
        "dp_rank": 0,
        "num_reqs": stats.running + stats.queued,
        "num_waiting_reqs": stats.queued,
        "num_tokens": used * (facts.page_size if facts is not None else 0),
    }
    return json_response([entry])


def current(server: Server) -> Stats:
    server.ingress.require_ready()
    stats: Stats = server.ingress.stats()
    return stats


@operation("Prometheus metrics", media=TEXT)
async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[MODELS].metrics_text(), headers={"Content-Type": METRICS_TYPE})
