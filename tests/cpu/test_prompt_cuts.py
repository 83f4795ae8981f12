"""Tiles of prompts are cut so that few with long histories keep all multiprocessors busy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgla.attention.base import cut
from sgla.kernels.cuda import prompt_attention

lengths = st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 400)), min_size=1, max_size=6)


@given(rows=lengths, heads=st.integers(1, 8), pattern=st.lists(st.integers(1, 16), min_size=1, max_size=5))
def test_parts_have_each_key_once(rows: list[tuple[int, int]], heads: int, pattern: list[int]) -> None:
    starts, counts = np.array(rows).T
    tiles = cut(np.arange(len(rows)), starts, counts, 0, 32)
    blocks = -(-(tiles[:, 2] + tiles[:, 3]) // prompt_attention.KEYS)
    for chosen in (prompt_attention.parts_of(tiles, heads, 132), np.resize(pattern, len(tiles))):
        if chosen is None:
            continue
        wanted = np.minimum(chosen, blocks)
        made = prompt_attention.cut(tiles, wanted)
        seen: dict[tuple[int, ...], list[int]] = {}
        numbers = []
        for tile, (first, last, number, _) in zip(made.tiles.tolist(), made.parts.tolist()):
            assert first <= last
            seen.setdefault(tuple(tile), []).extend(range(first, last + 1))
            numbers += [number] if number >= 0 else []
        for tile, count in zip(tiles.tolist(), blocks.tolist()):
            assert sorted(seen.pop(tuple(tile))) == list(range(count))
        assert not seen
        merged = [first + i for _, _, first, parts in made.merges.tolist() for i in range(parts)]
        assert sorted(numbers) == sorted(merged)
        assert max(numbers, default=-1) < wanted.sum()


@pytest.mark.parametrize(
    ("start", "count", "times"), [(100_000, 150, 2.5), (50_000, 276, 1.6), (9000, 100, 3)]
)
def test_few_tiles_end_sooner_in_parts(start: int, count: int, times: float) -> None:
    tiles = cut(np.array([0]), np.array([start]), np.array([count]), 0, 32)
    counts = prompt_attention.parts_of(tiles, 8, 132)
    blocks = -(-(tiles[:, 2] + tiles[:, 3]) // prompt_attention.KEYS)
    assert counts is not None
    alone = prompt_attention._last_end(blocks, np.ones_like(blocks), 8, 132)
    assert alone > times * prompt_attention._last_end(blocks, counts, 8, 132)


@pytest.mark.parametrize(("start", "count"), [(0, 8192), (24_576, 8192), (8192, 1000)])
def test_tiles_that_fill_the_gpu_stay_whole(start: int, count: int) -> None:
    tiles = cut(np.array([0]), np.array([start]), np.array([count]), 0, 32)
    assert prompt_attention.parts_of(tiles, 8, 132) is None
