"""Attention to shared prefixes: the plan covers every token of every row once, and the parts join to the
whole."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from sgla.attention.base import AttentionShape
from sgla.attention.cascade import Cascade, Prefixes, pack, unpack
from sgla.kernels.triton.cascade import attend_prefixes, tile_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16


def shape(heads: int = 32, kv_heads: int = 8, dim: int = 128, rows: int = 64) -> AttentionShape:
    return AttentionShape(heads, kv_heads, dim, PAGE, torch.bfloat16, frozenset({0}), 0.0, rows)


def families(
    lengths: list[tuple[int, int]], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows whose pages begin with those of an earlier one: ``lengths`` are ``(pages shared, tokens)`` of each
    row. Slots, positions of the next token and a page table, shuffled."""
    rows, most = len(lengths), max(1 + tokens // PAGE for _, tokens in lengths)
    table = np.zeros((rows + 3, most), np.int32)
    slots = rng.permutation(rows + 2)[:rows].astype(np.int32)
    starts = np.array([tokens for _, tokens in lengths], np.int32)
    fresh = iter(rng.permutation(rows * most + 1) + 1)
    for r, (shared, tokens) in enumerate(lengths):
        pages = 1 + tokens // PAGE
        parent = int(rng.integers(0, r)) if r else 0
        shared = min(shared, starts[parent] // PAGE, pages - 1) if r else 0
        table[slots[r], :shared] = table[slots[parent], :shared]
        table[slots[r], shared:pages] = [next(fresh) for _ in range(pages - shared)]
    mixed = rng.permutation(rows)
    return slots[mixed], starts[mixed], table


def check(plan: Prefixes, slots: np.ndarray, starts: np.ndarray, table: np.ndarray, tile: int) -> None:
    rows = len(slots)
    assert sorted(plan.order) == list(range(rows))
    covered: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
    parts: list[list[int]] = [[] for _ in range(rows)]
    for slot, begin, end, place, count, part in plan.items.tolist():
        assert begin % PAGE == 0
        assert end % PAGE == 0
        assert 0 < count <= tile
        for row in plan.order[place : place + count]:
            pages = slice(begin // PAGE, end // PAGE)
            assert (table[slots[row], pages] == table[slot, pages]).all()
            covered[row].append((begin, end))
            parts[row].append(part)
    for row in range(rows):
        at = 0
        for begin, end in sorted(covered[row]):
            assert begin == at
            at = end
        assert at == plan.skip[row] <= starts[row]
        assert sorted(parts[row]) == list(range(plan.first[row + 1] - plan.first[row]))


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 900)), min_size=1, max_size=40),
    st.integers(0, 1 << 30),
    st.booleans(),
)
@settings(max_examples=examples(60), deadline=None)
def test_every_token_is_covered_once(lengths: list[tuple[int, int]], seed: int, greedy: bool) -> None:
    """``greedy``: every node of the tree is worth a segment."""
    slots, starts, table = families(lengths, np.random.default_rng(seed))
    planner = Cascade(shape(rows=len(lengths)), 132)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sgla.attention.cascade.FIXED", 0.0)
        if greedy:
            patch.setattr(planner, "_gain", lambda rows, tokens, tiles: float(tokens))
        plan = planner.plan(slots, starts, table, 0, 16)
    if plan is not None:
        check(plan, slots, starts, table, 16)


def test_sharing_pays_only_where_it_saves() -> None:
    rng = np.random.default_rng(0)
    planner = Cascade(shape(rows=256), 132)
    alone = families([(0, 900)] * 40, rng)
    assert planner.plan(*alone, 0, 32) is None
    little = families([(1, 900)] * 4, rng)
    assert planner.plan(*little, 1, 32) is None
    much = families([(128, 128 * PAGE + 64)] * 256, rng)
    plan = planner.plan(*much, 2, 256)
    assert plan is not None
    assert set(plan.skip.tolist()) == {128 * PAGE}
    assert 100 <= len(plan.items) * 8 <= 140  # about one a multiprocessor and KV head


def test_two_levels() -> None:
    """A system prompt of 64 pages under four documents of 32."""
    table = np.zeros((64, 100), np.int32)
    for r in range(64):
        table[r, :64] = np.arange(1, 65)
        table[r, 64:96] = 100 + (r % 4) * 32 + np.arange(32)
        table[r, 96] = 1000 + r
    slots, starts = np.arange(64, dtype=np.int32), np.full(64, 96 * PAGE + 3, np.int32)
    plan = Cascade(shape(), 132).plan(slots, starts, table, 0, 64)
    assert plan is not None
    check(plan, slots, starts, table, 32)
    assert {(begin, end) for _, begin, end, *_ in plan.items.tolist()} >= {(1024, 1536)}
    assert set(plan.skip.tolist()) == {96 * PAGE}


