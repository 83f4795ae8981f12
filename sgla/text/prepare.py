"""Job -> Submits: render, encode, check, derive seeds.
Pure but for the seeds drawn for requests without one."""

from __future__ import annotations

import random
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, SupportsIndex
from weakref import ref

import numpy as np
from msgspec.structs import replace
from tokenizers import Encoding

from sgla.errors import BadRequest, ContextTooLong, InvalidField, UnsupportedField
from sgla.messages import (
    MAX_BIASES,
    MAX_STOP_IDS,
    Grammar,
    Job,
    Placed,
    Processor,
    RowSampling,
    SamplingParams,
    Submit,
    Thinking,
    ThinkLimit,
    int32,
)
from sgla.sched.limits import plan_bytes_of
from sgla.sched.repetition import check_repetition
from sgla.text.infill import Infill
from sgla.text.pictures import Speller, positions
from sgla.text.process import BoundedTemplate
from sgla.text.regex import RegexError
from sgla.text.stops import make_stops
from sgla.text.template import SHOWN, ChatTemplate
from sgla.text.tokenizer import Tokenizer
from sgla.text.words import word_tokens

MASK64 = (1 << 64) - 1
MASK63 = (1 << 63) - 1
SHORT = 512  # ids, of which Python's own functions find the extremes sooner
GOLDEN = 0x9E3779B97F4A7C15


SYSTEM = ("system", "developer")
CUT = 1 << 18  # tokens more than the context has that a prompt may lose
TAIL = 16  # tokens at a prompt's end in which the opener of a free part is looked for


class Free(NamedTuple):
    """``RowSampling.grammar_after`` and ``grammar_opener``."""

    after: tuple[str, ...]
    opener: str


NOT_FREE = Free((), "")


class Common(NamedTuple):
    """What of a request does not depend on its prompts, but on whether they have a gap (``infill``)."""

    infill: bool
    stop_ids: frozenset[int]
    sampling: RowSampling


class Latest:
    """What was made of the latest parameters, as long as these are there: it may be large. Thread-safe."""

    def __init__(self) -> None:
        self._kept: tuple[ref[SamplingParams], Common] | None = None

    def of(self, sampling: SamplingParams) -> Common | None:
        kept = self._kept
        return kept[1] if kept is not None and kept[0]() is sampling else None

    def keep(self, sampling: SamplingParams, common: Common) -> None:
        self._kept = ref(sampling, self._forget), common

    def _forget(self, gone: ref[SamplingParams]) -> None:
        if (kept := self._kept) is not None and kept[0] is gone:
            self._kept = None


class ModelFacts(Protocol):
    """What of ``Facts`` matters here."""

    context_len: int
    vocab_size: int
    hidden: int
    experts: list[int]
    media: dict[str, str]


class Preparer:
    """Callable on a Job, in any thread. Raises BadRequest and its kinds."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: BoundedTemplate | ChatTemplate | None,
        limits: ModelFacts,
        rng: random.Random,
        grammars: bool = False,
        processors: Mapping[str, Sequence[str]] = MappingProxyType({}),
        speller: Speller | None = None,
    ) -> None:
        """``speller``: of a model that takes pictures."""
        self.speller = speller
        self.tokenizer = tokenizer
        self.template = template
        self.limits = limits
        self.rng = rng
        self.grammars = grammars
        self.processors = processors
        self._latest = Latest()

    def __call__(self, job: Job) -> list[Submit]:
        """Of a grammar only that the sampler honours one is looked at."""
        if job.pool is not None:
            return [self._pooled(job, job.pool)]
        tokens, placed = self.prompt(job)
        taken = positions(job, tokens, placed, self.limits.context_len)
        max_new = self._max_new(taken, job.sampling.max_tokens, job.clip)
        common = self._common(job)
        if job.prompt_logprobs is not None:
            check_prompt_logprobs(len(tokens), job.sampling.n, common.sampling, job.prompt_logprobs)
        if job.hidden_states is not None:
            width = prod(self.limits.experts) if job.sampling.routed_experts else self.limits.hidden
            check_states((len(tokens) + max_new) * job.sampling.n, width, job)
        repetition = check_repetition(job.sampling.repetition_detection)
        free = free_part(job.sampling.grammar, tokens, self.tokenizer)
        thinking = self._think_limit(job.sampling.thinking, tokens)
        seed = self.rng.getrandbits(63) if job.sampling.seed is None else job.sampling.seed
        sampling = replace(
            common.sampling, thinking=thinking, grammar_after=free.after, grammar_opener=free.opener
        )
        sampling_bytes = plan_bytes_of(sampling)
        return [
            submit_of(
                job,
                choice,
                tokens=tokens,
                max_new=max_new,
                stop_ids=common.stop_ids,
                sampling=replace(sampling, seed=choice_seed(seed, choice)),  # the lists are shared
                sampling_bytes=sampling_bytes,
                repetition=repetition,
                media=[(shown.first, shown.picture.digest) for shown in placed],
                pictures=placed,
            )
            for choice in range(job.sampling.n)
        ]

    def _common(self, job: Job) -> Common:
        """Made once for all prompts of a request, whose jobs come one behind the other."""
        infill = job.suffix is not None
        if (known := self._latest.of(job.sampling)) is not None and known.infill == infill:
            return known
        stop_ids = self._stop_ids(job.sampling)
        if infill:
            stop_ids |= self._infill.ends
        check_counts(job.sampling, stop_ids)
        for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids"):
            self._check_known(name, getattr(job.sampling, name) or ())
        check_stops(job.sampling)
        if job.sampling.hidden_states and not self.limits.hidden:
            raise UnsupportedField(
                "return_hidden_states needs a server that runs with "
                "--enable-return-hidden-states; leave it out",
                param="return_hidden_states",
            )
        if job.sampling.routed_experts and not self.limits.experts:
            raise UnsupportedField(
                "return_routed_experts needs a server that runs with "
                "--enable-return-routed-experts; leave it out",
                param="return_routed_experts",
            )
        if job.sampling.routed_experts and job.sampling.hidden_states:
            raise UnsupportedField(
                "return_routed_experts cannot be had beside return_hidden_states; ask for them one by one",
                param="return_routed_experts",
            )
        grammar = job.sampling.grammar
        if grammar is not None and not self.grammars:
            raise UnsupportedField(f"{grammar.param} is not supported on this device", param=grammar.param)
        words = word_tokens(job.sampling.bad_words, self.tokenizer)
        row = row_sampling(job.sampling, stop_ids, words)
        if job.sampling.processors:
            row = replace(row, processors=self._processors(job.sampling.processors))
        if job.sampling.prompt_logprobs == -1:
            row = replace(row, prompt_logprobs=self.limits.vocab_size)
        common = Common(infill, stop_ids, row)
        self._latest.keep(job.sampling, common)
        return common

    def _processors(self, processors: Sequence[Processor]) -> list[Processor]:
        """Those that the request names, and those whose arguments it names alone."""
        found: list[Processor] = []
        for asked in processors:
            if not asked.name:
                found += self._declaring(asked.arguments)
            elif asked.name in self.processors:
                found.append(asked)
            else:
                there = ", ".join(self.processors) or "none; --logits-processors gives it some"
                raise UnsupportedField(
                    f"logits_processors: there is no {asked.name[:100]!r}; this server has {there}",
                    param="logits_processors",
                )
        return found

    def _declaring(self, arguments: dict[str, Any]) -> list[Processor]:
        for key in arguments:
            if not any(key in taken for taken in self.processors.values()):
                listed = [f"{name}({', '.join(taken)})" for name, taken in self.processors.items()]
                there = ", ".join(listed) or "none; --logits-processors gives it some"
                raise UnsupportedField(
                    f"vllm_xargs.{key[:100]}: no logit processor declares it; this server has {there}",
                    param="vllm_xargs",
                )
        given = {
            name: {key: value for key, value in arguments.items() if key in taken}
            for name, taken in self.processors.items()
        }
        return [Processor(name, its) for name, its in given.items() if its]

    def _pooled(self, job: Job, labels: list[int]) -> Submit:
        """For a request that wants a vector.
        Raises ContextTooLong if the input is too long and may not be cut."""
        limit = self.limits.context_len
        most = None if job.truncate is None else limit if job.truncate < 0 else min(job.truncate, limit)
        segment, placed = 0, list[Placed]()
        if job.prepared:
            tokens, placed = self.prompt(job)
            positions(job, tokens, placed, limit)
        elif job.text is not None:
            text, pair = self._reachable(job.text, most), job.pair and self._reachable(job.pair, most)
            special, longest = job.add_special_tokens, limit + CUT
            tokens, segment = self.tokenizer.encode_pair(text, pair, special, most, longest)
            self._checked_ids(tokens, "input")
        elif job.token_ids is not None:
            tokens = self._checked_ids(job.token_ids[:most], "input")
        else:
            tokens = self.tokens(job)[:most]
        if len(tokens) > limit:
            raise ContextTooLong(
                f"This model's maximum context length is {limit} tokens. However, your input has "
                f"{len(tokens)} tokens. Please shorten it, or have it cut with truncate_prompt_tokens: -1.",
                param="input",
            )
        for token in labels:
            if not 0 <= token < self.limits.vocab_size:
                raise InvalidField(
                    f"label_token_ids: {token} is not in the vocabulary (0 to {self.limits.vocab_size - 1})",
                    param="label_token_ids",
                )
        sampling = RowSampling(pool=labels)
        return submit_of(
            job,
            0,
            tokens=tokens,
            max_new=0,
            stop_ids=frozenset(),
            sampling=sampling,
            segment=segment,
            sampling_bytes=plan_bytes_of(sampling),
            media=[(shown.first, shown.picture.digest) for shown in placed],
            pictures=placed,
        )

    def tokens(self, job: Job) -> list[int]:
        """The prompt's token ids, checked."""
        if job.suffix is not None:
            self._check_length(job.suffix, "suffix")
            suffix = self._ids(self.tokenizer.encoding(job.suffix, add_special_tokens=False), "suffix")
            return self._infill.tokens(self._before(job), suffix)
        if job.token_ids is not None:
            return self._checked_ids(job.token_ids)
        if job.messages is not None:
            return self._chat(self._fitting(job))
        assert job.text is not None
        return self._encode(job.text, job.add_special_tokens, param="prompt")

    def prompt(self, job: Job) -> tuple[list[int], list[Placed]]:
        """The prompt's token ids, and where its pictures are."""
        check_cut(job)
        if self.speller is None or not job.prepared:
            return self._cut(self.tokens(job), job), []
        return self.speller.prompt(self._fitting(job), self.render, self._encode)

    def _fitting(self, job: Job) -> Job:
        if not job.drop_turns or job.messages is None:
            return job
        return fitting(job, self.limits.context_len, lambda shorter: len(self.prompt(shorter)[0]))

    def _chat(self, job: Job) -> list[int]:
        # As in transformers, BOS is the template's business.
        return self._encode(self.render(job), False, "messages", job.namespace)

    def _before(self, job: Job) -> list[int]:
        """The ids before a gap, which may be none."""
        if job.token_ids is not None:
            return self._checked_ids(job.token_ids)
        return self._encode(job.text, job.add_special_tokens, param="prompt") if job.text else []

    @cached_property
    def _infill(self) -> Infill:
        return Infill(self.tokenizer)

    def _cut(self, tokens: list[int], job: Job) -> list[int]:
        """The part of a prompt that the request wants to keep; see ``Job.keep_last`` and ``Job.truncate``."""
        check_cut(job)
        room = self.limits.context_len - (job.sampling.max_tokens or 1)
        if job.truncate is not None:
            tokens = tokens[: room if job.truncate < 0 else job.truncate]
        if job.keep_last is not None:
            last = room if job.keep_last < 0 else job.keep_last
            tokens = tokens[max(0, len(tokens) - last) :]
        return tokens

    def render(self, job: Job) -> str:
        """The prompt text of a chat."""
        if not job.messages:
            raise InvalidField("messages must have at least one message", param="messages")
        if self.template is None:
            raise BadRequest(
                "the model has no chat template; start the server with "
                "--chat-template FILE or use /v1/completions",
                param="messages",
            )
        options = {
            "tools": job.tools,
            "add_generation_prompt": job.add_generation_prompt,
            "continue_final_message": job.continue_final_message,
        } | job.template_kwargs
        if job.prepared:
            options["placeholders"] = self.limits.media
        if options["continue_final_message"]:
            options["add_generation_prompt"] = False
        return self.template.render(job.messages, **options)

    def _checked_ids(self, ids: list[int], param: str = "prompt") -> list[int]:
        if not ids:
            raise InvalidField(f"the {param} has no tokens; send at least one", param=param)
        try:
            low, high = extremes(ids)
        except struct.error:
            for token in ids:
                if not isinstance(token, SupportsIndex):
                    message = f"the {param} has {token!r}, which is no token id"
                    raise InvalidField(message, param=param) from None
            low, high = min(ids), max(ids)
        if low < 0 or high >= self.limits.vocab_size:
            wrong = low if low < 0 else high
            raise InvalidField(
                f"the {param} has token id {wrong}, the model's vocabulary is 0 to "
                f"{self.limits.vocab_size - 1}",
                param=param,
            )
        return ids

    def _check_length(self, text: str, param: str) -> None:
        """Raise ContextTooLong for a text that no context holds, before it is encoded."""
        limit = self.limits.context_len
        # Only a text far longer than the context can fail this, so the vocabulary is not measured before.
        if len(text) > 16 * limit and len(text) > limit * self.tokenizer.longest_token:
            least = len(text) // self.tokenizer.longest_token
            raise ContextTooLong.of(limit, least, 0, param)

    def _reachable(self, text: str, most: int | None) -> str:
        """The part of an input's text that an input cut to ``most`` tokens may reach;
        raises ContextTooLong if it is not to be cut."""
        if most is None:
            self._check_length(text, "input")
            return text
        short = len(text) <= 16 * self.limits.context_len
        return text if short else text[: 2 * self.limits.context_len * self.tokenizer.longest_token]

    def _encode(self, text: str, add_special_tokens: bool, param: str, space: str | None = None) -> list[int]:
        """``space``: of a conversation, whose turns may be known there."""
        self._check_length(text, param)
        if space is None:
            tokens = self._ids(self.tokenizer.encoding(text, add_special_tokens), param)
        else:
            tokens = self._ids(self.tokenizer.conversation(text, space), param)
        if not tokens:
            raise InvalidField("the prompt is empty; send at least one token", param=param)
        if max(tokens) >= self.limits.vocab_size:
            wrong = next(token for token in tokens if token >= self.limits.vocab_size)
            shown = self.tokenizer.token_bytes(wrong).decode("utf-8", "replace")
            raise BadRequest(f"the model has no embedding for the token {shown!r} (id {wrong})", param=param)
        return tokens

    def _ids(self, encoded: Encoding | array[int], param: str) -> list[int]:
        """Raises ContextTooLong for so many that other threads would wait for the list."""
        if len(encoded) > self.limits.context_len + CUT:
            raise ContextTooLong.of(self.limits.context_len, len(encoded), 0, param)
        return encoded.tolist() if isinstance(encoded, array) else encoded.ids

    def _max_new(self, prompt: int, max_tokens: int | None, clip: bool) -> int:
        limit = self.limits.context_len
        if clip and max_tokens is not None:
            max_tokens = max(1, min(max_tokens, limit - prompt))
        if prompt + (max_tokens or 1) > limit:
            raise ContextTooLong.of(limit, prompt, max_tokens or (1 if prompt == limit else 0))
        return limit - prompt if max_tokens is None else max_tokens

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        self._check_known("stop_token_ids", sampling.stop_token_ids)
        # At the end of a grammar nothing but an end is left.
        ignored = sampling.ignore_eos and sampling.grammar is None
        ends = frozenset() if ignored else self.tokenizer.eos_ids
        return frozenset(token for token in ends if token < self.limits.vocab_size).union(
            sampling.stop_token_ids
        )

    def _check_known(self, param: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self.limits.vocab_size:
                raise InvalidField(
                    f"{param}: {token} is not in the vocabulary (0 to {self.limits.vocab_size - 1})",
                    param=param,
                )

    def _think_limit(self, thinking: Thinking | None, prompt: list[int]) -> ThinkLimit | None:
        if thinking is None:
            return None
        ids = [
            self.tokenizer.encode(tag, add_special_tokens=False) for tag in (thinking.open, thinking.close)
        ]
        if len(ids[0]) > 1 or len(ids[1]) != 1 or ids[1][0] >= self.limits.vocab_size:
            if thinking.wish:
                return None
            raise UnsupportedField(
                f"{thinking.param} is not supported with this model: the "
                "tags of its reasoning are not tokens",
                param=thinking.param,
            )
        tail = self.tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip()
        opened = tail.endswith(thinking.open)  # also for ""
        return ThinkLimit(thinking.tokens, ids[0][0] if ids[0] else -1, ids[1][0], opened)


def extremes(ids: list[int]) -> tuple[int, int]:
    """Smallest and largest id: of long lists three times as fast as ``min`` and ``max``.
    Raises struct.error for what is no int32."""
    column = int32(ids)
    if len(ids) < SHORT:
        return min(ids), max(ids)
    values = np.frombuffer(column, np.int32)
    return int(values.min()), int(values.max())


def check_counts(sampling: SamplingParams, stop_ids: frozenset[int]) -> None:
    if len(sampling.logit_bias) > MAX_BIASES:
        raise InvalidField(
            f"logit_bias may name at most {MAX_BIASES} tokens, got {len(sampling.logit_bias)}",
            param="logit_bias",
        )
    if sampling.min_tokens > 0 and len(stop_ids) > MAX_STOP_IDS:
        raise InvalidField(
            f"min_tokens holds back at most {MAX_STOP_IDS} stop tokens, not {len(stop_ids)}",
            param="min_tokens",
        )


def check_prompt_logprobs(tokens: int, n: int, sampling: RowSampling, most: int) -> None:
    """Raise InvalidField for a prompt of so many tokens with more than ``most`` logprobs in ``n`` choices."""
    count = n * tokens * (1 + sampling.prompt_logprobs + len(sampling.logprob_ids))
    if count > most:
        raise InvalidField(
            f"the answer would have {count} logprobs of the prompt's {tokens} tokens, {most} is the limit "
            "of this request; send a shorter prompt, or ask for fewer choices or alternatives",
            param="prompt_logprobs",
        )


def check_states(tokens: int, width: int, job: Job) -> None:
    """Raise InvalidField for more numbers in the hidden states of so many tokens, or in the experts that they
    go to, than there is room for."""
    if tokens * width > (job.hidden_states or 0):
        routed = job.sampling.routed_experts
        raise InvalidField(
            f"the {'routed experts' if routed else 'hidden states'} of the answer may have {tokens * width} "
            f"numbers, {job.hidden_states} is the limit of this request; send a shorter prompt, or ask for "
            "fewer choices or tokens",
            param="return_routed_experts" if routed else "return_hidden_states",
        )


def check_stops(sampling: SamplingParams) -> None:
    try:
        make_stops(sampling)
    except RegexError as error:
        raise InvalidField(f"stop_regex: {error}", param="stop_regex") from error


def prepare(
    job: Job,
    tokenizer: Tokenizer,
    template: BoundedTemplate | ChatTemplate | None,
    limits: ModelFacts,
    rng: random.Random,
) -> list[Submit]:
    """One Submit for each of the job's ``n`` choices. Raises BadRequest and its kinds."""
    return Preparer(tokenizer, template, limits, rng)(job)


def row_sampling(
    sampling: SamplingParams,
    stop_ids: frozenset[int],
    bad_words: Sequence[list[int]] = (),
) -> RowSampling:
    """What the worker needs of ``sampling`` but for the seed, the grammar and what depends on the prompt;
    ``bad_words`` are its own in tokens."""
    return RowSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(0, sampling.top_k),
        min_p=sampling.min_p,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        repetition=sampling.repetition_penalty,
        ngram=sampling.no_repeat_ngram_size,
        min_tokens=sampling.min_tokens,
        stop_ids=sorted(stop_ids),
        logit_bias=sorted(sampling.logit_bias.items()),
        bad_words=list(bad_words),
        allowed=sorted(set(sampling.allowed_token_ids or ())),
        logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        prompt_logprobs=-1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs,
        logprob_start=sampling.logprob_start,
        logprob_ids=sampling.logprob_token_ids,
        processors=sampling.processors,
        hidden=sampling.hidden_states,
        experts=sampling.routed_experts,
        transcript=sampling.transcript,
    )


def check_cut(job: Job) -> None:
    """Raise UnsupportedField for a prompt with pictures or sounds that is to be cut between tokens."""
    if (job.pictures or job.prepared) and (job.truncate is not None or job.keep_last is not None):
        raise UnsupportedField(
            "truncate_prompt_tokens is not supported beside pictures and sounds; leave it out",
            param="truncate_prompt_tokens",
        )


def fitting(job: Job, context_len: int, length: Callable[[Job], int]) -> Job:
    """A chat without as many of its oldest turns as it takes to fit the context. The system's words stay."""
    messages = job.messages or []
    turns = [i for i, message in enumerate(messages) if message.get("role") == "user"] or [0]
    leading = next((i for i, message in enumerate(messages) if message.get("role") not in SYSTEM), 0)
    room = context_len - (job.sampling.max_tokens or 1)

    def shortened(dropped: int) -> Job:
        return replace(without(job, leading, turns[dropped]) if dropped else job, drop_turns=False)

    def fits(dropped: int) -> bool:
        try:
            return length(shortened(dropped)) <= room
        except ContextTooLong:
            return False

    return shortened(min(bisect_left(range(len(turns)), True, key=fits), len(turns) - 1))


def without(job: Job, start: int, end: int) -> Job:
    """The chat without the messages from ``start`` to ``end`` and their pictures."""
    messages = job.messages or []
    first, gone = pictures_in(messages[:start]), pictures_in(messages[start:end])
    return replace(
        job,
        messages=[*messages[:start], *messages[end:]],
        prepared=[*job.prepared[:first], *job.prepared[first + gone :]],
    )


def pictures_in(messages: Sequence[Mapping[str, Any]]) -> int:
    contents = (message.get("content") for message in messages)
    return sum(part in SHOWN for content in contents if isinstance(content, list) for part in content)


def free_part(grammar: Grammar | None, prompt: list[int], tokenizer: Tokenizer) -> Free:
    """What of an output after ``prompt`` is free; see ``Grammar.after``."""
    if grammar is None or not grammar.after:
        return NOT_FREE
    if grammar.opener:
        tail = tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith(grammar.opener.rstrip()):
            return Free(grammar.after, "")
        if tail.endswith(grammar.after):
            return NOT_FREE
    return Free(grammar.after, grammar.opener)


def child_rid(rid: str, choice: int) -> str:
    """The id of a choice of the job ``rid``."""
    return f"{rid}-{choice}"


def submit_of(job: Job, choice: int, **own: Any) -> Submit:
    """What the scheduler gets of a choice: ``own``, and what its job says of all."""
    return Submit(
        rid=child_rid(job.rid, choice),
        parent=job.rid,
        index=job.index_base + choice,
        client=job.client,
        priority=job.priority,
        yields=job.yields,
        deadline=job.deadline,
        namespace=job.namespace,
        adapter=job.adapter,
        cache_ttl=job.cache_ttl,
        arrival=job.arrival,
        **own,
    )


def choice_seed(seed: int, choice: int) -> int:
    """uint63 for choice ``choice``: the seed itself for the first, a splitmix64 value for the others.

    Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    if choice == 0:
        return seed & MASK63
    z = (seed + choice * GOLDEN) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return (z ^ (z >> 31)) & MASK63
