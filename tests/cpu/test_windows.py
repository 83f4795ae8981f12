"""Models with sliding windows: pages behind a window go to others, and no text changes."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from config_cases import gemma3, llama
from forked import ForkedExecutor
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tiny import check_draws, make_core, run, run_executor, submit, tiny_config, tiny_source

from sgla.config import Config
from sgla.layers.spec import StateTensor
from sgla.messages import CacheGroup, StepPlan, Submit
from sgla.model.read import read_decoder
from sgla.model.sharing import Slab, longest
from sgla.model.state import Demand, LayerState, Pool, apart, kv_groups, state_of
from sgla.observe.machine import Machine
from sgla.resolve import resolve
from sgla.sched.memory import Memory
from sgla.worker.cpu import CpuRunner
from sgla.worker.kv import forget, zero_pages
from sgla.worker.memory import cache_groups, size_kv

WINDOW, PAGE = 40, 16
MODEL = gemma3(
    vocab_size=331, num_hidden_layers=3, sliding_window=WINDOW, max_position_embeddings=1024, layer_types=...
)


def make_runner(**changes: Any) -> CpuRunner:
    source = tiny_source()
    source.config.clear()
    source.config.update(MODEL)
    return CpuRunner(tiny_config(**changes), source, 0, 1, "", lambda progress: None)


@pytest.fixture(scope="module", params=["torch", "native"])
def runner(request: pytest.FixtureRequest) -> CpuRunner:
    runner = make_runner(native_kernels=request.param == "native")
    if request.param == "native" and "torch" in runner.facts.notes[0]:
        pytest.skip(runner.facts.notes[0])
    return runner


@pytest.fixture(scope="module", params=["torch", "native"])
def pools(request: pytest.FixtureRequest) -> CpuRunner:
    """Groups have a memory each."""
    runner = make_runner(native_kernels=request.param == "native", window_ratio=0.75)
    if request.param == "native" and "torch" in runner.facts.notes[0]:
        pytest.skip(runner.facts.notes[0])
    return runner


def requests() -> list[Submit]:
    """Longer than the window by themselves, behind a prefix that others share, and shorter."""
    rng = random.Random(5)
    prompt = lambda n: [rng.randrange(331) for _ in range(n)]  # noqa: E731
    shared = prompt(3 * WINDOW)
    return [
        submit("long", prompt(5 * WINDOW), 60),
        submit("first", shared + prompt(5), 30, temperature=0.8, seed=3),
        submit("second", shared + prompt(50), 20, temperature=0.9, seed=4),
        submit("short", prompt(3), 2 * WINDOW, temperature=1.0, seed=7),
    ]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """What each gives by itself with one cache group, whose pages all stay."""
    runner = make_runner()
    runner.tables.page_table = runner.tables.page_table[:1].repeat(2, 0)
    check_draws(runner)
    tokens: dict[str, list[int]] = {}
    for request in requests():
        core = make_core(runner.facts, depth=1, prefix_cache=False)
        core._memory.slide = lambda request: None  # type: ignore[method-assign]
        tokens |= run(runner, [request], core).tokens()
    return tokens


def test_layers_are_grouped_by_their_windows(runner: CpuRunner) -> None:
    full, window = runner.facts.groups
    assert (full.window, window.window) == (0, WINDOW)
    assert {layer.group for layer in runner.kv} == {0, 1}
    assert 2 * full.page_bytes == window.page_bytes  # two layers of three
    assert (full.slab, window.slab) == (2, 1)
    assert full.pages - 1 == 2 * (window.pages - 1)


def test_groups_have_a_memory_each_on_request(pools: CpuRunner) -> None:
    full, window = pools.facts.groups
    assert full.pages > window.pages
    assert not full.slab
    assert not window.slab


@pytest.mark.parametrize("limits", [{"depth": 1, "step_tokens": 64}, {"depth": 3, "step_tokens": 9}])
def test_text_is_the_same_as_with_all_pages(
    runner: CpuRunner, alone: dict[str, list[int]], limits: dict[str, Any]
) -> None:
    core = make_core(runner.facts, **limits)
    assert run(runner, requests(), core).tokens() == alone
    cached = run(runner, requests(), core)
    assert cached.tokens() == alone
    assert cached["second"][0].cached_tokens >= 3 * WINDOW // PAGE * PAGE


def test_text_is_the_same_in_a_memory_that_is_too_small(
    runner: CpuRunner, alone: dict[str, list[int]]
) -> None:
    """Rows give their pages back, the tree loses prefixes, and groups have what others had before them."""
    full, window = runner.facts.groups
    slabs = 26  # the longest request takes 11 for all its tokens, and 5 for its window and a step
    few = [replace(full, pages=1 + 2 * slabs), replace(window, pages=1 + slabs)]
    core = make_core(runner.facts, groups=few, depth=2, step_tokens=32, reserve=0.0)
    memory, owners = core._memory.stock._memory, set[tuple[int, int]]()  # type: ignore[attr-defined]
    plan = core.plan

    def plan_and_look(now: float) -> StepPlan | None:
        made = plan(now)
        owners.update(enumerate(memory._owner))
        core.check()
        return made

    core.plan = plan_and_look  # type: ignore[method-assign]
    for _ in range(3):
        assert run(runner, requests(), core).tokens() == alone
    stats = core.stats()
    assert stats.preemptions > 0
    assert stats.hits["device"] > 0
    assert sum((slab, 0) in owners and (slab, 1) in owners for slab in range(slabs)) > slabs // 2


def test_pages_of_windows_are_used_again(pools: CpuRunner, alone: dict[str, list[int]]) -> None:
    """With no more of them than all rows read at a time, and nothing left for the tree; what they hold
    meanwhile is of others."""
    core = make_core(pools.facts, windows=[1 + 4 * (-(-(WINDOW - 1) // PAGE) + 2)], reserve=0.0)
    for _ in range(2):
        assert run(pools, requests(), core).tokens() == alone
    stats = core.stats()
    assert stats.preemptions == 0
    assert stats.pages_cached > 30


def test_what_others_leave_behind_a_window_is_not_read(pools: CpuRunner, alone: dict[str, list[int]]) -> None:
    """Not even to multiply it with 0: it may be no number."""
    core = make_core(pools.facts, depth=1, prefix_cache=False)
    memory, plan, given_back = core._memory, core.plan, set[int]()
    poisoned = 0

    def slide(request: Any) -> None:
        before = list(request.windows[0])
        Memory.slide(memory, request)
        given_back.update(page for page, now in zip(before, request.windows[0]) if page != now)

    def poison_and_plan(now: float) -> StepPlan | None:
        nonlocal poisoned
        if not core._queues.flights:
            given_back.difference_update(page for other in core._queues.running for page in other.windows[0])
            poisoned += len(given_back)
            for layer in pools.kv:
                if layer.group:
                    layer.k[list(given_back)] = layer.v[list(given_back)] = float("nan")
            given_back.clear()
        return plan(now)

    memory.slide, core.plan = slide, poison_and_plan  # type: ignore[method-assign]
    for request in requests():
        assert run(pools, [request], core).tokens()[request.rid] == alone[request.rid]
    assert poisoned > 20
    for layer in pools.kv:
        layer.k.zero_(), layer.v.zero_()


def test_what_others_leave_in_a_slab_is_not_read(runner: CpuRunner, alone: dict[str, list[int]]) -> None:
    """Whichever group had it."""
    core = make_core(runner.facts, depth=1, prefix_cache=False)
    slabs, plan, poisoned = core._memory.stock._memory, core.plan, set[int]()  # type: ignore[attr-defined]

    def poison_and_plan(now: float) -> StepPlan | None:
        if not core._queues.flights:
            left = slabs._free[-40:]  # who wants one has the last
            poisoned.update(left)
            for layer in runner.kv:
                size = slabs.pages[layer.group]
                pages = [slab * size + i for slab in left for i in range(1, size + 1)]
                layer.k[pages] = layer.v[pages] = float("nan")
        return plan(now)

    core.plan = poison_and_plan  # type: ignore[method-assign]
    for request in requests():
        assert run(runner, [request], core).tokens()[request.rid] == alone[request.rid]
    assert len(poisoned) > 20
    for layer in runner.kv:
        layer.k.zero_(), layer.v.zero_()


def test_pages_of_a_shared_memory_are_zeroed_and_given_back(
    runner: CpuRunner, alone: dict[str, list[int]]
) -> None:
    """A page of each group, and nothing outside of its slab; then all of them."""
    for layer in runner.kv:
        layer.k.fill_(1), layer.v.fill_(1)
    zero_pages(runner.kv, [torch.tensor([5]), torch.tensor([9])])  # of the third slab, and of the ninth
    for layer in runner.kv:
        for x in layer.tensors:
            zeros = set(x.eq(0).flatten(1).any(1).nonzero().flatten().tolist())
            assert zeros <= ({3, 9} if layer.group else {5, 17, 18})
            assert not x[9 if layer.group else 5].any()
    forget(runner.kv, 2)
    assert not any(x.any() for layer in runner.kv for x in layer.tensors)
    assert run(runner, requests(), make_core(runner.facts)).tokens() == alone


async def test_two_ranks_share_out_heads_and_agree_about_slabs() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    source = tiny_source()
    source.config.clear()
    source.config.update(MODEL | heads)
    one = CpuRunner(tiny_config(), source, 0, 1, "", lambda progress: None)
    executor = ForkedExecutor(tiny_config(tp=2), source)
    try:
        facts = await executor.start(lambda progress: None)
        assert [group.slab for group in facts.groups] == [2, 1]
        assert [2 * group.page_bytes for group in facts.groups] == [g.page_bytes for g in one.facts.groups]
        both = await run_executor(executor, facts, requests())
    finally:
        await executor.close()
    assert both.tokens() == run(one, requests()).tokens()


def test_a_budget_is_shared_out_by_use() -> None:
    kept = StateTensor("k", (1, 256)), StateTensor("v", (1, 256))
    state = [LayerState(0 if i % 6 == 5 else 512, kept) for i in range(18)]
    groups = kv_groups(state, 32768, "bfloat16")
    assert [(group.window, len(group.layers)) for group in groups] == [(0, 3), (512, 15)]

    def pages(budget: int, rows: int) -> list[int]:
        limits = {"available": 1 << 40, "wanted_context": None, "model_context": 32768}
        return size_kv(Pool(groups, PAGE, Demand(rows, 512)), budget=budget, **limits).pages

    equal = (512 << 20) // (18 * 1024 * PAGE)
    full, window = pages(512 << 20, 32)
    assert window == 1 + -(-(512 << 20) // (18 * 1024 * PAGE)) * 3 // 4
    assert full > 1.9 * equal
    full, window = pages(8 << 30, 32)
    assert window == 1 + 2 * 32 * 34 + 32  # no more are of use
    assert full * 3 + window * 15 <= (8 << 30) // (1024 * PAGE) + 18
    full, window = pages(8 << 20, 32)  # so little that all tokens have their pages
    assert full == window


SIZES = st.lists(st.integers(1, 60).map(lambda n: n * 1024), min_size=2, max_size=4)


@given(SIZES)
def test_a_slab_holds_whole_pages_of_any_group(sizes: list[int]) -> None:
    slab = Slab.of(sizes, 1024)
    for size, count, stride in zip(sizes, slab.pages, slab.strides):
        assert stride >= size
        assert stride % 1024 == 0
        assert count * stride == slab.bytes
        assert slab.bytes - count * size < max(sizes) * 1.1 + 1024 * math.lcm(*slab.pages)
    if len(set(sizes)) == 1:
        assert slab == Slab(sizes[0], (1,) * len(sizes))


@given(st.integers(1, 60), st.integers(1, 60))
def test_a_slab_of_two_groups_wastes_a_sixteenth_at_most(first: int, second: int) -> None:
    """Of layers with a head each on this rank, by whole ones of which pages lie apart."""
    sizes = [2 * layers * 4096 for layers in (first, second)]
    assert Slab.of(sizes, 4096).waste(sizes) <= 1 / 16


@pytest.mark.parametrize("layers", [(2, 41, 1), (31, 7, 29), (2, 5, 31)])
def test_room_between_pages_of_three_groups_is_counted_as_waste(layers: tuple[int, ...]) -> None:
    """Slabs in which little of the pages' own is left over, but which many bytes divide evenly."""
    sizes = [2 * count * 4096 for count in layers]
    assert Slab.of(sizes, 4096).waste(sizes) < 1 / 8


