"""POST /v1/completions."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from aiohttp import web

from sgla.errors import InvalidField
from sgla.http import answer_types as to
from sgla.http.answer import sse
from sgla.http.answer.collect import Choice, total_usage
from sgla.http.answer.reading import server_dialect, thinking_of
from sgla.http.answer.whole import Long, answered, few, slices
from sgla.http.errors import Aborted
from sgla.http.openai import beams
from sgla.http.openai.common import (
    ChunkStream,
    LastStates,
    answer_size,
    check_logprob_ids,
    check_prompt_logprobs,
    check_stream_options,
    response_head,
    shown_prompt,
    stop_fields,
    truncation,
    usage_object,
    width,
)
from sgla.http.operation import EVENTS, operation
from sgla.http.request.intake import intake
from sgla.http.request.sampling import are_ids, first, sampling_params
from sgla.http.request.schema import MAX_CHOICES, CompletionRequest, Schema, check_count
from sgla.http.request.work import limit_logprobs, make_work
from sgla.http.server import ABORTED, ASKED, Server, Work, raise_aborted
from sgla.http.turns import paced
from sgla.http.wire import encode
from sgla.messages import Event, Job, SamplingParams, TokenLogprob
from sgla.text.logprobs import TextOffsets, completion_logprobs

SCHEMA = Schema(CompletionRequest)
DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 20
MAX_AT_ONCE = 1 << 14  # logprobs of prompts in a stream, whose first event has them all
# vLLM's own fields of a choice, which clients find without having asked for them.
NULLS = dict.fromkeys(("token_ids", "prompt_token_ids", "prompt_logprobs"))


@operation("OpenAI: continue a text", CompletionRequest, to.TextCompletion, stream=EVENTS)
async def completions(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
    fields = await intake(request, SCHEMA)
    model = server.model(fields.model)
    work = await text_work(request, server, fields)
    if fields.stream and fields.echo:
        limit_logprobs(work.jobs, server.ingress.facts, MAX_AT_ONCE, outputs=False)
    head = response_head("cmpl", work.uid, "text_completion", model, server.fingerprint)
    search = beams.is_beam_search(fields)
    if fields.stream and not search:
        return await sse.stream(request, server, work, TextStream(head, fields, work, server))
    if search:
        work, choices = await beams.collect(request, work, fields)
    else:
        choices = await server.collect(work)
        raise_aborted(choices)
    form = AnswerFormat(fields, work, server)
    usage = total_usage(((choice.index, choice.usage) for choice in choices), work.n)

    def whole() -> dict[str, Any]:
        shown = [NULLS | form.choice(choice) for choice in best(choices, work.n, fields.n or 1)]
        for index, choice in enumerate(shown):
            choice["index"] = index
        return {**head, "choices": shown, "usage": usage_object(usage)}

    return await answered(request, answer_size(choices, work), whole, choices)


async def text_work(request: web.Request, server: Server, fields: CompletionRequest) -> Work:
    """The engine's share of a completion. Raises BadRequest kinds."""
    return await make_work(
        request,
        fields,
        await paced(map(job_fields, separate(fields.prompt, "prompt"))),
        text_sampling(fields, server),
        first(fields.rid, fields.request_id),
        add_special_tokens=fields.add_special_tokens is not False,
        suffix=fields.suffix or None,
        clip=fields.max_tokens is None,
        **truncation(fields),
    )


def best(choices: list[Choice], made: int, wanted: int) -> list[Choice]:
    """Of each prompt's ``made`` choices the ``wanted`` ones with the highest mean logprob a token,
    the best first."""
    if made == wanted:
        return choices
    groups = [choices[start : start + made] for start in range(0, len(choices), made)]
    return [choice for group in groups for choice in sorted(group, key=mean_logprob, reverse=True)[:wanted]]


def mean_logprob(choice: Choice) -> float:
    values = [entry.logprob for entry in choice.logprobs or []]
    return sum(values) / len(values) if values else -math.inf


