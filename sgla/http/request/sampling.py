"""Request fields -> ``SamplingParams``: aliases, the model's own defaults, stop lists, logit biases."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from sgla.defaults import SAMPLING, Defaults
from sgla.errors import InvalidField
from sgla.http.request.grammar import grammar_of
from sgla.http.request.schema import (
    MAX_ALLOWED,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_STOPS_CHARS,
    SamplingFields,
    check_count,
)
from sgla.messages import MAX_BIASES, Processor, SamplingParams, int32

PLAIN = (
    *(name for name in SAMPLING if name != "max_tokens"),
    "n",
    "ignore_eos",
    "stop_token_ids",
    "repetition_detection",
)
BUDGETS = ("thinking_token_budget", "thinking_budget", "max_thinking_tokens")  # vLLM's, DashScope's, SGLang's
MAX_WORDS = 256
MAX_PROCESSORS = 16
SWITCHES = ("skip_special_tokens", "spaces_between_special_tokens")


def sampling_params(
    fields: SamplingFields,
    defaults: Defaults,
    *,
    max_tokens: int | None,
    words: bool = False,
    usual: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    logprob_token_ids: list[int] | None = None,
    hidden_states: bool | None = None,
) -> SamplingParams:
    """Raises InvalidField. ``defaults`` stands in for fields that the request leaves out or sets to null;
    ``words``: of a chat that has no tools; ``usual`` as in ``Defaults.max_tokens``."""
    grammar = grammar_of(fields)
    chosen = dict((defaults.in_words() if words and grammar is None else defaults).values)
    for name in (*PLAIN, *SWITCHES):
        value = getattr(fields, name)
        if value is not None:
            chosen[name] = value
    check_ids("stop_token_ids", fields.stop_token_ids, MAX_STOPS)
    check_ids("allowed_token_ids", fields.allowed_token_ids, MAX_ALLOWED)
    if fields.allowed_token_ids == []:
        raise InvalidField("allowed_token_ids: the list is empty", param="allowed_token_ids")
    chosen["max_tokens"] = defaults.max_tokens(usual) if max_tokens is None else max_tokens
    return SamplingParams(
        **chosen,
        seed=first(fields.seed, fields.sampling_seed),
        logit_bias=logit_bias(fields.logit_bias),
        bad_words=bad_words(fields.bad_words),
        allowed_token_ids=fields.allowed_token_ids,
        min_tokens=first(fields.min_tokens, fields.min_new_tokens, 0),
        stop=stop_list("stop", fields.stop),
        stop_regex=stop_list("stop_regex", fields.stop_regex),
        include_stop_str_in_output=bool(fields.no_stop_trim or fields.include_stop_str_in_output),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=logprob_token_ids or [],
        hidden_states=bool(hidden_states),
        grammar=grammar,
        processors=processors(fields),
    )


def processors(fields: SamplingFields) -> list[Processor]:
    """Those that ``logits_processors`` names, alone or as vLLM's ``qualname`` and ``kwargs``, and those of
    ``vllm_xargs``: ``{NAME: {argument: value}}``, or flat as vLLM's, ``{"NAME.argument": value}`` or
    ``{argument: value}``. The engine knows which there are."""
    asked = []
    check_count("logits_processors", fields.logits_processors or [], MAX_PROCESSORS)
    for item in fields.logits_processors or []:
        named = {"qualname": item} if isinstance(item, str) else item
        name, arguments = named.get("qualname"), named.get("kwargs") or {}
        if not isinstance(name, str) or not name or not isinstance(arguments, dict) or named.get("args"):
            raise InvalidField(
                "logits_processors must be names, or objects with a qualname and kwargs",
                param="logits_processors",
            )
        asked.append(Processor(name, arguments))
    check_count("vllm_xargs", fields.vllm_xargs or {}, MAX_PROCESSORS)
    given: dict[str, dict[str, Any]] = {}
    for key, value in (fields.vllm_xargs or {}).items():
        name, _, argument = (key, "", "") if isinstance(value, dict) else key.rpartition(".")
        given.setdefault(name, {}).update(value if isinstance(value, dict) else {argument: value})
    asked += [Processor(name, arguments) for name, arguments in given.items()]
    return asked


def first(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def stop_list(name: str, stop: str | list[str] | None) -> list[str]:
    """Stops without empty ones. Raises InvalidField for too many or too long ones."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise InvalidField(f"{name} may list at most {MAX_STOPS} strings, got {len(stops)}", param=name)
    if any(len(text) > MAX_STOP_CHARS for text in stops):
        raise InvalidField(f"{name}: a string may have at most {MAX_STOP_CHARS} characters", param=name)
    if sum(map(len, stops)) > MAX_STOPS_CHARS:
        raise InvalidField(f"{name} may have at most {MAX_STOPS_CHARS} characters in all", param=name)
    return [text for text in stops if text]


def bad_words(words: list[str] | None) -> list[str]:
    if len(words or []) > MAX_WORDS or any(len(word) > MAX_STOP_CHARS for word in words or []):
        raise InvalidField(
            f"bad_words may list at most {MAX_WORDS} words of at most {MAX_STOP_CHARS} characters",
            param="bad_words",
        )
    return words or []


def check_ids(name: str, ids: list[int] | None, most: int | None = None) -> None:
    if ids is None:
        return
    if most is not None and len(ids) > most:
        raise InvalidField(f"{name} may list at most {most} ids, got {len(ids)}", param=name)
    if not are_ids(ids):
        raise InvalidField(f"{name} must be token ids: integers of at least 0", param=name)


def are_ids(ids: Sequence[Any]) -> bool:
    """Whether all are integers from 0 to 2^31 - 1: those whose highest byte is below 128."""
    try:
        return int32(ids)[3::4].isascii()
    except struct.error:
        return False


def logit_bias(bias: Mapping[str, float] | None) -> dict[int, float]:
    """``{"id": bias}`` with integer keys.
    Raises InvalidField for a key that is no id or a bias outside [-100, 100]."""
    result = {}
    check_count("logit_bias", bias or {}, MAX_BIASES)
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidField(f"logit_bias: keys must be token ids, got {key[:32]!r}", param="logit_bias")
        if not -100 <= value <= 100:
            raise InvalidField(
                f"logit_bias: values must be between -100 and 100, got {value}", param="logit_bias"
            )
        result[int(key)] = value
    return result
