"""Rows of several adapters in graphs of a GPU, without one: ``interpreted_adapters.py``."""

from __future__ import annotations

import json

from forked import run_script
from interpreted import check


def test_rows_whose_adapters_differ_answer_as_on_a_cpu() -> None:
    """In graphs of their own."""
    found = json.loads(run_script("interpreted_adapters.py")[-1])
    check(found, {"logprobs"})
    assert min(found["ran"][kind] for kind in ("_adapted", "_apart")) > 2
