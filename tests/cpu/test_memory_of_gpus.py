"""Who gets the bytes of a GPU, decided without one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sgla.attention import torch_ops
from sgla.attention.base import DeviceBatch, ExtendRows
from sgla.dist import gpus
from sgla.errors import ConfigError
from sgla.kernels import ops
from sgla.kernels.ops import KVLayer

HERE = Path(__file__).parent


def test_torch_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="is a CPU build" if torch.version.cuda is None else "shows none"):
        gpus.join_gpus(0, 1, HERE)


def test_torch_attention_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens at a time give what all together give."""
    heads, dim, page_size = 4, 8, 4
    q_lens, kv_lens = np.array([1, 1, 1, 5, 7], np.int32), np.array([3, 9, 1, 5, 13], np.int32)
    tables = torch.arange(1, 21, dtype=torch.int32).view(5, 4)
    kv = KVLayer(*torch.randn(2, 21, page_size, 2, dim))
    tokens = int(q_lens.sum())
    q = torch.randn(tokens, heads * dim)
    empty = torch.zeros(tokens, dtype=torch.int32)
    batch = DeviceBatch(
        rows=5, tokens=tokens, ids=empty, positions=empty, slots=torch.arange(5, dtype=torch.int32),
        q_start=torch.tensor([0, *q_lens.cumsum()], dtype=torch.int32), kv_len=torch.from_numpy(kv_lens), out_loc=empty,
        page_table=tables, page_size=page_size, sample_rows=empty, decode_rows=3,
        extend=ExtendRows(np.arange(3, 5, dtype=np.int32), q_lens[3:], kv_lens[3:], tables.numpy()),
    )  # fmt: skip
    whole = ops.attention(q, kv, batch, 0.3)
    monkeypatch.setattr(torch_ops, "PLACES", 10)
    monkeypatch.setattr(torch_ops, "PAIRS", 30)
    out = torch.empty_like(q)
    out[:3] = torch_ops.TorchDecode().forward(q[:3], kv, batch, 0.3, 0, 0.0)
    torch_ops.TorchExtend().forward(q[3:], kv, batch, 0.3, 0, 0.0, out[3:])
    torch.testing.assert_close(out, whole)
