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


@given(rows=lengths, heads=st.sampled_from([1, 2, 3, 8]), processors=st.integers(1, 140))
def test_an_order_has_each_tile_of_each_head_once(
    rows: list[tuple[int, int]], heads: int, processors: int
) -> None:
    starts, counts = np.array(rows).T
    tiles = cut(np.arange(len(rows)), starts, counts, 0, 32)
    blocks = -(-(tiles[:, 2] + tiles[:, 3]) // prompt_attention.KEYS)
    made = [prompt_attention._dealt(blocks, heads, together, processors) for together in (1, heads)]
    for order, end in made:
        assert order.shape[1] == processors
        there = order >= 0
        assert sorted(order[there]) == list(range(len(tiles) * heads))
        assert (there[:-1] >= there[1:]).all(), "a turn behind one with nothing"
        assert np.where(there, blocks[order // heads], 0).sum(0).max() == end
    for own in made[0][0].T:
        assert (np.diff(own[own >= 0] % heads) >= 0).all(), "a head behind one that comes later"


@pytest.mark.parametrize(
    ("start", "count", "most"), [(24_576, 8192, 0.98), (25_344, 7424, 0.96), (0, 8448, 1)]
)
def test_heads_in_an_order_end_no_later(start: int, count: int, most: float) -> None:
    tiles = cut(np.array([0]), np.array([start]), np.array([count]), 0, 32)
    order = prompt_attention.order_of(tiles, 8, 132)
    assert order is not None
    blocks = -(-(tiles[:, 2] + tiles[:, 3]) // prompt_attention.KEYS)
    end = np.where(order >= 0, blocks[order // 8], 0).sum(0).max()
    assert end <= most * prompt_attention._last_end(blocks, np.ones_like(blocks), 8, 132)


def test_heads_that_the_cache_keeps_are_read_together() -> None:
    tiles = cut(np.array([0, 1]), np.array([0, 0]), np.array([4096, 4096]), 0, 32)
    assert prompt_attention.order_of(tiles, 8, 132) is None
