"""How a request becomes jobs for the engine, within the limits that one request has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import msgspec
from aiohttp import web

from sgla import clock
from sgla.errors import InvalidField
from sgla.http.access import TALLY, Tally
from sgla.http.bodies import SHARE
from sgla.http.clients import CLIENT
from sgla.http.request.grammar import ignored_formats
from sgla.http.request.schema import MAX_CHOICES, MAX_LOGPROBS, MAX_NAME, OpenAIFields, RequestFields
from sgla.http.server import ASKED, IGNORED_FIELDS, RID, TRACE, UID, YIELDS, Work, unique
from sgla.http.turns import MANY, paced, pause
from sgla.messages import MAX_GRAMMAR, Facts, Job, SamplingParams

DAY = 86400.0  # seconds: the longest retention that OpenAI has a word for


async def make_work(
    request: web.Request,
    fields: RequestFields | OpenAIFields,
    prompts: Sequence[Mapping[str, Any]],
    sampling: SamplingParams | Sequence[SamplingParams],
    rid: str | None = None,
    **common: Any,
) -> Work:
    """A Work of one job for each of ``prompts`` (the Job fields that differ); ``common`` is the same for all.
    Many are made with pauses.

    ``rid`` is the id that the body asks for. ``sampling`` may be one for each prompt, with the same ``n``.
    """
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    n = each[0].n
    check_sizes(len(prompts), n, rid=rid, cache_salt=fields.cache_salt, extra_key=fields.extra_key)
    uid = request[UID] if rid is None else unique(rid)
    jobs = await paced(_jobs(request, fields, prompts, each, uid, common))
    limit_logprobs(jobs, request[ASKED].ingress.facts, MAX_LOGPROBS)
    limit_hidden_states(jobs, request[ASKED].ingress.facts, MAX_LOGPROBS)
    tell_ignored(request, each)
    trace(request, rid or request[RID], jobs)
    if YIELDS in request:
        request[YIELDS](len(jobs) * n)
    tally = request[TALLY] = Tally(n) if request[ASKED].config.log_requests else None
    if len(jobs) > MANY:
        await pause()
    return Work(
        rid=rid or request[RID],
        uid=uid,
        client=request[CLIENT],
        jobs=jobs,
        n=n,
        prompt_only=[params.max_tokens == 0 for params in each],
        share=request[SHARE],
        tally=tally,
    )


def _jobs(
    request: web.Request,
    fields: RequestFields | OpenAIFields,
    prompts: Sequence[Mapping[str, Any]],
    each: Sequence[SamplingParams],
    uid: str,
    common: Mapping[str, Any],
) -> Iterator[Job]:
    """See ``make_work``; ``each``: the sampling of each prompt."""
    shared, n = sampled(each[0]), each[0].n
    deadline = None if fields.timeout is None else clock.now() + fields.timeout
    client = request[CLIENT]
    owner = client.owner if request[ASKED].config.isolate_keys else ""
    space = "\0".join(filter(None, (owner, fields.cache_salt, fields.extra_key)))
    named = getattr(fields, "lora_path", None)
    adapters = [
        request[ASKED].adapter(fields.model, named[i] if isinstance(named, list) else named)
        for i in range(len(prompts))
    ]
    return (
        Job(
            rid=uid if len(prompts) == 1 else f"{uid}.{i}",
            sampling=shared if params is each[0] else sampled(params),
            stream=bool(fields.stream),
            priority=priority(fields),
            yields=YIELDS in request,
            index_base=i * n,
            client=client.runs_as,
            size=request[SHARE].body,
            namespace=request[ASKED].ingress.adapters.namespace(space, adapter),
            adapter=adapter,
            cache_ttl=cache_ttl(fields),
            deadline=deadline,
            **prompt,
            **common,
        )
        for i, (prompt, params, adapter) in enumerate(zip(prompts, each, adapters))
    )


def priority(fields: RequestFields | OpenAIFields) -> int:
    if fields.priority is not None:
        return fields.priority
    hints = fields.nvext and fields.nvext.agent_hints
    return (hints and hints.priority) or 0


def cache_ttl(fields: RequestFields | OpenAIFields) -> float:
    """Seconds for which the prefix is to be kept. Raises InvalidField."""
    if fields.cache_ttl is not None:
        return fields.cache_ttl
    control = fields.cache_control
    if control is None and fields.nvext is not None:
        control = fields.nvext.cache_control
    if control is not None:
        return control.seconds
    return DAY if getattr(fields, "prompt_cache_retention", None) == "24h" else 0.0


def check_sizes(prompts: int, n: int, **names: str | None) -> None:
    """Raise InvalidField for more choices than a request may have, and for a name that is too long."""
    if prompts * n > MAX_CHOICES:
        raise InvalidField(
            f"{prompts} prompts with n={n} are more than {MAX_CHOICES} choices in one request", param="n"
        )
    for name, text in names.items():
        if len(text or "") > MAX_NAME:
            raise InvalidField(f"{name} may have at most {MAX_NAME} characters", param=name)


def tell_ignored(request: web.Request, sampling: Iterable[SamplingParams]) -> None:
    """Have the answer's header name what is ignored of the grammars,
    as far as these are looked through in one turn of the loop."""
    room = MAX_GRAMMAR  # characters
    for grammar in dict.fromkeys(params.grammar for params in sampling if params.grammar is not None):
        room -= len(grammar.text)
        if room < 0:
            break
        request.setdefault(IGNORED_FIELDS, []).extend(ignored_formats(grammar))


def sampled(params: SamplingParams) -> SamplingParams:
    """The engine makes at least one token."""
    return params if params.max_tokens != 0 else msgspec.structs.replace(params, max_tokens=1)


def limit_logprobs(jobs: Sequence[Job], facts: Facts | None, limit: int, outputs: bool = True) -> None:
    """Raise InvalidField for more logprobs than an answer may have. How many tokens a prompt has is known
    when it is prepared, so this sets for how many there is room in each job's ``prompt_logprobs``. Without
    ``outputs`` those of prompts alone count."""
    context = facts.context_len if facts is not None else 0
    most, later = 0, counted_later(jobs)
    for job in jobs:
        sampling = job.sampling
        if sampling.logprobs is not None and outputs:
            named = 1 + sampling.logprobs + len(sampling.logprob_token_ids)
            tokens = context if sampling.max_tokens is None else min(sampling.max_tokens, context)
            most += sampling.n * tokens * named
        if sampling.prompt_logprobs is not None:
            named = 1 + sampling.prompt_logprobs + len(sampling.logprob_token_ids)
            room = limit - most if later else sampling.n * most_tokens(job, context) * named
            job.prompt_logprobs = room if job.prompt_logprobs is None else min(room, job.prompt_logprobs)
            most += 0 if later else room
    if most > limit:
        raise InvalidField(
            f"the answer may have {most} logprobs, {limit} is the limit of one request; send fewer prompts, "
            "or ask for fewer choices, alternatives or tokens",
            param="logprobs",
        )


def limit_hidden_states(jobs: Sequence[Job], facts: Facts | None, limit: int) -> None:
    """Raise InvalidField for hidden states or routed experts of more numbers than an answer may have, and set
    for how many there is room in each job's ``hidden_states``: as ``limit_logprobs`` does."""
    if facts is None:
        return
    most, context, later = 0, facts.context_len, counted_later(jobs)
    for job in jobs:
        if job.sampling.hidden_states or job.sampling.routed_experts:
            prompt, outputs = 0 if later else most_tokens(job, context), job.sampling.max_tokens
            tokens = context if outputs is None else min(prompt + outputs, context)
            width = prod(facts.experts) if job.sampling.routed_experts else facts.hidden
            room = job.sampling.n * tokens * width
            most += room
            room = limit if later else room
            job.hidden_states = room if job.hidden_states is None else min(room, job.hidden_states)
    if most > limit:
        raise InvalidField(
            f"hidden states or routed experts of the answer may have {most} numbers, {limit} is the limit of "
            "one request; send fewer or shorter prompts, or ask for fewer choices or tokens",
            param="return_hidden_states",
        )


def counted_later(jobs: Sequence[Job]) -> bool:
    """Whether it is one prompt, whose tokens count when it is prepared: a session may put others before."""
    return len(jobs) == 1


def most_tokens(job: Job, context: int) -> int:
    """That the job's prompt may have: a text one for each byte, and one at either end."""
    if job.suffix is not None or job.messages is not None:
        return context
    if job.token_ids is not None or len(job.text or "") >= context:
        return min(len(job.token_ids or job.text or ""), context)
    assert job.text is not None
    return min(len(job.text.encode("utf-8", "surrogatepass")) + 2, context)


def trace(request: web.Request, rid: str, jobs: Sequence[Job]) -> None:
    """Let the jobs' phases become part of the request's trace, if there are traces."""
    tracing = request[ASKED].metrics.tracing
    if tracing is None:
        return
    if TRACE not in request:
        request[TRACE] = tracing.begin(request.headers, request.method, request.path, rid, jobs[0])
    tracing.add(request[TRACE], jobs)