@given(st.integers(1, 40), SIZES, st.lists(st.integers(1, 30), min_size=3, max_size=3))
def test_one_request_has_as_many_pages_as_fit(slabs: int, sizes: list[int], least: list[int]) -> None:
    each = Slab.of(sizes).pages

    def needed(pages: int) -> int:
        return sum(-(-n // size) for n, size in zip([pages, *(min(pages, n) for n in least)], each))

    found = longest(slabs, each, least[: len(each) - 1])
    assert needed(found) <= slabs < needed(found + 1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, ""),
        ({"window_ratio": 0.5}, "--window-ratio"),
        ({"pp": 2}, "--pp"),
        ({"kv_host_bytes": 1 << 30}, "tiers"),
        ({"kv_disk": "/x:1G"}, "tiers"),
        ({"role": "prefill"}, "--role"),
        ({"kv_cache_dtype": "int8"}, "scales"),
        ({"kv_cache_dtype": "fp8"}, ""),
        ({"tp": 4}, ""),
        ({"tp": 5}, "heads"),
        ({"page_size": 1, "tp": 16, "kv_cache_dtype": "fp8"}, ""),
    ],
)
def test_groups_share_a_memory_where_all_of_it_can(settings: dict[str, Any], reason: str) -> None:
    folder = Path(__file__).parents[2] / "bench" / "models" / "gemma-3-27b"
    spec, config = read_decoder(json.loads((folder / "config.json").read_text())), Config(**settings)
    found = apart(config, spec, state_of(spec, config.tp), config.kv_dtype("bfloat16"))
    assert reason in found
    assert bool(reason) == bool(found)


