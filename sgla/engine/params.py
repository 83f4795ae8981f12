"""``SamplingParams`` as callers of ``Engine`` and ``LLM`` write them:
the fields of the message of that name, and vLLM's beside."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from sgla import messages
from sgla.defaults import REPETITION, SAMPLING, TOKENS, number
from sgla.engine.inputs import kind
from sgla.engine.pictures import each
from sgla.errors import InvalidField, UnsupportedField
from sgla.messages import MAX_GRAMMAR, STRUCTURED_OUTPUTS, Grammar, whitespace_of
from sgla.validation import Range, fault, root

WITH_DEFAULTS = (*SAMPLING, REPETITION)  # fields that a model or the user may have defaults for
COUNTS = {
    "n": Range(1, 65_536),
    "min_tokens": Range(0, TOKENS.high),
    "logprobs": Range(0, TOKENS.high),
    "prompt_logprobs": Range(-1, TOKENS.high),
    "logprob_start": Range(0, TOKENS.high),
}
PRIORITY = Range(-(2**31), 2**31 - 1)
LARGEST = 1e30  # bias, beside which no logit counts
VLLMS = messages.SamplingParams()
MISSING = ("logits_processors", "extra_args", "best_of", "truncate_prompt_tokens", "thinking_token_budget")


class StructuredOutputsParams(msgspec.Struct, kw_only=True):
    """What an output must look like; one of the first six fields (vLLM's class of this name).

    ``disable_any_whitespace``: False leaves the space between JSON tokens free.
    ``disable_additional_properties``: whether objects are closed whose schema does not say; None: as the
    engine is set.
    """

    json: str | bool | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool = False
    backend: str | None = None

    def as_grammar(self) -> Grammar:
        """Raises InvalidField unless exactly one kind is asked for."""
        asked = [name for name in STRUCTURED_OUTPUTS if getattr(self, name) not in (None, False)]
        if len(asked) != 1:
            raise InvalidField(
                f"structured_outputs must have one of {', '.join(STRUCTURED_OUTPUTS)}, not {len(asked)}",
                param="structured_outputs",
            )
        value = getattr(self, asked[0])
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        if len(text) > MAX_GRAMMAR:
            raise InvalidField(
                f"structured_outputs has {len(text)} characters; {MAX_GRAMMAR} is the limit",
                param="structured_outputs",
            )
        return Grammar(
            kind=STRUCTURED_OUTPUTS[asked[0]],
            text="" if asked[0] == "json_object" else text,
            whitespace=whitespace_of(self.disable_any_whitespace, self.whitespace_pattern),
            additional=None
            if self.disable_additional_properties is None
            else not self.disable_additional_properties,
            param="structured_outputs",
        )


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """vLLM's class of this name.
    ``temperature`` changes nothing, since beams are ranked by the model's own logprobs."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False


class SamplingParams(messages.SamplingParams, frozen=False, kw_only=True, repr_omit_defaults=True):  # type: ignore[misc]
    """How to choose the tokens of a request; see ``sgla.messages.SamplingParams``.
    May be changed until it is used.

    As with vLLM, ``stop`` and ``bad_words`` may be one string, and lists and dicts may be None. A field that
    is UNSET has the model's own default with ``Engine``, and vLLM's with ``LLM``.
    """

    temperature: float | UnsetType = UNSET  # type: ignore[assignment]
    top_p: float | UnsetType = UNSET  # type: ignore[assignment]
    top_k: int | UnsetType = UNSET  # type: ignore[assignment]
    min_p: float | UnsetType = UNSET  # type: ignore[assignment]
    presence_penalty: float | UnsetType = UNSET  # type: ignore[assignment]
    frequency_penalty: float | UnsetType = UNSET  # type: ignore[assignment]
    repetition_penalty: float | UnsetType = UNSET  # type: ignore[assignment]
    no_repeat_ngram_size: int | UnsetType = UNSET  # type: ignore[assignment]
    max_tokens: int | UnsetType | None = UNSET  # type: ignore[assignment]
    repetition_detection: messages.Repetition | UnsetType | None = UNSET  # type: ignore[assignment]
    stop: str | list[str] | None = None  # type: ignore[assignment]
    stop_regex: str | list[str] | None = None  # type: ignore[assignment]
    bad_words: str | list[str] | None = None  # type: ignore[assignment]
    stop_token_ids: list[int] | None = None  # type: ignore[assignment]
    logit_bias: dict[int, float] | None = None  # type: ignore[assignment]
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    detokenize: bool = True  # outputs have their text in any case
    flat_logprobs: bool = False
    output_kind: Any = None
    logits_processors: Any = None
    extra_args: dict[str, Any] | None = None
    best_of: int | None = None
    truncate_prompt_tokens: int | None = None


def with_vllms(given: Any) -> Any:
    """SamplingParams, or each of a list, in which nothing is UNSET; other values as they are."""
    if isinstance(given, (list, tuple)):
        found = {id(one): with_vllms(one) for one in given}
        return [found[id(one)] for one in given]
    if not isinstance(given, SamplingParams):
        return given
    unset = [name for name in WITH_DEFAULTS if getattr(given, name) is UNSET]
    return msgspec.structs.replace(given, **{name: getattr(VLLMS, name) for name in unset})


def is_constrained(given: messages.SamplingParams) -> bool:
    return any(getattr(given, name, None) is not None for name in ("grammar", "structured_outputs"))


def resolved(
    given: messages.SamplingParams, defaults: Mapping[str, Any] = MappingProxyType({})
) -> messages.SamplingParams:
    """The message that ``given`` means, with ``defaults`` where it is UNSET; a message is returned as it is.
    Raises InvalidField and UnsupportedField, which name the field."""
    if type(given) is messages.SamplingParams:
        return given
    if not isinstance(given, messages.SamplingParams):
        raise InvalidField(f"sampling must be SamplingParams(...), got {kind(given)}", param="sampling")
    for name in MISSING:
        value = getattr(given, name, None)
        if value is not None and not (name == "best_of" and value == given.n):
            raise UnsupportedField(f"{name} is not supported; leave it out", param=name)
    fields = {name: getattr(given, name) for name in messages.SamplingParams.__struct_fields__}
    fields = {name: value for name, value in fields.items() if value is not UNSET}
    fields = {**defaults, **fields}
    for name in ("stop", "stop_regex", "bad_words"):
        value = fields[name]
        fields[name] = ([value] if value else []) if isinstance(value, str) else value
    for name in ("stop", "stop_regex", "bad_words", "stop_token_ids", "logit_bias"):
        if fields[name] is None:
            del fields[name]
    asked = getattr(given, "structured_outputs", None)
    if asked is not None:
        if fields["grammar"] is not None:
            raise InvalidField(
                "structured_outputs and grammar exclude each other", param="structured_outputs"
            )
        fields["grammar"] = convert(asked, StructuredOutputsParams, "structured_outputs").as_grammar()
    for name in SAMPLING:
        if fields.get(name) is not None:
            try:
                fields[name] = number(name, fields[name])
            except ValueError as error:
                raise InvalidField(f"{name} {error}", param=name) from None
    found: messages.SamplingParams = convert(fields, messages.SamplingParams, None)
    for name, fits in COUNTS.items():
        value = getattr(found, name)
        if value is not None and value not in fits:
            raise InvalidField(f"{name} must be an integer {fits}, not {value}", param=name)
    for token, bias in found.logit_bias.items():
        if not (abs(bias) <= LARGEST or bias == -math.inf):
            raise InvalidField(
                f"logit_bias: token {token} has {bias}; give numbers of at most {LARGEST:g}, or -inf",
                param="logit_bias",
            )
    return found


def priorities(given: Any, count: int) -> list[int]:
    """Of each of ``count`` requests. Raises InvalidField, and ValueError for others than so many."""
    found: list[int] = each(given, count, "priorities")
    for value in found:
        check_count("priority", value, PRIORITY)
    return found


def check_count(name: str, value: Any, fits: Range) -> None:
    """Raise InvalidField for what is no such integer."""
    if type(value) is not int or value not in fits:
        raise InvalidField(f"{name} must be an integer {fits}, got {repr(value)[:99]}", param=name)


def convert(value: Any, kind: Any, param: str | None) -> Any:
    """``value`` as ``kind``, whose types it must have. Raises InvalidField."""
    try:
        return value if isinstance(value, kind) else msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        path, text = fault(error, kind)
        raise InvalidField(
            f"{param or 'sampling parameters'}: {text}", param=param or root(path) or None
        ) from None
