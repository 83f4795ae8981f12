"""The CUDA kernel of decode rows, emulated, against torch: rows that share a slot, any number of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated_cuda import HERE, kernels, tensor_map

from sgla.kernels import ops
from sgla.kernels.cuda import decode_attention
from sgla.kernels.cuda.decode_attention import FEW, MANY, TILE, Cut, DecodeAttention
from sgla.kernels.ops import KVLayer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU"),
]
PAGE, KV_HEADS, DIM = 16, 2, 64


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(decode_attention, "Kernel", kernels(tmp_path))
    monkeypatch.setattr(decode_attention, "tensor_map", tensor_map)
    kept = decode_attention._kernel, decode_attention._page_map
    for each in kept:
        each.cache_clear()
    yield
    for each in kept:
        each.cache_clear()


def kernel_of(rows: int, group: int) -> DecodeAttention:
    made = object.__new__(DecodeAttention)
    made.cut, made._rows = None, 256
    blocks = 2 * decode_attention.processors()
    made._part = torch.full((2 * blocks, group, DIM), torch.nan)
    made._part_ml = torch.full((2 * blocks, group, 2), torch.nan)
    made._count = torch.zeros(rows * KV_HEADS, dtype=torch.int32)
    return made


# Slots of rows, and how much each sees: a row that guesses alone; with others; without; what has no guess.
ROWS = {
    "one": ([1] * 8, [*range(45, 53)]),
    "several": ([1, 1, 1, 2, 2, 2, 2, 3, 4, 4], [*range(60, 63), *range(16, 20), 130, 7, 8]),
    "short": ([1, 1, 1, 0, 0, 0, 2, 2, 0, 0, 0, 0], [1, 2, 3, 1, 1, 1, 31, 32, 1, 0, 0, 0]),
}


def pages_of(count: int, beside: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v ``[pages, Hkv, PAGE, DIM]``; ``beside``: those of a page follow each other, and then what other
    layers have, which is no number."""
    if not beside:
        k, v = torch.randn(2, count, KV_HEADS, PAGE, DIM).bfloat16()
        return k, v
    kept = torch.full((count, 2 * KV_HEADS + 3, PAGE, DIM), torch.nan).bfloat16()
    kept[:, : 2 * KV_HEADS] = torch.randn(count, 2 * KV_HEADS, PAGE, DIM).bfloat16()
    return kept[:, :KV_HEADS], kept[:, KV_HEADS : 2 * KV_HEADS]


