"""The columns that a graph of a step with prompts reads: every token, tile and sample has its place, whatever
the plan."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from sgla.attention.base import AttentionShape, cut
from sgla.attention.native import NativeSplits
from sgla.device import nvidia
from sgla.kernels.cuda.prompt_attention import KEYS, lost
from sgla.kernels.triton import step
from sgla.kernels.triton.tokens import TokenTable
from sgla.messages import SAMPLE
from sgla.worker.batch import StateColumns
from sgla.worker.prompt_graphs import (
    DECODES,
    HISTORY,
    REAL,
    ROWS,
    SHORT,
    SPLIT,
    SPLIT_FROM,
    SPLIT_ROWS,
    TOKENS,
    PromptGraphs,
    _decodes,
    spread,
)

SLOTS, TILE = 300, 32


def without_a_gpu() -> Any:
    graphs = PromptGraphs.__new__(PromptGraphs)
    attention = SimpleNamespace(prompts=SimpleNamespace(lost=lambda tiles: lost(tiles, 8, 128, 132)))
    steps = SimpleNamespace(slots=SLOTS, kv=[None] * 36, attention=attention, apart=False)
    graphs._steps = steps  # type: ignore[assignment]
    graphs._splits, graphs.splits = None, []
    graphs.tokens, graphs.limit, graphs._tile = list(TOKENS), TOKENS[-1], TILE
    graphs._tiles, graphs._states, graphs.decodes = TOKENS[-1] // TILE + REAL, True, [*DECODES, SLOTS]
    size = sum(graphs._lengths(SLOTS))
    graphs._columns = torch.full((size,), -7, dtype=torch.int32)
    graphs._pinned, graphs._stage = [torch.full((size,), -7, dtype=torch.int32) for _ in range(8)], 0
    return graphs


def states_are_right(
    found: Any, n: int, slots: Any, row_of: dict[int, int], units: StateColumns, q_lens: Any
) -> None:
    """Each row begins and ends with its units, and leaves its marks where it is cut."""
    reads, writes, marks, runs, first, segments, chunks = found
    assert (runs == 1).all()
    told = {(row, end): unit for row, end, unit in units.marks.tolist()}
    covered = []
    for i, slot in enumerate(slots.tolist()):
        row = row_of.get(slot)
        if row is None:
            assert reads[i] == writes[i] == 0
            continue
        assert (reads[i], writes[i]) == (units.reads[row], units.writes[row])
        if i < n:
            assert marks[i, 2] == told.pop((row, 1), 0)
            continue
        own = segments[first[i - n] : first[i - n + 1]]
        ends = own[:, 1].cumsum()
        assert ends[-1] == q_lens[row]
        assert own[-1, 2] == writes[i]
        for end, unit in zip(ends[:-1].tolist(), own[:-1, 2].tolist()):
            assert told.pop((row, end)) == unit
        covered += [(t, i - n) for begin, count, _, _ in own.tolist() for t in range(begin, begin + count)]
    assert not told
    parts = [(t, row) for begin, count, row, _ in chunks.tolist() for t in range(begin, begin + count)]
    assert sorted(parts) == sorted(covered)


@pytest.mark.parametrize("seed", range(20))
def test_columns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    decodes, prompts = int(rng.integers(0, 60)), int(rng.integers(1, REAL + 1))
    rows = decodes + prompts
    q_lens = np.ones(rows, np.int32)
    long = rng.permutation(rows)[:prompts]
    q_lens[long] = rng.integers(1, 900 // prompts, prompts)
    flags = np.full(rows, SAMPLE, np.uint8)
    flags[long[rng.random(prompts) < 0.4]] = 0
    slots, starts = (
        rng.permutation(SLOTS)[:rows].astype(np.int32),
        rng.integers(0, 5000, rows).astype(np.int32),
    )
    graphs = without_a_gpu()
    marks = np.array(
        [(r, end, 900 + r) for r in range(rows) for end in {1, q_lens[r]} if r % 3 == 0], np.int32
    )
    units = StateColumns(*rng.integers(1, 900, (2, rows)).astype(np.int32), marks.reshape(-1, 3))
    assert graphs.takes(starts, q_lens, flags, units)
    is_decode, sampled = _decodes(q_lens, flags), np.flatnonzero(flags & SAMPLE)
    size = next(size for size in TOKENS if size >= q_lens.sum())
    n = graphs._pair(int(is_decode.sum()), size)[0]
    graphs._fill(slots, starts, q_lens, is_decode, sampled, (n, size), units)

    columns = graphs._columns[: sum(graphs._lengths(n))].split(graphs._lengths(n))
    tiles, d_slots, d_starts, kv_len, at, where, ends, q_start, kept = (c.numpy() for c in columns)
    states_are_right(
        graphs._units(kept, n), n, d_slots, dict(zip(slots.tolist(), range(rows))), units, q_lens
    )
    # Tokens as the kernels see them: (slot, position) of each hidden state; padding belongs to the last slot.
    tokens = [(d_slots[i], d_starts[i]) for i in range(q_start[0])]
    assert (d_starts[q_start[0] : n] == -1).all()
    for r in range(ROWS):
        slot, start = d_slots[n + r], d_starts[n + r]
        tokens += [(slot, start + i) for i in range(q_start[r + 1] - q_start[r])]
    assert len(tokens) == size
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
    covered = [
        (begin + i, slot, start + i)
        for slot, begin, start, count in tiles.reshape(-1, 4).tolist()
        for i in range(count)
    ]
    assert sorted(covered) == [(i, *tokens[i]) for i in range(q_start[0], size) if tokens[i][0] != SLOTS]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
def test_what_pads_a_step_is_known_by_its_places() -> None:
    """Mixtures read no experts for it. The first place behind the dummy page is a token's."""
    slots, starts = np.array([7, 3, 9], np.int32), np.array([0, 5, 8], np.int32)
    q_lens = np.array([1, 6, 4], np.int32)
    graphs, flags = without_a_gpu(), np.full(3, SAMPLE, np.uint8)
    n, size = graphs._pair(1, TOKENS[0])
    units = StateColumns(*np.zeros((2, 3), np.int32), np.zeros((0, 3), np.int32))
    graphs._fill(slots, starts, q_lens, _decodes(q_lens, flags), np.arange(3), (n, size), units)
    lengths = graphs._lengths(n)
    _, d_slots, d_starts, kv_len, *_, q_start, _ = graphs._columns[: sum(lengths)].split(lengths)
    table = torch.zeros(SLOTS + 1, size, dtype=torch.int32)
    table[slots.tolist(), :3] = 1 + torch.arange(9, dtype=torch.int32).view(3, 3)
    tokens = TokenTable(table, torch.zeros(SLOTS + 1, dtype=torch.int32), 4)
    ids, positions, places = torch.full((3, size), 9, dtype=torch.int32)
    made = ids[:n], positions[:n], kv_len[:n], places[:n]
    step.prepare_decode(d_slots[:n], d_starts[:n], tokens, table, *made, torch.zeros(n + 1).int(), tile=2)
    step.prepare_extend(d_slots[n:], d_starts[n:], q_start, size, tokens, table, ids, positions, places)
    assert places.min() == 0
    assert places[0] == tokens.page_size
    graphs._steps.model = SimpleNamespace(spec=SimpleNamespace(moe=object()))
    graphs._steps.tables = SimpleNamespace(page_size=4, windows=[0], part=(0, 1))
    assert graphs._live(places).tolist() == [1] * 11 + [0] * (size - 11)