def job_fields(prompt: str | list[Any]) -> dict[str, Any]:
    """Of a text or a list of ids. Raises InvalidField."""
    return token_prompt(prompt, "prompt") if isinstance(prompt, list) else {"text": prompt}


def separate(value: Any, param: str) -> list[Any]:
    """The texts, or lists of ids, of a string, a list of strings, a list of ids or a list of id lists. Raises
    InvalidField for a list that is empty, too long or mixed; whether a list of ids is mixed is for
    ``token_prompt`` to say."""
    if isinstance(value, str) or (value and isinstance(value[0], int)):
        return [value]
    if not value:
        raise InvalidField(f"{param}: the list is empty", param=param)
    check_count(param, value, MAX_CHOICES)
    if len(set(map(type, value))) > 1:
        raise mixed(param)
    return list(value)


def mixed(param: str) -> InvalidField:
    return InvalidField(
        f"{param} must be a string, a list of strings, a list of ids or a list of id lists", param=param
    )


def token_prompt(ids: list[Any], param: str) -> dict[str, Any]:
    """Job fields of a prompt of ids; the engine checks them against the vocabulary. Raises InvalidField."""
    if not ids:
        raise InvalidField(f"{param}: a list of token ids is empty", param=param)
    if not are_ids(ids):
        if not all(isinstance(token, int) for token in ids):
            raise mixed(param)
        raise InvalidField(f"{param}: token ids must be at least 0 and in the vocabulary", param=param)
    return {"token_ids": ids}


def text_sampling(fields: CompletionRequest, server: Server) -> SamplingParams:
    check_stream_options(fields)
    if fields.max_tokens == 0 and not fields.echo:
        raise InvalidField("max_tokens: 0 asks for no output; it needs echo: true", param="max_tokens")
    check_prompt_logprobs(fields, server)
    check_logprob_ids(fields)
    check_best_of(fields)
    if fields.suffix and fields.echo:
        raise InvalidField("echo and suffix exclude each other", param="suffix")
    if fields.logprobs is not None and not 0 <= fields.logprobs <= MAX_LOGPROBS:
        raise InvalidField(
            f"logprobs must be between 0 and {MAX_LOGPROBS}, got {fields.logprobs}", param="logprobs"
        )
    shown = [fields.prompt_logprobs, fields.logprobs if fields.echo else None]
    sampling = sampling_params(
        fields,
        server.sampling_defaults,
        max_tokens=fields.max_tokens,
        usual=DEFAULT_MAX_TOKENS,
        logprobs=fields.logprobs,
        prompt_logprobs=max((k for k in shown if k is not None), default=None),
        logprob_token_ids=fields.logprob_token_ids,
        hidden_states=fields.return_hidden_states,
    )
    sampling = msgspec.structs.replace(sampling, thinking=thinking_of(fields, server_dialect(server)))
    if made(fields) == sampling.n:
        return sampling
    return msgspec.structs.replace(sampling, n=made(fields), logprobs=fields.logprobs or 0)


def made(fields: CompletionRequest) -> int:
    """Choices that are generated for each prompt;
    bench_serving sends a ``best_of`` of 1, which asks for nothing."""
    return max(fields.n or 1, fields.best_of or 1)


def check_best_of(fields: CompletionRequest) -> None:
    n, best_of = fields.n or 1, fields.best_of
    if best_of not in (None, 1) and best_of < n:
        raise InvalidField(f"best_of must be at least n, got {best_of} for n={n}", param="best_of")
    if fields.stream and made(fields) > n:
        raise InvalidField("best_of greater than n cannot be streamed", param="best_of")


