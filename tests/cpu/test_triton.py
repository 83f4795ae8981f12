"""The portable kernels against the torch oracle. They run in Triton's interpreter, in float32, where
there is no GPU."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu has the same on the device", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from draws import DISTRIBUTIONS, possible
from token_tables import in_rows
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sgla.attention.base import AttentionShape, DeviceBatch, cut
from sgla.attention.latent_ops import LatentDecode, LatentPrompts
from sgla.device import Device
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.gpu import picked
from sgla.kernels.ops import KVLayer, Part, Scoring
from sgla.kernels.picking import pick, picked_attention
from sgla.kernels.triton import attention, elementwise, latent, picking, sampling, step, turning
from sgla.kernels.triton.tokens import TokenTable
from sgla.layers.spec import StateTensor
from sgla.model.state import LayerState, kv_groups
from sgla.sampling.draw import Distribution, bits_of
from sgla.worker.kv import allocate_kv, paged


def random_batch(
    q_lens: list[int],
    kv_lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int = 4,
    values: int = 0,
):
    """A batch over shuffled pages with random KV; the pages hold the same values in another order of dims."""
    generator = torch.Generator().manual_seed(sum(q_lens) * 7 + sum(kv_lens))
    rows, most = len(q_lens), -(-max(kv_lens) // page_size)
    pages = 1 + torch.randperm(rows * most, generator=generator).view(rows, most)
    table = torch.zeros(rows + 2, most, dtype=torch.int32)
    slots = torch.arange(1, rows + 1).flip(0)
    table[slots] = pages.int()
    shape = rows * most + 1, kv_heads, page_size
    k, v = (torch.randn(*shape, n, generator=generator).transpose(1, 2) for n in (dim, values or dim))
    q_start = torch.tensor([0, *q_lens]).cumsum(0).int()
    q = torch.randn(int(q_start[-1]), heads * dim, generator=generator)
    positions = torch.cat([torch.arange(n - m, n) for m, n in zip(q_lens, kv_lens)])
    batch = ForwardBatch(
        rows=rows,
        tokens=len(positions),
        ids=positions.int(),
        positions=positions.int(),
        slots=slots.int(),
        q_start=q_start,
        kv_len=torch.tensor(kv_lens).int(),
        out_loc=torch.zeros(len(positions)).int(),
        page_table=table,
        page_size=page_size,
        sample_rows=q_start[1:] - 1,
    )
    return q, KVLayer(k, v), batch


@pytest.mark.parametrize(
    ("group", "dim", "window", "softcap"),
    [
        (1, 16, 0, 0.0),
        (4, 32, 0, 0.0),
        (3, 16, 5, 0.0),
        (2, 16, 0, 2.0),
        (2, 80, 0, 0.0),
        (1, 100, 9, 0.0),
        (1, 8, 0, 0.0),
    ],
)
@pytest.mark.parametrize("splits", [1, 4])
def test_decode(group: int, dim: int, window: int, softcap: float, splits: int) -> None:
    q, kv, batch = random_batch([1, 1, 1], [1, 70, 101], 2 * group, 2, dim)
    expected = ops.attention(q, kv, batch, 0.3, window, softcap)
    out = attention.decode(
        q, kv.k, kv.v, batch.page_table, batch.slots, batch.kv_len, 0.3, window, softcap, splits
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
def test_leaves_see_what_stands_before_their_positions(splits: int) -> None:
    """And themselves, which are the last of their rows."""
    q, kv, batch = random_batch([1, 1, 1, 1], [3, 70, 101, 68], 4, 2, 16)
    ends = torch.tensor([3, 66, 101, 2]).int()
    out = attention.decode(
        q, kv.k, kv.v, batch.page_table, batch.slots, batch.kv_len, 0.3, splits=splits, ends=ends
    )
    for row, (slot, length, end) in enumerate(zip(batch.slots, batch.kv_len.tolist(), ends.tolist())):
        seen = torch.tensor([*range(end - 1), length - 1])
        pages, place = batch.page_table[slot, seen // 4].long(), seen % 4
        keys, values = (x[pages, place].transpose(0, 1) for x in (kv.k, kv.v))
        scores = (q[row].view(2, 2, 16) @ keys.transpose(1, 2) * 0.3).softmax(-1)
        torch.testing.assert_close(out[row], (scores @ values).flatten(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dim", "values"), [(24, 16), (12, 40)])
def test_values_of_another_width(dim: int, values: int) -> None:
    """Than keys: decode rows in one part and in several, with sinks, and prompts behind a window."""
    q, kv, batch = random_batch([1, 1, 1], [1, 70, 101], 4, 2, dim, values=values)
    sinks = torch.randn(4)
    for splits in (1, 4):
        decode = batch.page_table, batch.slots, batch.kv_len, 0.3, 0, 0.0, splits
        out = attention.decode(q, kv.k, kv.v, *decode, sinks=sinks)
        torch.testing.assert_close(out, ops.attention(q, kv, batch, 0.3, sinks=sinks), rtol=1e-4, atol=1e-5)
    q, kv, batch = random_batch([20, 3], [20, 40], 2, 1, dim, values=values)
    tiles = cut(batch.slots.numpy(), np.array([0, 37], np.int32), np.array([20, 3], np.int32), 0, 32)
    out, how = torch.empty(23, 2 * values), attention.Cut(32, 32, 2)
    attention.extend(q, kv.k, kv.v, batch.page_table, torch.from_numpy(tiles), 0.3, out, how, 9)
    torch.testing.assert_close(out, ops.attention(q, kv, batch, 0.3, 9), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("group", "dim", "window", "softcap", "tile"),
    [
        (1, 16, 0, 0.0, (128, 64)),
        (2, 32, 7, 0.0, (128, 64)),
        (2, 16, 0, 2.0, (128, 64)),
        (2, 80, 0, 0.0, (64, 32)),
        (1, 100, 9, 0.0, (32, 16)),
        (1, 8, 0, 0.0, (128, 64)),
    ],
)
def test_extend(group: int, dim: int, window: int, softcap: float, tile: tuple[int, int]) -> None:
    q_lens, kv_lens = [1, 40, 130, 3], [9, 40, 150, 70]
    q, kv, batch = random_batch(q_lens, kv_lens, group, 1, dim)
    expected = ops.attention(q, kv, batch, 0.3, window, softcap)
    slots, lens = batch.slots.numpy(), np.array(q_lens, np.int32)
    tiles = torch.from_numpy(cut(slots, np.array(kv_lens, np.int32) - lens, lens, 0, tile[0]))
    out = torch.empty_like(q)
    how = attention.Cut(*tile, 2)
    attention.extend(q, kv.k, kv.v, batch.page_table, tiles, 0.3, out, how, window, softcap)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_windows_that_are_chunks() -> None:
    """Decode rows in one part and in several, the last of a chunk, the first of the next one, and further on;
    a prompt that begins in the middle of one, and a whole one. What is before a chunk is no number."""
    q, kv, batch = random_batch([1, 1, 1, 20, 70], [32, 33, 75, 43, 70], 2, 1, 16)
    before = batch.page_table[batch.slots[2], :16].long()
    kv.k[before] = kv.v[before] = float("nan")
    expected = ops.attention(q, kv, batch, 0.3, 32, chunked=True)
    for splits in (1, 4):
        rows = batch.page_table, batch.slots[:3], batch.kv_len[:3], 0.3, 32, 0.0, splits
        out = attention.decode(q[:3], kv.k, kv.v, *rows, chunked=True)
        torch.testing.assert_close(out, expected[:3], rtol=1e-4, atol=1e-5)
    starts, lens = (np.array(x, np.int32) for x in ([23, 0], [20, 70]))
    tiles = torch.from_numpy(cut(batch.slots[3:].numpy(), starts, lens, 3, 32))
    out, how = torch.empty_like(q), attention.Cut(32, 16, 2)
    attention.extend(q, kv.k, kv.v, batch.page_table, tiles, 0.3, out, how, 32, chunked=True)
    torch.testing.assert_close(out[3:], expected[3:], rtol=1e-4, atol=1e-5)


def test_picked_tokens() -> None:
    """The same are picked, of equals the earliest, and attention to them is that of its body; in a few parts,
    behind a row with no history and beside one with more tokens than are picked."""
    q, kv, batch = random_batch([1, 1, 1], [1, 90, 101], 3, 1, 24, values=8)
    scored, weights = torch.randn(3, 5, 8), torch.randn(3, 5).abs()
    kv.v[:] = (kv.v * 2).round() / 2  # so that sums are exact, and many the same
    scored, weights = scored.round(), weights.round()
    table = batch.page_table, batch.slots, batch.kv_len
    found = picking.places(picking.ranks(scored, weights, kv.v, *table, 110).topk(20).values)
    given = scored, kv.v[batch.page_table[batch.slots.long(), 0].long(), 0, 0], weights, kv
    batch.out_loc = batch.page_table[batch.slots.long(), 0] * batch.page_size
    expected = pick(*given, batch, 20)
    assert torch.equal(found, expected)
    assert (found == -1).sum() == 19
    decode = DeviceBatch(**{name: getattr(batch, name) for name in ForwardBatch.__slots__}, decode_rows=3)
    for sinks in (None, torch.randn(3) + 1):
        out = picked.attend(q, kv.latent(16), decode, 0.3, found, sinks)
        seen = picked_attention(q, kv.latent(16), batch, 0.3, expected, sinks)
        torch.testing.assert_close(out, seen, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("group", "dim"), [(16, 80), (1, 96), (12, 100), (3, 112), (2, 192), (1, 256)])
def test_heads_of_every_size_and_sinks(group: int, dim: int) -> None:
    """Decode rows in one part and in several, and prompts."""
    sinks = torch.randn(group) + 4
    q, kv, batch = random_batch([1, 1], [5, 70], group, 1, dim)
    expected = ops.attention(q, kv, batch, dim**-0.5, sinks=sinks)
    assert (expected - ops.attention(q, kv, batch, dim**-0.5)).abs().max() > 1e-3
    for splits in (1, 2):
        decode = batch.page_table, batch.slots, batch.kv_len, dim**-0.5, 0, 0.0, splits
        out = attention.decode(q, kv.k, kv.v, *decode, sinks=sinks)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    q, kv, batch = random_batch([20, 3], [20, 40], group, 1, dim)
    tiles = cut(batch.slots.numpy(), np.array([0, 37], np.int32), np.array([20, 3], np.int32), 0, 32)
    out = torch.empty_like(q)
    how = attention.Cut(32, 32, 2)
    attention.extend(
        q, kv.k, kv.v, batch.page_table, torch.from_numpy(tiles), dim**-0.5, out, how, sinks=sinks
    )
    torch.testing.assert_close(out, ops.attention(q, kv, batch, dim**-0.5, sinks=sinks), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 80)])
def test_scores_that_rise_with_places(group: int, dim: int) -> None:
    slopes = torch.rand(2 * group) / 8
    q, kv, batch = random_batch([1, 1], [5, 70], 2 * group, 2, dim)
    expected = ops.attention(q, kv, batch, dim**-0.5, slopes=slopes)
    assert (expected - ops.attention(q, kv, batch, dim**-0.5)).abs().max() > 1e-3
    for splits in (1, 2):
        decode = batch.page_table, batch.slots, batch.kv_len, dim**-0.5, 0, 0.0, splits
        out = attention.decode(q, kv.k, kv.v, *decode, slopes=slopes)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    q, kv, batch = random_batch([20, 3], [20, 40], 2 * group, 2, dim)
    tiles = cut(batch.slots.numpy(), np.array([0, 37], np.int32), np.array([20, 3], np.int32), 0, 32)
    out, how = torch.empty_like(q), attention.Cut(32, 32, 2)
    expected = ops.attention(q, kv, batch, dim**-0.5, slopes=slopes)
    given = q, kv.k, kv.v, batch.page_table, torch.from_numpy(tiles), dim**-0.5, out, how
    attention.extend(*given, slopes=slopes)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def by_head(pages: int, page_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory as ``Arena`` lays it out."""
    heads, *width = shape
    return torch.zeros(pages, heads, page_size, *width, dtype=dtype).transpose(1, 2)


