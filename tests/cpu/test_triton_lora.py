"""What adapters add, by Triton's kernels, against the body of ``lora``. In Triton's interpreter, in
float32."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu has the same on the device", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from sgla.kernels import ops
from sgla.kernels.dispatch import using
from sgla.kernels.gpu.adapters import settle
from sgla.kernels.gpu.record import Recorder, Ref
from sgla.kernels.lora import Rows, Stack, add_lora, lora, tiles_of
from sgla.kernels.trace import STAND_INS
from sgla.kernels.triton.lora import TILE, add
from sgla.quant.weight import storage


@pytest.mark.parametrize(
    ("rank", "k", "sizes"), [(1, 40, [33]), (6, 70, [48, 9, 16]), (17, 33, [70]), (8, 1100, [20, 20])]
)
def test_rows_and_tiles(rank: int, k: int, sizes: list[int]) -> None:
    """Rows of several places and of none, of prompts and of one token each, and sampled ones."""
    generator = torch.Generator().manual_seed(rank)
    stack = Stack(3, rank, k, sizes, torch.float32)
    for place in (1, 2, 3):
        own = rank if place < 3 else max(1, rank // 2)
        for part, n in enumerate(sizes):
            if (place, part) != (2, 1):
                a, b = torch.randn(own, k, generator=generator), torch.randn(n, own, generator=generator)
                stack.put(place, part, a, b)
    q_lens = np.array([1, 1, TILE + 3, 3], np.int32)
    row_places = np.array([2, 0, 1, 3], np.int32)
    places = np.repeat(row_places, q_lens)
    picked = np.array([1, 40, len(places) - 1], np.int32)
    rows = Rows()
    rows.set(places, places[picked])
    rows.tokens, rows.sampled = torch.from_numpy(places), torch.from_numpy(places[picked])
    wide = torch.randn(len(places), k + 8, generator=generator)
    x, y = wide[:, :k], torch.randn(len(places), sum(sizes), generator=generator)
    expected = y + lora.body(x, stack, rows, False)
    rows.tiles = torch.from_numpy(tiles_of(row_places, q_lens, TILE))
    torch.testing.assert_close(add(y.clone(), x, stack, rows, False), expected, atol=1e-4, rtol=1e-4)
    few, before = x[picked.tolist()], y[picked.tolist()]
    made = add(before.clone(), few, stack, rows, True)
    torch.testing.assert_close(made, expected[picked.tolist()], atol=1e-4, rtol=1e-4)
    rows.tiles = None
    made = add(y[:2].clone(), x[:2], stack, rows, False)
    torch.testing.assert_close(made, expected[:2], atol=1e-4, rtol=1e-4)


def test_tiles() -> None:
    """Runs of tokens of one adapter, none longer than a tile; rows without an adapter have none."""
    found = tiles_of(np.array([2, 0, 1], np.int32), np.array([5, 3, 9], np.int32), 4)
    assert found.tolist() == [[0, 4, 2], [4, 1, 2], [8, 4, 1], [12, 4, 1], [16, 1, 1]]
    assert tiles_of(np.array([0], np.int32), np.array([5], np.int32), 4).shape == (0, 3)


def test_what_joins_the_residual_stream_is_added_there() -> None:
    """So a layer whose output does so keeps its kernel with add and norm. Others are added to behind, as is
    one whose residual is not there yet."""
    recorder, rows = Recorder(), Rows()
    x = recorder.input("hidden", (STAND_INS["tokens"], 8), torch.float32)
    weight, norm, stack = storage("f32").empty(8, 8), torch.ones(8), Stack(1, 2, 8, [8], torch.float32)

    def linear(x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, weight, None, lora(x, stack, rows, False))

    with using(recorder):
        stream = ops.add(x, x)
        first, stream = ops.add_rms_norm(linear(x), ops.gather(stream, torch.zeros(1).int()), norm, 1e-5)
        second, stream = ops.add_rms_norm(linear(first), stream, norm, 1e-5)
        recorder.record.outputs.append(recorder.number(linear(second)))
    record = recorder.record
    settle(record)
    names = [node.op.name for node in record.nodes if hasattr(node.op, "name")]
    late, joined = ["linear", "add_lora", "gather", "add_rms_norm"], ["add_lora", "linear", "add_rms_norm"]
    assert names == [*late, *joined, "linear", "add_lora"]
    _, joining, last = (node for node in record.nodes if node.op is add_lora)
    adds = [node for node in record.nodes if node.op is ops.add_rms_norm]
    assert joining.given["y"] == Ref(adds[0].results[1])
    assert adds[1].given["residual"] == Ref(joining.results[0])
    assert last.results == record.outputs
    assert not any(node.given.get("addend") for node in record.nodes)
