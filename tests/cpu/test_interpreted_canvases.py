"""Blocks that come out of noise on the runner of a GPU, as far as that shows without a GPU."""

from __future__ import annotations

import json

from forked import run_script


def test_a_gpu_writes_as_a_cpu() -> None:
    found = json.loads(run_script("interpreted_canvases.py")[-1])
    assert found["gpu"] == found["cpu"]
    assert found["cpu"]["together"] == found["cpu"]["alone"]