def in_integers(kv: KVLayer, kind: str = "int8") -> KVLayer:
    """Pages with these values, but for what a cache of ``kind`` loses."""
    pages, size, heads, _ = kv.k.shape
    places = torch.arange(pages * size) // size, torch.arange(pages * size) % size
    tensors = (StateTensor(name, (heads, x.shape[3])) for name, x in (("k", kv.k), ("v", kv.v)))
    state = LayerState(0, tuple(tensors))
    [found] = paged(allocate_kv([state], kv_groups([state], 0, kind), [pages], size, kind, by_head))
    found.put_keys(kv.k.flatten(0, 1), places)
    found.put_values(kv.v.flatten(0, 1), places)
    return found


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(
    ("group", "dim", "window", "softcap"), [(2, 64, 0, 0.0), (1, 80, 9, 2.0), (3, 8, 0, 0.0)]
)
def test_pages_of_integers(group: int, dim: int, window: int, softcap: float, kind: str) -> None:
    """Decode rows in one part and in several, and prompts."""
    q, kv, batch = random_batch([1, 1], [5, 70], group, 1, dim)
    kv = in_integers(kv, kind)
    expected = ops.attention(q, kv, batch, 0.3, window, softcap)
    for splits in (1, 4):
        decode = batch.page_table, batch.slots, batch.kv_len, 0.3, window, softcap, splits
        out = attention.decode(q, kv.k, kv.v, *decode, kv_scales=kv.scales)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    q, kv, batch = random_batch([20, 3], [20, 40], group, 1, dim)
    kv = in_integers(kv, kind)
    tiles = cut(batch.slots.numpy(), np.array([0, 37], np.int32), np.array([20, 3], np.int32), 0, 32)
    out, how = torch.empty_like(q), attention.Cut(32, 32, 2)
    pages = batch.page_table, torch.from_numpy(tiles), 0.3
    attention.extend(q, kv.k, kv.v, *pages, out, how, window, softcap, kv_scales=kv.scales)
    torch.testing.assert_close(out, ops.attention(q, kv, batch, 0.3, window, softcap), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, about what is no number
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 80), (1, 1, 8)])
def test_k_and_v_become_integers(q_heads: int, kv_heads: int, dim: int, kind: str) -> None:
    """Of rows that lie apart. A value that is no number spoils its head alone."""
    tokens, width = 11, (q_heads + 2 * kv_heads) * dim
    qkv = torch.randn(tokens, width + 24)[:, :width]
    qkv[0, -1], qkv[1, q_heads * dim], qkv[2, q_heads * dim :] = torch.inf, torch.nan, 0.0
    loc = torch.randperm(24)[:tokens].int()
    ours, theirs = (in_integers(KVLayer(*torch.zeros(2, 6, 4, kv_heads, dim)), kind) for _ in range(2))
    k, v = qkv[:, q_heads * dim :].unflatten(1, (2, kv_heads, dim)).unbind(1)
    places = loc.long() // 4, loc.long() % 4
    theirs.put_keys(k, places)
    theirs.put_values(v, places)
    turning.store(qkv, ours, loc)
    fine = torch.arange(tokens) > 1
    made, expected = ours.k[places][fine].float(), theirs.k[places][fine].float()
    assert (made - expected).abs().max() <= 1  # sums in another order
    assert (made != expected).float().mean() < 0.01
    assert torch.equal(ours.v[places][fine], theirs.v[places][fine])
    for made, expected in zip(ours.tensors[2:], theirs.tensors[2:]):
        odd = ~expected.isfinite()
        assert odd.any()
        torch.testing.assert_close(made.masked_fill(~made.isfinite(), 7.0), expected.masked_fill(odd, 7.0))


