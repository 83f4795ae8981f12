"""POST /v1/chat/completions/render and /v1/completions/render: the prompts in token ids, in vLLM's shape.
Nothing is generated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from sgla.errors import InvalidField
from sgla.http import answer_types as to
from sgla.http.answer.reading import Reading
from sgla.http.answer.whole import answered
from sgla.http.lanes import beside
from sgla.http.native.tokens import MAX_CHARS, check_size
from sgla.http.openai.chat import SCHEMA as CHAT
from sgla.http.openai.chat import chat_work
from sgla.http.openai.functions import as_tools
from sgla.http.openai.text import SCHEMA as TEXT
from sgla.http.openai.text import text_work
from sgla.http.operation import operation
from sgla.http.request.intake import intake
from sgla.http.request.schema import ChatRequest, CompletionRequest, OpenAIFields
from sgla.http.server import ASKED, Server
from sgla.http.wire import encode
from sgla.messages import Job, Submit
from sgla.text.prepare import Preparer

MAX_REPEATED = 32 << 20  # bytes of an answer that repeat the same parameters
VALUE = 8  # bytes of them that cost as much as an id


@operation("vLLM: a chat's prompt in token ids", ChatRequest, to.Rendered)
async def chat(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
    fields = await intake(request, CHAT)
    fields.model = server.model(fields.model)
    as_tools(fields)
    (job,) = (await chat_work(request, server, fields, Reading(server, fields))).jobs
    whole = rendered(job, await submitted(request, preparer(server), job), fields)
    return await answered(request, len(whole["token_ids"]), lambda: whole)


@operation("vLLM: prompts in token ids", CompletionRequest, list[to.Rendered])
async def text(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
    fields = await intake(request, TEXT)
    fields.model = server.model(fields.model)
    jobs = (await text_work(request, server, fields)).jobs
    check_size("prompt", [job.text or job.token_ids or "" for job in jobs], MAX_CHARS, "characters and ids")
    repeated = check_repeated(jobs)
    prepare = preparer(server)
    whole = [rendered(job, await submitted(request, prepare, job), fields) for job in jobs]
    size = sum(len(each["token_ids"]) for each in whole) + repeated // VALUE
    return await answered(request, size, lambda: whole)


def check_repeated(jobs: Sequence[Job]) -> int:
    """The bytes that the sampling parameters take, which are the same for all prompts and shown with each.
    Raises InvalidField for too many."""
    size = len(jobs) * len(encode(jobs[0].sampling))
    if size > MAX_REPEATED:
        raise InvalidField(
            f"the sampling parameters, which the answer shows with each of {len(jobs)} prompts, would take "
            f"{size} bytes of it; {MAX_REPEATED} is the limit; send fewer prompts",
            param="prompt",
        )
    return size


async def submitted(request: web.Request, prepare: Preparer, job: Job) -> Submit:
    """What the scheduler would get for the job's first choice. Raises what would refuse the job."""
    await look(request, job)
    size = len(job.text or job.token_ids or ()) if job.messages is None else job.size
    return (await beside(request, size, lambda: prepare(job), inline=-1))[0]


def preparer(server: Server) -> Preparer:
    facts, ingress = server.ingress.facts, server.ingress
    assert facts is not None
    return Preparer(
        ingress.tokenizer,
        ingress.template,
        facts,
        random.Random(),
        facts.grammars,
        facts.processors,
        ingress.speller,
    )


async def look(request: web.Request, job: Job) -> None:
    """Have the job's pictures prepared, as the actor does that gets jobs which run."""
    room = request[ASKED].ingress.pictures
    if job.pictures and room is not None:
        job.prepared, job.pictures = await room.prepare(job.pictures, job.client, job.media_kwargs), []


async def prompt_length(request: web.Request, fields: ChatRequest) -> int:
    """Tokens of a chat's prompt, of its pictures, too. Raises what would refuse the chat."""
    server = request[ASKED]
    (job,) = (await chat_work(request, server, fields, Reading(server, fields))).jobs
    await look(request, job)
    prepare = preparer(server)
    return await beside(request, job.size, lambda: len(prepare.prompt(job)[0]), inline=-1)


def rendered(job: Job, submit: Submit, fields: OpenAIFields) -> dict[str, Any]:
    sampling = msgspec.structs.replace(job.sampling, max_tokens=submit.max_new)
    return {
        "request_id": job.rid,
        "token_ids": submit.tokens,
        "features": None,
        "sampling_params": sampling,
        "model": fields.model,
        "stream": bool(fields.stream),
        "stream_options": fields.stream_options,
        "cache_salt": fields.cache_salt,
        "priority": job.priority,
        "kv_transfer_params": None,
    }
