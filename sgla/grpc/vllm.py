"""vLLM's protocol, ``vllm.grpc.engine.VllmEngine``. Prompts are tokens or texts, answers are tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from google.protobuf.message import Message

from sgla.grpc import telling
from sgla.grpc.answers import of_chunk, of_whole
from sgla.grpc.calls import Call
from sgla.grpc.logprobs import Logprobs
from sgla.grpc.proto import VLLM, make
from sgla.grpc.running import make_work, only_rank, prompt_of, run
from sgla.grpc.sampling import MAX_GUIDED, checked, decimal, native, refuse
from sgla.grpc.sglang import APART, MEDIA, embedded
from sgla.http.answer.collect import Choice
from sgla.http.openai.common import truncation
from sgla.http.pooling.common import text_prompt
from sgla.http.request.sampling import sampling_params
from sgla.http.request.schema import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    NativeSampling,
    check_count,
    check_ranges,
)
from sgla.messages import LONGEST, Event, SamplingParams

made = partial(make, VLLM)


async def generate(call: Call, request: Any) -> None:
    call.name(request.request_id)
    refuse(request, ("mm_inputs", "extra_mm_inputs", "media_refs"), MEDIA)
    refuse(request, ("kv_transfer_params", "kv_transfer_params_json"), APART)
    only_rank(request.data_parallel_rank)
    params = request.sampling_params
    cuts = params.HasField("truncate_prompt_tokens")
    if request.WhichOneof("input") == "text":
        prompt = text_prompt(request.text, "text")
    else:
        prompt = prompt_of(call.server, request.tokenized.input_ids, LONGEST if cuts else 0)
    if cuts:
        cut = CompletionRequest(prompt="", truncate_prompt_tokens=params.truncate_prompt_tokens)
        check_ranges(cut)
        prompt |= truncation(cut)
    sampling = generate_sampling(call, params)
    prompt["clip"] = not params.HasField("max_tokens")
    await run(call, make_work(call, prompt, sampling, stream=request.stream), Answers(sampling))


def generate_sampling(call: Call, params: Any) -> SamplingParams:
    """As ``/v1/completions`` reads it. Raises InvalidField."""
    server = call.server
    fields = native(params)
    fields.temperature = decimal(params.temperature) if params.HasField("temperature") else 1.0
    fields.min_tokens = params.min_tokens
    fields.include_stop_str_in_output = params.include_stop_str_in_output
    fields.seed = params.seed if params.HasField("seed") else None
    fields.max_new_tokens = params.max_tokens if params.HasField("max_tokens") else None
    constrain(fields, params)
    top = params.logprobs if params.HasField("logprobs") else None
    prompt = params.prompt_logprobs if params.HasField("prompt_logprobs") else None
    check_ranges(ChatRequest(messages=[], top_logprobs=top, prompt_logprobs=prompt))
    if prompt == -1:
        assert server.ingress.facts is not None
        prompt = server.ingress.facts.vocab_size
    return sampling_params(
        checked(fields),
        server.sampling_defaults,
        max_tokens=fields.max_new_tokens,
        logprobs=top,
        prompt_logprobs=prompt,
    )


def constrain(fields: NativeSampling, params: Any) -> None:
    """What the output must look like."""
    kind = params.WhichOneof("constraint")
    if kind == "choice":
        check_count("choice", params.choice.choices, MAX_GUIDED)
        fields.guided_choice = list(params.choice.choices)
    elif kind == "json_object":
        fields.guided_json_object = params.json_object
    elif kind is not None:
        setattr(fields, kind, getattr(params, kind))


class Answers:
    """Chunks count their own tokens alone."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._logprobs = Logprobs(VLLM, sampling)

    def chunk(self, choice: Choice, event: Event, first: bool) -> Message:
        fields = of_chunk(self._logprobs, choice, event, first)
        part = made("GenerateStreamChunk", **fields | {"completion_tokens": len(event.tokens)})
        return made("GenerateResponse", chunk=part)

    def complete(self, choice: Choice) -> Message:
        whole = made("GenerateComplete", **of_whole(self._logprobs, choice))
        return made("GenerateResponse", complete=whole)


async def embed(call: Call, request: Any) -> Message:
    call.name(request.request_id)
    values, tokens = await embedded(call, request.tokenized.input_ids, "embed")
    return made("EmbedResponse", embedding=values, embedding_dim=len(values), prompt_tokens=tokens)


async def health_check(call: Call, request: Any) -> Message:
    return made("HealthCheckResponse", **await telling.health(call))


async def abort(call: Call, request: Any) -> Message:
    check_count("request_ids", request.request_ids, MAX_CHOICES)
    for rid in request.request_ids:
        await call.server.abort(rid, call.client)
    return made("AbortResponse")


async def model_info(call: Call, request: Any) -> Message:
    return made("GetModelInfoResponse", **telling.model_facts(call.server))


async def server_info(call: Call, request: Any) -> Message:
    server = call.server
    facts, config = server.ingress.facts, server.config
    return made(
        "GetServerInfoResponse",
        active_requests=telling.active(server),
        is_paused=server.ingress.paused,
        uptime_seconds=telling.uptime(server),
        server_type="vllm-grpc",
        data_parallel_size=1,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=0 if facts is None else facts.page_size,
        model_dtype="" if facts is None else facts.dtype,
        max_num_seqs=0 if facts is None else facts.slots,
        constrained_decoding_start="first_token",
    )


async def loads(call: Call, request: Any) -> Message:
    only_rank(request.dp_rank)
    each = made("SchedulerLoad", **telling.load(call.server))
    return made("GetLoadsResponse", loads=[each], **telling.loads_head())
