"""The CUDA kernel of prompts, emulated: chunks give the same bits in prompts, in pieces of them and in decode
rows, so do tiles in any order, and pages of e4m3 give what torch makes of them. A few blocks share the
tiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated_cuda import HERE, kernels, tensor_map

from sgla.attention.base import AttentionShape, cut
from sgla.attention.native import NativeSplits
from sgla.device import nvidia
from sgla.kernels.cuda import prompt_attention
from sgla.kernels.cuda.prompt_attention import KEYS, Chunks, Cuts, Pages
from sgla.kernels.ops import KVLayer, Scoring
from sgla.kernels.triton import units

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU"),
]
BF16, FP8, SLOT, PAGE, BLOCKS = torch.bfloat16, torch.float8_e4m3fn, 1, 16, 3


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(prompt_attention, "Kernel", kernels(tmp_path))
    monkeypatch.setattr(prompt_attention, "_map", tensor_map)
    monkeypatch.setattr(prompt_attention, "processors", lambda: BLOCKS)
    for kept in (prompt_attention._kernel, prompt_attention._merging):
        kept.cache_clear()
    yield
    for kept in (prompt_attention._kernel, prompt_attention._merging):
        kept.cache_clear()


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """q ``[T, Hq, hd]`` from position ``start`` on, k and v ``[start + T, Hkv, hd]``."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k) * q.shape[2] ** -0.5
    seen = torch.arange(len(k))[None] <= start + torch.arange(len(q))[:, None]
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)


