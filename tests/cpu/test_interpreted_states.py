"""As ``test_interpreted_runner.py``: layers that keep states, and transformers' modules."""

from __future__ import annotations

from typing import Any

import pytest
from interpreted import answers_of, check

CASES = {
    "states": {"logprobs"},
    "module": {"logprobs"},
    "module with windows": set(),
    "module with wider keys": {"logprobs"},
    "convolutions": {"logprobs"},
    "delta of channels": {"logprobs"},
    "a scan beside attention": {"logprobs"},
    "one part in each layer": {"logprobs"},
    "scans alone": {"logprobs"},
    "states in a store": {"logprobs"},
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return answers_of(list(CASES))


@pytest.mark.parametrize(("case", "kinds"), CASES.items())
def test_a_gpu_answers_as_a_cpu(answers: dict[str, Any], case: str, kinds: set[str]) -> None:
    check(answers[case], kinds)


@pytest.mark.slow
def test_states_on_the_host_come_back() -> None:
    """What copies do is shown by states in a store, and by prefixes on the host."""
    check(answers_of(["states on the host"])["states on the host"], {"logprobs"})
