"""POST /generate: SGLang's native request.
Text in a stream is cumulative; lists of prompts give lists of results."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from sgla import clock
from sgla.errors import InvalidField, SglaError
from sgla.http import answer_types as to
from sgla.http.answer import sse
from sgla.http.answer.collect import Choice
from sgla.http.answer.encoder import Encoder
from sgla.http.answer.reading import server_dialect, thinking_of
from sgla.http.answer.whole import Long, answered, encode_all, few, slices
from sgla.http.bodies import SHARE
from sgla.http.errors import error_body
from sgla.http.lanes import beside
from sgla.http.media.parts import Source
from sgla.http.native.session_store import Turn
from sgla.http.native.tokens import MAX_CHARS, check_size, tokenized
from sgla.http.openai.common import MAX_LOGPROB_IDS, answer_size
from sgla.http.openai.text import token_prompt
from sgla.http.operation import EVENTS, operation
from sgla.http.request.chat import check_parts
from sgla.http.request.intake import intake
from sgla.http.request.sampling import are_ids, check_ids, first, sampling_params
from sgla.http.request.schema import (
    MAX_CHOICES,
    MAX_REPEATED,
    GenerateRequest,
    NativeSampling,
    Schema,
    SessionParams,
    check_count,
    unsupported,
)
from sgla.http.request.work import check_sizes, limit_hidden_states, limit_logprobs, make_work
from sgla.http.server import ABORTED, ASKED, Server, Work
from sgla.http.turns import paced
from sgla.http.wire import encode
from sgla.messages import Event, Rejected, SamplingParams, TokenLogprob, Usage
from sgla.text.logprobs import finite, token_text

SCHEMA = Schema(GenerateRequest, nested={"sampling_params": NativeSampling, "session_params": SessionParams})
DEFAULT_MAX_TOKENS = 128

Show = Callable[[int, TokenLogprob | None], Any]  # of a token's logprobs


@operation(
    "SGLang: continue texts or token ids", GenerateRequest, to.Generated | list[to.Generated], stream=EVENTS
)
async def generate(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
    fields = await intake(request, SCHEMA)
    server.model(fields.model)
    prompts, many = native_prompts(fields)
    rids = spread("rid", fields.rid, len(prompts))
    ids = asked_ids(fields.token_ids_logprob, len(prompts))
    fields.lora_path = spread("lora_path", fields.lora_path, len(prompts))
    count = len(prompts)
    check_sizes(count, 1, rid=max(filter(None, rids), key=len, default=None))
    # Made once, however many prompts it is for: it may be large.
    shared = None if isinstance(fields.sampling_params, list) else asked_for(fields, server, 0, count)
    sampling = await paced(
        native_sampling(fields, shared or asked_for(fields, server, i, count), i, count, ids[i] or [])
        for i in range(count)
    )
    for i, prompt in enumerate(prompts):
        prompt["clip"] = own_params(fields, i, count).max_new_tokens is None
    if len({params.n for params in sampling}) > 1:
        raise InvalidField("sampling_params: n must be the same for all prompts", param="sampling_params")
    await add_pictures(request, prompts, media_of(fields, count, many), fields)
    work = await make_work(request, fields, prompts, sampling, rids[0])
    if fields.stream:
        limit_logprobs(work.jobs, server.ingress.facts, MAX_REPEATED)
        limit_hidden_states(work.jobs, server.ingress.facts, MAX_REPEATED)
    shown = [rid or job.rid for rid, job in zip(rids, work.jobs)]
    form = AnswerFormat(fields, work, shown, server)
    if fields.session_params is None:
        return await answer(request, server, work, form, many)
    turn = await begin_turn(request, server, fields.session_params, shown[0], work, many)
    try:
        return await answer(request, server, work, form, many, turn)
    finally:
        turn.close()


async def answer(
    request: web.Request, server: Server, work: Work, form: AnswerFormat, many: bool, turn: Turn | None = None
) -> web.StreamResponse:
    if work.jobs[0].stream:
        return await sse.stream(request, server, work, NativeStream(form, work, many, turn))
    choices = await server.collect(work)
    if turn is not None:
        turn.end(choices[0].tokens)

    def whole() -> Any:
        results = [form.result(choice) for choice in choices]
        return results if many or work.n > 1 else results[0]

    return await answered(request, answer_size(choices, work), whole, choices)


async def begin_turn(
    request: web.Request, server: Server, params: SessionParams, rid: str, work: Work, many: bool
) -> Turn:
    """Put what the session has in front of the prompt.
    Raises BadRequest kinds, SessionNotFound, Overloaded."""
    if many or work.n > 1:
        raise InvalidField("session_params is for one prompt with n=1", param="session_params")
    (job,) = work.jobs
    params = server.sessions.resolved(params, work.client.owner)
    text, tokenizer, special = job.text or "", server.ingress.tokenizer, params.rid is None

    check_size("text", [text], MAX_CHARS, "characters")

    def encoded() -> list[int]:
        return tokenized(tokenizer, "text", [text], special)[0]

    added = await beside(request, len(text), encoded) if job.token_ids is None else job.token_ids
    facts = server.ingress.facts
    assert facts is not None
    turn = server.sessions.begin(params, rid, added, work.client.owner, facts.context_len)
    job.text = None
    job.token_ids = turn.prompt()
    return turn


def native_prompts(fields: GenerateRequest) -> tuple[list[dict[str, Any]], bool]:
    """Job fields of each prompt, and whether a list of prompts was given."""
    if (fields.text is None) == (fields.input_ids is None):
        raise InvalidField("give either text or input_ids", param="text")
    if fields.input_ids is not None:
        many = bool(fields.input_ids) and isinstance(fields.input_ids[0], list)
        batch: list[Any] = fields.input_ids if many else [fields.input_ids]
        check_count("input_ids", batch, MAX_CHOICES)
        if many:
            alike = all(isinstance(ids, list) for ids in batch)
        else:
            alike = are_ids(batch[0]) or list not in map(type, batch[0])
        if not alike:
            raise InvalidField("input_ids must be a list of ids or a list of id lists", param="input_ids")
        return [token_prompt(ids, "input_ids") for ids in batch], many
    texts = fields.text if isinstance(fields.text, list) else [fields.text]
    if not texts:
        raise InvalidField("text: the list is empty", param="text")
    check_count("text", texts, MAX_CHOICES)
    return [{"text": text} for text in texts], isinstance(fields.text, list)


def spread(name: str, value: Any, count: int) -> list[Any]:
    """``value`` for each of ``count`` prompts: itself, or the items of a list of that length."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidField(f"{name} has {len(value)} items for {count} prompts", param=name)
    return value


