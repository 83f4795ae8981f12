"""Towers with kernels for GPUs, in Triton's interpreter, give what transformers' modules give."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_vision import MAKERS, SHOWN
from torch import Tensor
from torch.nn.attention import varlen

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from sgla.loading import tower_attention
from sgla.loading.tower import load_tower
from sgla.worker import seeing, tower_kernels
from sgla.worker.pictures import arrays_of


def one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    ends_k: Tensor,
    longest: int,
    longest_k: int,
    scale: float | None = None,
) -> Tensor:
    """In place of torch's kernel, which CPUs have not."""
    assert torch.equal(ends, ends_k)
    assert longest == longest_k == int(ends.diff().max())
    parts = [[x[a:b].transpose(0, 1) for x in (q, k, v)] for a, b in zip(ends.tolist(), ends[1:].tolist())]
    return torch.cat([F.scaled_dot_product_attention(*part, scale=scale).transpose(0, 1) for part in parts])


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("qwen2.5-vl", 10),
        *(pytest.param(n, 3, marks=pytest.mark.slow) for n in ("qwen2-vl", "qwen3-vl")),
    ],
)
@torch.inference_mode()
def test_kernels_of_towers(name: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First one kernel for the attention of all windows, then those for other parts, too."""
    monkeypatch.setattr(varlen, "varlen_attn", one_by_one)
    model = MAKERS[name](tmp_path)
    tower = load_tower(model.source, model.speller.vision, torch.float32, torch.device("cpu"))
    given = [arrays_of(model.prepared(shown)) for shown in SHOWN]
    apart = [tower(arrays) for arrays in given]
    for step in (0, 1):
        if step == 0:
            tower_attention.use_packed(tower.module)
        else:
            assert tower_kernels.hasten(tower.module) == parts
        for arrays, expected in zip(given, apart):
            found = tower(arrays)
            torch.testing.assert_close(found.values, expected.values, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found.deep, expected.deep, atol=1e-5, rtol=1e-4)


def test_kernels_that_give_something_else_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MAKERS["qwen2.5-vl"](tmp_path)
    vision = model.speller.vision
    example = seeing.example_of(model.source, vision, 40)
    load = lambda: load_tower(model.source, vision, torch.float32, torch.device("cpu"))  # noqa: E731
    plain = load()
    monkeypatch.setattr(varlen, "varlen_attn", one_by_one)
    tower, note = seeing.quick(load(), load, vision, example)
    assert note == ""
    assert hasattr(tower.module.visual.blocks[0].mlp, "both")
    for fault, why in ((lambda q, *more: 2 * q, "differ by"), (lambda *given: 1 / 0, "ZeroDivisionError")):
        monkeypatch.setattr(varlen, "varlen_attn", fault)
        tower, note = seeing.quick(load(), load, vision, example)
        assert "slower" in note
        assert why in note
        with torch.inference_mode():
            assert torch.equal(tower(example).values, plain(example).values)