class AnswerFormat:
    """What the fields of one request make of text, logprobs and token ids;
    keeps each choice's text offsets."""

    def __init__(self, fields: CompletionRequest, work: Work, server: Server) -> None:
        self._echo = bool(fields.echo)
        self._logprobs = fields.logprobs
        self._prompt_logprobs = fields.prompt_logprobs
        self._as_ids = bool(fields.return_tokens_as_token_ids)
        self._token_ids = bool(fields.return_token_ids)
        self._work = work
        self._sampling = work.jobs[0].sampling
        self._tokenizer = server.ingress.tokenizer
        self.states = LastStates(work, server)
        self._offsets: dict[int, TextOffsets] = {}
        self._texts: dict[str, str] = {}  # of prompts that came as ids

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
            **self.states.shown(choice),
        }
        if self._token_ids:
            result["token_ids"] = choice.tokens
            if first_part:
                result["prompt_token_ids"] = choice.prompt_tokens
        if self._prompt_logprobs is not None:
            result["prompt_logprobs"] = shown_prompt(self._tokenizer, choice, self._prompt_logprobs)
        return result

    def shows_prompt(self, event: Event) -> bool:
        return event.prompt_tokens is not None and (self._echo or self._token_ids)

    def shows_ids(self, event: Event) -> bool:
        return self._token_ids and bool(event.tokens)

    def prompt_text(self, choice: Choice | Event) -> str:
        job = self._job(choice.index)
        if job.text is not None:
            return job.text
        if job.rid not in self._texts:  # its choices share it; a million ids take 40 ms of the loop
            self._texts[job.rid] = self._tokenizer.decode(choice.prompt_tokens, skip_special_tokens=False)
        return self._texts[job.rid]

    def logprobs(self, choice: Choice | Event) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        tokens: list[int] = []
        entries: list[TokenLogprob | None] = []
        at: list[int] = []
        if self._echo and choice.prompt_tokens is not None:
            tokens += choice.prompt_tokens
            entries += self._asked(choice.prompt_logprobs or [None] * len(choice.prompt_tokens))
            skips = self._job(choice.index).text is not None  # a text has none of those in front of it
            at += TextOffsets(self._tokenizer, skips).feed(tokens)
        new = [entry.token for entry in choice.logprobs or []]
        at += self._output_offsets(choice).feed(new)
        tokens += new
        entries += choice.logprobs or []
        size = few(width(self._sampling))
        if len(tokens) <= size:
            return completion_logprobs(self._tokenizer, tokens, entries, at, self._as_ids)
        written: dict[str, list[bytes]] = {}
        for part in slices(len(tokens), size):
            columns = completion_logprobs(
                self._tokenizer, tokens[part], entries[part], at[part], self._as_ids
            )
            for name, column in columns.items():
                written.setdefault(name, []).append(encode(column)[1:-1])
        return {name: Long(parts) for name, parts in written.items()}

    def _output_offsets(self, choice: Choice | Event) -> TextOffsets:
        """Made with the first part of a choice."""
        offsets = self._offsets.get(choice.index)
        if offsets is None:
            prompt = choice.prompt_tokens or []
            start = len(self.prompt_text(choice)) if self._echo else 0
            skips = self._sampling.skip_special_tokens
            offsets = self._offsets[choice.index] = TextOffsets(self._tokenizer, skips, start, prompt)
        return offsets

    def _asked(self, entries: list[TokenLogprob | None]) -> list[TokenLogprob | None]:
        """Without the alternatives that only ``prompt_logprobs`` wants."""
        return [
            entry
            and TokenLogprob(entry.token, entry.logprob, entry.rank, entry.top[: self._logprobs], entry.asked)
            for entry in entries
        ]

    def _job(self, index: int) -> Job:
        return self._work.jobs[index // self._work.n]


class TextStream(ChunkStream):
    """Events -> text_completion chunks."""

    def __init__(self, head: dict[str, Any], fields: CompletionRequest, work: Work, server: Server) -> None:
        sampling = work.jobs[0].sampling
        plain = sampling.logprobs is None and not sampling.hidden_states and not fields.echo
        super().__init__(head, fields, plain)
        self._form = AnswerFormat(fields, work, server)
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
            self._form.states.keep(event)
            if not (
                event.text or event.logprobs or self._form.shows_prompt(event) or self._form.shows_ids(event)
            ):
                return b""
        elif event.finish == "abort":
            return self.error(Aborted(ABORTED))
        return self.chunk(self._form.choice(event), event.usage)
