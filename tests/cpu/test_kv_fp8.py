"""The 8-bit KV cache: the oracle's rounding, and the portable kernels that read it. That kernels store what
the oracle stores is tested in tests/gpu: Triton's interpreter rounds e4m3 otherwise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from test_triton import random_batch
from token_tables import in_rows

from sgla.attention.base import cut
from sgla.kernels import ops
from sgla.kernels.ops import KVLayer
from sgla.kernels.triton import attention, invariant, step

E4M3 = torch.float8_e4m3fn
SCALES = (0.02, 0.011)


def pages(*shape: int) -> KVLayer:
    return KVLayer(*(torch.zeros(shape, dtype=E4M3).transpose(1, 2) for _ in range(2)), *SCALES)


def test_stored_values_are_rounded_to_three_bits_and_saturate() -> None:
    kv, qkv = pages(2, 2, 4, 16), torch.randn(5, 8 * 16)
    qkv[2, -1] = 1e6
    positions = torch.arange(5, dtype=torch.int32)
    ops.qk_norm_rope_store(qkv, positions, torch.ones(9, 16), None, None, 1e-6, kv, positions)
    v = qkv.view(5, 8, 16)[:, 6:]
    read = (kv.v.float() * kv.v_scale).reshape(8, 2, 16)[:5]
    assert read[2, -1, -1] == pytest.approx(448 * kv.v_scale)
    ordinary = (v.abs() > 0.02) & (v.abs() < 4)
    assert ((read - v).abs() / v.abs())[ordinary].max() <= 2**-4


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_attention_reads_it(softcap: float) -> None:
    q, wide, batch = random_batch([1, 40, 3], [70, 40, 90], 4, 2, 16)
    kv = KVLayer(*((t / s).to(E4M3) for t, s in zip((wide.k, wide.v), SCALES)), *SCALES)
    expected = ops.attention(q, kv, batch, 0.3, 0, softcap)
    same = KVLayer(kv.k.float() * kv.k_scale, kv.v.float() * kv.v_scale)
    torch.testing.assert_close(expected, ops.attention(q, same, batch, 0.3, 0, softcap))
    rows = (q, kv.k, kv.v, batch.page_table, batch.slots, batch.q_start, batch.kv_len)
    lens, ends = np.array([1, 40, 3], np.int32), np.array([70, 40, 90], np.int32)
    tile = attention.Cut(128, 64, 2)
    tiles = torch.from_numpy(cut(batch.slots.numpy(), ends - lens, lens, 0, tile.m))
    out = torch.empty_like(q)
    attention.extend(*rows[:4], tiles, 0.3 * kv.k_scale, out, tile, 0, softcap, kv.v_scale)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    tiles = invariant.tiles_of([1, 40, 3], 2, "cpu")
    out = invariant.attend(*rows, tiles, 0.3 * kv.k_scale, 0, softcap, 64, None, kv.v_scale)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_tiles_behind_a_prefix_are_counted() -> None:
    tokens, table = torch.zeros(3, 99, dtype=torch.int32), torch.ones(3, 8, dtype=torch.int32)
    slots, starts = torch.tensor([0, 1, 2]).int(), torch.tensor([40, 64, -1]).int()
    columns = [torch.zeros(3, dtype=torch.int32) for _ in range(4)]
    cum, skip = torch.zeros(4, dtype=torch.int32), torch.tensor([32, 0, 0]).int()
    step.prepare_decode(slots, starts, in_rows(tokens), table, *columns, cum, 16, 0, skip)
    assert cum.tolist() == [0, 1, 6, 6]
