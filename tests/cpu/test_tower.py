"""Towers with one kernel for the attention of all windows, as GPUs have it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_vision import MAKERS, SHOWN
from torch import Tensor
from torch.nn.attention import varlen

from sgla.loading import tower_attention
from sgla.loading.tower import load_tower
from sgla.worker.pictures import arrays_of


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, ends_k: Tensor, longest: int, longest_k: int, scale: float
) -> Tensor:
    """In place of torch's kernel, which CPUs have not."""
    assert torch.equal(ends, ends_k)
    assert longest == longest_k == int(ends.diff().max())
    parts = [[x[a:b].transpose(0, 1) for x in (q, k, v)] for a, b in zip(ends.tolist(), ends[1:].tolist())]
    return torch.cat([F.scaled_dot_product_attention(*part, scale=scale).transpose(0, 1) for part in parts])


@pytest.mark.parametrize(
    "name", ["qwen2.5-vl", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen2-vl", "qwen3-vl"))]
)
@torch.inference_mode()
def test_one_kernel_for_all_windows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", one_by_one)
    model = MAKERS[name](tmp_path)
    tower = load_tower(model.source, model.speller.vision, torch.float32, torch.device("cpu"))
    given = [arrays_of(model.prepared(shown)) for shown in SHOWN]
    apart = [tower(arrays) for arrays in given]
    tower_attention.use_packed(tower._module)
    for arrays, expected in zip(given, apart):
        found = tower(arrays)
        torch.testing.assert_close(found.values, expected.values)
        torch.testing.assert_close(found.deep, expected.deep)
