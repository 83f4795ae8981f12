"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from sgla.errors import InvalidField
from sgla.http import sse
from sgla.http.collect import Choice, total_usage
from sgla.http.errors import Aborted
from sgla.http.intake import intake
from sgla.http.openai_common import (
    ChunkStream,
    check_stream_options,
    response_head,
    stop_fields,
    usage_object,
)
from sgla.http.sampling import check_max_tokens, first, sampling_params
from sgla.http.schema import CompletionRequest, Schema, unsupported
from sgla.http.server import ABORTED, SERVER, Server, Work, make_work, raise_aborted
from sgla.http.wire import encode, json_response
from sgla.messages import Event, Job, SamplingParams, TokenLogprob
from sgla.text.logprobs import TextOffsets, completion_logprobs

SCHEMA = Schema(CompletionRequest)
DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 20


async def completions(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    fields = await intake(request, SCHEMA)
    model = server.model(fields.model)
    sampling = text_sampling(fields, server)
    special = fields.add_special_tokens is not False
    work = make_work(
        request,
        fields,
        prompts(fields.prompt),
        sampling,
        first(fields.rid, fields.request_id),
        add_special_tokens=special,
    )
    head = response_head("cmpl", work.uid, "text_completion", model, server.fingerprint)
    if fields.stream:
        return await sse.stream(
            request, server, work, TextStream(head, fields, work, server.ingress.tokenizer)
        )
    choices = await server.collect(work)
    raise_aborted(choices)
    shapes = Shapes(fields, work, server.ingress.tokenizer)
    usage = total_usage(((choice.index, choice.usage) for choice in choices), work.n)
    return json_response(
        {**head, "choices": [shapes.choice(choice) for choice in choices], "usage": usage_object(usage)}
    )


def prompts(prompt: str | list[int | str | list[int]]) -> list[dict[str, Any]]:
    """The Job fields of each prompt. Raises InvalidField for an empty or mixed list."""
    items: list[Any] = (
        [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)
    )
    if not items:
        raise InvalidField("prompt: the list is empty", param="prompt")
    kinds = {type(item) for item in (prompt if isinstance(prompt, list) else items)}
    if len(kinds) > 1:
        raise InvalidField(
            "prompt must be a string, a list of strings, a list of ids or a list of id lists", param="prompt"
        )
    return [token_prompt(item, "prompt") if isinstance(item, list) else {"text": item} for item in items]


def token_prompt(ids: list[int], param: str) -> dict[str, Any]:
    """Job fields of a prompt of ids; the engine checks them against the vocabulary."""
    if not ids:
        raise InvalidField(f"{param}: a list of token ids is empty", param=param)
    if min(ids) < 0 or max(ids) >= 2**31:
        raise InvalidField(f"{param}: token ids must be at least 0 and in the vocabulary", param=param)
    return {"token_ids": ids}


def text_sampling(fields: CompletionRequest, server: Server) -> SamplingParams:
    check_stream_options(fields)
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    check_max_tokens("max_tokens", max_tokens, echo=bool(fields.echo))
    if fields.best_of not in (None, 1, fields.n or 1):
        raise unsupported("best_of", " unless it equals n")
    if fields.logprobs is not None and not 0 <= fields.logprobs <= MAX_LOGPROBS:
        raise InvalidField(
            f"logprobs must be between 0 and {MAX_LOGPROBS}, got {fields.logprobs}", param="logprobs"
        )
    return sampling_params(
        fields,
        server.sampling_defaults,
        max_tokens=max_tokens,
        logprobs=fields.logprobs,
        prompt_logprobs=fields.logprobs if fields.echo else None,
    )


class Shapes:
    """What the fields of one request make of text, logprobs and token ids; keeps each choice's text offsets."""

    def __init__(self, fields: CompletionRequest, work: Work, tokenizer: Any) -> None:
        self._echo = bool(fields.echo)
        self._as_ids = bool(fields.return_tokens_as_token_ids)
        self._token_ids = bool(fields.return_token_ids)
        self._work = work
        self._sampling = work.jobs[0].sampling
        self._tokenizer = tokenizer
        self._offsets: dict[int, TextOffsets] = {}

    def choice(self, choice: Choice | Event) -> dict[str, Any]:
        """A choice object of what ``choice`` carries, prompt included if this is its first part."""
        first_part = choice.prompt_tokens is not None
        echo = self.prompt_text(choice) if self._echo and first_part else ""
        result = {
            "index": choice.index,
            "text": echo + choice.text,
            "logprobs": self.logprobs(choice),
            "finish_reason": choice.finish,
            **stop_fields(choice.finish, choice.matched, self._sampling.stop_token_ids),
        }
        if self._token_ids:
            result["token_ids"] = choice.tokens
            if first_part:
                result["prompt_token_ids"] = choice.prompt_tokens
        return result

    def shows_prompt(self, event: Event) -> bool:
        return event.prompt_tokens is not None and (self._echo or self._token_ids)

    def shows_ids(self, event: Event) -> bool:
        return self._token_ids and bool(event.tokens)

    def prompt_text(self, choice: Choice | Event) -> str:
        job = self._job(choice.index)
        if job.text is not None:
            return job.text
        return self._tokenizer.decode(
            choice.prompt_tokens, skip_special_tokens=self._sampling.skip_special_tokens
        )

    def logprobs(self, choice: Choice | Event) -> dict[str, Any] | None:
        if self._sampling.logprobs is None:
            return None
        tokens: list[int] = []
        entries: list[TokenLogprob | None] = []
        if self._echo and choice.prompt_tokens is not None:
            tokens += choice.prompt_tokens
            entries += choice.prompt_logprobs or [None] * len(choice.prompt_tokens)
        tokens += [entry.token for entry in choice.logprobs or []]
        entries += choice.logprobs or []
        offsets = self._offsets.get(choice.index)
        if offsets is None:
            offsets = self._offsets[choice.index] = TextOffsets(self._tokenizer, self._sampling)
        return completion_logprobs(self._tokenizer, tokens, entries, offsets.feed(tokens), self._as_ids)

    def _job(self, index: int) -> Job:
        return self._work.jobs[index // self._work.n]


class TextStream(ChunkStream):
    """Events -> text_completion chunks."""

    def __init__(self, head: dict[str, Any], fields: CompletionRequest, work: Work, tokenizer: Any) -> None:
        super().__init__(head, fields, plain=work.jobs[0].sampling.logprobs is None and not fields.echo)
        self._shapes = Shapes(fields, work, tokenizer)
        self._text_tail = b',"logprobs":null,"finish_reason":null}]' + self._tail

    def encode(self, event: Event) -> bytes:
        if event.finish is None:
            if self.plain:
                if not event.text:
                    return b""
                return b'%b{"index":%d,"text":%b%b' % (
                    self._head,
                    event.index,
                    encode(event.text),
                    self._text_tail,
                )
            if not (
                event.text
                or event.logprobs
                or self._shapes.shows_prompt(event)
                or self._shapes.shows_ids(event)
            ):
                return b""
        elif event.finish == "abort":
            return self.error(Aborted(ABORTED))
        return self.chunk(self._shapes.choice(event), event.usage)
