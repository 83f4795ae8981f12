"""What both protocols tell of the model and the server, and do to it."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

from sgla.errors import SglaError
from sgla.grpc.calls import Call
from sgla.http.admin import current
from sgla.http.errors import Busy
from sgla.http.server import Server
from sgla.version import __version__

SHOWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # defaults that clients take over


def model_facts(server: Server) -> dict[str, Any]:
    """Fields of GetModelInfoResponse that both have. Raises NotReady."""
    server.ingress.require_ready(resting=True)
    config, ingress = server.config, server.ingress
    facts, tokenizer, model = ingress.facts, ingress.tokenizer, ingress.model
    assert facts is not None
    defaults = {name: value for name, value in server.sampling_defaults.values.items() if name in SHOWN}
    return {
        "model_path": config.model,
        "tokenizer_path": config.tokenizer or config.model,
        "served_model_name": ingress.model_names[0],
        "is_generation": facts.pooling is None and facts.speech is None,
        "max_context_length": facts.context_len,
        "max_req_input_len": facts.context_len - 1,
        "vocab_size": facts.vocab_size,
        "model_type": "" if model is None else model.family,
        "architectures": [] if model is None else [model.architecture],
        "eos_token_ids": sorted(tokenizer.eos_ids),
        "pad_token_id": getattr(tokenizer, "pad_id", None) or 0,
        "bos_token_id": getattr(tokenizer, "bos_id", None) or 0,
        "default_sampling_params_json": json.dumps(defaults) if defaults else "",
    }


def load(server: Server) -> dict[str, Any]:
    """Fields of SchedulerLoad. Raises NotReady."""
    stats, facts = current(server), server.ingress.facts
    size = facts.page_size if facts is not None else 0
    used = stats.pages_total - stats.pages_free - stats.pages_evictable
    slots = facts.slots if facts is not None else 0
    return {
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.queued,
        "num_total_reqs": stats.running + stats.queued,
        "num_used_tokens": used * size,
        "max_total_num_tokens": stats.pages_total * size,
        "token_usage": used / max(1, stats.pages_total),
        "cache_hit_rate": stats.hit_tokens / max(1, stats.query_tokens),
        "utilization": stats.running / max(1, slots),
        "max_running_requests": slots,
    }


def active(server: Server) -> int:
    """Requests that run or wait."""
    stats = server.ingress.stats()
    return 0 if stats is None else stats.running + stats.queued


def uptime(server: Server) -> float:
    """Seconds."""
    return max(0.0, time.time() - server.created)


def loads_head() -> dict[str, Any]:
    return {"timestamp": datetime.now(UTC).isoformat(), "version": __version__, "dp_rank_count": 1}


async def health(call: Call) -> dict[str, Any]:
    """Fields of HealthCheckResponse: whether something comes out of the engine."""
    try:
        await call.server.probe.check()
    except SglaError as error:
        return {"healthy": False, "message": error.message}
    return {"healthy": True, "message": "ready"}


async def flush(call: Call) -> dict[str, Any]:
    """Fields of FlushCacheResponse. Raises Busy."""
    if not await call.server.ingress.flush_cache():
        raise Busy("requests are running, so the cache was not flushed; try again when they are done")
    return {"success": True, "message": "the prefix cache is empty"}
