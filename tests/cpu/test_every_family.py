"""Of every family: a prompt in chunks, behind a warm cache and over two ranks gives the same tokens as alone.
Some of this holds for each commit (``test_families.py`` and others), all of it each night."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_families
import test_hybrids
import test_mamba
import test_mixtures
from checkpoints import random_prompts, save_checkpoint
from tiny import make_core, over_two_ranks, run, submit, tiny_config

from sgla.errors import ConfigError
from sgla.hub.source import open_source
from sgla.worker.cpu import CpuRunner

PROMPTS = random_prompts([1, 7, 33, 90])
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{module.__name__.removeprefix('test_')}: {name}": family
    for module in (test_families, test_mixtures, test_hybrids, test_mamba)
    for name, family in module.FAMILIES.items()
}

UNSPLIT = {"hybrids: qwen3-next, one head for each, mixed"}  # three heads of keys


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
async def test_chunks_caches_and_ranks_change_nothing(name: str, tmp_path: Path) -> None:
    model_type, changes = FAMILIES[name]
    save_checkpoint(tmp_path, model_type, **changes)
    source = open_source(tmp_path)
    requests = [submit(str(i), prompt, 8) for i, prompt in enumerate(PROMPTS)]
    runner = CpuRunner(tiny_config(), source, 0, 1, "", lambda progress: None)
    expected = run(runner, requests).tokens()
    core = make_core(runner.facts, step_tokens=24)
    assert run(runner, requests, core).tokens() == expected
    warm = run(runner, requests, core)
    assert warm.tokens() == expected
    assert any(delta.cached_tokens for deltas in warm.values() for delta in deltas)
    if name in UNSPLIT:
        with pytest.raises(ConfigError, match="cannot be split over 2 ranks"):
            await over_two_ranks(source, requests)
        return
    assert (await over_two_ranks(source, requests)).tokens() == expected