def test_pages_that_copies_cannot_take_lie_apart() -> None:
    spec = read_decoder(MODEL)
    assert "too small" in apart(Config(page_size=1), spec, state_of(spec, 1), "bfloat16")
    assert not apart(Config(page_size=16), spec, state_of(spec, 1), "bfloat16")


def test_one_memory_or_a_ratio_of_windows_holds_more_tokens() -> None:
    """Of Gemma 3 27B in 40 GiB five times what equal pages hold, or four times, for as many requests as by
    default; a window of one request and a step's tokens are there in any case."""
    folder = Path(__file__).parents[2] / "bench" / "models" / "gemma-3-27b"
    spec = read_decoder(json.loads((folder / "config.json").read_text()))
    groups = kv_groups(state_of(spec, 1), 131072, "bfloat16")

    def tokens(ratio: float | None) -> int:
        return Pool(groups, PAGE, Demand(256, 8448, ratio=ratio)).tokens(40 << 30)

    whole = Pool(groups, PAGE, Demand(256, 8448)).whole(40 << 30)
    shared = Pool(groups, PAGE, Demand(256, 8448), shared=PAGE * 256)
    assert 5.3 < shared.tokens(40 << 30) / whole < 5.5  # of one text
    places = min(Pool(groups, PAGE, Demand(256, 8448)).split(40 << 30)) * PAGE
    assert shared.least(40 << 30) > 1.3 * places  # of texts that fill no window
    assert 2.2 < tokens(None) / whole < 2.4
    assert 4 < tokens(0.1) / whole < 4.2
    full, window = Pool(groups, PAGE, Demand(256, 8448, ratio=0.1)).split(40 << 30)
    assert abs(window / full - 0.1) < 0.01
    _, least = Pool(groups, PAGE, Demand(256, 8448, ratio=0.001)).split(40 << 30)
    assert least == -(-1023 // PAGE) + 1 + 8448 // PAGE


@pytest.mark.parametrize(
    ("model", "context", "heard"),
    [(MODEL, WINDOW + 1, True), (MODEL, WINDOW, False), (llama(vocab_size=331), None, False)],
)
def test_a_ratio_of_windows_is_for_layers_of_both_kinds(model: Any, context: int | None, heard: bool) -> None:
    """Those whose window is the context keep all."""
    found = resolve(Config(window_ratio=0.1, context_length=context), Machine(), model).notes
    assert any("--window-ratio" in note for note in found) is not heard


def test_states_take_half_of_a_budget() -> None:
    """But one for each row and one more come before tokens, up to three quarters, and no more than are of
    use; without the prefix tree there are no checkpoints. They lie as far apart as their bytes."""
    tokens = LayerState(0, (StateTensor("k", (2, 64)), StateTensor("v", (2, 64))))  # 512 bytes
    state = LayerState(0, (), unit=(StateTensor("memory", (8, 64, 256), "float32"),))  # 512 KiB
    groups = kv_groups([tokens, state, tokens], 4096, "bfloat16")
    assert [group.page_bytes(PAGE) for group in groups] == [1024 * PAGE, 512 << 10]
    pool = Pool(groups, PAGE, Demand(4, 512))
    assert pool.every == 512
    assert pool.needed(4096) == 4096 * 1024 + (1 << 20)
    for budget, states in ((8 << 20, 8), (4 << 20, 5), (2 << 20, 3), (1 << 30, 1 << 10)):
        pages, found = pool.split(budget)
        assert (found, pages) == (states, (budget - states * (512 << 10)) // (1024 * PAGE))
    assert Pool(groups, PAGE, Demand(4, 512, prefixes=False)).split(1 << 30)[1] == 5
    assert cache_groups(pool, [9, 6])[1] == CacheGroup(6, every=512, page_bytes=512 << 10)
    alone = kv_groups([state, LayerState(0, ())], 4096, "fp8")  # a layer may keep nothing
    assert [group.layers for group in alone] == [(1,), (0,)]
    assert Pool(alone, PAGE, Demand(4, 512)).split(8 << 20)[1] == 16