def test_the_plan_is_kept_until_a_slot_changes_hands() -> None:
    slots, starts, table = families([(64, 64 * PAGE + 10)] * 64, np.random.default_rng(0))
    planner = Cascade(shape(), 132)
    plan = planner.plan(slots, starts, table, 5, 32)
    assert planner.plan(slots, starts + 1, table, 5, 32) is plan
    assert planner.plan(slots, starts + 1, table, 6, 32) is not plan


def oracle(q, k, v, begins, ends, slots, table, scale, softcap, group):
    """Sums of exp2 and their products with v for tokens ``[begin, end)`` of each row, in float64, as base-2
    logarithms."""
    outs, logs = [], []
    for r in range(len(slots)):
        n = torch.arange(begins[r], ends[r])
        pages = torch.from_numpy(table[slots[r]]).long()[n // PAGE]
        keys, values = (x[pages, n % PAGE].double().repeat_interleave(group, 1) for x in (k, v))
        s = torch.einsum("hd,nhd->hn", q[r].double(), keys) * scale
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        outs.append(torch.einsum("hn,nhd->hd", s.softmax(1), values))
        logs.append(s.logsumexp(1))
    return torch.stack(outs), torch.stack(logs)


@pytest.mark.parametrize(
    ("group", "dim", "softcap", "dtype"),
    [(4, 32, 0.0, torch.float32), (3, 16, 2.0, torch.float32), (1, 16, 0.0, torch.float32)],
)
def test_parts_join_to_the_whole(
    group: int, dim: int, softcap: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgla.attention.cascade.FIXED", 0.0)
    kv_heads, scale = 2, 0.3
    rng = np.random.default_rng(dim)
    lengths = [(int(rng.integers(10, 26)), 32 * PAGE) for _ in range(7)] + [(0, 40), (0, 3)]
    slots, starts, table = families(lengths, rng)
    rows, heads = len(slots), kv_heads * group
    pool = torch.randn(2, table.max() + 1, kv_heads, PAGE, dim, dtype=dtype).transpose(2, 3)
    q = torch.randn(rows, heads * dim, dtype=dtype)
    planner = Cascade(shape(heads, kv_heads, dim, 64)._replace(dtype=dtype), 8)
    monkeypatch.setattr(planner, "_gain", lambda rows, tokens, tiles: float(rows - 1) * tokens)
    plan = planner.plan(slots, starts, table, 0, rows)
    assert plan is not None
    assert len(plan.items) > 3
    check(plan, slots, starts, table, tile_rows(rows, group, dim))
    flat = torch.from_numpy(pack(plan, rows)).to(DEVICE)
    count, items, order, _, first = unpack(flat, rows)
    part = torch.full((int(plan.first[-1]), heads, dim), float("nan"), device=DEVICE)
    ml = torch.full((int(plan.first[-1]), heads, 2), float("nan"), device=DEVICE)
    attend_prefixes(
        q.to(DEVICE),
        *pool.to(DEVICE),
        torch.from_numpy(table).to(DEVICE),
        items,
        count,
        order,
        first,
        part,
        ml,
        scale,
        softcap,
        4,
    )
    part, ml = part.cpu(), ml.cpu()
    heads_of = q.view(rows, heads, dim)
    whole, log = oracle(heads_of, *pool, [0] * rows, starts + 1, slots, table, scale, softcap, group)
    own, own_log = oracle(heads_of, *pool, plan.skip, starts + 1, slots, table, scale, softcap, group)
    for r in range(rows):
        mine = slice(int(plan.first[r]), int(plan.first[r + 1]))
        weights = torch.cat([ml[mine, :, 1] * torch.exp2(ml[mine, :, 0]), own_log[r].exp()[None]])
        outs = torch.cat([part[mine] / ml[mine, :, 1:], own[r][None]])
        joined = (weights[..., None] * outs).sum(0) / weights.sum(0)[:, None]
        torch.testing.assert_close(joined, whole[r], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights.sum(0).log(), log[r], rtol=1e-4, atol=1e-5)