@pytest.mark.parametrize(("heads", "content", "rotated"), [(3, 16, 8), (20, 40, 24), (80, 8, 16)])
def test_latents(heads: int, content: int, rotated: int) -> None:
    """Decode rows in one part and in several, and prompts behind a history and without."""
    q, kv, batch = random_batch([1, 1], [5, 70], heads, 1, content + rotated)
    kv = kv.latent(content)
    expected = ops.attention(q, kv, batch, 0.3)
    for splits in (1, 4):
        out = latent.decode(q, kv.k, content, batch.page_table, batch.slots, batch.kv_len, 0.3, splits)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    heads = min(heads, 3)
    q_lens, kv_lens = [1, 40, 35], [9, 40, 70]
    q, kv, batch = random_batch(q_lens, kv_lens, heads, 1, content + rotated)
    kv = kv.latent(content)
    slots, lens = batch.slots.numpy(), np.array(q_lens, np.int32)
    tiles = torch.from_numpy(cut(slots, np.array(kv_lens, np.int32) - lens, lens, 0, 32))
    out = q.new_empty(len(q), heads * content)
    latent.extend(q, kv.k, content, batch.page_table, tiles, 0.3, out, attention.Cut(32, 16, 2))
    torch.testing.assert_close(out, ops.attention(q, kv, batch, 0.3), rtol=1e-4, atol=1e-5)


