"""Parts that chat and text completions share: usage objects, stop reasons, chunk heads, request checks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from sgla.errors import InvalidField, SglaError
from sgla.http.answer.collect import Choice
from sgla.http.answer.encoder import Encoder
from sgla.http.answer.whole import INLINE, Long, encode_all, few, in_parts
from sgla.http.errors import error_body
from sgla.http.request.sampling import check_ids
from sgla.http.request.schema import ChatRequest, CompletionRequest, OpenAIFields
from sgla.http.server import Server, Work
from sgla.http.wire import encode
from sgla.messages import Event, Rejected, SamplingParams, Usage
from sgla.text.logprobs import PART, WholeVocabulary, prompt_logprobs

MAX_LOGPROB_IDS = 128


def usage_object(usage: Usage, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """``reasoning_tokens``: None where reasoning is not told apart. What came of guesses has OpenAI's names
    for those of a prediction."""
    made = {} if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
    if usage.verifies:
        made["accepted_prediction_tokens"] = usage.right
        made["rejected_prediction_tokens"] = usage.guessed - usage.right
    details = {"completion_tokens_details": made} if made else {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **details,
    }


def stop_fields(finish: str | None, matched: str | int | None, stop_token_ids: list[int]) -> dict[str, Any]:
    """Which stop ended the choice:
    SGLang's ``matched_stop`` names any, vLLM's ``stop_reason`` only asked-for ones."""
    if finish == "repetition":
        return {"matched_stop": None, "stop_reason": "repetition_detected"}
    if finish != "stop":
        return {"matched_stop": None, "stop_reason": None}
    asked = isinstance(matched, str) or matched in stop_token_ids
    return {"matched_stop": matched, "stop_reason": matched if asked else None}


def check_stream_options(fields: OpenAIFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidField("stream_options is only allowed with stream: true", param="stream_options")


def check_prompt_logprobs(fields: OpenAIFields, server: Server) -> None:
    """-1 becomes the size of the vocabulary."""
    facts = server.ingress.facts
    if fields.prompt_logprobs == -1 and facts is not None:
        fields.prompt_logprobs = facts.vocab_size
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidField("prompt_logprobs are not available with stream: true", param="prompt_logprobs")


def check_logprob_ids(fields: ChatRequest | CompletionRequest) -> None:
    """``logprob_token_ids`` come beside the likeliest tokens of outputs."""
    check_ids("logprob_token_ids", fields.logprob_token_ids, MAX_LOGPROB_IDS)
    if fields.logprob_token_ids and fields.logprobs in (None, False):
        raise InvalidField("logprob_token_ids needs logprobs", param="logprob_token_ids")


def truncation(fields: OpenAIFields) -> dict[str, Any]:
    """The Job fields that cut a long prompt: at its beginning, unless ``truncation_side`` is right."""
    if fields.truncation_side not in (None, "left", "right"):
        raise InvalidField("truncation_side must be left or right", param="truncation_side")
    if fields.truncate_prompt_tokens == 0:
        raise InvalidField("truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens")
    name = "truncate" if fields.truncation_side == "right" else "keep_last"
    return {name: fields.truncate_prompt_tokens}


def shown_prompt(tokenizer: Any, choice: Choice | Event, k: int) -> Any:
    """``prompt_logprobs`` of a choice that carries its prompt."""
    if choice.prompt_tokens is None or choice.prompt_logprobs is None:
        return None
    tokens, entries = choice.prompt_tokens, choice.prompt_logprobs
    assert len(tokens) == len(entries)
    if k > PART:  # the whole vocabulary
        whole = WholeVocabulary(tokenizer, k)
        return Long(b"null" if entry is None else Long(whole.parts(entry), b"{}") for entry in entries)
    return in_parts(
        len(tokens), lambda part: prompt_logprobs(tokenizer, tokens[part], entries[part], k), few(1 + k)
    )


def width(sampling: SamplingParams) -> int:
    """Values of a token that is shown with its logprobs."""
    return 1 + max(sampling.logprobs or 0, sampling.prompt_logprobs or 0) + len(sampling.logprob_token_ids)


class LastStates:
    """SGLang's ``hidden_states`` of a choice: the state of its last computed token, float32[``width``] behind
    the last norm; empty for one output token, whose state is the prompt's."""

    def __init__(self, work: Work, server: Server) -> None:
        facts = server.ingress.facts
        self.wanted = work.jobs[0].sampling.hidden_states
        self._width = 0 if facts is None else facts.hidden
        self._latest: dict[int, bytes] = {}  # rows by choice

    def keep(self, part: Choice | Event) -> None:
        if part.hidden:
            self._latest[part.index] = part.hidden[-1]

    def shown(self, part: Choice | Event) -> dict[str, list[float]]:
        """Where the choice ends."""
        if not self.wanted or part.finish is None:
            return {}
        self.keep(part)
        rows = np.frombuffer(self._latest.get(part.index, b""), np.float32)
        return {"hidden_states": rows[-self._width :].tolist() if part.usage.completion_tokens > 1 else []}


def answer_size(choices: Iterable[Choice], work: Work) -> int:
    """About how many values an answer has: tokens, logprobs, and what it takes to read the text.
    Of one that is too long for the loop in any case, not all are counted."""
    size = 0
    for i, choice in enumerate(choices):
        sampling = work.jobs[i // work.n].sampling
        size += (len(choice.tokens) + len(choice.prompt_logprobs or [])) * width(sampling)
        size += (sum(map(len, choice.texts)) + sum(map(len, choice.hidden))) // 2
        if size > INLINE:
            break
    return size


class ChunkStream(Encoder):
    """Chunks of one response. They share everything but their choices, so that part is encoded once.

    Subclasses encode events; ``plain`` tells them that a chunk is nothing but text.
    """

    def __init__(self, head: dict[str, Any], fields: OpenAIFields, plain: bool) -> None:
        options = fields.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous = self._include_usage and bool(options and options.continuous_usage_stats)
        self._token_ids = bool(fields.return_token_ids)
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if self._include_usage else b"}\n\n"
        self.plain = plain and not self._token_ids and not self._continuous

    def usage(self, usage: Usage, index: int | None = None) -> dict[str, Any]:
        """The usage object of choice ``index``, or of all of them."""
        return usage_object(usage)

    def chunk(self, choice: dict[str, Any], usage: Usage, beside: dict[str, Any] | None = None) -> bytes:
        """A block with one choice;
        ``usage`` is that choice's so far, ``beside`` stands next to the choices."""
        tail = self._tail
        if self._continuous:
            tail = b',"usage":%b}\n\n' % encode(self.usage(usage, choice["index"]))
        more = b"," + encode(beside)[1:-1] if beside else b""
        return b"%b%b]%b%b" % (self._head, encode_all(choice), more, tail)

    def end(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return b""
        return b'%b],"usage":%b}\n\n' % (self._head, encode(self.usage(usage)))

    def error(self, error: Rejected | SglaError) -> bytes:
        return b"data: %b\n\n" % encode(error_body(error))


def response_head(prefix: str, uid: str, kind: str, model: str, fingerprint: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uid}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }
