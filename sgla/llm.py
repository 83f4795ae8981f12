"""``LLM``: vLLM's class for offline use, over ``Engine``.
A script changes one import: ``from sgla import LLM, SamplingParams``.

Arguments and results have the names of vLLM 0.33's ``vllm.LLM`` and ``vllm.outputs``.
What is not supported is refused by name.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sgla.cli.aliases import ALIASES, Alias, Switch
from sgla.cli.settings import settings as fields_of
from sgla.engine import BeamSearchParams, Engine, Output, SamplingParams
from sgla.engine.inputs import is_conversation, is_one
from sgla.engine.params import with_vllms
from sgla.engine.pictures import THINGS
from sgla.errors import ConfigError, InvalidField, UnsupportedField
from sgla.messages import TokenLogprob
from sgla.text.beams import MAX_CANDIDATES

log = logging.getLogger(__name__)

# Keys of vLLM's TextPrompt and TokensPrompt.
TEXT, IDS = "prompt", "prompt_token_ids"
MEDIA, SIZES = "multi_modal_data", "mm_processor_kwargs"


class Logprob(msgspec.Struct):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct, kw_only=True):
    """``finish_reason``: stop | length | abort; ``stop_reason``:
    the stop string or token id that ended it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    hidden_states: list[bytes] | None = None  # see engine.Output

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, kw_only=True):
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """``tokens`` and ``text``: prompt and output; ``logprobs``:
    of each token of the output, its end included."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str
    finish_reason: str
    stop_reason: int | None = None


class BeamSearchOutput(msgspec.Struct):
    """The best sequence first."""

    sequences: list[BeamSearchSequence]


class EmbeddingOutput(msgspec.Struct):
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct):
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(msgspec.Struct):
    score: float


class PooledOutput(msgspec.Struct, kw_only=True):
    """Of ``embed``, ``classify`` and ``score``."""

    request_id: str
    outputs: Any
    finished: bool = True


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter by its name, loaded from ``lora_path`` when it is first asked for. ``lora_int_id`` is vLLM's
    number of it, which has no meaning here."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class LLM:
    """A loaded model. Keywords are vLLM's, and the settings of ``sgla serve`` with ``_`` for ``-``;
    None stands for the default.

    ``with LLM(...) as llm`` or ``llm.close()`` frees it; so does the end of the process.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        self._count = itertools.count()
        self.engine = Engine(model, **translated(settings))

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Any = 0,
    ) -> list[RequestOutput]:
        """Complete prompts:
        a text, token ids, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or a list of such; beside the
        text or the ids there may be ``{"multi_modal_data": {"image": one or several}}``, ``video`` and
        ``audio`` likewise, and ``mm_processor_kwargs``.

        Without ``sampling_params`` the model's own defaults hold, for 16 tokens; what they do not set is
        vLLM's default.
        ``use_tqdm`` None: a bar on a terminal.
        """
        asked = as_list(prompts)
        batch, media = [prompt_of(prompt, True) for prompt in asked], [media_of(one) for one in asked]
        params, adapter = with_vllms(sampling_params), self._adapter(lora_request)
        results = self.engine.generate(
            batch,
            params,
            priority=priority,
            progress=use_tqdm,
            lora_path=adapter,
            **{f"{kind}_data": [each.get(kind) for each in media] for kind in THINGS},
            mm_processor_kwargs=[one.get(SIZES) if isinstance(one, Mapping) else None for one in asked],
        )
        return [self._request(result, prompt) for result, prompt in zip(results, batch)]

    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of them. ``chat_template``: Jinja, instead of the model's."""
        if chat_template_content_format != "auto":
            raise UnsupportedField(
                "chat_template_content_format: the chat template tells how content is rendered; leave it out",
                param="chat_template_content_format",
            )
        kwargs = dict(chat_template_kwargs or {})
        if chat_template is not None:
            kwargs["chat_template"] = chat_template
        batch = [messages] if is_conversation(messages) else list(messages)
        results = self.engine.chat(
            batch,
            with_vllms(sampling_params),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            progress=use_tqdm,
            lora_path=self._adapter(lora_request),
            mm_processor_kwargs=mm_processor_kwargs,
            **kwargs,
        )
        return [self._request(result, None) for result in results]

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool | None = None,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The best beams of each prompt, as ``use_beam_search`` of the server finds them.
        ``concurrency_limit``: prompts at a time; None: 64."""
        refuse(lora_request=lora_request)
        found = self.engine.beam_search(
            [prompt_of(prompt) for prompt in as_list(prompts)],
            params.beam_width,
            params.max_tokens,
            length_penalty=params.length_penalty,
            ignore_eos=params.ignore_eos,
            logprobs=min(2 * params.beam_width, MAX_CANDIDATES),
            concurrency=concurrency_limit or 64,
            progress=use_tqdm,
        )
        return [
            BeamSearchOutput([self._beam(beam, params.include_stop_str_in_output) for beam in beams])
            for beams in found
        ]

    def embed(
        self, prompts: Any, *, use_tqdm: bool | None = None, dimensions: int | None = None
    ) -> list[PooledOutput]:
        """Vectors of an embedding model: ``output.outputs.embedding``. Prompts as of ``generate``."""
        asked = as_list(prompts)
        batch, media = [prompt_of(prompt, True) for prompt in asked], [media_of(one) for one in asked]
        shown: Any = {f"{kind}_data": [each.get(kind) for each in media] for kind in THINGS}
        vectors = self.engine.embed(batch, dimensions=dimensions, progress=use_tqdm, **shown)
        return [self._pooled(EmbeddingOutput(vector.tolist())) for vector in vectors]

    def classify(self, prompts: Any, *, use_tqdm: bool | None = None) -> list[PooledOutput]:
        """Probabilities of a classifier: ``output.outputs.probs``."""
        batch = [prompt_of(prompt) for prompt in as_list(prompts)]
        found = self.engine.classify(batch, progress=use_tqdm)
        return [self._pooled(ClassificationOutput(list(labels.values()))) for labels in found]

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], /, *, use_tqdm: bool | None = None
    ) -> list[PooledOutput]:
        """How well texts fit: one with each of ``data_2``, or pairs at the same places:
        ``output.outputs.score``."""
        left, right = as_list(data_1), as_list(data_2)
        if len(left) == 1:
            values = self.engine.score(left[0], right, progress=use_tqdm)
        elif len(left) == len(right):
            values = [self.engine.score(a, b) for a, b in zip(left, right)]
        else:
            raise ValueError(
                f"data_1 has {len(left)} texts and data_2 has {len(right)}; give one, or as many"
            )
        return [self._pooled(ScoringOutput(value)) for value in values]

    def _adapter(self, asked: Any) -> Any:
        """The names of adapters, which are loaded if need be."""
        if isinstance(asked, Sequence):
            return [self._adapter(one) for one in asked]
        if asked is None:
            return None
        if asked.lora_name not in self.engine.adapters:
            self.engine.load_lora_adapter(asked.lora_name, asked.lora_path)
        return asked.lora_name

    def get_tokenizer(self) -> Any:
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's files recommend, for 16 tokens unless they say otherwise; may be changed."""
        return with_vllms(self.engine.sampling())

    def reset_prefix_cache(self) -> bool:
        return self.engine.flush_cache()

    def sleep(self, level: int = 1) -> None:
        """Give memory back: 1: the KV cache, and what weights take of a GPU; 2: the weights, too."""
        self.engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.engine.wake_up(tags)

    def start_profile(self) -> None:
        """Record what the workers do, until ``stop_profile``; the trace goes to ``profile_folder``."""
        self.engine.start_profile()

    def stop_profile(self) -> list[str]:
        """Write the recording: a file for each rank, which Perfetto shows."""
        return self.engine.stop_profile()

    def close(self) -> None:
        self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _request(self, result: Output | list[Output], prompt: Any) -> RequestOutput:
        choices = result if isinstance(result, list) else [result]
        first = choices[0]
        text = prompt if isinstance(prompt, str) else None
        if prompt is None:  # a chat: what the template made of it
            text = self.engine.tokenizer.decode(first.prompt_tokens, skip_special_tokens=False)
        return RequestOutput(
            request_id=str(next(self._count)),
            prompt=text,
            prompt_token_ids=first.prompt_tokens,
            prompt_logprobs=None if first.prompt_logprobs is None else self._logprobs(first.prompt_logprobs),
            outputs=[self._completion(choice) for choice in choices],
            num_cached_tokens=first.usage.cached_tokens,
        )

    def _completion(self, choice: Output) -> CompletionOutput:
        chosen = choice.logprobs
        return CompletionOutput(
            index=choice.index,
            text=choice.text,
            token_ids=choice.tokens,
            cumulative_logprob=None if chosen is None else sum(one.logprob for one in chosen),
            logprobs=None if chosen is None else self._logprobs(chosen),
            finish_reason=choice.finish,
            stop_reason=choice.matched,
            hidden_states=choice.hidden_states,
        )

    def _beam(self, beam: Output, with_end: bool) -> BeamSearchSequence:
        tokens = beam.prompt_tokens + beam.tokens
        if beam.matched is not None and not with_end:
            tokens.pop()
        logprobs = beam.logprobs or []
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=self._logprobs(logprobs),
            cum_logprob=sum(one.logprob for one in logprobs),
            text=self.engine.tokenizer.decode(tokens, skip_special_tokens=False),
            finish_reason=beam.finish or "length",
            stop_reason=beam.matched if isinstance(beam.matched, int) else None,
        )

    def _logprobs(self, found: Sequence[TokenLogprob | None]) -> list[Any]:
        """Token id -> Logprob for each place: the token that is there, and the likeliest ones."""
        decode = self.engine.tokenizer.decode
        places: list[dict[int, Logprob] | None] = []
        for one in found:
            if one is None:
                places.append(None)
                continue
            likeliest = {
                token: Logprob(logprob, rank, decode([token]))
                for rank, (token, logprob) in enumerate(one.top, 1)
            }
            places.append({one.token: Logprob(one.logprob, one.rank, decode([one.token])), **likeliest})
        return places

    def _pooled(self, outputs: Any) -> PooledOutput:
        return PooledOutput(request_id=str(next(self._count)), outputs=outputs)


def translated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Config from vLLM's keywords and ours. What is so in any case, and values that are understood
    as others, are logged. Raises ConfigError, which names what is not supported."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if value is None:
            continue
        if key == "dtype":
            value = str(value).removeprefix("torch.")
        renamed = isinstance(ALIASES.get(key.replace("_", "-")), Alias | Switch)
        try:
            found |= fields_of(key, value, log.info if renamed else log.warning)
        except ValueError as error:
            raise ConfigError(f"LLM({key}=...): {error}", param=key) from error
    return found


def refuse(**fields: Any) -> None:
    for name, value in fields.items():
        if value is not None:
            raise UnsupportedField(f"{name} is not supported; leave it out", param=name)


def as_list(prompts: Any) -> list[Any]:
    """One prompt or a list of them, as a list."""
    return [prompts] if isinstance(prompts, Mapping) or is_one(prompts) else list(prompts)


def media_of(prompt: Any) -> Mapping[str, Any]:
    """By kind: one or several. Raises UnsupportedField for other kinds."""
    media = prompt.get(MEDIA) if isinstance(prompt, Mapping) else None
    if media is None:
        return {}
    if not isinstance(media, Mapping):
        raise InvalidField(f"{MEDIA} must have keys such as 'image'", param=MEDIA)
    for name, value in media.items():
        if name not in THINGS and value is not None:
            raise UnsupportedField(
                f"{MEDIA} with {name!r} is not supported; {', '.join(THINGS)} are", param=MEDIA
            )
    return media


def prompt_of(prompt: Any, shows: bool = False) -> Any:
    """A text or token ids. ``shows``: there may be media, too. Raises UnsupportedField for other parts of
    a prompt."""
    if not isinstance(prompt, Mapping):
        return prompt
    for name, value in prompt.items():
        if name not in (TEXT, IDS, *((MEDIA, SIZES) if shows else ())) and value is not None:
            raise UnsupportedField(f"a prompt with {name} is not supported; leave it out", param=name)
    found = prompt.get(IDS) if prompt.get(IDS) is not None else prompt.get(TEXT)
    if found is None:
        raise ValueError(f"a prompt must have {TEXT} or {IDS}")
    return found