def media_of(fields: GenerateRequest, count: int, many: bool) -> list[list[Source]]:
    """Pictures, sounds and videos for each of ``count`` prompts. Raises InvalidField."""
    given = (
        ("image_data", "image", fields.image_data),
        ("audio_data", "audio", fields.audio_data),
        ("video_data", "video", fields.video_data),
    )
    found = [media_sources(name, kind, value, count, many) for name, kind, value in given]
    return [list(chain.from_iterable(of)) for of in zip(*found)]


def media_sources(name: str, kind: str, value: Any, count: int, many: bool) -> list[list[Source]]:
    """The field's ``value`` for each of ``count`` prompts: one picture for all of them, a list for a single
    prompt, or a list with a picture, a list or nothing for each. Raises InvalidField."""
    listed = value if isinstance(value, list) else [] if value is None else None
    if listed is None:
        return [[Source(value, name, kind)]] * count
    if many:
        each = spread(name, listed, count) if listed else [None] * count
        places = [f"{name}[{i}]" for i in range(count)]
    else:
        nested = len(listed) == 1 and isinstance(listed[0], list)
        each, places = [listed[0] if nested else listed], [name]
    found = []
    for things, place in zip(each, places):
        texts = things if isinstance(things, list) else [] if things is None else [things]
        if not all(isinstance(text, str) and text for text in texts):
            raise InvalidField(f"{place} must be a URL, base64, a path, or a list of such texts", param=place)
        found.append([Source(text, f"{place}[{i}]", kind) for i, text in enumerate(texts)])
    return found


async def add_pictures(
    request: web.Request, prompts: list[dict[str, Any]], found: list[list[Source]], fields: GenerateRequest
) -> None:
    """Load the pictures, sounds and videos of all prompts, which are then Job fields of each."""
    server, first_one = request[ASKED], next(chain.from_iterable(found), None)
    if first_one is not None and fields.session_params is not None:
        raise unsupported(f"{first_one.kind}_data", " beside session_params")
    check_parts("image_data, audio_data and video_data", found)
    for sources in found:
        server.media.check(sources, server.ingress)
    sizes = server.media.sizes(fields.mm_processor_kwargs, server.ingress)
    pictures = await server.media.pictures(found, server.ingress, request[SHARE], sizes)
    for prompt, own in zip(prompts, pictures):
        prompt |= {"pictures": own, "media_kwargs": sizes}


