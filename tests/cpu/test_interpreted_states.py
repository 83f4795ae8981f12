"""As ``test_interpreted_runner.py``: layers that keep states, and transformers' modules."""

from __future__ import annotations

from typing import Any

import pytest
from interpreted import answers_of, check

CASES = {
    "states": {"logprobs"},
    "module": {"logprobs"},
    "one part in each layer": {"logprobs"},
    "states in a store": {"logprobs"},
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return answers_of(list(CASES))


@pytest.mark.parametrize(("case", "kinds"), CASES.items())
def test_a_gpu_answers_as_a_cpu(answers: dict[str, Any], case: str, kinds: set[str]) -> None:
    check(answers[case], kinds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "states on the host",
        "module with wider keys",
        "delta of channels",
        "a scan beside attention",
        "convolutions",
        "convolutions, local attention",
        "scans alone",
        "lightning",
        "module with windows",
    ],
)
def test_others_answer_as_a_cpu(case: str) -> None:
    """Copies are shown by states in a store, kernels of these by their own tests."""
    check(answers_of([case])[case], set() if case == "module with windows" else {"logprobs"})
