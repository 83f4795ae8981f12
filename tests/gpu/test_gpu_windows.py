"""On a GPU, too, pages behind a window go to others, and no text changes."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from test_gpu_runner import assert_same_bits, ints, make, plan, twice

from sgla.messages import SAMPLE, NewRow, RowSampling, StepPlan, Submit

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
import tiny
from config_cases import gemma3
from tiny import Launching, Transcript, make_core, submit

WINDOW, PAGE = 100, 16
MODEL = gemma3(
    vocab_size=5000,
    hidden_size=512,
    intermediate_size=1024,
    head_dim=128,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_hidden_layers=6,
    sliding_window=WINDOW,
    max_position_embeddings=1024,
    layer_types=...,
)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest) -> Any:
    return make(MODEL, dtype=request.param)


@pytest.fixture(scope="module")
def pools(runner: Any) -> Any:
    """Groups have a memory each."""
    return make(MODEL, dtype=runner.facts.dtype, window_ratio=0.75)


def requests() -> list[Submit]:
    """Longer than the window by themselves, behind a prefix that others share, and shorter."""
    rng = random.Random(5)
    prompt = lambda n: [rng.randrange(5000) for _ in range(n)]  # noqa: E731
    shared = prompt(3 * WINDOW)
    return [
        submit("long", prompt(4 * WINDOW), 40),
        submit("first", shared + prompt(5), 30, temperature=0.8, seed=3),
        submit("second", shared + prompt(50), 20, temperature=0.9, seed=4),
        submit("short", prompt(3), WINDOW + 40, temperature=1.0, seed=7),
    ]


def run(runner: Any, wanted: list[Submit], core: Any) -> dict[str, list[int]]:
    return answers(runner, wanted, core).tokens()


def answers(runner: Any, wanted: list[Submit], core: Any) -> Transcript:
    """Steps are launched when they are planned, as the worker does."""
    return tiny.run(runner, wanted, core, executor=Launching(runner))


def kept(runner: Any, **limits: Any) -> dict[str, list[int]]:
    """What the requests give, planned in the same way, if no page is given back."""
    core = make_core(runner.facts, **limits)
    core._memory.slide = lambda request: None  # type: ignore[method-assign]
    return run(runner, requests(), core)


def test_layers_are_grouped_by_their_windows(runner: Any) -> None:
    full, window = runner.facts.groups
    assert (full.window, window.window) == (0, WINDOW)
    assert {layer.group for layer in runner.steps.kv} == {0, 1}
    assert (full.slab, window.slab) == (2, 1)  # two layers of six keep all
    slabs = window.pages - 1
    assert full.pages == 1 + 2 * slabs
    assert 0.9 * (256 << 20) < runner.facts.ledger["kv"] <= 256 << 20
    assert slabs * window.page_bytes <= runner.facts.ledger["kv"] < (slabs + 2) * 1.01 * window.page_bytes


def test_groups_have_a_memory_each_on_request(pools: Any) -> None:
    full, window = pools.facts.groups
    assert {layer.group for layer in pools.steps.kv} == {0, 1}
    assert full.pages > window.pages
    assert not full.slab
    assert sum(group.pages * group.page_bytes for group in (full, window)) == pools.facts.ledger["kv"]


def test_text_is_the_same_wherever_pages_lie(runner: Any, pools: Any) -> None:
    """With no more slabs than one request needs pages and the others a few: rows give theirs back, and groups
    have each other's."""
    full, window = runner.facts.groups
    slabs = 44
    few = [replace(full, pages=1 + slabs * full.slab), replace(window, pages=1 + slabs)]
    limits: dict[str, Any] = {"depth": 2, "step_tokens": 64, "reserve": 0.0}
    alone = make_core(pools.facts, depth=1, step_tokens=64, prefix_cache=False)
    expected: dict[str, list[int]] = {}
    for request in requests():
        expected |= run(pools, [request], alone)
    core = make_core(runner.facts, groups=few, **limits)
    for _ in range(3):
        found = run(runner, requests(), core)
        assert runner.facts.dtype != "float32" or found == expected
    core.check()
    assert core.stats().preemptions > 0