def native_sampling(
    fields: GenerateRequest, asked: SamplingParams, i: int, count: int, ids: list[int]
) -> SamplingParams:
    """Of prompt ``i`` of ``count``. ``asked``: by its sampling_params; ``ids``: whose logprobs, too."""
    wanted = spread("return_logprob", fields.return_logprob, count)[i]
    top = (spread("top_logprobs_num", fields.top_logprobs_num, count)[i] or 0) if wanted else None
    # Where nothing is generated, who names no start can only mean the prompt: SGLang's client does.
    usual = 0 if asked.max_tokens == 0 else -1
    start = first(spread("logprob_start_len", fields.logprob_start_len, count)[i], usual)
    ids = ids if wanted else []
    check_ids("token_ids_logprob", ids, MAX_LOGPROB_IDS)
    return msgspec.structs.replace(
        asked,
        logprobs=top,
        prompt_logprobs=top if start >= 0 else None,
        logprob_start=max(0, start),
        logprob_token_ids=ids,
        hidden_states=bool(spread("return_hidden_states", fields.return_hidden_states, count)[i]),
        routed_experts=bool(spread("return_routed_experts", fields.return_routed_experts, count)[i]),
    )


def asked_for(fields: GenerateRequest, server: Server, i: int, count: int) -> SamplingParams:
    """By the sampling_params of prompt ``i``."""
    params = own_params(fields, i, count)
    sampling = sampling_params(
        params, server.sampling_defaults, max_tokens=params.max_new_tokens, usual=DEFAULT_MAX_TOKENS
    )
    return msgspec.structs.replace(sampling, thinking=thinking_of(params, server_dialect(server)))


def own_params(fields: GenerateRequest, i: int, count: int) -> NativeSampling:
    return spread("sampling_params", fields.sampling_params, count)[i] or NativeSampling()


def asked_ids(value: list[int | list[int] | None] | None, count: int) -> list[Any]:
    """``token_ids_logprob`` for each of ``count`` prompts: one list for all of them, or one each."""
    kinds = {isinstance(item, int) for item in value or []}
    if len(kinds) > 1:
        raise InvalidField(
            "token_ids_logprob must be a list of ids or of id lists", param="token_ids_logprob"
        )
    return [value] * count if kinds != {False} else spread("token_ids_logprob", value, count)