@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("group", [2, 7])
@pytest.mark.parametrize("blocks", [1, 5])
def test_rows_of_a_slot_are_as_torch_has_them(
    case: str, group: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "processors", lambda: blocks)
    torch.manual_seed(0)
    slots, lengths = ROWS[case]
    longest, count = max(lengths), max(slots) + 1
    pages = -(-longest // PAGE)
    table = torch.arange(1, 1 + count * pages).view(count, pages).flip(1).int().contiguous()
    k, v = pages_of(count * pages + 1, beside=blocks > 1)
    last = {slot: max(n for s, n in zip(slots, lengths) if s == slot) for slot in slots}
    for slot, length in last.items():  # what no token has stored is no number
        for at in range(length, pages * PAGE):
            k[table[slot, at // PAGE], :, at % PAGE] = v[table[slot, at // PAGE], :, at % PAGE] = torch.nan
    q = torch.randn(len(slots), group * KV_HEADS * DIM).bfloat16()
    kernel = kernel_of(len(slots), group)
    slot, length = torch.tensor(slots).int(), torch.tensor(lengths).int()
    cum = torch.tensor([0, *(-(-n // TILE) for n in lengths)]).cumsum(0).int()
    paged = k.transpose(1, 2), v.transpose(1, 2)
    out = kernel(q, *paged, table, slot, length, cum, DIM**-0.5)
    assert not kernel._count.any()
    for r, (s, n) in enumerate(zip(slots, lengths)):
        if not n:
            continue
        at = torch.arange(n)
        keys, values = (x[table[s, at // PAGE].long(), :, at % PAGE].float() for x in (k, v))
        heads = q[r].view(KV_HEADS, group, DIM).float()
        shares = torch.einsum("hgd,nhd->hgn", heads, keys).mul(DIM**-0.5).softmax(-1)
        expected = torch.einsum("hgn,nhd->hgd", shares, values).flatten()
        torch.testing.assert_close(out[r].float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("blocks", [1, 5])
def test_leaves_see_what_stands_before_their_positions(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And themselves, which are the last of their rows: of one row three guesses and the ones beside them, of
    another 40 and some, between whose places a tile of nobody lies."""
    monkeypatch.setattr(decode_attention, "processors", lambda: blocks)
    torch.manual_seed(0)
    group, slots = 2, [1] * 7 + [2] * 3
    lengths, ends = [*range(45, 52), 150, 190, 195], [45, 46, 47, 48, 46, 47, 48, 150, 151, 156]
    pages = -(-max(lengths) // PAGE)
    table = torch.arange(1, 1 + 3 * pages).view(3, pages).flip(1).int().contiguous()
    k, v = pages_of(3 * pages + 1, beside=blocks > 1)
    q = torch.randn(len(slots), group * KV_HEADS * DIM).bfloat16()
    kernel = kernel_of(len(slots), group)
    slot, length, end = (torch.tensor(numbers).int() for numbers in (slots, lengths, ends))
    cum = torch.tensor([0, *(-(-n // TILE) for n in lengths)]).cumsum(0).int()
    paged = k.transpose(1, 2), v.transpose(1, 2)
    out = kernel(q, *paged, table, slot, length, cum, DIM**-0.5, ends=end)
    assert not kernel._count.any()
    for r, s in enumerate(slots):
        at = torch.tensor([*range(ends[r] - 1), lengths[r] - 1])
        keys, values = (x[table[s, at // PAGE].long(), :, at % PAGE].float() for x in (k, v))
        heads = q[r].view(KV_HEADS, group, DIM).float()
        shares = torch.einsum("hgd,nhd->hgn", heads, keys).mul(DIM**-0.5).softmax(-1)
        expected = torch.einsum("hgn,nhd->hgd", shares, values).flatten()
        torch.testing.assert_close(out[r].float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("v_norm", "scaled"), [(False, ""), (True, ""), (False, "heads"), (False, "rows")])
@pytest.mark.parametrize(
    ("lengths", "cut"),
    [([200], FEW), ([2600], FEW), ([40, 7, 0, 300], FEW), ([40, 7, 0, 300], MANY)],
    ids=["short", "long", "several", "several by one"],
)
def test_rows_from_the_projection(
    lengths: list[int], cut: Cut, v_norm: bool, scaled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their new tokens are stored on the way, by the warp beside the one that makes the queries, if there are
    two."""
    group, blocks = 2, 16
    monkeypatch.setattr(decode_attention, "processors", lambda: blocks)
    torch.manual_seed(0)
    rows, longest = len(lengths), max(lengths)
    pages = -(-longest // PAGE)
    table = torch.arange(1, 1 + rows * pages).view(rows, pages).flip(1).int().contiguous()
    k, v = pages_of(rows * pages + 1, beside=v_norm)
    length = torch.tensor(lengths).int()
    cum = torch.tensor([0, *(-(-n // TILE) for n in lengths)]).cumsum(0).int()
    qkv = torch.randn(rows, (group + 2) * KV_HEADS * DIM).bfloat16()
    cos_sin, norms = torch.randn(longest, DIM), torch.rand(2, DIM) + 0.5
    live = torch.tensor([r for r, n in enumerate(lengths) if n])
    at = length[live].long() - 1
    places = table[live, at // PAGE].long() * PAGE + at % PAGE
    expected_kv = KVLayer(k.clone().transpose(1, 2), v.clone().transpose(1, 2))
    store = ops.qkv_norm_rope_store if v_norm else ops.qk_norm_rope_store
    made = store(qkv[live], at.int(), cos_sin, norms[0], norms[1], 1e-6, expected_kv, places.int())
    kernel = kernel_of(rows, group)
    kernel.cut = cut
    projection = decode_attention.Projection(cos_sin, norms[0], norms[1], 1e-6, v_norm)
    if scaled == "heads":
        by, also = torch.rand(2, DIM) + 0.5
        made, projection = ops.scale_queries(made, by, also), projection._replace(by=by, also=also)
    elif scaled:
        by = torch.rand(rows, 1) * 3
        made, projection = ops.scale_queries(made, by[live]), projection._replace(by=by)
    slots = torch.arange(rows, dtype=torch.int32)
    paged = k.transpose(1, 2), v.transpose(1, 2)
    out = kernel(qkv, *paged, table, slots, length, cum, DIM**-0.5, projection=projection)
    assert not kernel._count.any()
    for heads, r in zip(made.view(len(live), KV_HEADS, group, DIM).float(), live.tolist()):
        n = torch.arange(lengths[r])
        pool = expected_kv.k.transpose(1, 2), expected_kv.v.transpose(1, 2)
        keys, values = (x[table[r, n // PAGE].long(), :, n % PAGE].float() for x in pool)
        shares = torch.einsum("hgd,nhd->hgn", heads, keys).mul(DIM**-0.5).softmax(-1)
        expected = torch.einsum("hgn,nhd->hgd", shares, values).flatten()
        torch.testing.assert_close(out[r].float(), expected, atol=2e-2, rtol=2e-2)
    page, offset = places // PAGE, places % PAGE
    stored = k[page, :, offset].float()
    assert (stored - expected_kv.k[page, offset].float()).norm() < 5e-3 * stored.norm()
    close = {"rtol": 1e-2, "atol": 1e-2} if v_norm else {"rtol": 0, "atol": 0}  # by one bit of bfloat16
    torch.testing.assert_close(v[page, :, offset], expected_kv.v[page, offset], **close)
