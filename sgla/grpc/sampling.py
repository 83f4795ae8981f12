"""Sampling parameters of both protocols as the fields of HTTP, so that both mean and refuse the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from sgla.http.request.schema import (
    MAX_STOPS,
    NativeSampling,
    check_count,
    check_ranges,
    unsupported,
)
from sgla.messages import MAX_BIASES

MAX_GUIDED = 4096  # texts of which an output may be one


def decimal(value: float) -> float:
    """The shortest decimal that float32 has as ``value``: what the client wrote."""
    return float(str(np.float32(value)))


def refuse(fields: Any, names: Collection[str], detail: str = "") -> None:
    """Raise UnsupportedField for the first of these fields that asks for something."""
    for field, value in fields.ListFields():
        if field.name in names and (field.message_type is None or field.is_repeated or value.ByteSize()):
            raise unsupported(field.name, detail)


def native(params: Any) -> NativeSampling:
    """What both protocols have; they cannot tell a 0 from what is not set. Raises InvalidField."""
    check_count("stop", params.stop, MAX_STOPS)
    check_count("stop_token_ids", params.stop_token_ids, MAX_STOPS)
    check_count("logit_bias", params.logit_bias, MAX_BIASES)
    return NativeSampling(
        top_p=decimal(params.top_p or 1.0),
        min_p=decimal(params.min_p),
        frequency_penalty=decimal(params.frequency_penalty),
        presence_penalty=decimal(params.presence_penalty),
        repetition_penalty=decimal(params.repetition_penalty or 1.0),
        top_k=params.top_k,
        n=params.n or 1,
        stop=list(params.stop),
        stop_token_ids=list(params.stop_token_ids),
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        ignore_eos=params.ignore_eos,
        logit_bias={str(token): decimal(bias) for token, bias in params.logit_bias.items()},
    )


def checked(fields: NativeSampling) -> NativeSampling:
    """Raises InvalidField for a number outside its range."""
    check_ranges(fields, "sampling_params.")
    return fields