def paged(rows: list[torch.Tensor], v_scale: float = 1.0, shuffled: bool = True) -> Pages:
    """k and v ``[T, Hkv, hd]`` in shuffled pages, or in such as follow each other but for two in the second
    block of keys; what no token has stored is no number, nor is what lies between pages."""
    length, heads, dim = rows[0].shape
    count = -(-length // PAGE)
    table = torch.zeros(2, count, dtype=torch.int32)
    numbers = torch.arange(count)
    if not shuffled and count > 10:
        numbers[9], numbers[10] = 10, 9
    table[SLOT] = (torch.randperm(count) if shuffled else numbers) + 1
    at, kind = torch.arange(length), torch.uint8 if rows[0].dtype == FP8 else torch.int16
    pools = []
    for values in rows:
        nan = 0x7F if kind == torch.uint8 else 0x7FFF
        pool = torch.full((count + 1, heads + 3, PAGE, dim), nan, dtype=kind)[:, :heads]
        pool[table[SLOT, at // PAGE].long(), :, at % PAGE] = values.view(kind)
        pools.append(pool.view(values.dtype).transpose(1, 2))
    return Pages(pools[0], pools[1], table, v_scale)


def tiles_of(starts: list[int], counts: list[int], group: int) -> Any:
    tokens = prompt_attention.tile_tokens(group)
    return cut(np.full(len(starts), SLOT), np.array(starts), np.array(counts), 0, tokens)


@pytest.mark.parametrize(("kv_heads", "group", "dim", "length"), [(2, 4, 64, 600), (1, 3, 128, 300)])
def test_chunks_give_the_same_bits(kv_heads: int, group: int, dim: int, length: int) -> None:
    q = torch.randn(length, kv_heads * group * dim).to(BF16)
    rows = [torch.randn(length, kv_heads, dim).to(BF16) for _ in "kv"]
    there, blocks, scale = paged(rows), 2, dim**-0.5
    chunks = Chunks(blocks, torch.full((prompt_attention.kept_by_blocks(dim),), torch.nan))

    def attend(q: torch.Tensor, starts: list[int], counts: list[int]) -> torch.Tensor:
        out = torch.full_like(q, torch.nan)
        tiles = torch.from_numpy(tiles_of(starts, counts, group))
        prompt_attention.attend(q, there, None, tiles, scale, out, chunks=chunks)
        return out

    whole = attend(q, [0], [length])
    wanted = expected(q.view(length, -1, dim), rows[0], rows[1], 0)
    torch.testing.assert_close(whole.float(), wanted, atol=6e-3, rtol=2e-2)
    for piece in (1, length // 2):
        got = attend(torch.cat([q[piece:], q[:piece]]), [piece, 0], [length - piece, piece])
        assert torch.equal(torch.cat([got[-piece:], got[:-piece]]), whole)
    most, count = -(-length // (blocks * KEYS)), 7
    chosen = torch.cat([torch.tensor([length - 1]), torch.randperm(length)[: count - 1]])
    lens = (chosen + 1).int()
    lens[2] = 0  # a row that is not there
    room = units.room(count, most, "cpu")
    made = units.units_of(torch.full((count,), SLOT, dtype=torch.int32), lens, blocks, room)
    sums = torch.full((prompt_attention.sums_of(count, most, kv_heads * group, dim),), torch.nan)
    got = torch.full((count, q.shape[1]), torch.nan).to(BF16)
    prompt_attention.attend_one(q[chosen], there, made, count, scale, got, sums)
    live = lens > 0
    assert torch.equal(got[live], whole[chosen[live]])
    assert got[~live].isnan().all()


@pytest.mark.parametrize(("chunked", "dim"), [(False, 64), (True, 64), (False, 128)])
def test_any_order_gives_the_same_bits(chunked: bool, dim: int) -> None:
    kv_heads, group, start, count = 2, 4, 300, 70
    q = torch.randn(count, kv_heads * group * dim).to(BF16)
    rows = [torch.randn(start + count, kv_heads, dim).to(BF16) for _ in "kv"]
    there, tiles = paged(rows, shuffled=False), tiles_of([start], [count], group)
    kept = torch.full((prompt_attention.kept_by_blocks(dim),), torch.nan)
    chunks, made = Chunks(2, kept) if chunked else None, torch.from_numpy(tiles)
    outs = []
    dealt, _ = prompt_attention._dealt(-(-(tiles[:, 2] + tiles[:, 3]) // KEYS), kv_heads, 1, BLOCKS)
    one = np.full((kv_heads * len(tiles), 2), -1, np.int32)  # all by the second of two blocks
    one[:, 1] = np.random.permutation(len(one))
    for order in (None, dealt, one):
        out = torch.full_like(q, torch.nan)
        given = None if order is None else torch.from_numpy(order)
        prompt_attention.attend(q, there, None, made, dim**-0.5, out, chunks=chunks, order=given)
        outs.append(out)
    wanted = expected(q.view(count, -1, dim), rows[0], rows[1], start)
    torch.testing.assert_close(outs[0].float(), wanted, atol=6e-3, rtol=2e-2)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("kind", [BF16, FP8])
def test_a_plan_that_splits_histories(kind: torch.dtype) -> None:
    """Of a captured step, with places for more tiles, parts and merged ones than there are."""
    kv_heads, group, dim, start, count = 2, 4, 64, 1500, 40
    q = torch.randn(count, kv_heads * group * dim).to(BF16)
    rows = [torch.randn(start + count, kv_heads, dim).to(kind) for _ in "kv"]
    shape = AttentionShape(kv_heads * group, kv_heads, dim, PAGE, BF16, frozenset({0}), 0.0, 4)
    splits, there = NativeSplits(shape, nvidia("H200", (9, 0), 132)), paged(rows)
    plan = splits.plan(tiles_of([start], [count], group))
    assert plan is not None
    out = torch.full_like(q, torch.nan)
    splits.forward(q, KVLayer(there.k, there.v), there.table, torch.from_numpy(plan), Scoring(dim**-0.5), out)
    wanted = expected(q.view(count, -1, dim), rows[0].float(), rows[1].float(), start)
    torch.testing.assert_close(out.float(), wanted, atol=6e-3, rtol=2e-2)


@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "start", "count"), [(2, 4, 64, 300, 70), (1, 7, 128, 127, 40)]
)
@pytest.mark.parametrize("shuffled", [False, True])
def test_pages_of_e4m3(kv_heads: int, group: int, dim: int, start: int, count: int, shuffled: bool) -> None:
    q = torch.randn(count, kv_heads * group * dim).to(BF16)
    rows = [torch.randn(start + count, kv_heads, dim).to(FP8) for _ in "kv"]
    there, tiles = paged(rows, 0.25, shuffled), tiles_of([start], [count], group)
    wanted = expected(q.view(count, -1, dim), rows[0].float() * 0.5, rows[1].float() * 0.25, start)
    blocks = -(-(tiles[:, 2] + tiles[:, 3]) // KEYS)
    for counts in (np.ones_like(blocks), np.minimum(blocks, 3)):
        made, parts, merges = (torch.from_numpy(x) for x in prompt_attention.cut(tiles, counts))
        cuts = Cuts(parts, merges, int(counts.sum())) if len(merges) else None
        out = torch.full_like(q, torch.nan)
        prompt_attention.attend(q, there, None, made, 0.5 * dim**-0.5, out, cuts)
        torch.testing.assert_close(out.float(), wanted, atol=1e-3, rtol=1e-2)
