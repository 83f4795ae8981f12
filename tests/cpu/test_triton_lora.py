"""What adapters add, by Triton's kernels, against the body of ``lora``. In Triton's interpreter, in
float32."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu has the same on the device", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from sgla.device import nvidia
from sgla.kernels import ops
from sgla.kernels.cuda.batch_gemm import Unscaled
from sgla.kernels.dispatch import using
from sgla.kernels.gpu import e4m3, rewrite, rules
from sgla.kernels.gpu.adapters import EXPAND, SHRINK, settle
from sgla.kernels.gpu.record import Recorder, Ref
from sgla.kernels.lora import Rows, Stack, Tiles, lora, tiles_of
from sgla.kernels.trace import STAND_INS
from sgla.kernels.triton.lora import (
    FEW,
    MANY,
    SOME,
    add,
    add_experts,
    expand_added,
    expand_gated,
    grouped,
    pairs,
    shrink,
    sort,
)
from sgla.quant.weight import storage
from sgla.worker.gpu_adapters import AdaptedRows, apart_of
from sgla.worker.gpu_steps import sizes_up_to
from sgla.worker.graphs import fewer_sizes


@pytest.mark.parametrize(
    ("rank", "k", "sizes"),
    [(1, 40, [33]), (6, 70, [48, 9, 16]), (17, 33, [70]), (8, 1100, [20, 20]), (19, 40, [9, 9])],
)
def test_rows_and_tiles(rank: int, k: int, sizes: list[int]) -> None:
    """Rows of several places and of none, of prompts and of one token each, and sampled ones."""
    generator = torch.Generator().manual_seed(rank)
    stack = Stack(3, k, sizes, first=16)
    memory = torch.zeros(3, rank, stack.last + 16)
    stack.lie(memory)
    for place in (1, 2, 3):
        own = rank if place < 3 else max(1, rank // 2)
        for part, n in enumerate(sizes):
            if (place, part) != (2, 1):
                a, b = torch.randn(own, k, generator=generator), torch.randn(n, own, generator=generator)
                stack.put(memory[place - 1], part, a, b)
                stack.ranks[place - 1] = own
    places = np.repeat(np.array([2, 0, 1, 3, 1], np.int32), [1, 1, MANY + 3, 3, 2])
    picked = np.array([1, 40, len(places) - 1], np.int32)
    rows = Rows()
    rows.set(places, places[picked])
    rows.tiles = on_host(places, MANY), on_host(places[picked], FEW)
    wide = torch.randn(len(places), k + 8, generator=generator)
    x, y = wide[:, :k], torch.randn(len(places), sum(sizes), generator=generator)
    expected = y + lora.body(x, stack, rows, False)
    torch.testing.assert_close(add(y.clone(), x, stack, rows, False), expected, atol=1e-4, rtol=1e-4)
    rows.tiles = on_host(places, SOME), rows.tiles[1]
    torch.testing.assert_close(add(y.clone(), x, stack, rows, False), expected, atol=1e-4, rtol=1e-4)
    few, before = x[picked.tolist()], y[picked.tolist()]
    made = add(before.clone(), few, stack, rows, True)
    torch.testing.assert_close(made, expected[picked.tolist()], atol=1e-4, rtol=1e-4)
    on_device(rows, places)
    torch.testing.assert_close(add(y.clone(), x, stack, rows, False), expected, atol=1e-4, rtol=1e-4)
    for rows.apart in (True, False):
        torch.testing.assert_close(add(y.clone(), x, stack, rows, False), expected, atol=1e-4, rtol=1e-4)
        if len(sizes) == 2:
            gated = expand_gated(y.clone(), shrink(x, stack, rows, False), stack, rows, False, "silu")
            torch.testing.assert_close(gated, ops.act_mul.body(expected, "silu"), atol=1e-3, rtol=1e-3)
    squares = torch.zeros(3, 96)
    squares[:2, : len(places)] = torch.rand(2, len(places), generator=generator)
    scale = ((squares.sum(0) / k + 0.01) ** -0.5)[: len(places), None]
    for rows.apart in (True, False):
        made = add(y.clone(), Unscaled(x, squares, 0.01), stack, rows, False)
        torch.testing.assert_close(made, y + (expected - y) * scale, atol=1e-3, rtol=1e-4)
    if len(sizes) == 1:
        stream, weight = torch.randn(y.shape, generator=generator), torch.rand(stack.n, generator=generator)
        normed, total = ops.add_rms_norm.body(expected, stream, weight, 1e-5)
        for rows.apart in (True, False):
            norm = ops.AddedNorm(stream.clone(), weight, 1e-5)
            found = expand_added(y.clone(), shrink(x, stack, rows, False), norm, stack, rows, False)
            sums = found.squares[:, : len(places), None].sum(0)
            made = found.x * torch.rsqrt(sums / stack.n + found.eps)
            torch.testing.assert_close((made, norm.residual), (normed, total), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("parts", [1, 2])
def test_pairs_alone_and_together(parts: int) -> None:
    """Of tokens and experts, some of which other ranks have; rows of several adapters, and of none."""
    generator, experts, top_k, rank, k, n = torch.Generator().manual_seed(parts), 5, 3, 6, 40, 24
    stack = Stack(3, k, [n] * experts * parts)
    memory = torch.randn(3, rank, stack.last, generator=generator)
    stack.lie(memory)
    whole = Stack(3, k, [parts * n] * experts)  # of which each has one
    places = np.repeat(np.array([2, 0, 1, 3, 1], np.int32), [1, 2, 90, 3, 4])
    ids = torch.stack([torch.randperm(experts + 1, generator=generator)[:top_k] - 1 for _ in places]).int()
    rows = Rows()
    rows.places = (torch.from_numpy(places),) * 2
    x = torch.randn(len(places) * top_k, k, generator=generator)
    y = torch.randn(len(x), parts * n, generator=generator)
    expected = y.clone()
    for pair, (place, expert) in enumerate(zip(np.repeat(places, top_k), ids.flatten().tolist())):
        for part in range(parts if place and expert >= 0 else 0):
            number = expert * parts + part
            b = stack.b[place - 1, number * n : (number + 1) * n]
            expected[pair, part * n : (part + 1) * n] += b @ (stack.a[place - 1, number] @ x[pair])
    made = [pairs(ids, rows, False, whole), grouped(ids, rows.places[0], whole)]
    assert made[0].experts is not None
    assert len(made[1].runs) < len(made[0].runs)
    for tiles in made:
        found = add_experts(y.clone(), x, stack, tiles, parts)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    counted = [sum(count for _, count, _ in tiles.runs.tolist()) for tiles in made]
    assert counted == [int(((ids >= 0) & (rows.places[0] > 0)[:, None]).sum())] * 2


def on_host(places: np.ndarray, size: int) -> Tiles:
    order, runs = map(torch.from_numpy, tiles_of(places, size))
    return Tiles(order, runs, size)


def on_device(rows: Rows, places: np.ndarray) -> None:
    """The tiles of decode rows, by the kernel that sorts."""
    count = len(places)
    slots = torch.randperm(count).int()
    table = torch.zeros(count, dtype=torch.int32)
    table[slots.long()] = torch.from_numpy(places)
    rows.places = (torch.full((count,), -1, dtype=torch.int32),) * 2
    tiles = Tiles(torch.full((count,), -1, dtype=torch.int32), torch.full((count, 3), -1).int(), FEW)
    rows.tiles = tiles, tiles
    sort(rows, table, slots)


def test_tiles() -> None:
    """Rows of one adapter, no more of them than a tile takes; rows without an adapter are in none."""
    order, runs = tiles_of(np.repeat(np.array([2, 0, 1], np.int32), [5, 3, 9]), 4)
    assert order.tolist() == [5, 6, 7, *range(8, 17), *range(5)]
    assert runs.tolist() == [[3, 4, 1], [7, 4, 1], [11, 1, 1], [12, 4, 2], [16, 1, 2]]
    assert tiles_of(np.array([0, 0], np.int32), 4)[1].tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("count", [1, 7, 50])
def test_decode_rows_are_sorted_on_the_device(count: int) -> None:
    """Every row with an adapter is in one tile, with others of its adapter alone, and the tiles are full."""
    rows, places = Rows(), np.random.default_rng(count).integers(0, 4, count).astype(np.int32)
    on_device(rows, places)
    order, runs, size, _ = rows.tiles[0]
    assert rows.places[0].tolist() == places.tolist()
    assert sorted(order.tolist()) == list(range(count))
    tiles = [(order[first : first + n].tolist(), place) for first, n, place in runs.tolist() if n]
    assert all(places[row] == place > 0 for own, place in tiles for row in own)
    assert sorted(row for own, _ in tiles for row in own) == np.flatnonzero(places).tolist()
    assert len(tiles) == sum(-(-int((places == place).sum()) // size) for place in (1, 2, 3))


@pytest.mark.parametrize("limit", [4, 10, 24, 64, 256])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 16, 64])
def test_rows_whose_adapters_differ_have_graphs_and_no_others(limit: int, count: int) -> None:
    """As many rows as may differ: of ``count`` adapters."""
    sizes = fewer_sizes(sizes_up_to(limit))
    places = np.zeros(limit, np.int32)
    tables = SimpleNamespace(host=SimpleNamespace(place=places))
    adapted: Any = SimpleNamespace(_tables=tables)
    taken = set()
    for rows in range(1, limit + 1):
        places[:rows] = 1 + np.arange(rows) % count
        if AdaptedRows.differ(adapted, np.arange(rows)):
            taken.add(next(size for size in sizes if size >= rows))
    assert apart_of(sizes, count) == sorted(taken)


@pytest.mark.parametrize(
    ("kind", "adapted", "rows", "rule"),
    [
        ("bf16", False, 64, "gate"),
        ("fp8", True, 64, "gate"),
        ("fp8", False, 8, "gate"),
        ("fp8", False, 64, "gate and e4m3"),
    ],
)
def test_who_does_the_gate_behind_adapters(
    kind: str, adapted: bool, rows: int, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product behind it where that rounds and has no adapter, which would read the gate, too."""
    for module in (e4m3, rewrite):
        monkeypatch.setattr(module, "this_device", lambda: nvidia("H200", (9, 0), 132))
    recorder, places = Recorder(), Rows()
    x = recorder.input("hidden", (STAND_INS["tokens"], 128), torch.bfloat16)
    up, down = storage("bf16").empty(512, 128), storage(kind).empty(128, 256)
    with using(recorder):
        wide = ops.linear(x, up, None, lora(x, Stack(1, 128, [256, 256]), places, False))
        gated = ops.act_mul(wide, "silu")
        addend = lora(gated, Stack(1, 256, [128]), places, False) if adapted else None
        recorder.record.outputs.append(recorder.number(ops.linear(gated, down, None, addend)))
    settle(recorder.record)
    taken = rules.apply(recorder.record, rewrite.Asked({"tokens": rows, "sampled": 0, "rows": rows})).taken
    assert {name for name in taken if "gate" in name} == {rule}


