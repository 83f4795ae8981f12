"""Shared prefixes on the GPU: kernels against the oracle, and the runner with and without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_kernels import relative
from test_gpu_runner import TINY, assert_same_bits, ints, make, plan, twice

from sgla import attention
from sgla.attention import DeviceBatch
from sgla.attention.cascade import Cascade, pack, unpack
from sgla.kernels import ops
from sgla.kernels.ops import KVLayer, Scoring
from sgla.messages import SAMPLE, NewRow, RowSampling

pytest.importorskip("triton")
BF16 = torch.bfloat16
PAGE = 16


def tree(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Page table and lengths: three families, one of them in two levels, and rows alone."""
    common = [rng.integers(20, 70) for _ in range(3)]
    table = np.zeros((rows, 200), np.int32)
    lengths = np.zeros(rows, np.int32)
    fresh = iter(rng.permutation(rows * 200) + 1)
    stems = [[next(fresh) for _ in range(n)] for n in common]
    branches = [[next(fresh) for _ in range(30)] for _ in range(3)]
    for r in range(rows):
        family = r % 4
        head = stems[family] if family < 3 else []
        if family == 0:
            head = head + branches[r % 3]
        own = int(rng.integers(1, 40))
        pages = head + [next(fresh) for _ in range(own)]
        table[r, : len(pages)] = pages
        lengths[r] = (len(head) + own) * PAGE - int(rng.integers(0, PAGE - 1))
    return table, lengths


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "softcap"),
    [
        (16, 8, 128, 0.0),
        (32, 8, 128, 0.0),
        (9, 3, 64, 0.0),
        (8, 4, 256, 20.0),
        (8, 1, 128, 0.0),
        (5, 5, 64, 0.0),
        (26, 2, 64, 0.0),
    ],
)
@pytest.mark.parametrize("rows", [6, 40, 200])
def test_decode_with_shared_prefixes(
    rows: int, heads: int, kv_heads: int, dim: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgla.attention.cascade.FIXED", 0.0)
    monkeypatch.setattr(Cascade, "_gain", lambda self, rows, tokens, tiles: float(tokens * (rows - 1)))
    table, lengths = tree(np.random.default_rng(rows), rows)
    shape = attention.AttentionShape(heads, kv_heads, dim, PAGE, BF16, frozenset({0}), softcap, 256)
    attend = attention.choose_backend("auto", [shape._replace(scale=dim**-0.5)])[0]
    planner = Cascade.of([shape], attend)
    assert planner is not None
    slots = np.arange(rows, dtype=np.int32)
    prefixes = planner.plan(slots, lengths - 1, table, 0, rows)
    assert prefixes is not None
    pool = torch.randn(2, table.max() + 1, kv_heads, PAGE, dim, dtype=BF16, device="cuda").transpose(2, 3)
    tiles = -(-lengths // attention.TILE) - prefixes.skip // attention.TILE
    empty = torch.zeros(0, dtype=torch.int32, device="cuda")

    def upload(x: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(x, np.int32)).cuda()

    batch = DeviceBatch(
        rows=rows,
        tokens=rows,
        ids=empty,
        positions=empty,
        slots=upload(slots),
        q_start=upload(np.arange(rows + 1)),
        kv_len=upload(lengths),
        out_loc=empty,
        page_table=upload(table),
        page_size=PAGE,
        sample_rows=empty,
        decode_rows=rows,
        cum={0: upload(np.concatenate([[0], np.cumsum(tiles)]))},
        prefixes=unpack(upload(pack(prefixes, rows)), rows),
    )
    q = torch.randn(rows, heads * dim, dtype=BF16, device="cuda")
    kv = KVLayer(pool[0], pool[1])
    expected = ops.attention(q.float(), KVLayer(kv.k.float(), kv.v.float()), batch, dim**-0.5, 0, softcap)
    for _ in range(2):
        assert relative(attend(q, kv, batch, Scoring(dim**-0.5, softcap=softcap)), expected) < 1e-2


SHARED, ROWS = 28, 20  # pages


def rows_of_a_family(lone: int, **sampling: Any) -> list[NewRow]:
    """All but ``lone`` rows begin with the same tokens in the same pages."""
    rng = np.random.default_rng(3)
    stem = rng.integers(0, TINY["vocab_size"], SHARED * PAGE)
    new = []
    for slot in range(ROWS):
        first = 1 + SHARED + slot * 40
        alone = slot >= ROWS - lone
        head = np.arange(first + 8, first + 8 + SHARED) if alone else np.arange(1, 1 + SHARED)
        tokens = np.concatenate([np.roll(stem, alone * slot), rng.integers(0, TINY["vocab_size"], 5 + slot)])
        new.append(
            NewRow(
                slot=slot,
                tokens=ints(*tokens),
                prompt_len=len(tokens),
                pages=[ints(*head, *range(first, first + 8))],
                sampling=RowSampling(seed=slot, **sampling),
            )
        )
    return new


def decode(runner: Any, new: list[NewRow], steps: int) -> np.ndarray:
    """int32[steps, rows], two steps in flight; a mixed step on the way."""
    lens = [len(row.tokens) // 4 for row in new]
    runner.execute(plan(0, [(row.slot, 0, n, SAMPLE) for row, n in zip(new[:-1], lens)], new[:-1]))
    last = (new[-1].slot, 0, lens[-1], SAMPLE)
    first = [(row.slot, n, 1, SAMPLE) for row, n in zip(new[:-1], lens)]
    out = [np.frombuffer(runner.execute(plan(1, [*first, last], new[-1:])).tokens, np.int32)]
    flights = []
    for i in range(steps):
        rows = [(row.slot, n + i + (row is not new[-1]), 1, SAMPLE) for row, n in zip(new, lens)]
        flights.append(runner.launch(plan(2 + i, rows)))
        if len(flights) == 2:
            out.append(np.frombuffer(runner.finish(flights.pop(0)).tokens, np.int32))
    return np.stack(out)


@pytest.mark.parametrize("lone", [0, 6])
def test_the_runner_reads_prefixes_once(lone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgla.attention.cascade.FIXED", 0.0)
    runner = make()
    new = rows_of_a_family(lone)
    calls = []
    kept = Cascade._make
    monkeypatch.setattr(Cascade, "_make", lambda *a: calls.append(kept(*a)) or calls[-1])
    shared = decode(runner, new, 12)
    plans = [p for p in calls if p is not None]
    assert len(plans) == len(calls) == 2  # the mixed step's rows, then all
    assert (plans[-1].skip == SHARED * PAGE).sum() == ROWS - lone
    with monkeypatch.context() as patch:
        graphs = runner.graphs
        runs = twice(graphs, patch, "_cascades", lambda size: graphs._forward(size, True))
        assert (decode(runner, new, 12) == shared).all()
        decode(runner, rows_of_a_family(lone, temperature=0.8, top_k=9), 12)
    assert len(runs) == 24
    for i, both in enumerate(runs):
        assert_same_bits(both, ROWS, logits=i >= 12)
    runner.steps.cascade = None
    apart = decode(runner, new, 12)
    same = (apart == shared).cumprod(0).sum() / apart.size  # bf16: a near tie may fall the other way
    assert same >= 0.8
    torch.cuda.empty_cache()
