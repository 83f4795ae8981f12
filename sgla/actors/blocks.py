"""What requests cannot ask of a model that writes a block of tokens at a time."""

from __future__ import annotations

from typing import Any

from sgla.errors import UnsupportedField
from sgla.messages import SamplingParams

# Fields that are about each token given those before it, with what asks for nothing.
OF_TOKENS: dict[str, Any] = {
    "logprobs": None,
    "prompt_logprobs": None,
    "logprob_token_ids": [],
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "logit_bias": {},
    "bad_words": [],
    "allowed_token_ids": None,
    "min_tokens": 0,
    "processors": [],
    "hidden_states": False,
}
NAMES = {"processors": "logits_processors", "hidden_states": "return_hidden_states"}


def check_blocks(sampling: SamplingParams) -> None:
    """Raises UnsupportedField."""
    asked = [NAMES.get(name, name) for name, plain in OF_TOKENS.items() if getattr(sampling, name) != plain]
    if sampling.grammar is not None:
        asked.append(sampling.grammar.param)
    if sampling.thinking is not None and not sampling.thinking.wish:
        asked.append(sampling.thinking.param)
    if asked:
        raise UnsupportedField(
            f"{asked[0]} is not supported by this model, which writes a block of tokens at a time; leave it "
            "out",
            param=asked[0],
        )
