"""Request fields -> ``SamplingParams``: aliases, the model's own defaults, stop lists, logit biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgla.errors import InvalidField
from sgla.http.request.grammar import grammar_of
from sgla.http.request.schema import MAX_STOP_CHARS, MAX_STOPS, RANGES, TOKENS, SamplingFields
from sgla.messages import SamplingParams

# The fields of generation_config.json that change how tokens are chosen.
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
PLAIN = (*MODEL_DEFAULTS, "presence_penalty", "frequency_penalty", "n", "ignore_eos", "stop_token_ids")
SWITCHES = ("skip_special_tokens", "spaces_between_special_tokens")


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling defaults that a model's generation_config.json states, where they are valid."""
    return {
        name: value
        for name in MODEL_DEFAULTS
        if isinstance(value := generation_config.get(name), (int, float)) and value in RANGES[name]
    }


def sampling_params(
    fields: SamplingFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Raises InvalidField. ``defaults`` stands in for fields that the request leaves out or sets to null."""
    chosen = dict(defaults)
    for name in (*PLAIN, *SWITCHES):
        value = getattr(fields, name)
        if value is not None:
            chosen[name] = value
    check_ids(fields.stop_token_ids)
    return SamplingParams(
        **chosen,
        seed=first(fields.seed, fields.sampling_seed),
        logit_bias=logit_bias(fields.logit_bias),
        min_tokens=first(fields.min_tokens, fields.min_new_tokens, 0),
        max_tokens=max_tokens,
        stop=stop_list(fields.stop),
        include_stop_str_in_output=bool(fields.no_stop_trim or fields.include_stop_str_in_output),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar_of(fields),
    )


def first(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def stop_list(stop: str | list[str] | None) -> list[str]:
    """Stop strings without empty ones. Raises InvalidField for too many or too long ones."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise InvalidField(f"stop may list at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
    if any(len(text) > MAX_STOP_CHARS for text in stops):
        raise InvalidField(f"a stop string may have at most {MAX_STOP_CHARS} characters", param="stop")
    return [text for text in stops if text]


def check_ids(ids: list[int] | None) -> None:
    if ids is None:
        return
    if len(ids) > MAX_STOPS:
        raise InvalidField(
            f"stop_token_ids may list at most {MAX_STOPS} ids, got {len(ids)}", param="stop_token_ids"
        )
    if any(not 0 <= token < 2**31 for token in ids):
        raise InvalidField("stop_token_ids must be token ids: integers of at least 0", param="stop_token_ids")


def logit_bias(bias: Mapping[str, float] | None) -> dict[int, float]:
    """``{"id": bias}`` with integer keys. Raises InvalidField for a key that is no id or a bias outside [-100, 100]."""
    result = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidField(f"logit_bias: keys must be token ids, got {key[:32]!r}", param="logit_bias")
        if not -100 <= value <= 100:
            raise InvalidField(
                f"logit_bias: values must be between -100 and 100, got {value}", param="logit_bias"
            )
        result[int(key)] = value
    return result


def check_max_tokens(name: str, value: int | None, echo: bool = False) -> None:
    """Zero output tokens make sense only where the prompt itself is returned."""
    if value == 0 and not echo:
        raise InvalidField(f"{name} must be {TOKENS}, got 0", param=name)
