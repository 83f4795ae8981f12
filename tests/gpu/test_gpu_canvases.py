"""A model that writes blocks on a GPU: what the CPU writes, together, alone and in small steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from test_diffusion import BLOCK, REQUESTS, save_model
from tiny import make_core, run, tiny_config

from sgla.hub.source import ModelSource
from sgla.worker.start_cpu import cpu_runner
from sgla.worker.start_gpu import cuda_runner


@pytest.fixture(scope="module")
def source(tmp_path_factory: Any) -> ModelSource:
    return save_model(tmp_path_factory.mktemp("diffusion"))[1]


def gpu(source: ModelSource, **settings: Any) -> Any:
    config = tiny_config(**{"device": "cuda", "kv_cache_bytes": 64 << 20, **settings})
    return cuda_runner(config, source, 0, 1, "", lambda progress: None)


def test_equal_to_the_cpu(source: ModelSource) -> None:
    host: Any = cpu_runner(tiny_config(), source, 0, 1, "", lambda progress: None)
    expected = run(host, REQUESTS, make_core(host.facts)).tokens()
    runner = gpu(source)
    assert runner.facts.canvas == BLOCK
    assert run(runner, REQUESTS, make_core(runner.facts)).tokens() == expected
    for request in REQUESTS:
        limits = {"step_tokens": 2 * BLOCK, "prefix_cache": False}
        found = run(runner, [request], make_core(runner.facts, **limits))
        assert found.tokens() == {request.rid: expected[request.rid]}


def test_bfloat16_writes_whole_blocks(source: ModelSource) -> None:
    runner = gpu(source, dtype="bfloat16")
    found = run(runner, REQUESTS, make_core(runner.facts))
    assert {len(tokens) for tokens in found.tokens().values()} == {2 * BLOCK}
    assert found.tokens() == run(runner, REQUESTS, make_core(runner.facts)).tokens()
    torch.cuda.empty_cache()
