"""What the routes that answer with vectors share:
their fields, the check of the task, and running a list of inputs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from sgla import clock
from sgla.errors import InvalidField, UnsupportedTask
from sgla.http.answer.collect import Choice
from sgla.http.openai.text import separate, token_prompt
from sgla.http.request.sampling import first
from sgla.http.request.schema import MAX_CHOICES, RequestFields
from sgla.http.request.work import make_work
from sgla.http.server import YIELDS, Server, raise_aborted
from sgla.messages import Pooling, SamplingParams

ENTRY = 16  # values that an entry of an answer costs beside its own
WINDOW = 256  # inputs of one request that are open at a time: a long list leaves room in the queue for others

NEEDS = {
    "embed": "an embedding model, for example --model minilm",
    "classify": "a sequence-classification model, for example --model cross-encoder/ms-marco-MiniLM-L6-v2",
}


class PooledFields(RequestFields, kw_only=True):
    rid: str | None = None
    request_id: str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None


def pooling_of(server: Server, *tasks: str) -> Pooling:
    """Of a model that does one of ``tasks``. Raises UnsupportedTask, which says what to serve."""
    facts = server.ingress.facts
    pooling = facts.pooling if facts is not None else None
    if pooling is None or pooling.task not in tasks:
        made = "text" if pooling is None else "embeddings" if pooling.task == "embed" else "classifications"
        raise UnsupportedTask(
            f"this server's model makes {made}; this route needs "
            f"{' or '.join(NEEDS[task] for task in tasks)}",
            param="model",
        )
    return pooling


def inputs(value: Any, param: str) -> list[dict[str, Any]]:
    """Job fields of each input: a text, a list of texts, a list of token ids, or a list of such lists.

    Raises InvalidField for what is empty or mixed.
    """
    items = separate(value, param)
    return [
        token_prompt(item, param) if isinstance(item, list) else text_prompt(item, param) for item in items
    ]


def text_prompt(text: Any, param: str) -> dict[str, Any]:
    if not isinstance(text, str) or not text:
        raise InvalidField(f"{param}: a text is empty; send at least one character", param=param)
    return {"text": text}


async def run(
    request: web.Request,
    server: Server,
    fields: PooledFields,
    prompts: Sequence[Mapping[str, Any]],
    labels: Sequence[int] = (),
) -> list[Choice]:
    """The vectors of ``prompts``, in order. Raises the SglaError that refuses or ends the request."""
    if fields.stream:
        raise InvalidField("stream: there is nothing to stream on this route; leave it out", param="stream")
    if len(prompts) > MAX_CHOICES:
        raise InvalidField(f"{len(prompts)} inputs are more than {MAX_CHOICES} in one request", param="input")
    deadline = None if fields.timeout is None else clock.now() + fields.timeout
    choices: list[Choice] = []
    open_at_once = window(server, YIELDS in request)
    for start in range(0, len(prompts), open_at_once):
        work = await make_work(
            request,
            fields,
            prompts[start : start + open_at_once],
            SamplingParams(),
            first(fields.rid, fields.request_id),
            add_special_tokens=fields.add_special_tokens is not False,
            pool=list(labels),
            truncate=fields.truncate_prompt_tokens,
        )
        for job in work.jobs:
            job.deadline = deadline
        choices += await server.collect(work)
        raise_aborted(choices)
    return choices


def window(server: Server, yields: bool = False) -> int:
    """How many inputs of one request to open: never more than half of what the server admits at all, of one
    that yields no more than there are slots."""
    facts = server.ingress.facts
    slots = facts.slots if facts is not None else 1
    if yields:
        return min(WINDOW, slots)
    return max(1, min(WINDOW, (server.config.max_queued_requests + slots) // 2))


def vector(choice: Choice) -> bytes:
    assert choice.vector is not None
    return choice.vector


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    total = sum(choice.usage.prompt_tokens for choice in choices)
    return {"prompt_tokens": total, "total_tokens": total}


def head(prefix: str, uid: str, model: str) -> dict[str, Any]:
    """The first fields of vLLM's answers."""
    return {"id": f"{prefix}-{uid}", "object": "list", "created": int(time.time()), "model": model}
