"""What runners of a GPU answer is what those of the CPU do, as far as that shows without a GPU. Layers that
keep states and transformers' modules: ``test_interpreted_states.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from interpreted import KINDS, answers_of, check

CASES = {
    "windows, decode": set(),
    "windows, prompts": set(),
    "chunks": set(),
    "picked tokens": set(),
    "entries": set(),
    "picked tokens and sinks": set(),
    "experts that do nothing": {"logprobs"},
    "text": set(KINDS),
    "stages": set(KINDS),
    "weights on the host": {"logprobs"},
    "streams, weights on the host": {"logprobs"},
    "adapters": {"logprobs"},
    "adapters of experts": {"logprobs"},
    "adapters of packed experts": {"logprobs"},
    "prefixes that come late": {"logprobs"},
    "prefixes on a disk": {"logprobs"},
    "prefixes with windows": {"logprobs"},
    "prefixes of latents": {"logprobs"},
    "prefixes for others": {"logprobs"},
    "prefixes for others on a GPU": {"logprobs"},
    "after a sleep": {"logprobs"},
    "pages of int8": {"logprobs"},
    "pages of int4": {"logprobs"},
    "toy family": {"logprobs"},
    "toy latent": {"logprobs"},
    "toy format": {"logprobs"},
    "experts in mxfp4": {"logprobs", "states"},
    "layer norm": {"logprobs"},
    "rising scores": {"logprobs"},
    "last": {"vector"},
    "mean": {"vector"},
    "encoder": {"vector"},
    "rotary encoder": {"vector"},
    "encoder that shares keys": {"vector"},
    "norms of heads": {"logprobs"},
}
NEAR = "encoder in bfloat16"


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return answers_of([*CASES, NEAR])


@pytest.mark.parametrize(("case", "kinds"), CASES.items())
def test_a_gpu_answers_as_a_cpu(answers: dict[str, Any], case: str, kinds: set[str]) -> None:
    check(answers[case], kinds)


@pytest.mark.slow
def test_prefixes_come_back_from_the_host() -> None:
    """Those on a disk come back by the same memory."""
    check(answers_of(["prefixes on the host"])["prefixes on the host"], {"logprobs"})


def test_an_encoder_in_bfloat16_is_near(answers: dict[str, Any]) -> None:
    both = answers[NEAR]
    for rid, expected in both["cpu"].items():
        a, b = np.array(expected["vector"]), np.array(both["gpu"][rid]["vector"])
        assert 0 < np.linalg.norm(a - b) < 0.03 * np.linalg.norm(a)