@pytest.mark.parametrize("adapted", [False, True])
def test_the_layer_behind_a_sum_divides_by_its_rms(adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an adapter, whose ranks are added to the stream behind the layer, as without; and so do the ranks
    of its own adapter. No kernel norms."""
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    recorder, rows, stack = Recorder(), Rows(), Stack(1, 4096, [4096])
    x, stream = (
        recorder.input(name, (STAND_INS["tokens"], 4096), torch.bfloat16) for name in ("x", "stream")
    )
    weight, norm = storage("bf16").empty(4096, 4096), torch.ones(4096)
    with using(recorder):
        stream = ops.add(stream, stream)
        addend = lora(x, stack, rows, False) if adapted else None
        normed, stream = ops.add_rms_norm(ops.linear(x, weight, None, addend), stream, norm, 1e-5)
        last = ops.linear(normed, weight, None, lora(normed, stack, rows, False))
        recorder.record.outputs += [recorder.number(last), recorder.number(stream)]
    settle(recorder.record)
    work = rules.apply(recorder.record, rewrite.Asked({"tokens": 64, "sampled": 0, "rows": 64}))
    nodes = list(work.nodes.values())
    names = [node.op for node in nodes if isinstance(node.op, str)]
    added = ["tiles", SHRINK, "expanded, added"] if adapted else ["tiles, added"]
    assert names == [*added, "tiles", SHRINK, EXPAND]
    unscaled = next(node for node in nodes if node.op == added[-1]).results[0]
    assert [node.given["x"] for node in nodes[-3:-1]] == [Ref(unscaled)] * 2


def test_what_joins_the_residual_stream_is_added_there() -> None:
    """So a layer whose output does so keeps its kernel with add and norm. Others are added to behind, as is
    one whose residual is not there yet."""
    recorder, rows = Recorder(), Rows()
    x = recorder.input("hidden", (STAND_INS["tokens"], 8), torch.float32)
    weight, norm, stack = storage("f32").empty(8, 8), torch.ones(8), Stack(1, 8, [8])

    def linear(x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, weight, None, lora(x, stack, rows, False))

    with using(recorder):
        stream = ops.add(x, x)
        first, stream = ops.add_rms_norm(linear(x), ops.gather(stream, torch.zeros(1).int()), norm, 1e-5)
        second, stream = ops.add_rms_norm(linear(first), stream, norm, 1e-5)
        recorder.record.outputs.append(recorder.number(linear(second)))
    record = recorder.record
    settle(record)
    names = [getattr(node.op, "name", node.op) for node in record.nodes]
    names = [name for name in names if isinstance(name, str)]
    late = [SHRINK, "linear", EXPAND, "gather", "add_rms_norm"]
    joined = [SHRINK, EXPAND, "linear", "add_rms_norm"]
    assert names == ["add", *late, *joined, SHRINK, "linear", EXPAND]
    _, joining, last = (node for node in record.nodes if node.op == EXPAND)
    adds = [node for node in record.nodes if node.op is ops.add_rms_norm]
    assert joining.given["y"] == Ref(adds[0].results[1])
    assert adds[1].given["residual"] == Ref(joining.results[0])
    assert last.results == record.outputs
    assert not any(node.given.get("addend") for node in record.nodes)
