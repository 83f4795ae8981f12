"""Two batches by turns, whose sums have a stream of their own: who reads one has waited for it, and nobody
takes its memory before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sgla.dist import Shard
from sgla.kernels import gpu, ops
from sgla.kernels.gpu.program import Half
from sgla.quant.weight import pack
from sgla.worker.place import NoPages

WIDTH, LAYERS, ROWS, CYCLES = 1024, 6, 2048, 400_000


class Late(Shard):
    """One of two ranks that have the same weights. Sums take a while, in which all else could go on."""

    def all_reduce(self, x: Tensor) -> None:
        torch.cuda._sleep(CYCLES)
        x.mul_(2)


class Layers:
    """Sums and norms as those of a decoder's layers."""

    unrecorded, embed = "", SimpleNamespace(dtype=torch.bfloat16)
    spec = SimpleNamespace(hidden=WIDTH)

    def __init__(self) -> None:
        self.shard = Late(0, 2)
        self.table = pack(torch.randn(ROWS, WIDTH, device="cuda"), "bf16")
        self.weights = [pack(torch.randn(WIDTH, WIDTH, device="cuda") / 30, "bf16") for _ in range(LAYERS)]
        self.norm = torch.rand(WIDTH, device="cuda") + 0.5

    def forward(self, batch: Any, kv: Any, rows: Any = None) -> Tensor:
        h = ops.embedding(batch.ids, self.table)
        x = ops.rms_norm(h, self.norm, 1e-5)
        for w in self.weights:
            x, h = ops.add_rms_norm(ops.all_reduce(ops.linear(x, w), self.shard), h, self.norm, 1e-5)
        return x if rows is None else ops.gather(x, rows)


def test_halves_are_as_each_alone() -> None:
    """The same kernels, so the same bits."""
    forward = gpu.RecordedForward(Layers(), [], gpu.GpuOps(NoPages()))  # type: ignore[arg-type]
    rows = torch.arange(0, ROWS // 4, 7, dtype=torch.int32, device="cuda")
    batches: list[Any] = []
    for ids in torch.randperm(ROWS, dtype=torch.int32, device="cuda").view(2, -1):
        batches.append(SimpleNamespace(ids=ids, tokens=len(ids), rows=1, media=None, canvas=None, live=None))
    with torch.inference_mode():
        for wanted in (None, rows):
            alone = [forward.hidden(batch, wanted) for batch in batches]
            for _ in range(3):
                halves = forward.halves([Half(batch, wanted, NoPages()) for batch in batches])
                assert all(map(torch.equal, halves, alone))
    assert not forward.notes