def splitting() -> Any:
    graphs = without_a_gpu()
    shape = AttentionShape(32, 8, 128, 16, torch.bfloat16, frozenset({0}), 0.0, SLOTS)
    graphs._splits = splits = NativeSplits(shape, nvidia("H200", (9, 0), 132))
    graphs.splits, graphs._tiles = [(SPLIT_ROWS, size) for size in SPLIT], splits.room
    size = sum(graphs._lengths(SLOTS))
    graphs._columns = torch.full((size,), -7, dtype=torch.int32)
    graphs._pinned = [torch.full((size,), -7, dtype=torch.int32) for _ in range(8)]
    return graphs


@pytest.mark.parametrize("seed", range(10))
def test_columns_of_a_step_that_splits_histories(seed: int) -> None:
    """Every key of each tile is in one of its parts, and these are merged."""
    rng = np.random.default_rng(seed)
    decodes, prompts = int(rng.integers(0, SPLIT_ROWS)), int(rng.integers(1, REAL + 1))
    q_lens = np.array([1] * decodes + rng.integers(2, 400 // prompts, prompts).tolist(), np.int32)
    starts = rng.integers(20, 40_000, len(q_lens)).astype(np.int32)
    starts[-1] = 60_000
    slots, graphs = rng.permutation(SLOTS)[: len(q_lens)].astype(np.int32), splitting()
    flags = np.full(len(q_lens), SAMPLE, np.uint8)
    assert graphs.takes(starts, q_lens, flags)
    is_decode = _decodes(q_lens, flags)
    plan = graphs._plan_splits(slots, starts, q_lens, is_decode)
    assert plan is not None
    sizes = next(sizes for sizes in graphs.splits if sizes[1] >= q_lens.sum())
    graphs._fill(slots, starts, q_lens, is_decode, np.arange(len(q_lens)), sizes, None, plan)
    rows = graphs._columns[: 4 * graphs._splits.room].view(-1, 4).numpy()
    tiles, parts, merges = np.split(rows, np.cumsum(graphs._splits._lengths)[:-1])
    seen: dict[tuple[int, ...], list[int]] = {}
    numbers = []
    for tile, (first, last, number, _) in zip(tiles.tolist(), parts.tolist()):
        if tile[3]:
            seen.setdefault(tuple(tile), []).extend(range(first, last + 1))
            numbers += [number] if number >= 0 else []
    rest = ~is_decode
    for tile in cut(slots[rest], starts[rest], q_lens[rest], decodes, TILE).tolist():
        assert sorted(seen.pop(tuple(tile))) == list(range(-(-(tile[2] + tile[3]) // KEYS)))
    assert not seen
    assert sorted(numbers) == [first + i for _, _, first, count in merges.tolist() for i in range(count)]
    assert max(numbers) < graphs._splits._parts


def test_what_may_split_histories() -> None:
    graphs, one = splitting(), np.full(1, SAMPLE, np.uint8)
    for start, tokens, taken, split in (
        (2 * HISTORY, 2, True, True),
        (2 * HISTORY, 300, True, True),
        (2 * HISTORY, 512, True, False),
        (SPLIT_FROM - 1, 100, True, False),
        (SPLIT_FROM, 100, True, True),
        (2 * HISTORY, 700, False, False),
    ):
        row = np.array([start], np.int32), np.array([tokens], np.int32)
        assert graphs.takes(*row, one) == taken
        assert (graphs._plan_splits(np.zeros(1, np.int32), *row, np.zeros(1, bool)) is not None) == split


def test_sizes_of_graphs() -> None:
    """Those of large steps have room for some decode rows, or for all."""
    graphs = without_a_gpu()
    pairs = [graphs._pair(*asked) for asked in ((0, 64), (1, 32), (65, 1024), (0, 2048), (257, 2048))]
    assert pairs == [(0, 64), (32, 32), (DECODES[2], 1024), (DECODES[1], 2048), (SLOTS, 2048)]


def test_what_is_left_to_eager_steps() -> None:
    graphs = without_a_gpu()
    one = np.full(1, SAMPLE, np.uint8)
    none = np.zeros(1, np.int32)
    assert graphs.takes(none, np.array([TOKENS[-1]], np.int32), one)
    assert not graphs.takes(none, np.array([TOKENS[-1] + 1], np.int32), one)
    for tokens, taken in ((2, False), (256, False), (400, True), (512, True), (700, False), (1024, True)):
        assert graphs.takes(none + 2 * HISTORY, np.array([tokens], np.int32), one) == taken
        assert graphs.takes(none + HISTORY - 1, np.array([tokens], np.int32), one)
    graphs._steps.apart = True  # ranks must not choose by what they have themselves
    assert not graphs.takes(none + 2 * HISTORY, np.array([1024], np.int32), one)
    graphs._steps.apart = False
    graphs._steps.attention = SimpleNamespace(prompts=SimpleNamespace(lost=lambda tiles: math.inf))
    assert not graphs.takes(none + HISTORY, np.array([512], np.int32), one)
    assert graphs.takes(none.repeat(REAL), np.full(REAL, 2, np.int32), one.repeat(REAL))
    assert not graphs.takes(none.repeat(REAL + 1), np.full(REAL + 1, 2, np.int32), one.repeat(REAL + 1))
    assert graphs.takes(none.repeat(251), np.array([1] * 250 + [9], np.int32), one.repeat(251))


@pytest.mark.parametrize("seed", range(20))
def test_short_rows_become_decode_rows(seed: int) -> None:
    """Of the same tokens, in the same order, of which the same are sampled; as many as there is room for."""
    rng = np.random.default_rng(seed)
    rows, most = int(rng.integers(1, 40)), int(rng.integers(40, 200))
    slots = rng.permutation(SLOTS)[:rows].astype(np.int32)
    starts = rng.choice([0, 5, 1008, 30000], rows).astype(np.int32)
    q_lens = rng.choice([1, 1, 1, 2, SHORT, SHORT + 1, 200], rows).astype(np.int32)
    flags = np.where(rng.random(rows) < 0.8, SAMPLE, 0).astype(np.uint8)
    decodes = _decodes(q_lens, flags)
    owners, (of, begin, count, flagged), found = spread(slots, starts, q_lens, flags, decodes, most)

    def tokens(slots: Any, starts: Any, q_lens: Any, flags: Any) -> list[tuple[int, int, bool]]:
        """Slot, place, and whether its successor is sampled."""
        rows = zip(slots.tolist(), starts.tolist(), q_lens.tolist(), flags.tolist())
        return [(s, at + i, bool(f) and i == n - 1) for s, at, n, f in rows for i in range(n)]

    assert tokens(of, begin, count, flagged) == tokens(slots, starts, q_lens, flags)
    assert (slots[owners] == of).all()
    assert [x.dtype for x in (of, begin, count, flagged)] == [x.dtype for x in (slots, starts, q_lens, flags)]
    assert (count[found] == 1).all()
    assert found.sum() <= max(most, decodes.sum())


@pytest.mark.parametrize(
    ("starts", "q_lens", "most", "spreads"),
    [
        ([1008, 900], [SHORT, 1], 200, True),
        ([1008, 900], [SHORT + 1, 1], 200, False),
        ([0, 900], [SHORT, 1], 200, False),  # it has no history
        ([1008, 900], [SHORT, 1], SHORT, False),  # there is no room
        ([30000, 900], [SHORT, 1], 200, False),  # its history would be read too often
    ],
)
def test_which_rows_become_decode_rows(
    starts: list[int], q_lens: list[int], most: int, spreads: bool
) -> None:
    slots, flags = np.arange(2, dtype=np.int32), np.full(2, SAMPLE, np.uint8)
    columns = np.array(starts, np.int32), np.array(q_lens, np.int32), flags
    found = spread(slots, *columns, _decodes(*columns[1:]), most)[2]
    assert found.all() == spreads