class AnswerFormat:
    """Result objects of one request. ``rids``: the id shown for each prompt."""

    def __init__(self, fields: GenerateRequest, work: Work, rids: Sequence[str], server: Server) -> None:
        self._work = work
        self._rids = rids
        self._tokenizer = server.ingress.tokenizer
        self._texts = bool(fields.return_text_in_logprobs)
        self._starts = spread("logprob_start_len", fields.logprob_start_len, len(work.jobs))
        self._width = server.ingress.facts.hidden if server.ingress.facts is not None else 0
        self._version = server.ingress.weight_version
        self._since = clock.now()
        self._shown: dict[int, dict[str, list[msgspec.Raw]]] = {}  # logprobs by choice and name

    def result(self, choice: Choice) -> dict[str, Any]:
        prompt, nth = divmod(choice.index, self._work.n)
        rid = self._rids[prompt] if self._work.n == 1 else f"{self._rids[prompt]}-{nth}"
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": self._finish(choice),
            "prompt_tokens": choice.usage.prompt_tokens,
            "completion_tokens": choice.usage.completion_tokens,
            "cached_tokens": choice.usage.cached_tokens,
            "weight_version": self._version,
        }
        if choice.usage.verifies:
            meta |= guesses_of(choice.usage)
        sampling = self._work.jobs[prompt].sampling
        if choice.finish is not None:
            meta["e2e_latency"] = clock.now() - self._since
            if sampling.hidden_states:
                meta["hidden_states"] = self._hidden_states(choice)
            if sampling.routed_experts:
                meta["routed_experts"] = b64encode(b"".join(choice.hidden)).decode()
        return {
            "text": choice.text,
            "output_ids": choice.tokens,
            "meta_info": meta | self._logprobs(choice, sampling, self._starts[prompt]),
        }

    def _finish(self, choice: Choice) -> dict[str, Any] | None:
        if choice.finish == "stop":
            return {"type": "stop", "matched": choice.matched}
        if choice.finish in ("length", "repetition"):
            return {"type": choice.finish, "length": choice.usage.completion_tokens}
        return None if choice.finish is None else {"type": "abort", "message": ABORTED}

    def _hidden_states(self, choice: Choice) -> Long:
        """As SGLang's: a list of those of the prompt's tokens,
        then that of each output token but the last, which nothing came after."""
        usage, width = choice.usage, self._width
        rows = np.frombuffer(b"".join(choice.hidden), np.float32).reshape(-1, width)

        def parts(start: int, end: int) -> Iterator[bytes]:
            part = rows[start:end]
            return (encode(part[items].tolist())[1:-1] for items in slices(len(part), few(width)))

        prompt = usage.prompt_tokens
        return Long(
            chain([Long(parts(0, prompt))], parts(prompt, prompt + max(0, usage.completion_tokens - 1)))
        )

    def _logprobs(self, choice: Choice, sampling: SamplingParams, start: int | None) -> dict[str, Any]:
        """All so far. What an earlier result of the choice had is not made again:
        a stream shows it with each event."""
        if sampling.logprobs is None:
            return {}
        asked: dict[str, Show] = {"token": self._chosen}
        if sampling.logprobs:
            asked["top"] = self._top
        if sampling.logprob_token_ids:
            asked["token_ids"] = self._asked
        names = [f"{side}_{kind}_logprobs" for kind in asked for side in ("input", "output")]
        rows = self._shown.setdefault(choice.index, {name: [] for name in names})
        begin = 0 if start is None or start < 0 else start
        if not rows["input_token_logprobs"] and choice.prompt_logprobs is not None:
            prompt = zip((choice.prompt_tokens or [])[begin:], choice.prompt_logprobs[begin:])
            add_rows(rows, "input", asked, list(prompt))
        new = (choice.logprobs or [])[len(rows["output_token_logprobs"]) :]
        add_rows(rows, "output", asked, [(entry.token, entry) for entry in new])
        return rows

    def _chosen(self, token: int, entry: TokenLogprob | None) -> list[Any]:
        return [None if entry is None else finite(entry.logprob), token, self._text(token)]

    def _top(self, token: int, entry: TokenLogprob | None) -> list[list[Any]] | None:
        return None if entry is None else self._rows(entry.top)

    def _asked(self, token: int, entry: TokenLogprob | None) -> list[list[Any]] | None:
        return None if entry is None else self._rows(entry.asked)

    def _rows(self, values: Iterable[tuple[int, float]]) -> list[list[Any]]:
        return [[finite(value), token, self._text(token)] for token, value in values]

    def _text(self, token: int) -> str | None:
        return token_text(self._tokenizer, token) if self._texts else None


def guesses_of(usage: Usage) -> dict[str, float]:
    """SGLang's names for what came of the guesses of a choice."""
    return {
        "spec_verify_ct": usage.verifies,
        "spec_draft_token_num": usage.guessed,
        "spec_accept_token_num": usage.right,
        "spec_accept_length": usage.completion_tokens / usage.verifies,
        "spec_accept_rate": usage.right / max(1, usage.guessed),
    }


def add_rows(
    rows: dict[str, list[msgspec.Raw]],
    side: str,
    asked: dict[str, Show],
    entries: list[tuple[int, TokenLogprob | None]],
) -> None:
    for kind, show in asked.items():
        rows[f"{side}_{kind}_logprobs"] += [
            msgspec.Raw(encode(show(token, entry))) for token, entry in entries
        ]


class NativeStream(Encoder):
    """Events -> cumulative results. Batches and ``n > 1`` carry the choice's index."""

    cumulative = True

    def __init__(self, form: AnswerFormat, work: Work, many: bool, turn: Turn | None = None) -> None:
        self._turn = turn
        self._form = form
        self._indexed = many or work.n > 1
        self._choices: dict[int, Choice] = {}

    def encode(self, event: Event) -> bytes:
        choice = self._choices.get(event.index)
        if choice is None:
            choice = self._choices[event.index] = Choice(event.index)
        choice.add(event)
        if event.finish is not None and self._turn is not None:
            self._turn.end(choice.tokens)
        if not (event.tokens or event.text or event.finish):
            return b""
        result = self._form.result(choice)
        return b"data: %b\n\n" % encode_all({"index": event.index, **result} if self._indexed else result)

    def end(self, usage: Usage) -> bytes:
        return b""

    def error(self, error: Rejected | SglaError) -> bytes:
        return b"data: %b\n\n" % encode(error_body(error))
