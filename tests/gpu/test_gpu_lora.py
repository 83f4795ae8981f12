"""Adapters on a GPU: the kernels against the body, and runners whose rows have several."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.messages import Submit

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from adapters import invent
from test_gpu_runner import TINY, assert_same_bits, twice
from tiny import make_core, run, submit


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rank", "k", "sizes"),
    [(16, 4096, [4096, 1024, 1024]), (24, 12288, [4096]), (64, 1024, [3072, 3072]), (6, 200, [72])],
)
def test_kernels(dtype: torch.dtype, rank: int, k: int, sizes: list[int]) -> None:
    from sgla.kernels import ops
    from sgla.kernels.cuda.batch_gemm import Unscaled
    from sgla.kernels.lora import Rows, Stack, Tiles, lora, tiles_of
    from sgla.kernels.triton.lora import FEW, MANY, SOME, add, expand_added, expand_gated, shrink, sort

    torch.manual_seed(rank)
    with torch.device("cuda"):
        stack = Stack(5, k, sizes, first=64)
        memory = torch.zeros(5, rank, stack.last + 64, dtype=dtype)
        stack.lie(memory)
        for place in range(1, 5):
            for part, n in enumerate(sizes):
                own = max(1, rank // place)
                a, b = torch.randn(own, k) / k**0.5, torch.randn(n, own) / own**0.5
                stack.put(memory[place - 1], part, a, b)
                stack.ranks[place - 1] = own
        q_lens = np.array([1, 1, 1, 700, 65, 3, 64], np.int32)
        row_places = np.array([1, 0, 4, 2, 3, 0, 1], np.int32)
        places = np.repeat(row_places, q_lens)
        rows = Rows()
        x = torch.randn(len(places), k).to(dtype)
        y = torch.randn(len(places), sum(sizes)).to(dtype)
        expected = y.float()
        for place in range(1, 5):
            index = torch.from_numpy(np.flatnonzero(places == place)).cuda()
            rows._groups = [(place, index)], []
            expected = expected + lora.body(x.float(), stack, rows, False)
        tolerance = 0.03 if dtype == torch.bfloat16 else 2e-3

        def check(x: Any, expected: torch.Tensor) -> None:
            made = add(y.clone(), x, stack, rows, False).float()
            torch.testing.assert_close(made, expected, atol=tolerance, rtol=tolerance)

        for size in (MANY, SOME, FEW):
            order, runs = (torch.from_numpy(part).cuda() for part in tiles_of(places, size))
            rows.tiles = (Tiles(order, runs, size),) * 2
            check(x, expected)
        slots = torch.randperm(len(places)).int()
        table = torch.zeros(len(places), dtype=torch.int32)
        table[slots.long()] = torch.from_numpy(places).cuda()
        rows.places = (torch.zeros(len(places), dtype=torch.int32),) * 2
        rows.tiles = (Tiles(torch.zeros_like(rows.places[0]), torch.zeros(len(places), 3).int(), FEW),) * 2
        sort(rows, table, slots)
        assert rows.places[0].tolist() == places.tolist()
        for rows.apart in (True, False):
            check(x, expected)
            if len(sizes) == 2:
                gated = expand_gated(
                    y.clone(), shrink(x, stack, rows, False), stack, rows, False, "silu"
                ).float()
                wanted = ops.act_mul.body(expected, "silu")
                torch.testing.assert_close(gated, wanted, atol=2 * tolerance, rtol=2 * tolerance)
        if len(sizes) == 1:
            stream, weight = torch.randn(y.shape).to(dtype), torch.rand(stack.n)
            wanted = ops.add_rms_norm.body(expected, stream.float(), weight, 1e-5)
            for rows.apart in (True, False):
                norm = ops.AddedNorm(stream.clone(), weight, 1e-5)
                found = expand_added(y.clone(), shrink(x, stack, rows, False), norm, stack, rows, False)
                sums = found.squares[:, : len(places), None].sum(0)
                normed = found.x.float() * torch.rsqrt(sums / stack.n + found.eps)
                for made, each in zip((normed, norm.residual), wanted):
                    torch.testing.assert_close(made.float(), each, atol=tolerance, rtol=tolerance)
        squares = torch.rand(32, -(-len(places) // 32) * 32) * k / 32
        scale = torch.rsqrt(squares.sum(0)[: len(places), None] / k + 1e-6)
        for rows.apart in (True, False):
            check(Unscaled(x, squares, 1e-6), y.float() + (expected - y.float()) * scale)


MODELS, SMALL = Path(__file__).parents[2] / "bench/models", {"vocab_size": 5000, "num_experts": 16}
MIXTURE, HYBRID = (
    json.loads((MODELS / name / "config.json").read_text()) | SMALL | {"num_hidden_layers": 2}
    for name in ("qwen3-30b-a3b", "qwen3-next-80b-a3b")
)
HYBRID["layer_types"] = ["linear_attention", "full_attention"]


def adapted_runner(model: dict[str, Any] = TINY, **settings: Any) -> Any:
    from sgla.worker.cuda import CudaRunner

    common = {"max_running_requests": 24, "step_tokens": 1024, "context_length": 640, "enable_lora": True}
    common |= {"kv_cache_bytes": 256 << 20, "max_loras": 4, "max_lora_rank": 16}
    config = Config(device="cuda", load_format="dummy", **common | settings)
    runner = CudaRunner(
        config, ModelSource("dummy", Path("."), (), model, {}), 0, 1, "", lambda progress: None
    )
    for number, rank in enumerate((16, 8, 1, 16, 4, 16) if runner.adapters else (), 1):
        invent(runner, number, rank)
    return runner


def requests() -> list[Submit]:
    """Of six adapters and the base, with prompts of several lengths."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 5000, n).tolist() for n in (5, 200, 33, 400, 8, 64, 90, 17)]
    made = [submit(str(i), prompt, 8, logprobs=0) for i, prompt in enumerate(prompts)]
    return [replace(one, adapter=i % 7, namespace=str(i % 7)) for i, one in enumerate(made)]


