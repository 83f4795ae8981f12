"""What ends a request where its logits give no token. Samplers put one of these in the place of the token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sgla.messages import Failed

NOT_NUMBERS = -1  # the largest logit is +inf, or one is NaN
NONE_LEFT = -2  # all logits are -inf

BROKEN = (
    "they are NaN or infinite. The model's weights are broken, or overflow for this input; "
    "try another checkpoint, --dtype float32, or no --quantization"
)


def no_token(row: int, fault: int, ruled: bool) -> Failed:
    """``fault``: NOT_NUMBERS or NONE_LEFT. ``ruled``: the request has rules or a grammar of its own."""
    if fault == NOT_NUMBERS:
        return Failed(row, f"the logits of the next token are no numbers: {BROKEN}", fault=True)
    if ruled:
        return Failed(
            row,
            "no token is left to choose: what this request forbids is all that its grammar, its allowed "
            "tokens or the model leave",
        )
    return Failed(row, "no token is left to choose: the model gives every token the logit -inf", fault=True)


def no_logprobs(row: int) -> Failed:
    return Failed(row, f"logprobs cannot be computed: of logits, {BROKEN}", fault=True)


def of_vector(row: int, values: NDArray[np.float32], labels: bool) -> list[Failed]:
    """The failure of a row whose vector holds what is no number.
    ``labels``: the values are log-probabilities of labels, of which one may be -inf."""
    if labels:
        return [no_logprobs(row)] if np.isnan(values).any() else []
    why = f"the vector's values are no numbers: {BROKEN}"
    return [] if np.isfinite(values).all() else [Failed(row, why, fault=True)]
