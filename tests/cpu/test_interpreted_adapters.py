"""Rows of several adapters in graphs of a GPU, without one: ``interpreted_adapters.py``."""

from __future__ import annotations

import json

import pytest
from forked import run_script
from interpreted import check


@pytest.mark.parametrize("model", ["dense", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_rows_whose_adapters_differ_answer_as_on_a_cpu(model: str) -> None:
    """In graphs of their own."""
    found = json.loads(run_script("interpreted_adapters.py", model)[-1])
    check(found, {"logprobs"})
    assert min(found["ran"][kind] for kind in ("_adapted", "_apart")) > 2
