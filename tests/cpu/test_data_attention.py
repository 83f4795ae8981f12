"""Attention by data: ranks with requests of their own, which share out MLPs and experts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from forked import ForkedExecutor
from msgspec.structs import replace
from test_stages import MODELS, one, requests, scores
from tiny import Transcript, make_core, run, run_executor, submit, tiny_config, tiny_source

from sgla.cli.settings import load_config
from sgla.config import Config
from sgla.errors import ConfigError, UnsupportedField
from sgla.ledger import mesh
from sgla.messages import Control, Facts, Ready, StepResult
from sgla.model.data_attention import check_data
from sgla.model.read import read_spec
from sgla.observe.machine import Machine
from sgla.resolve import resolve
from sgla.sched.parts import PartedCore


def parted(facts: Facts, count: int = 2, **limits: Any) -> PartedCore:
    return PartedCore(make_core(facts, **limits).limits, count)


@asynccontextmanager
async def ranks(source: Any, **changes: Any) -> AsyncIterator[Callable[..., Any]]:
    """Runs requests through two ranks, with a scheduler that lasts."""
    executor = ForkedExecutor(tiny_config(tp=2, dp_attention=True, **changes), source)
    stages = changes.get("pp", 1)
    try:
        facts = await executor.start(lambda progress: None)
        core = parted(facts, **({"stages": stages, "depth": stages + 1} if stages > 1 else {}))

        async def through(wanted: Any) -> Transcript:
            return await run_executor(executor, facts, wanted, core)

        through.core, through.executor = core, executor
        yield through
    finally:
        await executor.close()


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("mixture", {}),
        ("latent", {"ep": 2}),
        ("mixture", {"ep": 2, "pp": 2}),
        ("mixture", {"cp": 2}),
        ("a scan beside attention", {}),
        pytest.param("an MLP beside attention", {}, marks=pytest.mark.slow),
        pytest.param("latent", {"cp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param("dense, tied", {"cp": 2}, marks=pytest.mark.slow),
        pytest.param("mixture", {"cp": 2, "pp": 2}, marks=pytest.mark.slow),
        pytest.param("latent", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("dense, tied", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("mixture", {"ep": 2}, marks=pytest.mark.slow),
        pytest.param("dense, tied", {}, marks=pytest.mark.slow),
        pytest.param("states", {}, marks=pytest.mark.slow),
    ],
)
async def test_ranks_with_own_requests_equal_one(model: str, changes: dict[str, Any]) -> None:
    """With a cold cache and a warm one. Prompts are read in chunks, beside ranks that decode or have nothing
    to do."""
    source, wanted = tiny_source(**MODELS[model]), requests(model)
    expected = run(one(source), wanted)
    async with ranks(source, **changes) as through:
        for _ in range(2):
            found = await through(wanted)
            assert found.tokens() == expected.tokens()
            for rid, values in scores(expected).items():
                assert scores(found)[rid] == pytest.approx(values, abs=1e-4)
        assert all(core.stats().steps > 3 for core in through.core.cores)


async def test_counting_of_experts_is_refused_where_it_would_be_wrong() -> None:
    async with ranks(tiny_source(**MODELS["mixture"]), cp=2) as through:
        with pytest.raises(UnsupportedField, match="with --cp and --dp-attention"):
            await through.executor.control(Control(verb="experts_start"))


async def test_choices_of_experts_are_counted_once_and_a_lost_rank_is_told() -> None:
    """Each token chooses two in each layer, on whatever rank it is; tokens of nobody choose none."""
    prompts = [submit(str(n), list(range(n, n + 20)), 6) for n in range(3)]
    async with ranks(tiny_source(**MODELS["mixture"]), ep=2) as through:
        executor = through.executor
        await executor.control(Control(verb="experts_start"))
        await through(prompts)
        told = (await executor.control(Control(verb="experts_dump")))["ranks"]
        (counts,) = [rank["experts"] for rank in told if rank]
        assert {layer: sum(numbers) for layer, numbers in counts.items()} == dict.fromkeys(
            range(3), 3 * 2 * 25
        )
        lost = asyncio.get_running_loop().create_future()
        executor.on_death(lost.set_result)
        executor._ranks[1].process.kill()
        assert "rank 1" in str(await asyncio.wait_for(lost, 10))


async def test_fake_ranks_answer_for_their_own_requests() -> None:
    config, source = tiny_config(tp=2, executor="fake", fake_step_ms=1, dp_attention=True), tiny_source()
    wanted = [submit(str(n), list(range(n, n + 20)), 6) for n in range(5)]
    found = []
    for changes in ({"tp": 1, "dp_attention": False}, {}):
        executor = ForkedExecutor(replace(config, **changes), source, runner="sgla.executor.fake:FakeRunner")
        try:
            facts = await executor.start(lambda progress: None)
            core = None if changes else parted(facts)
            found.append((await run_executor(executor, facts, wanted, core)).tokens())
        finally:
            await executor.close()
    assert found[0] == found[1]


def cores(**limits: Any) -> PartedCore:
    return parted(one(tiny_source()).facts, **limits)


def homes(core: PartedCore) -> dict[str, int]:
    return {rid: i for i, own in enumerate(core.cores) for rid in own.rids}


def test_requests_go_where_least_is_to_do() -> None:
    core = cores()
    for rid, length in (("long", 60), ("a", 5), ("b", 5), ("c", 5), ("e", 5)):
        core.offer(submit(rid, list(range(length)), 3), 0.0)
    assert homes(core) == {"long": 0, "a": 1, "b": 1, "c": 1, "e": 0}
    choice = replace(submit("d", [7] * 9, 3), parent="long")
    core.offer(choice, 0.0)
    assert homes(core)["d"] == 0, "choices of a prompt are together, since it is read once"
    assert core.stats().waiting == 6
    assert core.cancel("long", "stop").finish == "stop"
    assert core.cancel("long", "stop") is None
    core.ready(Ready(rid="nobody", reason="grammar"))


def test_all_wait_for_the_end_of_a_long_step() -> None:
    """Of one of them, or its next part would be missing in a step of the others."""
    core = cores(itl_target=10.0)
    core.offer(submit("long", list(range(60)), 3), 0.0)
    core.offer(submit("a", [1, 2, 3], 3), 0.0)
    assert all(core.plan(0.0).parts)
    assert core.plan(0.1) is None
    assert 0.1 < core.cores[1].ahead.when(0.1) < core.next_plan
    assert all(core.plan(core.next_plan).parts)


def test_a_prompt_goes_where_it_is_cached() -> None:
    core, runners = cores(), [one(tiny_source()) for _ in range(2)]

    def finish() -> None:
        while not core.idle:
            while (plan := core.plan(0.0)) is not None:
                parts = [
                    StepResult(step=0, tokens=b"") if own is None else runner.execute(own)
                    for runner, own in zip(runners, plan.parts, strict=True)
                ]
                core.retire(StepResult(step=0, tokens=b"", parts=parts), 0.0)
            core.check()

    core.offer(submit("x", [9] * 40, 2), 0.0)
    finish()
    home = next(i for i, own in enumerate(core.cores) if own.stats().cached_tokens)
    core.offer(submit("z", [9] * 50, 2), 0.0)
    core.offer(submit("y", [8] * 40, 2), 0.0)
    assert homes(core) == {"z": home, "y": 1 - home}
    tree = core.cores[home]._memory.cache
    before = tree.nodes, tree._clock
    core.offer(submit("v", [9] * 20 + [7] * 20, 2), 0.0)
    assert (tree.nodes, tree._clock) == before, "a look cuts no node, and keeps none"
    finish()
    told = core.stats()
    assert (told.hit_tokens, told.finished, told.running) == (48, {"length": 4}, 0)
    assert len(core.drain_finished()) == 4
    assert core.renew("2")
    assert core.flush_cache()
    assert core.stats().cached_tokens == 0


def test_what_has_ended_is_forgotten_and_deadlines_hold() -> None:
    core = cores()
    for n in range(300):
        core.offer(replace(submit(str(n), [1, 2], 2), deadline=1.0), 0.0)
        core.cancel(str(n), "abort")
    assert len(core._home) < 80
    assert len(core._families) < 80
    core.offer(replace(submit("late", [1, 2], 2), deadline=1.0), 0.0)
    assert core.next_deadline == 1.0
    assert [delta.finish for delta in core.expire(2.0)] == ["error"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp": 1}, "with --tp 1"),
        ({"executor": "fake"}, "with --executor fake without --fake-step-ms"),
        ({"kv_disk": "/tmp:1G"}, "--kv-disk cannot be honoured with --dp-attention"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_loads(settings: dict[str, Any], words: str) -> None:
    machine = Machine(cores=2, physical_cores=2, memory_available=1 << 34)
    config = Config(**{"device": "cpu", "tp": 2, "dp_attention": True} | settings)
    with pytest.raises(ConfigError, match=words):
        resolve(config, machine, tiny_source().config)


@pytest.mark.parametrize(
    "name",
    """
    enable_lora kv_disk kv_host_bytes kv_host_ratio kv_store
    kv_events_config role encode_url logits_processors enable_return_routed_experts cpu_offload_gb
    enable_torch_compile
    """.split(),  # noqa: SIM905
)
def test_settings_that_it_is_not_together_with(name: str) -> None:
    kinds: dict[type, Any] = {int: 2, bool: True, dict: {"a": 1}, list: ["x"]}
    value = kinds.get(type(getattr(Config(), name)), "x")
    config = replace(Config(tp=2, dp_attention=True), **{name: value})
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} cannot be honoured") as caught:
        check_data(config, "cpu", None, False)
    assert caught.value.param == name


def test_models_that_it_does_not_go_together_with() -> None:
    spec, config = read_spec(tiny_source().config), Config(tp=2, dp_attention=True)
    check_data(config, "cpu", spec, False)
    for changed, device, vectors, words in (
        (dataclasses.replace(spec, architecture="Gemma4ForCausalLM"), "cpu", False, "by Gemma4"),
        (spec, "cpu", True, "with vectors"),
        (spec, "other", False, "on --device other"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_data(config, device, changed, vectors)


def test_who_holds_what_is_known_before_anything_loads() -> None:
    config = tiny_source(**MODELS["mixture"]).config
    data, cut = (mesh(tiny_config(tp=2, dp_attention=whole), config) for whole in (True, False))
    assert [held.kv_bytes_per_token for held in data] == [2 * held.kv_bytes_per_token for held in cut]
    assert all(held.weights > other.weights for held, other in zip(data, cut))


def test_sglangs_flags_mean_it() -> None:
    found = load_config({"tp": 2, "dp": 2, "dp_attention": True}, environ={})
    assert (found.tp, found.dp, found.dp_attention) == (2, 1, True)
