"""Attention of prompts whose tiles are cut into parts equals that of whole tiles, and torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgla.attention.base import cut
from sgla.kernels.cuda import prompt_attention
from sgla.kernels.cuda.build import processors
from sgla.kernels.cuda.prompt_attention import Beside, Cuts, Pages

BF16, SLOT = torch.bfloat16, 1


def to_gpu(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(numbers).cuda()


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """q ``[T, Hq, hd]`` from position ``start`` on, k and v ``[start + T, Hkv, hd]``, in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k) * q.shape[2] ** -0.5
    seen = torch.arange(len(k), device="cuda")[None] <= start + torch.arange(len(q), device="cuda")[:, None]
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(8, 4, 128), (2, 7, 128), (3, 3, 64)])
@pytest.mark.parametrize(("start", "count"), [(9000, 100), (16383, 257), (127, 2), (0, 300), (511, 2000)])
def test_pages_of_8_bits(kv_heads: int, group: int, dim: int, start: int, count: int) -> None:
    """Against torch with what the pages hold; what no token has stored is no number."""
    torch.manual_seed(start)
    page, length = 16, start + count
    pages, k_scale, v_scale = -(-length // page), 0.5, 0.25
    q = torch.randn(count, kv_heads * group, dim, device="cuda", dtype=BF16)
    rows = [torch.randn(length, kv_heads, dim, device="cuda").to(torch.float8_e4m3fn) for _ in "kv"]
    table = torch.zeros(2, pages, dtype=torch.int32, device="cuda")
    table[SLOT] = torch.randperm(pages, device="cuda") + 1
    at = torch.arange(length, device="cuda")
    pools = []
    for values in rows:
        pool = torch.full((pages + 1, kv_heads + 3, page, dim), 0x7F, device="cuda", dtype=torch.uint8)
        pool = pool[:, :kv_heads]  # other layers have what is between pages
        pool[table[SLOT, at // page].long(), :, at % page] = values.view(torch.uint8)
        pools.append(pool.view(torch.float8_e4m3fn).transpose(1, 2))
    there = Pages(pools[0], pools[1], table, v_scale)
    tiles = cut(
        np.array([SLOT]), np.array([start]), np.array([count]), 0, prompt_attention.tile_tokens(group)
    )
    chosen = prompt_attention.parts_of(tiles, kv_heads, processors())
    keys, values = rows[0].float() * k_scale, rows[1].float() * v_scale
    wanted, flat = expected(q, keys, values, start), q.flatten(1)
    for counts in (np.ones(len(tiles), int), chosen):
        if counts is None:
            continue
        tiles_, parts, merges = (to_gpu(x) for x in prompt_attention.cut(tiles, counts))
        cuts = Cuts(parts, merges, int(counts.sum())) if len(merges) else None
        outs = [torch.full_like(flat, torch.nan) for _ in range(3)]
        for out in outs:
            prompt_attention.attend(flat, there, None, tiles_, k_scale * dim**-0.5, out, cuts)
        torch.testing.assert_close(outs[0].float(), wanted.flatten(1), atol=3e-3, rtol=2e-2)
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(8, 4, 128), (2, 7, 128), (3, 3, 64)])
@pytest.mark.parametrize(("start", "count"), [(9000, 100), (5000, 33), (16383, 257), (127, 2), (0, 300)])
def test_parts_of_tiles_equal_the_whole(kv_heads: int, group: int, dim: int, start: int, count: int) -> None:
    torch.manual_seed(start)
    page, length = 16, start + count
    pages = -(-length // page)
    q = torch.randn(count, kv_heads * group, dim, device="cuda", dtype=BF16)
    k, v = (torch.full((pages + 1, kv_heads, page, dim), torch.nan, device="cuda", dtype=BF16) for _ in "kv")
    keys, values = (torch.randn(length, kv_heads, dim, device="cuda", dtype=BF16) for _ in "kv")
    table = torch.zeros(2, pages, dtype=torch.int32, device="cuda")
    table[SLOT] = torch.randperm(pages, device="cuda") + 1
    at = torch.arange(length, device="cuda")
    for pool, rows in ((k, keys), (v, values)):
        pool[table[SLOT, at // page].long(), :, at % page] = rows
    there = Pages(k.transpose(1, 2), v.transpose(1, 2), table)
    beside = Beside(keys, values) if start == 0 else None
    slot, tokens = (-1 if start == 0 else SLOT), prompt_attention.tile_tokens(group)
    tiles = cut(np.array([slot]), np.array([start]), np.array([count]), 0, tokens)
    chosen = prompt_attention.parts_of(tiles, kv_heads, processors())
    blocks = -(-(tiles[:, 2] + tiles[:, 3]) // prompt_attention.KEYS)
    # Each block of keys alone, some tiles whole and some not, and as it is chosen.
    mixed = np.minimum(1 + np.arange(len(tiles)) % 3, blocks)
    wanted, flat = expected(q, keys, values, start), q.flatten(1)
    for counts in (np.ones_like(blocks), np.minimum(blocks, 16), mixed, chosen):
        if counts is None:
            continue
        made = prompt_attention.cut(tiles, counts)
        tiles_, parts, merges = (to_gpu(x) for x in made)
        cuts = Cuts(parts, merges, int(counts.sum())) if len(merges) else None
        for _ in range(3):
            out = torch.full_like(flat, torch.nan)
            prompt_attention.attend(flat, there, beside, tiles_, dim**-0.5, out, cuts)
            torch.testing.assert_close(out.float(), wanted.flatten(1), atol=6e-3, rtol=2e-2)


@pytest.mark.parametrize("kind", [BF16, torch.float8_e4m3fn])
def test_any_order_and_any_pages_give_the_same_bits(kind: torch.dtype) -> None:
    """Of a prompt behind a history, in pages that follow each other and in others, and, of bfloat16, of one
    beside q."""
    torch.manual_seed(1)
    kv_heads, group, dim, page = 8, 4, 128, 16
    starts, counts = np.array([5000, 0]), np.array([2100, 700])
    slots, tokens = np.array([SLOT, -1]), int(counts.sum())
    pages = -(-int(starts[0] + counts[0]) // page)
    held = [torch.randn(pages, kv_heads, page, dim, device="cuda").to(kind) for _ in "kv"]
    beside = Beside(*(torch.randn(tokens, kv_heads, dim, device="cuda", dtype=BF16) for _ in "kv"))
    if kind != BF16:
        slots, starts, counts, beside = slots[:1], starts[:1], counts[:1], None
    q = torch.randn(tokens, kv_heads * group * dim, device="cuda", dtype=BF16)
    tiles = cut(slots, starts, counts, 0, prompt_attention.tile_tokens(group))
    blocks = -(-(tiles[:, 2] + tiles[:, 3]) // prompt_attention.KEYS)
    orders = [None, *(prompt_attention._dealt(blocks, kv_heads, n, processors())[0] for n in (1, 2, 8))]
    apart = torch.arange(pages, device="cuda")
    apart[100], apart[101] = 101, 100
    outs = []
    for numbers in (torch.randperm(pages, device="cuda"), torch.arange(pages, device="cuda"), apart):
        table = torch.zeros(2, pages, dtype=torch.int32, device="cuda")
        table[SLOT] = numbers + 1
        pools = [torch.empty(pages + 1, kv_heads, page, dim, device="cuda", dtype=kind) for _ in "kv"]
        for pool, values in zip(pools, held):
            pool.view(torch.uint8)[numbers + 1] = values.view(torch.uint8)
        there = Pages(pools[0].transpose(1, 2), pools[1].transpose(1, 2), table)
        for order in orders:
            out = torch.zeros_like(q)
            made = None if order is None else to_gpu(order)
            prompt_attention.attend(q, there, beside, to_gpu(tiles), dim**-0.5, out, order=made)
            outs.append(out)
    assert outs[0][: int(counts.sum())].float().abs().sum(1).all()
    for out in outs[1:]:
        assert torch.equal(out, outs[0])