class Made(TorchDispatchMode):
    """``bytes``: what tensors take that were made meanwhile, whether they are left or not."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        had = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in had:
                self.bytes += x.untyped_storage().nbytes()
        return made


def test_attention_to_latents_takes_no_memory_that_grows_with_the_prefix() -> None:
    """Decode rows and prompts read latents where their pages are. The body, which gathers them, shows that
    this would be seen."""
    heads, content, device = 2, 16, Device("cuda", "", (9, 0), 132, 227 << 10)
    taken: dict[str, list[int]] = {"decode": [], "prompts": [], "body": []}
    for behind in (64, 2048):
        for q_len in (1, 5):
            q, kv, batch = random_batch([q_len, q_len], [2053, 2053], heads, 1, content + 8, 16)
            kv, batch.kv_len = kv.latent(content), torch.full((2,), behind + q_len, dtype=torch.int32)
            rows = {name: getattr(batch, name) for name in ForwardBatch.__slots__}
            step = DeviceBatch(**rows, decode_rows=2)
            shape = AttentionShape(heads, 1, content + 8, 16, q.dtype, frozenset({0}), 0.0, 2, latent=True)
            with Made() as made:
                if q_len == 1:
                    out = LatentDecode(shape, device).forward(q, kv, step, Scoring(0.3))
                else:
                    prompts = LatentPrompts(shape._replace(v_dim=content), device)
                    lens = np.full(2, q_len, np.int32)
                    tiles = cut(batch.slots.numpy(), np.full(2, behind, np.int32), lens, 0, prompts.tile)
                    out = q.new_empty(len(q), heads * content)
                    given = batch.page_table, torch.from_numpy(tiles), Scoring(0.3), out
                    prompts.forward(q, kv, *given)
            taken["decode" if q_len == 1 else "prompts"].append(made.bytes)
            with Made() as made:
                expected = ops.attention(q, kv, batch, 0.3)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
            if q_len > 1:
                taken["body"].append(made.bytes)
    assert taken["decode"][0] == taken["decode"][1] > 0
    assert taken["prompts"][0] == taken["prompts"][1] > 0
    assert taken["body"][1] > 10 * taken["body"][0]


def parts_of(kv: KVLayer, ranks: int, told: list[torch.Tensor]) -> list[KVLayer]:
    """The pages of each rank, which has every ``ranks``-th token of them."""
    return [
        KVLayer(kv.k[:, rank::ranks].contiguous(), kv.v[:, :0], part=Part(ranks, rank, told[rank]))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_parts_of_latents_add_up(ranks: int, splits: int) -> None:
    """Of decode rows, in so many parts, and of prompts (0). A rank may have no token of a history, and none
    has one of a row that nobody is in."""
    heads, content, rotated = 4, 16, 8
    q_lens, kv_lens = ([1, 1, 1, 1], [1, 2, 5, 70]) if splits else ([3, 40, 35, 1], [3, 40, 70, 8])
    q, kv, batch = random_batch(q_lens, kv_lens, heads, 1, content + rotated)
    kv = kv.latent(content)
    expected = ops.attention(q, kv, batch, 0.3)
    if splits:
        q = torch.cat([q, q[:1]])
        batch.slots, batch.kv_len = (
            torch.cat([batch.slots, batch.slots[:1]]),
            torch.cat([batch.kv_len, torch.zeros(1, dtype=torch.int32)]),
        )
    told = [torch.full((len(q), heads, 2), 7.0) for _ in range(ranks)]
    lens, slots = np.array(q_lens, np.int32), batch.slots.numpy()
    tiles = torch.from_numpy(cut(slots[: len(lens)], np.array(kv_lens, np.int32) - lens, lens, 0, 32))
    seen = []
    for own in parts_of(kv, ranks, told):
        if splits:
            rows = batch.page_table, batch.slots, batch.kv_len, 0.3, splits
            seen.append(latent.decode(q, own.k, content, *rows, own=own.part))
        else:
            seen.append(q.new_empty(len(q), heads * content))
            how = batch.page_table, tiles, 0.3, seen[-1], attention.Cut(32, 16, 2)
            latent.extend(q, own.k, content, *how, own=own.part)
    sums = torch.cat([each.flatten(1) for each in told])
    shares = [latent.share(each, sums, ranks, rank) for rank, each in enumerate(seen)]
    found = torch.stack(shares).sum(0).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(found[: len(expected)], expected, rtol=1e-4, atol=1e-5)
    assert not found[len(expected) :].any()


def test_decode_takes_q_beside_k_and_v() -> None:
    """As the projection leaves it where prompts are attended in place."""
    q, kv, batch = random_batch([1, 1, 1], [1, 70, 101], 4, 2, 16)
    expected = ops.attention(q, kv, batch, 0.3)
    beside = torch.cat([q, torch.randn(3, 64)], 1)[:, : q.shape[1]]
    out = attention.decode(beside, kv.k, kv.v, batch.page_table, batch.slots, batch.kv_len, 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norms", [0, 1, 3, 4])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("two", [False, True])
def test_norms_of_what_joins_the_stream_through_norms(two: bool, scaled: bool, norms: int) -> None:
    x, y, h = torch.randn(3, 5, 96)
    norm, y_norm, both, *weights = torch.rand(3 + norms, 96) + 0.5
    scale = torch.tensor([0.75]) if scaled else None
    added = ops.rms_norm(x, norm, 1e-5)
    if two:
        added = ops.rms_norm(ops.add(added, ops.rms_norm(y, y_norm, 1e-5)), both, 1e-5)
    total = ops.add(h, added) if scale is None else ops.scaled_add(added, h, scale)
    expected = [total, *(ops.rms_norm(total, weight, 1e-5) for weight in weights)]
    second = elementwise.Second(y, y_norm, both) if two else None
    made = elementwise.norms_of_sum(x, norm, h, weights, 1e-5, scale, second)
    torch.testing.assert_close(made, expected)


def test_norms_and_activations() -> None:
    x, h, w = torch.randn(5, 96), torch.randn(5, 96), torch.rand(96)
    torch.testing.assert_close(elementwise.rms_norm(x, w, 1e-5), ops.rms_norm(x, w, 1e-5))
    torch.testing.assert_close(
        elementwise.rms_norm_beside(x, w[:40], w[:16], 1e-5), ops.rms_norm_beside(x, w[:40], w[:16], 1e-5)
    )
    for out, expected in zip(elementwise.add_rms_norm(x, h, w, 1e-5), ops.add_rms_norm(x, h, w, 1e-5)):
        torch.testing.assert_close(out, expected)
    for kind in ("silu", "gelu_tanh"):
        torch.testing.assert_close(elementwise.act_mul(x, kind), ops.act_mul(x, kind), rtol=1e-5, atol=1e-6)
    for kind in ("silu", "gelu_tanh", "gelu", "relu", "relu2"):
        torch.testing.assert_close(elementwise.activate(x, kind), ops.activate(x, kind), rtol=1e-5, atol=1e-6)
    rows = torch.tensor([4, 0, 0], dtype=torch.int32)
    torch.testing.assert_close(elementwise.take_rows(x, rows, 2.0), ops.gather(x, rows) * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norms(dtype: torch.dtype) -> None:
    """Of rows that lie apart, of heads, and of sums, which are rounded first."""
    x, y = (torch.randn(5, 120, dtype=dtype)[:, :96] + 3 for _ in range(2))
    w, b, named = torch.rand(96), torch.rand(96), {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {}

    def expected(x: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(x.float(), w, b, 1e-5).to(dtype)

    torch.testing.assert_close(elementwise.layer_norm(x, w, b, 1e-5), expected(x), **named)
    heads = x.reshape(5, 2, 48).contiguous()
    of_heads = ops.layer_norm(heads.float(), w[:48], b[:48], 1e-5).to(dtype)
    torch.testing.assert_close(elementwise.layer_norm(heads, w[:48], b[:48], 1e-5), of_heads, **named)
    normed, total = elementwise.add_layer_norm(x.contiguous(), y.contiguous(), w, b, 1e-5)
    torch.testing.assert_close(total, x + y, **named)
    torch.testing.assert_close(normed, expected(total), **named)
    h = y.contiguous()
    again, kept = elementwise.add_layer_norm(x.contiguous(), h, w, b, 1e-5, in_place=True)
    assert kept is h
    assert torch.equal(h, total)
    assert torch.equal(again, normed)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "rot", "norm", "dim"),
    [
        (4, 2, 16, True, 16),
        (3, 3, 16, False, 16),
        (9, 3, 8, True, 16),
        (16, 2, 16, True, 16),
        (4, 2, 80, False, 80),
        (3, 3, 24, True, 96),
        (2, 1, 100, True, 100),
        (2, 1, 192, False, 192),
    ],
)
def test_qk_norm_rope_store(q_heads: int, kv_heads: int, rot: int, norm: bool, dim: int) -> None:
    """Of rows that lie apart."""
    tokens, width = 6, (q_heads + 2 * kv_heads) * dim
    qkv = torch.randn(tokens, width + 24)[:, :width]
    cos_sin, positions = torch.randn(20, rot), torch.randint(0, 20, (tokens,), dtype=torch.int32)
    weights = (torch.rand(dim), torch.rand(dim)) if norm else (None, None)
    loc = torch.randperm(24)[:tokens].int()
    ours, theirs = (KVLayer(*torch.zeros(2, 6, kv_heads, 4, dim).transpose(2, 3)) for _ in range(2))
    expected = ops.qk_norm_rope_store(qkv, positions, cos_sin, *weights, 1e-6, theirs, loc)
    out = elementwise.qk_norm_rope_store(qkv, positions, cos_sin, *weights, 1e-6, ours.k, ours.v, loc)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(ours.k, theirs.k)
    torch.testing.assert_close(ours.v, theirs.v)
    v = qkv[:, (q_heads + kv_heads) * dim :].clone()
    q = elementwise.qk_norm_rope_store(
        qkv, positions, cos_sin, *weights, 1e-6, ours.k, ours.v, loc, in_place=True
    )
    torch.testing.assert_close(q, expected)
    assert q.data_ptr() == qkv.data_ptr()
    k, kept = qkv[:, q_heads * dim :].split((kv_heads * dim, kv_heads * dim), 1)
    torch.testing.assert_close(k.view(tokens, kv_heads, dim), theirs.k[loc.long() // 4, loc.long() % 4])
    assert torch.equal(kept, v)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("kv_heads", "dim"), [(2, 16), (3, 80)])
def test_values_are_normed_on_the_way(kv_heads: int, dim: int, joined: bool) -> None:
    tokens, heads = 5, 2 * kv_heads
    width = (heads + kv_heads * (1 if joined else 2)) * dim
    qkv = torch.randn(tokens, width + 16)[:, :width]
    cos_sin, positions = torch.randn(20, dim // 2), torch.randint(0, 20, (tokens,), dtype=torch.int32)
    loc, weights = torch.randperm(24)[:tokens].int(), torch.rand(2, dim)
    ours, theirs = (KVLayer(*torch.zeros(2, 6, kv_heads, 4, dim).transpose(2, 3)) for _ in range(2))
    expected = ops.qkv_norm_rope_store(qkv, positions, cos_sin, *weights, 1e-6, theirs, loc, joined)
    out = elementwise.qk_norm_rope_store(
        qkv, positions, cos_sin, *weights, 1e-6, ours.k, ours.v, loc, v_norm=True, joined=joined
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(ours.k, theirs.k)
    torch.testing.assert_close(ours.v, theirs.v)
    if joined:
        v = qkv[:, heads * dim :].unflatten(1, (kv_heads, dim))
        kept = ours.v[loc.long() // 4, loc.long() % 4]
        torch.testing.assert_close(kept, ops.rms_norm(v, torch.ones(dim), 1e-6))


@pytest.mark.parametrize(
    ("heads", "nope", "value", "content", "rotated"), [(3, 24, 20, 72, 8), (2, 16, 16, 64, 2)]
)
def test_latent_queries_and_values(heads: int, nope: int, value: int, content: int, rotated: int) -> None:
    """Of rows that lie apart, in blocks that are not full."""
    for tokens in (3, 37):
        rows = torch.randn(tokens, heads * (nope + rotated) + content + rotated)
        q, x = rows.split([heads * (nope + rotated), content + rotated], 1)
        k_up, v_up = torch.randn(heads, nope, content), torch.randn(heads, value, content)
        norm, positions = torch.rand(content), torch.randint(0, 50, (tokens,), dtype=torch.int32)
        cos_sin = torch.randn(50, rotated)
        out_loc = torch.randperm(48)[:tokens].int()
        ours, theirs = (torch.zeros(12, 4, 1, content + rotated) for _ in range(2))
        given = q, x, k_up, norm, 1e-6, positions, cos_sin
        expected = ops.latent_queries.body(*given, KVLayer(theirs, theirs), out_loc)
        torch.testing.assert_close(latent.queries(*given, ours, out_loc), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        seen = torch.randn(tokens, heads * content)
        made = ops.latent_values.body(seen, v_up)
        torch.testing.assert_close(latent.values(seen, v_up), made, rtol=1e-4, atol=1e-4)


def test_prepare_decode_and_pages() -> None:
    table = torch.zeros(4, 8, dtype=torch.int32)
    step.append_pages(torch.tensor([[2, 2, 0], [0, 1, 0], [5, 6, 7]], dtype=torch.int32), table)
    assert table[2].tolist() == [5, 6, 0, 0, 0, 0, 0, 0]
    assert table[0, 0] == 7
    held = torch.tensor([0, 0, 8, 0], dtype=torch.int32)  # what slot 0 has drawn has no page yet
    tokens = TokenTable(table, held, 4)
    tokens.resize(9)
    tokens.ids[:] = torch.arange(len(tokens.ids))
    slots, starts = torch.tensor([2, 0, 3], dtype=torch.int32), torch.tensor([5, 3, -1], dtype=torch.int32)
    ids, positions, kv_len, out_loc = (torch.full((3,), 9, dtype=torch.int32) for _ in range(4))
    cum = torch.zeros(4, dtype=torch.int32)
    step.prepare_decode(slots, starts, tokens, table, ids, positions, kv_len, out_loc, cum, tile=2)
    assert ids.tolist() == [tokens.base + 25, 3, 0]
    assert positions.tolist() == [5, 3, 0]
    assert kv_len.tolist() == [6, 4, 0]
    assert out_loc.tolist() == [6 * 4 + 1, 7 * 4 + 3, 0]
    assert cum.tolist() == [0, 3, 5, 5]
    step.count_tiles(kv_len, cum, tile=2, window=3)
    assert cum.tolist() == [0, 2, 4, 4]


def test_no_token_is_turned_by_less_than_nothing() -> None:
    """Pictures of slot 2 have 40 tokens more than positions: in front of them a token would be before the
    first row of a table of rotations, and of a ring of hidden states."""
    tokens = in_rows(torch.zeros(4, 64, dtype=torch.int32))
    table = torch.zeros(4, 8, dtype=torch.int32)
    deltas = torch.tensor([0, 0, -40, 0], dtype=torch.int32)
    slots, starts = torch.tensor([2, 2, 0], dtype=torch.int32), torch.tensor([5, 50, 7], dtype=torch.int32)
    ids, positions, kv_len, out_loc = (torch.full((3,), 9, dtype=torch.int32) for _ in range(4))
    cum, given = torch.zeros(4, dtype=torch.int32), (tokens, table, ids, positions)
    step.prepare_decode(slots, starts, *given, kv_len, out_loc, cum, tile=2, deltas=deltas)
    assert positions.tolist() == [0, 10, 7]
    q_start = torch.tensor([0, 2, 3], dtype=torch.int32)
    begins = torch.tensor([39, 7], dtype=torch.int32)
    step.prepare_extend(slots[1:], begins, q_start, 2, *given, out_loc, deltas)
    assert positions.tolist() == [0, 0, 7]


def draw(
    logits: torch.Tensor, temperature: float, seeds: list[int], position: int = 3, cut: bool = False, **shape
):
    """One draw of each row, row r in slot r."""
    n = logits.shape[0]
    full = lambda name, off: torch.full((n,), shape.get(name, off))  # noqa: E731
    slots, positions = torch.arange(n, dtype=torch.int32), torch.full((n,), position, dtype=torch.int32)
    temperatures = torch.full((n,), temperature)
    table, out = torch.zeros(n, 8, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    cuts = None
    if cut:
        cuts = sampling.find_thresholds(
            logits, slots, temperatures, full("top_k", 0).int(), full("top_p", 1.0), full("min_p", 0.0)
        )
    sampling.sample(logits, slots, positions, torch.tensor(seeds), temperatures, in_rows(table), out, cuts)
    assert torch.equal(table[:, position], out.clamp(min=0))
    return out, cuts


@pytest.mark.parametrize(("temperature", "cut"), [(0.0, False), (0.8, False), (0.8, True)])
def test_the_second_is_drawn_as_if_there_were_no_first(temperature: float, cut: bool) -> None:
    """It goes where it is wanted; the third row wants none, and of the last nothing else is left."""
    torch.manual_seed(0)
    logits = torch.randn(4, 5000) * 3
    logits[3] = -torch.inf
    logits[3, 7] = 0.0
    slots, where = torch.arange(4, dtype=torch.int32), torch.full((4,), 3, dtype=torch.int32)
    beside = torch.tensor([6, 7, 0, 5]).int()
    seeds, temperatures = torch.tensor([1, 2, 3, 4]), torch.full((4,), temperature)
    cuts = torch.full((4,), 1.0) if cut else None
    cuts = torch.where(torch.arange(4) < 3, cuts, -torch.inf) if cut else None
    both, alone = torch.zeros(2, 4, 8, dtype=torch.int32)
    out, second = torch.zeros(2, 4, dtype=torch.int32)
    given = slots, where, seeds, temperatures
    sampling.sample(logits, *given, in_rows(both), out, cuts, beside=beside)
    assert both[:, 3].tolist() == out.tolist()
    logits.scatter_(1, out[:, None].long(), -torch.inf)
    sampling.sample(logits, *given, in_rows(alone), second, cuts)
    assert [both[0, 6], both[1, 7]] == second[:2].tolist()
    assert (both > 0).sum(1)[:3].tolist() == [2, 2, 1]


def test_greedy_takes_the_first_largest() -> None:
    logits = torch.randn(2, 5000)
    logits[0, 4500] = logits[0, 17] = 9.0
    out, _ = draw(logits, 0.0, [1, 2])
    assert out.tolist() == logits.argmax(-1).tolist()
    assert out[0] == 17


def test_draws_follow_the_distribution_and_the_seed() -> None:
    n = 64
    row = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5])
    out, _ = draw(row.repeat(n, 1), 0.7, list(range(n)))
    expected = (row / 0.7).softmax(0)
    measured = torch.bincount(out, minlength=5) / n
    assert (measured - expected).abs().max() < 4 * (0.25 / n) ** 0.5
    again, _ = draw(row.repeat(3, 1), 0.7, [5, 50, 5])
    assert again.tolist() == [out[5], out[50], out[5]]


@pytest.mark.parametrize(("spread", "temperature"), [(0.0, 1.0), (1.0, 0.8), (4.0, 0.6), (30.0, 1.5)])
def test_the_best_of_all_tokens_wins(spread: float, temperature: float) -> None:
    rows, vocab = 8, 9000
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5)) * spread
    logits[0, 4000:] = float("-inf")
    out, _ = draw(logits, temperature, list(range(rows)), position=6)
    v = np.stack([bits_of(seed, 6, np.arange(vocab)) + 0.5 for seed in range(rows)]) / 2**32
    scores = logits.double().numpy() / temperature - np.log(-np.log1p(-v))
    assert out.tolist() == scores.argmax(1).tolist()


def test_a_token_that_is_left_alone_wins() -> None:
    logits = torch.full((12, 5000), float("-inf"))
    allowed = torch.arange(12) * 397 + 13
    logits[torch.arange(12), allowed] = -5.0
    out, _ = draw(logits, 1.0, list(range(12)))
    assert out.tolist() == allowed.tolist()


@pytest.mark.parametrize(
    ("vocab", "rows", "each"),
    [
        *((vocab, rows, each) for each in DISTRIBUTIONS[:3] for vocab, rows in ((40, 6), (50_000, 2))),
        *((vocab, rows, each) for each in DISTRIBUTIONS[3:] for vocab, rows in ((40, 6), (2000, 3))),
    ],
)
def test_the_kernels_draw_the_tokens_of_the_cpu(vocab: int, rows: int, each: Distribution) -> None:
    chance = np.random.default_rng(vocab)
    scales = chance.choice([0.0, 0.5, 3.0, 20.0], (rows, 1))
    logits = (chance.standard_normal((rows, vocab)) * scales).round(2).astype(np.float32)
    logits[:, 1:][chance.random((rows, vocab - 1)) < 0.2] = -np.inf
    rest = each._asdict()
    cut = each != Distribution(each.temperature)
    seeds = chance.integers(0, 2**62, rows).tolist()
    out, _ = draw(torch.from_numpy(logits), rest.pop("temperature"), seeds, 5, cut, **rest)
    found = [possible(row, each, seed, 5) for row, seed in zip(logits, seeds)]
    assert all(token in tokens for token, tokens in zip(out.tolist(), found))
    assert sum(len(tokens) == 1 for tokens in found) > rows / 2


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(7, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2), (20, 0.5, 0.05)]
)
def test_cuts_keep_what_the_host_sampler_keeps(top_k: int, top_p: float, min_p: float) -> None:
    logits, temperature = torch.randn(1, 300) * 2, 0.8
    _, cuts = draw(logits, temperature, [1], cut=True, top_k=top_k, top_p=top_p, min_p=min_p)
    assert cuts is not None
    order = logits[0].argsort(descending=True)
    keep = order[:top_k] if top_k else order
    p = (logits[0][keep].double() / temperature).softmax(0)
    keep = keep[: int((p.cumsum(0) < top_p).sum()) + 1]
    weights = ((logits[0][keep] - logits.max()) / temperature).exp()
    keep = keep[weights >= min_p]
    assert set((logits[0] >= cuts[0]).nonzero()[:, 0].tolist()) == set(keep.tolist())


@pytest.mark.parametrize("vocab", [40, 5000])
def test_masks_leave_what_is_allowed(vocab: int) -> None:
    """Where that is forbidden already, nothing is left, but in a row whose grammar ends."""
    torch.manual_seed(vocab)
    logits = torch.randn(6, vocab)
    logits[2] = float("-inf")
    allowed = torch.rand(4, 32 * -(-vocab // 32)) < 0.3
    rows = torch.tensor([5, 0, 2, 3], dtype=torch.int32)
    logits[5, allowed[0, :vocab]] = float("-inf")
    expected = logits.clone()
    for n, row in enumerate(rows.tolist()):
        kept = allowed[n, :vocab]
        expected[row, ~kept] = float("-inf")
        if n == 0:
            expected[row, kept] = 0.0
    bits = allowed.view(4, -1, 32).long() << torch.arange(32)
    ends = torch.tensor([1, 0, 0, 1], dtype=torch.int32)
    sampling.mask(logits, rows, bits.sum(-1).to(torch.int32), ends)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("ranks", "temperature", "cut"), [(1, 0.0, False), (1, 0.9, True), (2, 0.0, True), (2, 0.9, False)]
)
def test_logits_without_a_token(ranks: int, temperature: float, cut: bool) -> None:
    """Marked in the output, a token in the table; other rows draw as they did."""
    vocab, half = 5000, 2500
    torch.manual_seed(5)
    clean = torch.randn(7, vocab)
    logits = clean.clone()
    logits[0, 17], logits[1, vocab - 1], logits[2], logits[3] = torch.nan, torch.inf, -torch.inf, torch.nan
    logits[4] = -torch.inf
    logits[4, 3000] = 0.5
    rows = len(logits)
    slots, positions, seeds = torch.arange(rows).int(), torch.arange(1, rows + 1).int(), torch.arange(rows)
    temperatures = torch.full((rows,), temperature)

    def draw(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cuts = torch.full((rows,), -2.0) if cut else None
        table, out = torch.zeros(rows, rows + 1).int(), torch.zeros(rows).int()
        keys: list[torch.Tensor] = []

        def best_of_ranks(own: torch.Tensor) -> None:
            keys.append(own.clone())
            own.copy_(torch.stack(keys).max(0).values)

        for first, stop in [(0, vocab)] if ranks == 1 else [(0, half), (half, vocab)]:
            sampling.sample(
                logits[:, first:stop].contiguous(),
                slots,
                positions,
                seeds,
                temperatures,
                in_rows(table),
                out,
                cuts,
                first,
                best_of_ranks if ranks > 1 else None,
            )
        return table, out

    table, out = draw(logits)
    assert out[:5].tolist() == [-1, -1, -2, -1, 3000]
    assert torch.equal(out[5:], draw(clean)[1][5:])
    assert torch.equal(table[slots.long(), positions.long()], out.clamp(min=0))


@pytest.mark.parametrize("narrowed", [False, True])
def test_rounded_logits_are_compared_by_exact_ones(narrowed: bool) -> None:
    """Those of the best token of each piece; what is drawn is what exact ones bring, where rounded ones bring
    something else. Row 2 has a threshold, row 3 nothing to draw."""
    torch.manual_seed(1)
    rows, vocab, k = 4, 5000, 96
    weight, hidden = torch.randn(vocab, k) / k**0.5, torch.randn(rows, k)
    exact = hidden @ weight.t()
    own = torch.arange(0, vocab, 3) if narrowed else torch.arange(vocab)
    left = torch.full_like(exact, -torch.inf)
    left[:, own] = exact[:, own]
    rounded = left + 0.2 * torch.randn(rows, vocab)
    rounded[3] = -torch.inf
    which = torch.zeros(vocab, dtype=torch.int32)
    which[own] = torch.arange(len(own)).int()
    made_of = sampling.Exact(hidden, weight[own].contiguous(), which if narrowed else None)
    slots, positions, seeds = torch.arange(rows).int(), torch.arange(1, rows + 1).int(), torch.arange(rows)
    temperatures = torch.tensor([0.0, 1.0, 0.7, 1.0])
    cuts = torch.tensor([-torch.inf, -torch.inf, 2.0, -torch.inf])
    found = rounded.clone()
    sampling.sharpen(found, slots, positions, seeds, temperatures, made_of, cuts)
    kept = found > -torch.inf
    pieces = -(-vocab // 32)
    for piece in range(pieces):
        tokens = [t for t in range(vocab) if t // sampling.NEAR % pieces == piece]
        assert set(kept[:2, tokens].sum(1).tolist()) == {1}
    assert not kept[3].any()
    torch.testing.assert_close(found[:2][kept[:2]], exact[:2][kept[:2]])
    assert found[2][kept[2]].min() >= 2.0
    assert (rounded[2][kept[2]] >= 2.0).all()

    none = torch.full((rows, 64), -torch.inf)  # a rank that has no token of a map has no weights either
    given = slots, positions, seeds, temperatures
    sampling.sharpen(none, *given, made_of._replace(weight=weight[:0].clone(), rows=None), cuts)
    assert not (none > -torch.inf).any()

    def drawn(logits: torch.Tensor) -> list[int]:
        table, out = torch.zeros(rows, rows + 1).int(), torch.zeros(rows).int()
        sampling.sample(logits, slots, positions, seeds, temperatures, in_rows(table), out, cuts)
        return out.tolist()

    wanted = drawn(torch.cat([left[:3], rounded[3:]]))
    got = drawn(found)
    assert [*got[:2], got[3]] == [*wanted[:2], wanted[3]]
    assert drawn(rounded)[:2] != wanted[:2]


def test_a_mask_hides_no_broken_logits() -> None:
    """Where all that is allowed is NaN, or a part of it; not where it is allowed not."""
    logits = torch.randn(3, 5000)
    logits[0, :40], logits[1, 5], logits[2, 4000] = torch.nan, torch.nan, torch.nan
    words = torch.zeros(3, -(-5000 // 32), dtype=torch.int32)
    words[:, 0] = 0b111111
    sampling.mask(logits, torch.arange(3).int(), words)
    out, _ = draw(logits, 0.7, [1, 2, 3])
    assert out[:2].tolist() == [-1, -1]
    assert 0 <= out[2] < 6
    sampling.mask(logits, torch.arange(3).int(), words * 0)
    assert draw(logits, 0.7, [1, 2, 3])[0].tolist() == [-2] * 3


def test_ranks_find_what_one_would_draw_second() -> None:
    """They go through it twice, so that each knows in the end what all have found. Rows 0 and 1 have many
    equal logits."""
    rows, vocab, split = 12, 10_000, 4_500
    torch.manual_seed(3)
    logits = torch.randn(rows, vocab)
    logits[:2] = logits[:2].round()
    slots, positions = torch.arange(rows).int(), torch.full((rows,), 2).int()
    temperatures, seeds = torch.tensor([0.0] * 5 + [0.9] * (rows - 5)), torch.arange(rows)
    given = slots, positions, seeds, temperatures
    keys: tuple[list[torch.Tensor], ...] = [], []
    calls: list[int] = []

    def best_of_ranks(own: torch.Tensor) -> None:
        known = keys[len(calls) % 2]
        calls.append(0)
        known.append(own.clone())
        own.copy_(torch.stack(known).max(0).values)

    tables, out = torch.zeros(2, rows, 8).int(), torch.zeros(rows).int()
    beside = torch.full((rows,), 5).int()
    sampling.sample(logits, *given, in_rows(tables[0]), out, beside=beside)
    for first, stop in [(0, split), (split, vocab)] * 2:
        part, table = logits[:, first:stop].contiguous(), in_rows(tables[1])
        sampling.sample(part, *given, table, out, None, first, best_of_ranks, beside=beside)
    assert torch.equal(*tables)
    assert set(tables[0, :, 5].ge(split).tolist()) == {False, True}


def test_ranks_draw_what_one_would() -> None:
    """Each from its part of the vocabulary; ties go to the lower id, wherever that is."""
    rows, vocab, split = 16, 10_000, 4_500
    torch.manual_seed(3)
    logits = torch.randn(rows, vocab)
    logits[:4] = logits[:4].round()  # many equal ones
    slots, positions = torch.arange(rows).int(), torch.arange(rows).int()
    temperatures = torch.tensor([0.0] * 6 + [0.9] * (rows - 6))
    seeds = torch.arange(rows)
    found = []
    keys: list[torch.Tensor] = []

    def best_of_ranks(own: torch.Tensor) -> None:
        keys.append(own.clone())
        own.copy_(torch.stack(keys).max(0).values)

    for parts in ([(0, vocab)], [(0, split), (split, vocab)]):
        table, out = torch.zeros(rows, rows).int(), torch.zeros(rows).int()
        landing = sampling.Landing(torch.zeros(3, rows).int(), torch.tensor([2]).int())
        for first, stop in parts[::-1]:
            sampling.sample(
                logits[:, first:stop].contiguous(),
                slots,
                positions,
                seeds,
                temperatures,
                in_rows(table),
                out,
                first=first,
                best_of_ranks=best_of_ranks if len(parts) > 1 else None,
                landing=landing,
            )
        assert torch.equal(landing.tokens, torch.stack([0 * out, 0 * out, out]))
        found.append((table, out))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(out[:6].long(), logits[:6].argmax(-1))
    assert (out >= split).any()
    sampling.follow(torch.full((rows,), sampling.WORST), slots, positions, in_rows(table), out, best_of_ranks)
    assert torch.equal(out, found[0][1])
