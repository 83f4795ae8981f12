"""Answers of runners of a GPU beside those of the CPU, from ``interpreted_gpu.py``."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from forked import run_script

KINDS = "logprobs", "vector", "states"


def answers_of(cases: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_script("interpreted_gpu.py", *cases)[-1])
    return found


def check(both: dict[str, Any], kinds: set[str]) -> None:
    """Whether both answer alike, and which ``kinds`` of answers there are."""
    cpu, gpu = both["cpu"], both["gpu"]
    assert cpu.keys() == gpu.keys()
    assert {kind for found in gpu.values() for kind in KINDS if found[kind]} == kinds
    for rid, expected in cpu.items():
        assert gpu[rid]["tokens"] == expected["tokens"]
        for kind in KINDS:
            np.testing.assert_allclose(gpu[rid][kind], expected[kind], atol=2e-5, rtol=1e-4)
