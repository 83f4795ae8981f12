"""Layers on the host: the same tokens as without, from graphs as from eager steps."""

from __future__ import annotations

from typing import Any

import pytest
from test_gpu_runner import TINY, agreement, assert_same_bits, generate, make, prompt, twice

DEEP = TINY | {"num_hidden_layers": 7}
PROMPTS = {slot: prompt(slot, 20 + 13 * slot) for slot in range(8)}


@pytest.fixture(scope="module")
def runner() -> Any:
    """All layers but one are on the host."""
    made = make(DEEP, cpu_offload_gb=0.15, kv_cache_bytes=512 << 20)  # pages for 24 slots
    assert any("the matrices of 6 of 7 layers" in note for note in made.notes), made.notes
    return made


def test_layers_on_the_host_do_not_change_the_tokens(runner: Any) -> None:
    """Rules do not reach across the layers' ends, so sums may be those of other kernels."""
    plain = generate(make(DEEP), PROMPTS, 12, True)
    away = generate(runner, PROMPTS, 12, True)
    assert agreement(plain, away) >= 0.8


def test_the_same_sums_are_the_same_tokens() -> None:
    plain, away = (
        generate(make(DEEP, deterministic=True, cpu_offload_gb=gib), PROMPTS, 12, True) for gib in (0.0, 0.15)
    )
    assert plain == away


def test_copies_are_part_of_graphs(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = twice(runner.graphs, monkeypatch, "_graphs", runner.graphs._forward)
    for rows in (1, 3, 8, 20):
        kept.clear()
        generate(runner, {slot: prompt(slot, 30 + slot) for slot in range(rows)}, 4, True)
        assert len(kept) == 3
        for both in kept:
            assert_same_bits(both, rows, logits=False)
