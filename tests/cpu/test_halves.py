"""Steps that are two batches by turns (``--two-batch-overlap``): in which order they are computed, and what
of a step each of them has. That ranks answer as one is in ``test_interpreted_ranks.py``, and that who reads a
sum has waited for it in ``tests/gpu/test_gpu_halves.py``."""

from __future__ import annotations

import os
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from sgla.device import nvidia
from sgla.dist import Shard
from sgla.kernels import gpu, ops
from sgla.kernels.cuda import all_reduce, prompt_gemm
from sgla.kernels.cuda.all_reduce import AllReduce
from sgla.kernels.gpu import rewrite
from sgla.kernels.gpu.aside import Aside
from sgla.kernels.gpu.program import Half
from sgla.kernels.ops import AddedNorm
from sgla.quant.weight import pack
from sgla.worker import gpu_halves
from sgla.worker.batch import Columns, StateColumns
from sgla.worker.gpu_halves import Halves
from sgla.worker.gpu_steps import GpuSteps
from sgla.worker.place import NoPages

WIDTH, LAYERS = 128, 3

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu/test_gpu_halves.py has the same on the device"
)


class Exchange:
    """Of a rank whose peer has the same weights. ``told``: rows of each sum, in their order, and whether they
    were on their way before."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []

    def takes(self, x: Tensor) -> bool:
        return True

    def sending(self, rows: int, d: int) -> Any:
        return SimpleNamespace()

    def for_steps(self, shape: Any) -> None:
        return None

    def sum(self, x: Tensor, norm: AddedNorm | None = None, *, sent: str = "") -> Tensor:
        self.told.append((len(x), sent))
        x.mul_(2)
        if norm is None:
            return x
        assert norm.residual is not None
        norm.residual.add_(x)
        return x.copy_(ops.rms_norm.body(norm.residual, norm.weight, norm.eps))

    def beside(self) -> Exchange:
        return self


class Layers:
    """Sums and norms as those of a decoder's layers."""

    unrecorded, embed = "", SimpleNamespace(dtype=torch.bfloat16)
    spec = SimpleNamespace(hidden=WIDTH)

    def __init__(self, exchange: Any) -> None:
        torch.manual_seed(0)
        self.shard = Shard(0, 2, exchange=exchange)
        self.table = pack(torch.randn(40, WIDTH), "bf16")
        self.weights = [pack(torch.randn(WIDTH, WIDTH) / 12, "bf16") for _ in range(LAYERS)]
        self.norm = torch.rand(WIDTH) + 0.5

    def forward(self, batch: Any, kv: Any, rows: Any = None) -> Tensor:
        h = ops.embedding(batch.ids, self.table)
        x = ops.rms_norm(h, self.norm, 1e-5)
        for w in self.weights:
            x, h = ops.add_rms_norm(ops.all_reduce(ops.linear(x, w), self.shard), h, self.norm, 1e-5)
        return x if rows is None else ops.gather(x, rows)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of a GPU, and the kernels that it would have."""

    @contextmanager
    def stream(_: Any) -> Any:
        yield

    nothing = SimpleNamespace(
        wait_stream=lambda other: None, record_event=lambda: None, wait_event=lambda event: None
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: nothing)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    monkeypatch.setattr(prompt_gemm, "processors", lambda: 132)


def batch_of(ids: range) -> Any:
    tokens = torch.tensor(ids, dtype=torch.int32)
    return SimpleNamespace(ids=tokens, tokens=len(ids), rows=1, media=None, canvas=None, live=None)


@needs_interpreter
@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("wanted", [None, [1, 4]])
def test_batches_take_turns_at_sums(wanted: list[int] | None) -> None:
    exchange, attends = Exchange(), [NoPages(), NoPages()]
    ops_ = gpu.GpuOps(attends[0])
    forward = gpu.RecordedForward(Layers(exchange), [], ops_)  # type: ignore[arg-type]
    rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int32)
    batches = [batch_of(range(20)), batch_of(range(15, 40))]
    found = forward.halves([Half(batch, rows, attend) for batch, attend in zip(batches, attends)])
    assert exchange.told == LAYERS * [(20, ""), (25, "")]
    assert Aside(Shard(0, 2, exchange=exchange)).sending(64, WIDTH) is None
    assert ops_.attend is attends[0]
    for batch, hidden in zip(batches, found):
        assert torch.equal(hidden, forward.hidden(batch, rows))


@needs_interpreter
@pytest.mark.usefixtures("card")
def test_what_is_not_recorded_is_computed_one_after_the_other() -> None:
    exchange, seen = Exchange(), []
    layers = Layers(exchange)
    layers.unrecorded = "it looks at values"
    ops_ = gpu.GpuOps(NoPages())
    forward = gpu.RecordedForward(layers, [], ops_)  # type: ignore[arg-type]
    forward.awaits = lambda kept: seen.append(len(exchange.told))
    found = forward.halves([Half(batch_of(range(n)), None, NoPages()) for n in (20, 25)])
    assert [len(hidden) for hidden in found] == [20, 25]
    assert exchange.told == [*LAYERS * [(20, "")], *LAYERS * [(25, "")]]
    assert seen == [0, LAYERS]


def test_sums_beside_others_leave_most_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "processors", lambda: 132)
    whole = AllReduce.__new__(AllReduce)
    assert whole._blocks(4096, 512) == 264
    assert whole.beside()._blocks(4096, 512) == 26
    assert whole.beside()._blocks(3, 512) == 3
    assert whole._blocks(4096, 512) == 264


class Told:
    """In the place of a forward pass, whose hidden states say which token of which slot they are of; and of
    what makes batches. ``batches``: columns of those that were made, with the states of their rows."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, Any, Any, StateColumns | None, Any]] = []

    def extend(self, slots: Any, starts: Any, q_lens: Any, states: Any, attention: Any) -> Any:
        assert ((q_lens == 1)[:-1] >= (q_lens == 1)[1:]).all(), "rows of one token come first"
        self.batches.append((slots, starts, q_lens, states, attention))
        first = np.repeat(q_lens.cumsum() - q_lens - starts, q_lens)
        ids = np.repeat(slots, q_lens) * 1000 + np.arange(q_lens.sum()) - first
        return SimpleNamespace(tokens=len(ids), ids=torch.from_numpy(ids))

    def halves(self, halves: Any) -> list[Tensor]:
        return [
            (half.batch.ids if half.rows is None else half.batch.ids[half.rows.long()])[:, None]
            for half in halves
        ]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_in_one_half(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the plan's order, so that the second half may read what the first one stores; its part of a row that
    is cut goes on where the other one ends, from the state that it leaves."""
    monkeypatch.setattr(gpu_halves, "TILE", 1 + seed % 3)
    monkeypatch.setattr(gpu_halves, "upload", torch.from_numpy)
    monkeypatch.setattr(gpu_halves, "upload_columns", lambda columns: [torch.from_numpy(c) for c in columns])
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    slots = rng.permutation(20)[:count].astype(np.int32)
    starts = (rng.integers(0, 2, count) * rng.integers(1, 50, count)).astype(np.int32)
    q_lens = rng.choice([1, 1, 2, 7, 30], count).astype(np.int32)
    q_lens[-1] += 2
    total = int(q_lens.sum())
    rising = np.arange(count, dtype=np.int32)
    states = StateColumns(100 + rising, 200 + rising, np.zeros((0, 3), np.int32))
    expected = np.concatenate([1000 * s + np.arange(b, b + n) for s, b, n in zip(slots, starts, q_lens)])
    wanted = rng.integers(0, total, 9).astype(np.int32)
    told, attentions = Told(), (object(), object())
    halves = Halves(attentions)  # type: ignore[arg-type]
    columns = Columns(slots, starts, q_lens, wanted, states)
    forward: Any = told
    assert halves.hidden(forward, columns, None, told.extend)[:, 0].tolist() == expected.tolist()
    assert halves.hidden(forward, columns, wanted, told.extend)[:, 0].tolist() == expected[wanted].tolist()
    first, second = told.batches[:2]
    assert (first[4], second[4]) == attentions
    assert min(first[2].sum(), second[2].sum()) > 0
    ends = dict(zip(slots.tolist(), zip(starts.tolist(), rising.tolist())))
    for slot, start, _, reads, writes in zip(*second[:3], *second[3][:2]):  # type: ignore[misc]
        began, row = ends[slot]
        assert reads == (200 if start > began else 100) + row
        assert writes == 200 + row
    order = slots.tolist()
    assert max(order.index(s) for s in first[0]) <= min(order.index(s) for s in second[0])


def test_which_steps_are_cut() -> None:
    halves = Halves((None, None))  # type: ignore[arg-type]
    assert halves.takes(np.array([1, gpu_halves.WHOLE], np.int32))
    assert not halves.takes(np.array([1, gpu_halves.WHOLE - 1], np.int32))
    assert not halves.takes(np.ones(gpu_halves.WHOLE + 1, np.int32)), "decode rows alone"
    steps: Any = SimpleNamespace(divides=halves, pictures=None)
    columns = Columns(*np.array([[3], [0], [gpu_halves.WHOLE + 1]], np.int32), np.zeros(0, np.int32))
    assert GpuSteps._divided(steps, columns) is halves
    steps.pictures = SimpleNamespace(reads=lambda slots, starts: (slots, starts) == ([3], [0]))
    assert GpuSteps._divided(steps, columns) is None, "tokens of a picture are in one batch"
