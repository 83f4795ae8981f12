"""The columns that a graph of a step with prompts reads: every token, tile and sample has its place, whatever the plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from sgla.kernels.triton.attention import BLOCK_M
from sgla.messages import SAMPLE
from sgla.worker.prompt_graphs import DECODES, REAL, ROWS, TOKENS, PromptGraphs, _decodes

SLOTS = 300


def without_a_gpu() -> Any:
    graphs = PromptGraphs.__new__(PromptGraphs)
    graphs._runner = SimpleNamespace(slots=SLOTS)  # type: ignore[assignment]
    graphs.tokens, graphs.limit, graphs._tiles = list(TOKENS), TOKENS[-1], TOKENS[-1] // BLOCK_M + ROWS
    size = sum(graphs._lengths(SLOTS))
    graphs._columns = torch.full((size,), -7, dtype=torch.int32)
    graphs._pinned, graphs._stage = [torch.full((size,), -7, dtype=torch.int32) for _ in range(8)], 0
    return graphs


@pytest.mark.parametrize("seed", range(20))
def test_columns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    decodes, prompts = int(rng.integers(0, 60)), int(rng.integers(1, REAL + 1))
    rows = decodes + prompts
    q_lens = np.ones(rows, np.int32)
    long = rng.permutation(rows)[:prompts]
    q_lens[long] = rng.integers(1, 1000 // prompts, prompts)
    flags = np.full(rows, SAMPLE, np.uint8)
    flags[long[rng.random(prompts) < 0.4]] = 0
    slots, starts = (
        rng.permutation(SLOTS)[:rows].astype(np.int32),
        rng.integers(0, 5000, rows).astype(np.int32),
    )
    graphs = without_a_gpu()
    assert graphs.takes(q_lens, flags)
    is_decode, sampled = _decodes(q_lens, flags), np.flatnonzero(flags & SAMPLE)
    n = next(size for size in (*DECODES, SLOTS) if size >= is_decode.sum())
    size = next(size for size in TOKENS if size >= q_lens[~is_decode].sum())
    graphs._fill(slots, starts, q_lens, is_decode, sampled, (n, size))

    columns = graphs._columns[: sum(graphs._lengths(n))].split(graphs._lengths(n))
    d_slots, d_starts, kv_len, at, where, ends, tiles, q_start = (c.numpy() for c in columns)
    # Tokens as the kernels see them: (slot, position) of each hidden state; padding belongs to the last slot.
    tokens = [(d_slots[i], d_starts[i]) if d_starts[i] >= 0 else (SLOTS, 0) for i in range(n)]
    for r in range(ROWS):
        slot, start = d_slots[n + r], d_starts[n + r]
        tokens += [(slot, start + i) for i in range(q_start[r + 1] - q_start[r])]
    assert len(tokens) == n + size
    real = [(slot, position) for slot, position in tokens if slot != SLOTS]
    assert sorted(real) == sorted((s, a + i) for s, a, q in zip(slots, starts, q_lens) for i in range(q))
    # Each row that samples finds its last token, in the plan's order.
    for i, row in enumerate(sampled):
        assert tokens[at[i]] == (slots[row], starts[row] + q_lens[row] - 1)
        assert (where[i], ends[i]) == (slots[row], starts[row] + q_lens[row])
    assert (where[len(sampled) :] == SLOTS).all()
    assert (ends[len(sampled) :] == 0).all()
    lengths = dict(zip(d_slots.tolist(), kv_len.tolist()))
    assert all(lengths[s] == a + q for s, a, q in zip(slots.tolist(), starts.tolist(), q_lens.tolist()))
    # The tiles cover each prompt row's queries once.
    covered = [(r, o + i) for r, o in tiles.reshape(-1, 2).tolist() for i in range(BLOCK_M)]
    covered = [(r, i) for r, i in covered if i < q_start[r + 1] - q_start[r] and d_slots[n + r] != SLOTS]
    assert len(covered) == len(set(covered)) == q_lens[~is_decode].sum()


def test_what_is_left_to_eager_steps() -> None:
    graphs = without_a_gpu()
    one = np.full(1, SAMPLE, np.uint8)
    assert graphs.takes(np.array([TOKENS[-1]], np.int32), one)
    assert not graphs.takes(np.array([TOKENS[-1] + 1], np.int32), one)
    assert graphs.takes(np.full(REAL, 2, np.int32), one.repeat(REAL))
    assert not graphs.takes(np.full(REAL + 1, 2, np.int32), one.repeat(REAL + 1))
    assert graphs.takes(np.array([1] * 250 + [9], np.int32), one.repeat(251))
