"""The fake executor: the same text through the asynchronous interface, and plans that are wrong are
caught."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import msgspec
import pytest
from simulation import Simulation, make_limits, make_submit

from sgla.config import Config
from sgla.errors import WorkerDied
from sgla.executor.fake import FakeExecutor, FakeModel, ints
from sgla.executor.procs import ProcsExecutor
from sgla.hub.source import ModelSource
from sgla.messages import Delta, Facts, Progress, StepPlan
from sgla.sched.core import Core


def plans_of(count: int = 3) -> tuple[Simulation, list[StepPlan]]:
    simulation = Simulation(make_limits(pages=65))
    for i in range(count):
        simulation.offer(make_submit(f"r{i}", [i, *range(20)], max_new=10))
    simulation.run()
    return simulation, simulation.plans


def replay(simulation: Simulation, plans: list[StepPlan]) -> None:
    model = FakeModel(simulation.model.facts, seed=1)
    for plan in plans:
        model.execute(plan)


def with_pages(plan: StepPlan, page: int) -> StepPlan:
    return msgspec.structs.replace(
        plan, page_ids=[array("i", [page] * len(ints(plan.page_ids[0]))).tobytes()]
    )


def test_a_page_given_to_two_requests_is_caught() -> None:
    simulation, plans = plans_of()
    replay(simulation, plans)
    grows = next(i for i, plan in enumerate(plans) if len(plan.page_ids[0]) >= 8)
    stolen = ints(plans[0].new[0].pages[0])[0]
    for page, reason in ((stolen, "two rows write|another prefix"), (0, "dummy")):
        with pytest.raises(AssertionError, match=reason):
            replay(simulation, [*plans[:grows], with_pages(plans[grows], page), *plans[grows + 1 :]])


def test_steps_out_of_order_and_rows_beyond_their_tokens_are_caught() -> None:
    simulation, plans = plans_of()
    with pytest.raises(AssertionError, match="step 2 after 0"):
        replay(simulation, plans[1:])
    later = msgspec.structs.replace(
        plans[0], starts=array("i", [s + 1 for s in ints(plans[0].starts)]).tobytes()
    )
    with pytest.raises(AssertionError, match="does not exist|without pages"):
        replay(simulation, [later])


def in_a_process(facts: Facts) -> ProcsExecutor:
    """The timed fake, behind the real process boundary."""
    config = Config(
        executor="fake",
        fake_step_ms=2.0,
        page_size=facts.page_size,
        max_running_requests=facts.slots,
        step_tokens=facts.step_tokens,
        random_seed=1,
        threads=1,
    )
    model = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.context_len,
    }
    source = ModelSource("dummy", Path("fake"), (), model, {})
    return ProcsExecutor(config, source, runner="sgla.executor.fake:FakeRunner")


@pytest.mark.parametrize("apart", [False, True])
async def test_results_come_through_the_descriptor(apart: bool) -> None:
    limits = make_limits()
    reference = Simulation(limits)
    facts = reference.model.facts
    executor = in_a_process(facts) if apart else FakeExecutor(facts, seed=1)
    phases: list[Progress] = []
    assert (await executor.start(phases.append)).vocab_size == facts.vocab_size
    assert phases
    core = Core(limits)
    deltas: list[Delta] = []
    done = asyncio.Event()

    def on_results() -> None:
        for result in executor.drain():
            assert result.error is None
            deltas.extend(core.retire(result, 0.0))
        advance()
        if core.idle:
            done.set()

    def advance() -> None:
        while (plan := core.plan(0.0)) is not None:
            executor.submit(plan)

    asyncio.get_running_loop().add_reader(executor.results_fd(), on_results)
    for i in range(5):
        submit = make_submit(f"r{i}", [i, 2, 3, 4, 5, 6])
        core.offer(submit, 0.0)
        reference.offer(submit)
    advance()
    await asyncio.wait_for(done.wait(), 10)
    asyncio.get_running_loop().remove_reader(executor.results_fd())
    await executor.close()
    await executor.close()
    for rid in reference.submits:
        assert [t for delta in deltas if delta.rid == rid for t in delta.tokens] == reference.alone(rid)[0]
    if apart:
        assert core.stats().step_seconds >= core.stats().steps * 0.002


async def test_death_is_told_once_and_ends_the_results() -> None:
    _, plans = plans_of(1)
    executor = FakeExecutor(Simulation(make_limits(pages=65)).model.facts)
    deaths: list[WorkerDied] = []
    executor.on_death(deaths.append)
    await executor.start(lambda progress: None)
    executor.submit(plans[0])
    executor.die("gone")
    executor.die("gone")
    executor.submit(plans[1])
    assert executor.drain() == []
    assert [death.message for death in deaths] == ["gone"]
    await executor.close()
