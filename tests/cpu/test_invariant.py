"""The batch-invariant kernels against the oracle; that they are invariant is tested where the hardware is, in
tests/gpu."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from test_triton import random_batch

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.kernels.triton import invariant, units


@pytest.mark.parametrize(("m", "n", "k", "bias"), [(3, 70, 64, True), (130, 40, 96, False)])
def test_linear(m: int, n: int, k: int, bias: bool) -> None:
    x, w = torch.randn(m, k), torch.randn(n, k)
    b = torch.randn(n) if bias else None
    torch.testing.assert_close(
        invariant.linear(x, w, b), torch.nn.functional.linear(x, w, b), rtol=1e-4, atol=1e-4
    )


def attend(
    q: torch.Tensor,
    kv: KVLayer,
    batch: ForwardBatch,
    tiles: torch.Tensor,
    window: int,
    softcap: float,
    parts: tuple[torch.Tensor, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    return invariant.attend(
        q,
        kv.k,
        kv.v,
        batch.page_table,
        batch.slots,
        batch.q_start,
        batch.kv_len,
        tiles,
        0.3,
        window,
        softcap,
        64,
        parts,
        1.0,
        sinks,
    )


@pytest.mark.parametrize(
    ("group", "dim", "window", "softcap"),
    [(4, 32, 0, 0.0), (3, 16, 30, 0.0), (2, 16, 0, 2.0), (2, 80, 0, 0.0)],
)
def test_attention(group: int, dim: int, window: int, softcap: float) -> None:
    q_lens, kv_lens = [1, 40, 70, 3], [9, 40, 150, 70]
    q, kv, batch = random_batch(q_lens, kv_lens, group, 1, dim)
    sinks = torch.randn(group) if group == 2 else None
    expected = ops.attention(q, kv, batch, 0.3, window, softcap, sinks)
    out = attend(q, kv, batch, invariant.tiles_of(q_lens, group, "cpu"), window, softcap, None, sinks)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "softcap", "dim"), [(0, 0.0, 16), (80, 0.0, 16), (0, 2.0, 16), (0, 0.0, 96)]
)
def test_decode_in_chunks(window: int, softcap: float, dim: int) -> None:
    q, kv, batch = random_batch([1, 1, 1], [1, 70, 201], 4, 2, dim)
    sinks = torch.randn(4) if dim == 96 else None
    expected = ops.attention(q, kv, batch, 0.3, window, softcap, sinks)
    parts = torch.full((3, 4, 4, dim), float("nan")), torch.full((3, 4, 4, 2), float("nan"))
    out = attend(q, kv, batch, invariant.tiles_of([1, 1, 1], 2, "cpu"), window, softcap, parts, sinks)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_log_sum_exp() -> None:
    x = torch.randn(3, 5001) * 8
    x[1, :3000] = float("-inf")
    torch.testing.assert_close(invariant.log_sum_exp(x), x.logsumexp(-1, keepdim=True))


def test_units_of_decode_rows() -> None:
    """Every block of keys of every row once, in chunks, the longest first; nothing behind them."""
    lengths = [1, 0, 700, 128, 1025, 256, 5]
    into = units.room(16, 5, "cpu")
    for whole in into[:3]:
        whole.fill_(7)
    slots = torch.tensor([3, 9, 1, 8, 0, 4, 5], dtype=torch.int32)
    made = units.units_of(slots, torch.tensor(lengths, dtype=torch.int32), 2, into)
    seen, sizes = {}, []
    count = int((made.tiles[:, 3] == 1).sum())
    assert not made.tiles[count:, 3].any()
    for (slot, row, start, _), (first, last, part, _) in zip(
        made.tiles[:count].tolist(), made.parts[:count].tolist()
    ):
        assert (slot, start) == (slots[row], lengths[row] - 1)
        seen.setdefault(row, []).append((first, last, part))
        sizes.append(last - first + 1)
    assert sizes == sorted(sizes, reverse=True)
    for row, length in enumerate(lengths):
        blocks = -(-length // 128)
        chunks = [(b, min(b + 1, blocks - 1)) for b in range(0, blocks, 2)]
        many = len(chunks) > 1
        expected = [(*chunk, row * 5 + i if many else -1) for i, chunk in enumerate(chunks)]
        assert sorted(seen.get(row, [])) == expected
        assert made.merges[row].tolist() == [row, int(many), row * 5, len(chunks)]
