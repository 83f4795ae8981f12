"""``use_beam_search``: beams that grow by one-token requests, whose prompts the prefix cache has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from sgla.errors import ContextTooLong, InvalidField, UnsupportedField
from sgla.http.answer.collect import Choice
from sgla.http.lanes import beside
from sgla.http.request.schema import ChatRequest, CompletionRequest
from sgla.http.server import ASKED, Server, Work, raise_aborted
from sgla.messages import Job, SamplingParams, Usage
from sgla.text.beams import MAX_WIDTH, BeamSearch, Finished, one_token
from sgla.text.output import OutputStream

# What else could be asked of the tokens, with the values that ask for nothing.
# A search knows no temperature and no seed.
OTHERS: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "repetition_detection": (None,),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "min_tokens": (None, 0),
    "min_new_tokens": (None, 0),
    "stop": (None, "", []),
    "stop_regex": (None, "", []),
    "logprob_token_ids": (None, []),
    "suffix": (None, ""),
    "logits_processors": (None, []),
    "vllm_xargs": (None, {}),
    "return_hidden_states": (None, False),
}
OPTIONS = {"beam_width": (None, 1), "length_penalty": (None, 1), "early_stopping": (None, False)}


def is_beam_search(fields: ChatRequest | CompletionRequest) -> bool:
    """Whether beams are asked for. Raises InvalidField for options of a search without one."""
    if fields.use_beam_search:
        return True
    for name, harmless in OPTIONS.items():
        if getattr(fields, name) not in harmless:
            raise InvalidField(f"{name} needs use_beam_search: true", param=name)
    return False


async def collect(
    request: web.Request, work: Work, fields: ChatRequest | CompletionRequest
) -> tuple[Work, list[Choice]]:
    """The ``n`` best beams of each prompt, of as many as ``beam_width``,
    ``best_of`` or ``n`` says, and the work with that ``n``."""
    wanted = fields.n or 1
    width = fields.beam_width or max(wanted, getattr(fields, "best_of", None) or 1)
    check(fields, work, width, wanted)
    work = msgspec.structs.replace(work, n=wanted)
    choices: list[Choice] = []
    for i, job in enumerate(work.jobs):
        found = await best_beams(request, work, job, fields, width)
        for choice in found:
            choice.index += i * wanted
        choices += found
    if work.tally is not None:
        work.tally.settle({choice.index: choice.usage for choice in choices}, wanted)
    return work, choices


def check(fields: ChatRequest | CompletionRequest, work: Work, width: int, wanted: int) -> None:
    """Raises InvalidField, and UnsupportedField for what cannot be had with beams."""
    if not wanted <= width <= MAX_WIDTH:
        raise InvalidField(
            f"beam_width must be at least n and at most {MAX_WIDTH}, got {width} for n={wanted}",
            param="beam_width",
        )
    if any(work.prompt_only):
        raise InvalidField("max_tokens must be at least 1 with use_beam_search", param="max_tokens")
    names = [name for name, none in OTHERS.items() if getattr(fields, name, None) not in none]
    sampling = work.jobs[0].sampling
    names += [part.param for part in (sampling.grammar, sampling.thinking) if part is not None]
    if names:
        raise UnsupportedField(
            f"{names[0]} is not supported with use_beam_search; leave it out", param=names[0]
        )


async def best_beams(
    request: web.Request, work: Work, job: Job, fields: ChatRequest | CompletionRequest, width: int
) -> list[Choice]:
    server = request[ASKED]
    tokenizer, facts, sampling = server.ingress.tokenizer, server.ingress.facts, job.sampling
    assert facts is not None
    ends = {*([] if sampling.ignore_eos else tokenizer.eos_ids), *sampling.stop_token_ids}
    step = one_token(width, len(ends))
    prompted = msgspec.structs.replace(step, prompt_logprobs=sampling.prompt_logprobs)
    whole = msgspec.structs.replace(job, rid=f"{job.rid}.b", sampling=prompted, index_base=0)
    for name in ("keep_last", "truncate"):
        if getattr(job, name) == -1:
            setattr(whole, name, max(1, facts.context_len - (sampling.max_tokens or 1)))
    (first,) = await grown(server, work, [whole])
    prompt = first.prompt_tokens or []
    room = facts.context_len - len(prompt)
    longest = room if sampling.max_tokens is None else sampling.max_tokens
    if longest > room and not job.clip:
        raise ContextTooLong.of(facts.context_len, len(prompt), longest)
    search = BeamSearch(
        width,
        ends,
        min(longest, room),
        1.0 if fields.length_penalty is None else fields.length_penalty,
        fields.early_stopping or False,
        sampling.logprobs,
    )
    search.take([(first.logprobs or [])[0]])
    while not search.done:
        beams = [
            Job(
                rid=f"{job.rid}.b{i}.{len(beam.tokens)}",
                sampling=step,
                token_ids=prompt + beam.tokens,
                priority=job.priority,
                yields=job.yields,
                deadline=job.deadline,
                namespace=job.namespace,
                adapter=job.adapter,
                cache_ttl=job.cache_ttl,
                client=job.client,
                index_base=i,
            )
            for i, beam in enumerate(search.running)
        ]
        search.take([(choice.logprobs or [])[0] for choice in await grown(server, work, beams)])
    shown = search.finished[: work.n]
    size = sum(len(one.beam.tokens) for one in shown)
    return await beside(
        request,
        size,
        lambda: [as_choice(one, i, tokenizer, sampling, first) for i, one in enumerate(shown)],
    )


async def grown(server: Server, work: Work, jobs: Sequence[Job]) -> list[Choice]:
    """One token behind each of ``jobs``."""
    step = msgspec.structs.replace(work, jobs=list(jobs), n=1, prompt_only=[False] * len(jobs))
    choices = await server.collect(step)
    raise_aborted(choices)
    return choices


def as_choice(one: Finished, index: int, tokenizer: Any, sampling: SamplingParams, first: Choice) -> Choice:
    """A beam as if its tokens had been sampled. ``first``: has the prompt."""
    beam, prompt = one.beam, first.prompt_tokens or []
    choice = Choice(index, first.rid)
    choice.finish = "length" if one.matched is None else "stop"
    choice.matched = one.matched
    logprobs = None if sampling.logprobs is None else beam.entries
    output = OutputStream(tokenizer, sampling, prompt)
    piece = output.feed(beam.tokens, logprobs, choice.finish, one.matched)
    choice.texts, choice.tokens, choice.logprobs = [piece.text], piece.tokens, piece.logprobs
    choice.prompt_tokens, choice.prompt_logprobs = first.prompt_tokens, first.prompt_logprobs
    choice.usage = Usage(len(prompt), len(beam.tokens), first.usage.cached_tokens)
    return choice