@pytest.mark.parametrize("limits", [{"depth": 1}, {"depth": 3}, {"step_tokens": 50}, {"step_tokens": 500}])
def test_text_is_the_same_as_with_all_pages(runner: Any, limits: dict[str, Any]) -> None:
    """The same steps read the same values, wherever these lie. Also behind a prefix that is cached, in
    float32: in bfloat16 sums depend on the batch, and a random model of six layers makes other tokens of
    that."""
    core, expected = make_core(runner.facts, **limits), kept(runner, **limits)
    assert run(runner, requests(), core) == expected
    warm = run(runner, requests(), core)
    assert runner.facts.dtype != "float32" or warm == expected
    assert core.stats().pages_cached > 30


def test_pages_of_windows_are_used_again(pools: Any) -> None:
    pages = 1 + 4 * (-(-(WINDOW - 1) // PAGE) + 2)
    core = make_core(pools.facts, windows=[pages], reserve=0.0, depth=3, step_tokens=64)
    expected = kept(pools, depth=3, step_tokens=64)
    for _ in range(2):
        found = run(pools, requests(), core)
        assert pools.facts.dtype != "float32" or found == expected
    assert core.stats().preemptions == 0


def test_what_others_leave_behind_a_window_is_not_read(pools: Any) -> None:
    """Not even to multiply it with 0: it may be no number."""
    limits: dict[str, Any] = {"depth": 1, "prefix_cache": False, "step_tokens": 60}
    core, expected = make_core(pools.facts, **limits), kept(pools, **limits)
    planned = core.plan

    @torch.inference_mode()
    def poison_and_plan(now: float) -> StepPlan | None:
        if not core._queues.flights:
            torch.cuda.synchronize()
            free = torch.tensor(core._memory.windows[0]._free, device="cuda")
            for layer in pools.steps.kv:
                if layer.group:
                    layer.k[free] = layer.v[free] = float("nan")
        return planned(now)

    core.plan = poison_and_plan  # type: ignore[method-assign]
    assert run(pools, requests(), core) == expected
    with torch.inference_mode():
        for layer in pools.steps.kv:
            layer.k.zero_(), layer.v.zero_()


def test_what_others_leave_in_a_slab_is_not_read(runner: Any) -> None:
    """Whichever group had it."""
    limits: dict[str, Any] = {"depth": 1, "prefix_cache": False, "step_tokens": 60}
    core, expected = make_core(runner.facts, **limits), kept(runner, **limits)
    planned, slabs = core.plan, core._memory.windows[0]._slabs

    @torch.inference_mode()
    def poison_and_plan(now: float) -> StepPlan | None:
        if not core._queues.flights:
            torch.cuda.synchronize()
            for layer in runner.steps.kv:
                size = slabs.pages[layer.group]
                free = [slab * size + i for slab in slabs._free[-20:] for i in range(1, size + 1)]
                layer.k[free] = layer.v[free] = float("nan")
        return planned(now)

    core.plan = poison_and_plan  # type: ignore[method-assign]
    assert run(runner, requests(), core) == expected
    with torch.inference_mode():
        for layer in runner.steps.kv:
            layer.k.zero_(), layer.v.zero_()


def test_replay_equals_eager(pools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows beyond the window, decoded, and beside a prompt: bit for bit."""
    length, rows = 150, 12
    new = [
        NewRow(
            slot=slot,
            tokens=ints(*((7 * slot + i) % 5000 for i in range(length))),
            prompt_len=length,
            pages=[ints(*range(1 + slot * 12, 13 + slot * 12))] * 2,
            sampling=RowSampling(temperature=0.8, top_k=9, seed=slot),
        )
        for slot in range(rows + 1)
    ]
    for row in new[:-1]:
        pools.execute(plan(0, [(row.slot, 0, length, SAMPLE)], [row]))
    decode = [(slot, length, 1, SAMPLE) for slot in range(rows)]
    for steps, graphs in (
        ([plan(1, decode)], pools.graphs),
        ([plan(2, [*decode, (rows, 0, length, SAMPLE)], new[-1:])], pools.prompts),
    ):
        with monkeypatch.context() as patch:
            both: list[Any] = twice(graphs, patch, "_graphs", graphs._forward)
            for step in steps:
                assert not pools.execute(step).failed
        assert len(both) == len(steps)
        for pair, step in zip(both, steps):
            assert_same_bits(pair, len(step.slots) // 4)