def answers(runner: Any, submits: list[Submit]) -> dict[str, list[float]]:
    core = make_core(runner.facts, adapters=runner.facts.adapters)
    found = run(runner, submits, core)
    return {rid: [p.logprob for d in deltas for p in d.logprobs or []] for rid, deltas in found.items()}


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "modules"), [(TINY, []), (MIXTURE, ["q_proj", "experts"]), (HYBRID, [])])
def test_rows_of_many_adapters_are_as_each_alone(model: dict[str, Any], modules: list[str]) -> None:
    """In float32; more adapters than places, graphs and eager steps."""
    runner = adapted_runner(model, dtype="float32", lora_target_modules=modules)
    together = answers(runner, requests())
    assert runner.graphs._adapted
    base = answers(runner, [replace(one, adapter=0, namespace="base") for one in requests()])
    for one in requests():
        alone = answers(runner, [one])[one.rid]
        np.testing.assert_allclose(together[one.rid], alone, atol=2e-3)
        if one.adapter:
            assert np.abs(np.subtract(alone[0], base[one.rid][0])) > 1e-3, "the adapter does nothing"


@pytest.mark.gpu
def test_rows_have_their_adapters_in_graphs_as_in_eager_steps() -> None:
    """In float32; each alone, so that it is known which of its steps are graphs."""
    runner, eager = (adapted_runner(dtype="float32") for _ in range(2))
    assert runner.graphs._adapted
    eager._captures = False
    for one in requests()[1:4]:
        expected = answers(eager, [one])[one.rid]
        np.testing.assert_allclose(answers(runner, [one])[one.rid], expected, atol=2e-3)


@pytest.mark.gpu
def test_rows_whose_adapters_differ_are_as_each_alone() -> None:
    """In float32, in a graph of their own: eleven rows, which have six adapters."""
    runner = adapted_runner(dtype="float32", max_loras=8)
    used: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        graph = runner.graphs._apart[16]
        replay = graph.replay
        patch.setitem(runner.graphs._apart, 16, SimpleNamespace(replay=lambda: (used.append(1), replay())))
        places = [1, 2, 3, 4, 5, 6, 1, 0, 0, 0, 0]
        asked = [
            replace(submit(str(i), [i + 5] * 9, 12, logprobs=0), adapter=place, namespace=str(place))
            for i, place in enumerate(places)
        ]
        together = answers(runner, asked)
    assert used
    for one in asked:
        np.testing.assert_allclose(together[one.rid], answers(runner, [one])[one.rid], atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "modules"), [(TINY, []), (MIXTURE, ["q_proj", "experts"])])
def test_prompts_of_rows_with_adapters_are_read_in_graphs(model: dict[str, Any], modules: list[str]) -> None:
    """In float32: a prompt, and others beside decode rows; as in eager steps, in which the same rows are, and
    with the same bits as the graph's kernels one by one."""
    runner = adapted_runner(model, dtype="float32", lora_target_modules=modules)
    with pytest.MonkeyPatch.context() as patch:
        kept = twice(runner.prompts, patch, "_graphs", runner.prompts._forward)
        first, rest = requests()[1:3], requests()[3:6]
        read = [answers(runner, first) | answers(runner, rest)]
        patch.setattr(runner, "_captures", False)
        read.append(answers(runner, first) | answers(runner, rest))
    assert len(kept) >= 2
    for both in kept:
        assert_same_bits(both, 1)
    for rid, expected in read[1].items():
        np.testing.assert_allclose(read[0][rid], expected, atol=2e-3)


@pytest.mark.gpu
def test_a_batch_without_adapters_has_the_same_bits_as_a_server_without() -> None:
    plain = [replace(one, adapter=0, namespace="") for one in requests()]
    with_room, without = adapted_runner(), adapted_runner(enable_lora=False, max_loras=8)
    assert answers(with_room, plain) == answers(without, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("modules", [["q_proj", "k_proj", "v_proj", "o_proj"], []])
def test_what_is_shrunk_beside_a_layer_is_as_before_it(
    monkeypatch: pytest.MonkeyPatch, modules: list[str]
) -> None:
    """In bfloat16, graphs and eager steps."""
    from sgla.kernels.gpu import tiles

    asked = [replace(one, rid=f"{one.rid} {i}") for i in range(3) for one in requests()]
    runner = adapted_runner(lora_target_modules=modules)
    found = [answers(runner, asked) for _ in range(3)]
    monkeypatch.setattr(tiles, "BESIDE", False)
    before = answers(adapted_runner(lora_target_modules=modules), asked)
    for rid, expected in before.items():
        for one in found:
            assert abs(one[rid][0] - expected[0]) < 0.05
