"""Ranks that share rows out between products (``--sequence-parallel``): what a record becomes, rows that are
rounded before they are gathered. What is refused is in ``test_long_steps.py``. That ranks answer as one is in
``test_interpreted_ranks.py``."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from sgla.device import nvidia
from sgla.dist import Shard
from sgla.dist.lockstep import SharedRows
from sgla.kernels import gpu, ops
from sgla.kernels.cuda import prompt_gemm
from sgla.kernels.gpu import regions, rewrite
from sgla.kernels.triton import fp8
from sgla.quant.weight import Weight, pack
from sgla.worker.place import NoPages

ROWS, WIDTH = 40, 128

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu/test_tp.py has the same on the device"
)


class Twin(SharedRows):
    """One of two ranks that have the same weights, and the same tokens as their rows. ``sent``: what went to
    the other one, bytes of a row each time."""

    def __init__(self, exchanges: bool) -> None:
        super().__init__(0, 2)
        self.can, self.sent = exchanges, list[int]()

    @property
    def exchanges(self) -> bool:
        return self.can

    def norms(self, y: Tensor, x: Tensor) -> bool:
        return False

    def gather(self, x: Tensor) -> Tensor:
        assert len(x) == ROWS // 2
        self.sent.append(x.shape[1] * x.itemsize)
        return torch.cat([x, x])

    def reduce_scatter(self, y: Tensor, x: Tensor) -> Tensor:
        return 2 * y[self.own]


class Both(Shard):
    """Such a rank."""

    def all_reduce(self, x: Tensor) -> None:
        x.mul_(2)


class Layers:
    """Sums and norms as those of a decoder's layers. ``read``: the stream is read beside its norm, too;
    ``biased``: norms are LayerNorms."""

    unrecorded, embed = "", SimpleNamespace(dtype=torch.bfloat16)
    spec = SimpleNamespace(hidden=WIDTH)

    def __init__(self, kind: str, rows: Twin | None, read: bool = False, biased: bool = False) -> None:
        torch.manual_seed(0)
        self.shard, self.read = Both(0, 2, rows=rows), read
        self.table = pack(torch.randn(ROWS, WIDTH), "bf16")
        self.weights: list[Weight] = [pack(torch.randn(WIDTH, WIDTH) / 12, kind) for _ in range(4)]
        self.norm = torch.rand(WIDTH) + 0.5
        self.bias = torch.rand(WIDTH) if biased else None

    def forward(self, batch: Any, kv: Any, rows: Any = None) -> Tensor:
        h = ops.embedding(batch.ids, self.table)
        x = ops.rms_norm(h, self.norm, 1e-5)
        for w in self.weights:
            x = ops.all_reduce(ops.linear(x, w), self.shard)
            if self.bias is None:
                x, h = ops.add_rms_norm(x, h, self.norm, 1e-5)
            else:
                x, h = ops.add_layer_norm(x, h, self.norm, self.bias, 1e-5)
            if self.read:
                x = x + ops.activate(h, "silu")
        return x


def found(layers: Layers) -> tuple[Tensor, Any]:
    """Hidden states of so many tokens, each of which is there twice, and what the rules have made."""
    ids = torch.arange(ROWS // 2, dtype=torch.int32).repeat(2)
    batch: Any = SimpleNamespace(ids=ids, tokens=ROWS, rows=ROWS, media=None, canvas=None, live=None)
    forward = gpu.RecordedForward(layers, [], gpu.GpuOps(NoPages()))  # type: ignore[arg-type]
    hidden = forward.hidden(batch).float()
    assert not forward.notes
    [program] = forward._programs.values()
    return hidden, program.work


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are long enough, on a GPU, whose e4m3 products are in float32."""
    monkeypatch.setattr(regions, "LEAST", ROWS)
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    monkeypatch.setattr(prompt_gemm, "processors", lambda: 132)

    def scaled_mm(a: Tensor, b: Tensor, by_row: Tensor, by_column: Tensor, bias: Any, **_: Any) -> Tensor:
        return ((a.float() * by_row) @ (b.float() * by_column)).bfloat16()

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


@needs_interpreter
@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize(("kind", "row"), [("bf16", 2 * WIDTH), ("fp8", WIDTH)])
def test_rows_are_gathered_before_products(kind: str, row: int, exchanges: bool) -> None:
    """Of e4m3 weights rounded: half the bytes, and a scale a row."""
    twin = Twin(exchanges)
    expected, _ = found(Layers(kind, None))
    hidden, work = found(Layers(kind, twin))
    assert (hidden - expected).norm() < 0.01 * expected.norm()
    assert torch.equal(hidden[: ROWS // 2], hidden[ROWS // 2 :])
    rounded = [row, 16] if kind == "fp8" else [row]
    assert twin.sent == 3 * rounded + [2 * WIDTH]  # the last ones are the forward's result
    assert work.taken["rounded rows"] == (3 if kind == "fp8" else 0)
    assert work.taken["norm behind the ranks' sum"] == 4 * exchanges


@needs_interpreter
@pytest.mark.usefixtures("long")
def test_rows_have_layer_norms() -> None:
    twin = Twin(True)
    expected, _ = found(Layers("bf16", None, biased=True))
    hidden, work = found(Layers("bf16", twin, biased=True))
    assert (hidden - expected).norm() < 0.01 * expected.norm()
    assert len(twin.sent) == work.taken["norm behind the ranks' sum"] == 4


@needs_interpreter
@pytest.mark.usefixtures("long")
def test_a_stream_that_is_read_between_sums_stays_whole() -> None:
    twin = Twin(False)
    expected, _ = found(Layers("bf16", None, read=True))
    hidden, _ = found(Layers("bf16", twin, read=True))
    assert torch.equal(hidden, expected)
    assert not twin.sent


@needs_interpreter
@pytest.mark.usefixtures("long")
def test_short_steps_are_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "LEAST", ROWS + 1)
    twin = Twin(True)
    found(Layers("bf16", twin))
    assert not twin.sent


@needs_interpreter
@pytest.mark.parametrize("tokens", [7, 8, 300])
def test_rounded_rows_are_those_of_all(tokens: int) -> None:
    """As they would be rounded together, with scales of blocks behind."""
    torch.manual_seed(0)
    x = torch.randn(tokens, 256).bfloat16()
    own, expected = fp8.quantize(x[: tokens // 2]), fp8.quantize(x)
    others = fp8.quantize(x[tokens // 2 :])
    rest = iter([others.numbers, others.scale[:, None].expand(-1, 4).contiguous()])
    joined = fp8.joined(own, lambda part: torch.cat([part, next(rest).view(torch.bfloat16)]))
    assert torch.equal(joined.numbers.view(torch.uint8), expected.numbers.view(torch.uint8))
    assert torch.equal(joined.scale, expected.scale)
    for one, other in zip(joined.for_blocks(), expected.for_blocks()):
        assert one.stride() == other.stride()
        assert torch.equal(one[:tokens].float(), other[:tokens].float())


def test_every_row_is_of_one_rank() -> None:
    for tokens in (3, 8, 17):
        ranks = [SharedRows(rank, 3) for rank in range(3)]
        counts = [rank.share_out(tokens) for rank in ranks]
        assert sum(counts) == tokens
        assert max(counts) - min(counts) <= 1
        assert [row for rank in ranks for row in range(tokens)[rank.own]] == list(range(tokens))
