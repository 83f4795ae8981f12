"""SGLang's protocol, ``sglang.grpc.scheduler.SglangScheduler``. Prompts are tokens, and so are answers."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import msgspec
import numpy as np
from google.protobuf.message import Message

from sgla.config import SECRETS
from sgla.errors import InvalidField
from sgla.grpc import telling
from sgla.grpc.answers import of_chunk, of_whole
from sgla.grpc.calls import Call
from sgla.grpc.logprobs import Logprobs
from sgla.grpc.proto import SGLANG, make
from sgla.grpc.running import make_work, only_rank, prompt_of, run
from sgla.grpc.sampling import checked, decimal, native, refuse
from sgla.http.answer.collect import Choice
from sgla.http.answer.parts import Reader
from sgla.http.answer.reading import Reading
from sgla.http.native.generate import native_sampling
from sgla.http.pooling.common import pooling_of, vector
from sgla.http.request.sampling import sampling_params
from sgla.http.request.schema import ChatRequest, GenerateRequest, check_count, check_ranges
from sgla.http.server import raise_aborted
from sgla.messages import Event, SamplingParams
from sgla.text.vectors import embedding, raw
from sgla.version import __version__

made = partial(make, SGLANG)

CONSTRAINTS = ("regex", "json_schema", "ebnf_grammar", "structural_tag")
MEDIA = " with this protocol here: prompts are tokens of text"
APART = " with this protocol here: --role makes servers for prompts and for answers"
MOST_NAMED = 4096  # tokens of token_ids_logprob that are looked at


async def generate(call: Call, request: Any) -> None:
    call.name(request.request_id)
    refuse(request, ("mm_inputs", "input_embeds"), MEDIA)
    refuse(request, ("disaggregated_params",), APART)
    refuse(request, ("custom_logit_processor",))
    only_rank(request.data_parallel_rank)
    prompt = prompt_of(call.server, request.tokenized.input_ids)
    sampling = generate_sampling(call, request)
    reading = None
    if request.require_reasoning:
        reading = Reading(call.server, ChatRequest(messages=[]))
        sampling = reading.sampling(sampling)
    prompt["clip"] = not request.sampling_params.HasField("max_new_tokens")
    work = make_work(call, prompt, sampling, stream=request.stream, lora=request.lora_id)
    facts = call.server.ingress.facts
    await run(call, work, Answers(call.rid, sampling, facts.hidden if facts else 0, reading))


def generate_sampling(call: Call, request: Any) -> SamplingParams:
    """As ``/generate`` reads it. Raises InvalidField, UnsupportedField."""
    params, defaults = request.sampling_params, call.server.sampling_defaults
    refuse(params, ("custom_params",))
    check_count("token_ids_logprob", request.token_ids_logprob, MOST_NAMED)
    fields = native(params)
    fields.temperature = decimal(params.temperature)
    fields.min_new_tokens = params.min_new_tokens
    fields.no_stop_trim = params.no_stop_trim
    fields.max_new_tokens = params.max_new_tokens if params.HasField("max_new_tokens") else None
    if kind := params.WhichOneof("constraint"):
        setattr(fields, "ebnf" if kind == "ebnf_grammar" else kind, getattr(params, kind))
    asked = sampling_params(checked(fields), defaults, max_tokens=fields.max_new_tokens)
    wants = GenerateRequest(
        return_logprob=request.return_logprob,
        logprob_start_len=request.logprob_start_len,
        top_logprobs_num=request.top_logprobs_num,
        return_hidden_states=request.return_hidden_states,
    )
    check_ranges(wants)
    return native_sampling(wants, asked, 0, 1, list(request.token_ids_logprob))


class Answers:
    """``width``: numbers of a hidden state. ``reading``: counts tokens of reasoning."""

    def __init__(self, rid: str, sampling: SamplingParams, width: int, reading: Reading | None) -> None:
        self._rid, self._sampling, self._width, self._reading = rid, sampling, width, reading
        self._logprobs = Logprobs(SGLANG, sampling, asked=True)
        self._readers: dict[int, Reader] = {}

    def chunk(self, choice: Choice, event: Event, first: bool) -> Message:
        fields = of_chunk(self._logprobs, choice, event, first)
        part = made("GenerateStreamChunk", reasoning_tokens=self._reasoning(event), **fields)
        return made("GenerateResponse", request_id=self._rid, chunk=part)

    def complete(self, choice: Choice) -> Message:
        if choice.index not in self._readers:
            self._reasoning(choice)
        whole = made(
            "GenerateComplete",
            all_hidden_states=self._hidden(choice),
            reasoning_tokens=self._readers[choice.index].reasoning_tokens if self._reading else 0,
            **of_whole(self._logprobs, choice),
        )
        return made("GenerateResponse", request_id=self._rid, complete=whole)

    def _reasoning(self, event: Event | Choice) -> int:
        """Tokens of reasoning so far."""
        if self._reading is None:
            return 0
        if event.index not in self._readers:
            self._readers[event.index] = self._reading.reader()
        reader = self._readers[event.index]
        reader.read(event)
        return reader.reasoning_tokens

    def _hidden(self, choice: Choice) -> list[Message]:
        """Of the last layer: of each token of the prompt, and of the output but for its last one."""
        if not self._sampling.hidden_states:
            return []
        rows = np.frombuffer(b"".join(choice.hidden), np.float32).reshape(-1, self._width)
        return [made("HiddenStates", values=row, position=i) for i, row in enumerate(rows)]


async def embed(call: Call, request: Any) -> Message:
    """An embedding, or the logits of a classification or reward model."""
    call.name(request.request_id)
    refuse(request, ("mm_inputs",), MEDIA)
    refuse(request, ("is_cross_encoder", "texts"), ": HTTP's /v1/rerank and /v1/score take pairs of texts")
    only_rank(request.data_parallel_rank)
    check_count("token_type_ids", request.token_type_ids, len(request.tokenized.input_ids))
    if any(request.token_type_ids):
        raise InvalidField("token_type_ids must be zeros: there is one text", param="token_type_ids")
    values, tokens = await embedded(call, request.tokenized.input_ids, "embed", "classify")
    return made("EmbedResponse", embedding=values, embedding_dim=len(values), prompt_tokens=tokens)


async def embedded(call: Call, ids: Any, *tasks: str) -> tuple[Any, int]:
    """float32[*] of a prompt, by a model for one of ``tasks``; and the tokens of the prompt."""
    server = call.server
    pooling = pooling_of(server, *tasks)
    work = make_work(call, prompt_of(server, ids), SamplingParams(), pool=[])
    choices = await server.collect(work)
    raise_aborted(choices)
    data = vector(choices[0])
    values = embedding(data, pooling) if pooling.task == "embed" else raw(data)
    return values, choices[0].usage.prompt_tokens


async def health_check(call: Call, request: Any) -> Message:
    return made("HealthCheckResponse", **await telling.health(call))


async def abort(call: Call, request: Any) -> Message:
    if not request.request_id:
        raise InvalidField("request_id is empty; name the request to abort", param="request_id")
    count = await call.server.abort(request.request_id, call.client)
    told = f"{count} aborted" if count else "no request with this id is running"
    return made("AbortResponse", success=count > 0, message=told)


async def model_info(call: Call, request: Any) -> Message:
    server = call.server
    facts, values = server.ingress.facts, server.sampling_defaults.values
    labels = facts.pooling.labels if facts is not None and facts.pooling is not None else []
    return made(
        "GetModelInfoResponse",
        preferred_sampling_params=json.dumps(values) if values else "",
        weight_version=server.ingress.weight_version,
        id2label_json=json.dumps(dict(enumerate(labels))) if labels else "",
        num_labels=len(labels),
        **telling.model_facts(server),
    )


async def server_info(call: Call, request: Any) -> Message:
    server = call.server
    stats, facts = server.ingress.stats(), server.ingress.facts
    settings = msgspec.to_builtins(server.config, builtin_types=()) | dict.fromkeys(SECRETS)
    answer: Any = made(
        "GetServerInfoResponse",
        active_requests=telling.active(server),
        is_paused=server.ingress.paused,
        uptime_seconds=telling.uptime(server),
        sglang_version=__version__,
        server_type="grpc",
        max_total_num_tokens=0 if facts is None else (facts.groups[0].pages - 1) * facts.page_size,
    )
    answer.server_args.update(settings)
    answer.scheduler_info.update({} if stats is None else msgspec.to_builtins(stats))
    answer.start_time.FromSeconds(server.created)
    return answer


async def loads(call: Call, request: Any) -> Message:
    only_rank(request.dp_rank)
    each = telling.load(call.server)
    total = made(
        "AggregateMetrics",
        total_running_reqs=each["num_running_reqs"],
        total_waiting_reqs=each["num_waiting_reqs"],
        total_reqs=each["num_total_reqs"],
        avg_token_usage=each["token_usage"],
        avg_utilization=each["utilization"],
    )
    head = telling.loads_head()
    return made("GetLoadsResponse", loads=[made("SchedulerLoad", **each)], aggregate=total, **head)
