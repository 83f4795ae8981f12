"""What the scheduler promises, one promise a test."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from random import Random
from typing import Any

import msgspec
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Simulation, make_limits, make_submit, random_submits

from sgla.cache.pages import PagePool
from sgla.cache.radix import RadixCache
from sgla.errors import ContextTooLong, InvalidField
from sgla.executor.child import PLANS
from sgla.executor.fake import ints
from sgla.messages import (
    PROMPT_LOGPROBS,
    SAMPLE,
    Array,
    CacheGroup,
    Placed,
    Prepared,
    RowSampling,
    StepCost,
    StepPlan,
    StepResult,
    int32,
)
from sgla.sched import limits as limits_of_steps
from sgla.sched.core import Core
from sgla.sched.limits import LONGEST, SAMPLING_BYTES, STEP_BYTES, Limits, plan_bytes_of
from sgla.sched.policy import WINDOW, order
from sgla.sched.request import Prompt, Request

PROMPT = [7, 3, 9, 9, 1, 4, 2, 8, 6, 5, 3, 1, 0, 2, 4, 6, 8, 1, 3, 5, 7]  # 21 tokens, 5 full pages of 4


def transcripts(limits: Limits, seed: int, forced: int = 0) -> dict[str, tuple[list[int], str | None]]:
    """All requests at once, to their end."""
    simulation = Simulation(limits, forced=forced)
    for submit in random_submits(Random(seed), 6):
        submit.deadline, submit.holds = None, frozenset()
        simulation.offer(submit)
    simulation.run()
    simulation.verify()
    return {rid: (simulation.tokens(rid), simulation.finish(rid)) for rid in simulation.submits}


@settings(max_examples=examples(30), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    changes=st.fixed_dictionaries(
        {
            "depth": st.sampled_from((1, 2, 3)),
            "step_tokens": st.sampled_from((1, 5, 16, 64)),
            "prefix_cache": st.booleans(),
            "page_size": st.sampled_from((1, 4, 7)),
            "policy": st.sampled_from(("fcfs", "lpm", "auto", "dfs-weight", "lof", "random", "priority")),
            "slots": st.sampled_from((1, 3, 8)),
            "costs": st.sampled_from(
                ([], *([StepCost(tokens=t, prompts=p), StepCost(tokens=64)] for t in (1, 8) for p in (1, 3)))
            ),
        }
    ),
    forced=st.sampled_from((0, 1, 2, 9)),
)
def test_transcripts_do_not_depend_on_settings(seed: int, changes: dict[str, Any], forced: int) -> None:
    """Depth 1 = 2 = 3, chunked = whole, cache on = off, alone = in a batch, tokens one by one = several at
    once."""
    reference = make_limits(depth=1, step_tokens=1000, prefix_cache=False, pages=200)
    limits = make_limits(pages=100 // changes["page_size"] + 2, **changes)
    assert transcripts(limits, seed, forced) == transcripts(reference, seed)


def test_identical_prompts_of_one_step_compute_the_prefix_once() -> None:
    simulation = Simulation(make_limits(slots=8, step_tokens=64, pages=65))
    for i in range(8):
        simulation.offer(make_submit(f"r{i}", PROMPT))
    simulation.submit_plans()
    assert list(ints(simulation.plans[0].q_lens)) == [21] + [1] * 7
    simulation.run()
    simulation.verify()
    assert [simulation.deltas[f"r{i}"][0].cached_tokens for i in range(8)] == [0] + [20] * 7


def test_plans_stay_small_enough_for_the_ring() -> None:
    """However many requests with a cached prefix wait: their tokens travel with the plan."""
    core = Core(make_limits(slots=256, pages=4000, page_size=16, context_len=40_000, step_tokens=8192))
    prompt = list(range(20_000))
    for i in range(200):
        core.offer(make_submit(f"r{i}", [*prompt, i], max_new=1), 0.0)
    sizes, answered = [], 0
    while (plan := core.plan(0.0)) is not None:
        sizes.append(len(msgspec.msgpack.encode(plan)))
        tokens = bytes(4 * sum(flag & SAMPLE for flag in plan.flags))
        answered += len(core.retire(StepResult(step=plan.step, tokens=tokens), 0.0))
    assert answered == 200
    assert max(sizes) < 1.2 * STEP_BYTES < sum(sizes)
    sampling = RowSampling(grammar="x" * SAMPLING_BYTES)
    with pytest.raises(InvalidField, match="parameters"):
        plan_bytes_of(sampling)


def test_long_lists_are_counted_as_no_less_than_they_take() -> None:
    ids = [1, 200, 1 << 15, 1 << 17, (1 << 31) - 1]
    sampling = RowSampling(allowed=ids * 1000, logit_bias=[(token, -1.5) for token in ids] * 100)
    taken = len(msgspec.msgpack.encode(sampling))
    assert taken <= plan_bytes_of(sampling) < 2 * taken


def test_choices_share_their_prompt_until_they_run() -> None:
    core = Core(make_limits(slots=2))
    prompt = [1, 2, 3]
    for i in range(4):
        core.offer(make_submit(f"r-{i}", prompt, parent="r"), 0.0)
    waiting = core._queues.waiting
    assert all(request.tokens is waiting[0].tokens for request in waiting)
    assert all(request.data is waiting[0].data for request in waiting)
    plan = core.plan(0.0)
    assert plan is not None
    core.retire(StepResult(step=plan.step, tokens=int32([7, 8])), 0.0)
    assert [list(request.tokens) for request in core._queues.running] == [[1, 2, 3, 7], [1, 2, 3, 8]]
    assert [list(request.tokens) for request in core._queues.waiting] == [[1, 2, 3]] * 2


def bytes_in_flight(core: Core, count: int) -> int:
    """Most bytes of plans that are on their way at a time until ``count`` requests have taken their slots."""
    flying: deque[StepPlan] = deque()
    most = began = 0
    while began < count or flying:
        while (plan := core.plan(0.0)) is not None:
            flying.append(plan)
            began += len(plan.new)
        most = max(most, sum(len(msgspec.msgpack.encode(plan)) for plan in flying))
        done = flying.popleft()
        core.retire(StepResult(step=done.step, tokens=bytes(4 * sum(f & SAMPLE for f in done.flags))), 0.0)
    return most


def test_long_contexts_wait_for_each_other_at_the_ring() -> None:
    limits = make_limits(
        slots=8, pages=40_000, page_size=128, context_len=LONGEST, step_tokens=1 << 17, depth=3
    )
    core = Core(limits)
    for i in range(4):
        core.offer(make_submit(f"r{i}", [i] * (LONGEST - 200), max_new=1), 0.0)
    assert 4 * LONGEST < bytes_in_flight(core, 4) < 7 << 20


def test_the_ring_has_room_for_pages_of_one_token() -> None:
    limits = make_limits(
        slots=8, pages=600_000, page_size=1, context_len=LONGEST, step_tokens=LONGEST, depth=3
    )
    core = Core(limits)
    prompt = list(range(500_000))
    core.offer(make_submit("first", prompt, max_new=1), 0.0)
    bytes_in_flight(core, 1)
    for i in range(3):
        core.offer(make_submit(f"r{i}", [*prompt, i], max_new=1), 0.0)
    assert 8 << 20 < bytes_in_flight(core, 3) < PLANS


@pytest.mark.parametrize(
    "wish", [{"logprobs": 1000}, {"prompt_logprobs": 30}, {"logprob_ids": [1] * 1000}, {"pool": [1] * 2000}]
)
def test_answers_stay_small_enough_for_the_ring(wish: dict[str, Any]) -> None:
    core = Core(make_limits(slots=256, pages=4000, step_tokens=8192))
    core.offer(make_submit("fits", PROMPT, sampling=RowSampling(logprobs=20, prompt_logprobs=20)), 0.0)
    with pytest.raises(InvalidField, match="more logprobs"):
        core.offer(make_submit("huge", PROMPT, sampling=RowSampling(**wish)), 0.0)


def test_a_second_turn_finds_prompt_and_answer() -> None:
    simulation = Simulation(make_limits())
    simulation.offer(make_submit("first", PROMPT, max_new=12))
    simulation.run()
    history = PROMPT + simulation.tokens("first")
    simulation.offer(make_submit("second", [*history, 1, 2]))
    simulation.offer(make_submit("salted", [*history, 1, 2], namespace="salt"))
    simulation.run()
    simulation.verify()
    assert simulation.deltas["second"][0].cached_tokens == 32  # 33 known, the last of them not computed
    assert simulation.deltas["salted"][0].cached_tokens == 0


def test_requests_that_compute_the_same_prompt_help_each_other() -> None:
    """The second catches up with the first chunk by chunk, although both started before anything was
    cached."""
    limits = make_limits(slots=2, step_tokens=8, context_len=200, pages=101)
    simulation = Simulation(limits)
    prompt = [i % 50 for i in range(120)]
    for rid in ("a", "b"):
        simulation.offer(make_submit(rid, prompt, max_new=2))
    simulation.run()
    simulation.verify()
    assert simulation.model.computed_tokens < 120 + 10


def test_the_rest_of_a_chunk_is_not_spent_on_the_same_page_twice() -> None:
    """The second prompt gets 12 of the 15 tokens left, on a page; its twin must not start on the other 3."""
    simulation = Simulation(make_limits(step_tokens=32))
    prompt = [i % 50 for i in range(30)]
    for rid, tokens in (("first", PROMPT[:17]), ("a", prompt), ("b", prompt)):
        simulation.offer(make_submit(rid, tokens, max_new=1))
    simulation.run()
    simulation.verify()
    assert simulation.model.computed_tokens == 17 + 30 + 2


def test_an_overlapped_step_needs_no_token_from_the_host() -> None:
    simulation = Simulation(make_limits(depth=3))
    simulation.offer(make_submit("r", PROMPT[:5]))
    simulation.submit_plans()
    assert [(list(ints(p.starts)), list(ints(p.q_lens)), p.flags) for p in simulation.plans] == [
        ([0], [5], bytes((SAMPLE,))),
        ([5], [1], bytes((SAMPLE,))),
        ([6], [1], bytes((SAMPLE,))),
    ]


@pytest.mark.parametrize(("rows", "most"), [(4, 6), (5, 4)])
def test_there_are_pages_for_second_guesses_of_few_rows(rows: int, most: int) -> None:
    core = Core(make_limits(pages=400, page_size=1, slots=8, step_tokens=64, depth=1, drafts=6, leaves=2))
    for i in range(rows):
        core.offer(make_submit(f"{i}", [i] * 4, 40), 0.0)
    prompts = core.plan(0.0)
    assert prompts is not None
    core.retire(StepResult(step=prompts.step, tokens=int32([1] * rows)), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    assert list(ints(plan.drafts)) == [most] * rows
    assert list(ints(plan.page_counts)) == [1 + most] * rows
    core.check()


@pytest.mark.parametrize(
    ("seconds", "drafts", "grammar", "most"),
    [(0.0005, 0, "", 3), (0.0, 0, "", 2), (0.002, 0, "", 2), (0.0005, 3, "", 2), (0.0005, 0, "g", 2)],
)
def test_brief_steps_have_one_more_in_flight(seconds: float, drafts: int, grammar: str, most: int) -> None:
    """But for those that do not tell what they took, and those whose rows guess or wait for a grammar."""
    simulation = Simulation(make_limits(brief_depth=3, drafts=drafts), lambda tokens, work: seconds)
    sampling = RowSampling(grammar=grammar)
    simulation.offer(make_submit("r", PROMPT[:5], max_new=40, sampling=sampling))
    flights = []
    while simulation.step():
        simulation.submit_plans()
        flights.append(len(simulation.flights))
    assert max(flights) == most
    assert simulation.tokens("r") == simulation.alone("r")[0]


@pytest.mark.parametrize("target", [None, 0.03])
@pytest.mark.parametrize("seconds", [0.0005, 0.02])
@pytest.mark.parametrize("late", range(4))
def test_nobody_waits_for_three_steps_that_read_a_prompt(
    target: float | None, seconds: float, late: int
) -> None:
    """Not behind brief steps either, of which three are in flight when a prompt of several chunks comes."""
    limits = make_limits(pages=200, brief_depth=3, itl_target=target, context_len=200)
    simulation = Simulation(limits, lambda tokens, work: seconds if tokens > 3 else 0.0005)
    flights: list[int] = []  # after each step
    reading = 0  # most that read a prompt

    def step() -> bool:
        nonlocal reading
        going = simulation.step()
        simulation.submit_plans()
        longer = sum(max(ints(plan.q_lens)) > 1 for plan in simulation.flights)
        reading = max(reading, longer)
        flights.append(len(simulation.flights))
        assert flights[-1] < 3 or not longer
        return going

    simulation.offer(make_submit("there", PROMPT[:5], max_new=80))
    while step() and flights[-1] < 3:
        pass
    assert flights[-1] == 3
    simulation.offer(make_submit("long", [i % 50 for i in range(100)], max_new=20))
    for _ in range(late):
        step()
    simulation.offer(make_submit("comes", PROMPT[:3], max_new=20))
    while step():
        pass
    simulation.verify()
    assert reading == 2
    assert flights[-30:].count(3) > 20


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_row_is_planned_beyond_max_new(depth: int) -> None:
    simulation = Simulation(make_limits(depth=depth))
    simulation.offer(make_submit("r", PROMPT[:5], max_new=4))
    simulation.run()
    assert len(simulation.plans) == 4
    assert simulation.model.computed_tokens == 5 + 3


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_forced_tokens_are_computed_in_one_step(depth: int) -> None:
    simulation = Simulation(make_limits(depth=depth, step_tokens=64, pages=65), forced=30)
    simulation.offer(make_submit("r", PROMPT, max_new=70))
    simulation.run()
    simulation.verify()
    stats = simulation.core.stats()
    runs = [len(delta.tokens) - 1 for delta in simulation.deltas["r"]]
    assert (stats.forced_tokens, stats.output_tokens) == (sum(runs), 70)
    assert sum(runs) > 40
    # A step for each sampled token, and those in flight whose tokens were known before they came.
    samples = len(runs)
    assert samples <= stats.steps <= samples * depth
    chunks = [count for plan in simulation.plans[1:] for count in ints(plan.q_lens)]
    assert max(chunks) >= max(runs[:-1]) - depth + 2


def test_stop_tokens_and_limits_cut_a_forced_run() -> None:
    whole = Simulation(make_limits()).model.continuation(PROMPT, RowSampling(), frozenset(), 40)
    for cut in range(1, 40):
        for stop_ids in (frozenset[int](), frozenset(whole[cut - 1 : cut])):
            simulation = Simulation(make_limits(), forced=20)
            max_new = 40 if stop_ids else cut
            simulation.offer(make_submit("r", PROMPT, max_new=max_new, stop_ids=stop_ids))
            simulation.run()
            simulation.verify()
            assert (simulation.deltas["r"][-1].matched is not None) == bool(stop_ids)


def test_stop_token_ends_and_is_named_but_not_before_min_tokens() -> None:
    simulation = Simulation(make_limits())
    simulation.offer(make_submit("free", PROMPT, max_new=12))
    simulation.run()
    text = simulation.tokens("free")
    third = frozenset((text[2],))
    simulation.offer(make_submit("stop", PROMPT, max_new=12, stop_ids=third))
    simulation.offer(
        make_submit("later", PROMPT, max_new=12, stop_ids=third, sampling=RowSampling(min_tokens=12))
    )
    simulation.run()
    first = text.index(text[2]) + 1
    assert simulation.tokens("stop") == text[:first]
    assert simulation.deltas["stop"][-1].matched == text[2]
    assert simulation.tokens("later") == text


def test_echo_alone_ends_after_the_prompt_with_its_logprobs() -> None:
    simulation = Simulation(make_limits(step_tokens=8))
    simulation.offer(make_submit("warm", PROMPT))
    simulation.run()
    before = simulation.model.computed_tokens
    simulation.offer(make_submit("echo", PROMPT, max_new=0, sampling=RowSampling(prompt_logprobs=1)))
    simulation.run()
    (delta,) = simulation.deltas["echo"]
    assert (delta.finish, delta.tokens) == ("length", [])
    assert delta.prompt_logprobs is not None
    assert delta.prompt_logprobs[0] is None
    assert [entry.token for entry in delta.prompt_logprobs if entry] == PROMPT[1:]
    assert simulation.model.computed_tokens - before == len(PROMPT), (
        "the cached prefix was not computed again"
    )


def test_logprobs_from_a_place_on_keep_the_cached_prefix_in_front_of_it() -> None:
    simulation = Simulation(make_limits(step_tokens=8))
    start = len(PROMPT) - 3
    wish = RowSampling(prompt_logprobs=1, logprob_start=start)
    found = []
    for rid in ("cold", "warm"):
        simulation.offer(make_submit(rid, PROMPT, max_new=0, sampling=wish))
        simulation.run()
        (delta,) = simulation.deltas[rid]
        found.append((delta.prompt_logprobs, delta.cached_tokens))
    assert found[0][0] == found[1][0]
    assert [count for _, count in found] == [0, (start - 1) // 4 * 4]
    simulation.offer(make_submit("all", PROMPT, max_new=0, sampling=RowSampling(prompt_logprobs=1)))
    simulation.run()
    whole = simulation.deltas["all"][0].prompt_logprobs
    assert whole is not None
    assert found[0][0] == [None] * start + whole[start:]


def test_prompts_with_very_many_logprobs_are_read_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_of_steps, "ALTERNATIVES", 3 * 301)
    simulation = Simulation(make_limits())
    wide = RowSampling(prompt_logprobs=300)
    for rid, sampling in (
        ("a", wide),
        ("b", wide),
        ("c", RowSampling(prompt_logprobs=2)),
        ("d", RowSampling()),
    ):
        simulation.offer(make_submit(rid, [len(rid), ord(rid) % 50, *PROMPT], sampling=sampling))
    simulation.run()
    simulation.verify()
    slots: dict[int, int] = {}
    for plan in simulation.plans:
        for new in plan.new:
            slots[new.slot] = new.sampling.prompt_logprobs
        rows = zip(ints(plan.slots), ints(plan.q_lens), plan.flags)
        owed = [count for slot, count, flags in rows if slots[slot] == 300 and flags & PROMPT_LOGPROBS]
        assert len(owed) <= 1
        assert sum(owed) <= 3
    for rid in ("a", "b", "c"):
        (found,) = [d.prompt_logprobs for d in simulation.deltas[rid] if d.prompt_logprobs is not None]
        assert [entry.token for entry in found if entry] == simulation.submits[rid].tokens[1:]
        assert {len(entry.top) for entry in found if entry} == {2 if rid == "c" else 300}


def test_prompt_logprobs_do_not_depend_on_chunks() -> None:
    values = []
    for step_tokens in (3, 100):
        simulation = Simulation(make_limits(step_tokens=step_tokens, slots=3))
        simulation.offer(make_submit("r", PROMPT, sampling=RowSampling(prompt_logprobs=2, logprobs=1)))
        simulation.run()
        deltas = simulation.deltas["r"]
        values.append((deltas[0].prompt_logprobs, [delta.logprobs for delta in deltas]))
    assert values[0] == values[1]


def test_refusals() -> None:
    simulation = Simulation(make_limits(slots=1))
    with pytest.raises(ContextTooLong, match="maximum context length is 96 tokens"):
        simulation.offer(make_submit("long", [1] * 96))
    with pytest.raises(InvalidField):
        simulation.offer(make_submit("empty", []))
    simulation.offer(make_submit("a", PROMPT))
    simulation.run()
    simulation.verify()
    assert simulation.core.stats().rejected == 2


def test_what_was_admitted_is_never_refused_however_many_wait() -> None:
    simulation = Simulation(make_limits(slots=2))
    for i in range(100):
        simulation.offer(make_submit(str(i), PROMPT, max_new=2))
    assert simulation.core.stats().waiting == 100
    simulation.run()
    simulation.verify()
    assert simulation.core.stats().finished == {"length": 100}


def test_a_prompt_that_the_pool_can_never_hold_is_refused_and_the_longest_one_that_fits_ends() -> None:
    limits = make_limits(pages=6, context_len=1000)  # 5 pages of 4
    simulation = Simulation(limits)
    with pytest.raises(ContextTooLong):
        simulation.offer(make_submit("long", [1] * 21))
    simulation.offer(make_submit("full", [1] * 20, max_new=50))
    simulation.offer(make_submit("grow", [2] * 3, max_new=50))
    simulation.run()
    simulation.verify()
    assert len(simulation.tokens("full")) == 1
    assert len(simulation.tokens("grow")) == 18


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_cancel_frees_slot_and_pages_within_the_steps_in_flight(depth: int) -> None:
    simulation = Simulation(make_limits(depth=depth, slots=2, prefix_cache=False))
    for rid in ("running", "other", "waiting"):
        simulation.offer(make_submit(rid, PROMPT, max_new=40))
    for _ in range(6):
        simulation.step()
    simulation.cancel("running")
    simulation.cancel("waiting")
    assert simulation.finish("running") == simulation.finish("waiting") == "abort"
    for _ in range(depth):
        simulation.step()
    stats = simulation.core.stats()
    assert (stats.running, stats.waiting, stats.draining) == (1, 0, 0)
    assert stats.pages_private == len(PROMPT + simulation.tokens("other")) // 4 + 1
    simulation.cancel("unknown")
    assert simulation.core.cancel("running", "client") is None
    simulation.run()
    simulation.verify()


def test_a_cancelled_request_leaves_only_committed_tokens_in_the_cache() -> None:
    simulation = Simulation(make_limits(depth=3))
    simulation.offer(make_submit("r", PROMPT, max_new=40))
    for _ in range(9):
        simulation.step()
    committed = PROMPT + simulation.tokens("r")
    simulation.cancel("r")
    simulation.run()
    simulation.offer(make_submit("next", [*committed, *[1] * 9], max_new=1))
    simulation.run()
    simulation.verify()
    assert simulation.deltas["next"][0].cached_tokens == len(committed) // 4 * 4


def test_a_deadline_ends_waiting_and_running_requests_with_an_error() -> None:
    simulation = Simulation(make_limits(slots=1))
    for rid in ("a", "b"):
        simulation.offer(make_submit(rid, PROMPT, max_new=60, deadline=8.0, parent=f"parent-{rid}"))
    assert simulation.core.next_deadline == 8.0
    simulation.run()
    for rid in ("a", "b"):
        final = simulation.deltas[rid][-1]
        assert final.finish == "error"
        assert final.error is not None
        assert (final.error.status, final.error.rid) == (408, f"parent-{rid}")
    assert simulation.tokens("a")
    assert not simulation.tokens("b")
    simulation.verify()


def first_steps(simulation: Simulation) -> dict[str, float]:
    return {item.rid: item.scheduled or 0.0 for item in simulation.core.drain_finished()}


def test_priority_goes_first_and_takes_the_slot_of_a_lower_one() -> None:
    simulation = Simulation(make_limits(policy="priority", slots=1, patience=1000.0))
    simulation.offer(make_submit("low", PROMPT, max_new=30))
    for _ in range(5):
        simulation.step()
    simulation.offer(make_submit("middle", PROMPT[::-1], max_new=5, priority=1))
    simulation.offer(make_submit("high", PROMPT[::-2], max_new=5, priority=2))
    simulation.run()
    simulation.verify()
    order = [item.rid for item in simulation.core.drain_finished()]
    assert order == ["high", "middle", "low"]
    assert simulation.core.stats().preemptions == 1


def test_lpm_takes_the_longest_cached_prefix_first_and_dfs_the_heaviest_branch() -> None:
    for policy, expected in (
        ("lpm", ["long", "s1", "s2", "none"]),
        ("dfs-weight", ["s1", "s2", "long", "none"]),
    ):
        simulation = Simulation(make_limits(policy=policy, slots=1, patience=1000.0, pages=200))
        simulation.offer(make_submit("warm1", PROMPT, max_new=1))
        simulation.offer(make_submit("warm2", PROMPT[::-1], max_new=1))
        simulation.run()
        simulation.core.drain_finished()
        simulation.offer(make_submit("none", [11] * 20, max_new=1))
        simulation.offer(make_submit("s1", PROMPT[::-1][:9], max_new=1))
        simulation.offer(make_submit("s2", PROMPT[::-1][:10], max_new=1))
        simulation.offer(make_submit("long", PROMPT, max_new=1))
        simulation.run()
        scheduled = first_steps(simulation)
        assert sorted(scheduled, key=scheduled.__getitem__) == expected, policy


def test_lof_takes_the_longest_output_first_and_among_equals_the_oldest() -> None:
    simulation = Simulation(make_limits(policy="lof", slots=1, patience=1000.0, pages=200))
    for i, max_new in enumerate((3, 7, 5, 7, 3, 9)):
        simulation.offer(make_submit(f"r{i}", [i] * 5, max_new=max_new))
    simulation.run()
    assert list(first_steps(simulation)) == ["r5", "r1", "r3", "r2", "r0", "r4"]
    simulation.verify()


@pytest.mark.parametrize("policy", ["lof", "priority"])
def test_what_is_served_first_is_the_same_however_many_are_looked_at(policy: str) -> None:
    random, prompt = Random(1), Prompt(PROMPT)
    waiting = [
        Request(
            make_submit(f"r{i}", PROMPT), prompt, random.randint(1, 90), i, float(i), random.randint(0, 5)
        )
        for i in range(WINDOW + 100)
    ]

    def key(request: Request) -> tuple[float, ...]:
        return request.rank if policy == "priority" else (-request.limit, request.arrival)

    expected = sorted(waiting[2:], key=key)
    cache = RadixCache(4, PagePool(2))
    served = []
    for request in order(policy, waiting, cache, 11.5, 10.0):
        served.append(request)
        request.known += 50  # it runs
    assert served == waiting[:2] + expected


def test_random_is_no_order_of_arrival_and_the_same_each_time() -> None:
    orders = []
    for _ in range(2):
        simulation = Simulation(make_limits(policy="random", slots=1, patience=1000.0, pages=200))
        for i in range(12):
            simulation.offer(make_submit(f"r{i}", [i] * 4, max_new=1))
        simulation.run()
        orders.append(list(first_steps(simulation)))
    assert orders[0] == orders[1] != sorted(orders[0], key=lambda rid: int(rid[1:]))


def test_auto_changes_to_the_longest_prefix_where_prompts_are_found() -> None:
    simulation = Simulation(make_limits(policy="auto", slots=1, patience=1000.0, pages=200))
    auto = simulation.core._admission._auto
    assert auto is not None
    auto.rate = 1.0
    for rid, tokens in (("first", PROMPT), ("other", PROMPT[::-1]), ("same", PROMPT)):
        simulation.offer(make_submit(rid, tokens, max_new=1))
    simulation.run()
    assert list(first_steps(simulation)) == ["first", "same", "other"]


def test_lpm_sees_what_others_cached_meanwhile() -> None:
    simulation = Simulation(make_limits(policy="lpm", slots=1, patience=1000.0))
    for rid, tokens in (("first", PROMPT), ("other", PROMPT[::-1]), ("same", PROMPT)):
        simulation.offer(make_submit(rid, tokens, max_new=1))
    simulation.run()
    assert list(first_steps(simulation)) == ["first", "same", "other"]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "auto", "dfs-weight", "lof", "random", "priority"])
def test_nobody_starves(policy: str) -> None:
    """One request without a cached prefix, with low priority or a short output, against an endless stream of
    preferred ones."""
    simulation = Simulation(make_limits(policy=policy, slots=2, patience=30.0))
    for i in range(200):
        if i == 3:
            simulation.offer(make_submit("poor", [9] * 20, max_new=5 if policy == "lof" else 30))
        if simulation.core.stats().waiting < 6:
            rich = make_submit(f"rich{i}", PROMPT, max_new=6, priority=3)
            simulation.offer(rich)
        simulation.step()
    assert simulation.finish("poor") == "length"
    times = {item.rid: item for item in simulation.core.drain_finished()}["poor"]
    assert times.preemptions == 0, "it has waited long enough to keep its slot"
    assert times.scheduled is not None
    assert times.scheduled - times.arrival < 30 + 15
    simulation.run()
    simulation.verify()


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "auto", "dfs-weight", "lof", "random", "priority"])
def test_those_that_yield_go_behind_all_others(policy: str) -> None:
    """However many of them run and wait, and since when: one that comes takes a slot as soon as the steps in
    flight are over."""
    simulation = Simulation(make_limits(policy=policy, slots=2, pages=65, patience=5.0))
    for i in range(6):
        simulation.offer(make_submit(f"batch{i}", [i] * 9, max_new=30, priority=9, yields=True))
    for _ in range(10):
        simulation.step()
    assert simulation.core.stats().running == 2
    for i in range(2):
        simulation.offer(make_submit(f"user{i}", [20 + i] * 9, max_new=5))
    simulation.run()
    simulation.verify()
    ended = simulation.core.drain_finished()
    first = [item.rid for item in ended[:2]]
    assert (sorted(first) if policy == "random" else first) == ["user0", "user1"]
    assert [item.yields for item in ended] == [False, False] + [True] * 6
    assert all((item.scheduled or 0.0) - item.arrival <= simulation.limits.depth for item in ended[:2])


def test_those_that_yield_give_their_pages_to_others() -> None:
    simulation = Simulation(make_limits(slots=4, pages=17, reserve=1.0, prefix_cache=False))
    for i in range(3):
        simulation.offer(make_submit(f"batch{i}", [i] * 8, max_new=12, yields=True))
    for _ in range(8):
        simulation.step()
    simulation.offer(make_submit("user", [9] * 30, max_new=30))
    simulation.run()
    simulation.verify()
    ended = {item.rid: item for item in simulation.core.drain_finished()}
    assert next(iter(ended)) == "user"
    assert ended["user"].preemptions == 0
    assert sum(item.preemptions for item in ended.values()) > 0


def rows_of(simulation: Simulation, step: int) -> set[str]:
    """The requests that have a row in the newest plan."""
    return {request.rid for request in simulation.core._queues.flights[step].rows}


def test_those_that_yield_take_no_part_while_a_prompt_is_read() -> None:
    simulation = Simulation(make_limits(slots=4, pages=65, step_tokens=8, depth=1))
    for i in range(2):
        simulation.offer(make_submit(f"batch{i}", [i] * 20, max_new=40, yields=True))
    for _ in range(3):
        simulation.step()
    simulation.offer(make_submit("user", PROMPT, max_new=4))
    for _ in range(3):
        simulation.submit_plans()
        assert rows_of(simulation, -1) == {"user"}
        simulation.step()
    simulation.submit_plans()
    assert rows_of(simulation, -1) > {"user"}
    simulation.run()
    simulation.verify()


@pytest.mark.parametrize(
    ("target", "each", "rows"), [(None, 0.001, {9}), (0.1, 0.001, {4, 5}), (0.1, 0.01, {2}), (0.1, 0.0, {9})]
)
def test_beside_others_as_many_yield_as_make_a_step_little_longer(
    target: float | None, each: float, rows: set[int]
) -> None:
    """A step takes 16 ms, and ``each`` a token."""
    limits = make_limits(slots=9, pages=400, step_tokens=64, itl_target=target, depth=1)
    simulation = Simulation(limits, cost=lambda tokens, pairs: 0.016 + each * tokens)
    for i in range(8):
        simulation.offer(make_submit(f"batch{i}", [i] * 4, max_new=80, yields=True))
    for _ in range(20):
        simulation.step()
    simulation.offer(make_submit("user", [9] * 4, max_new=40))
    for _ in range(5):
        simulation.step()
    simulation.submit_plans()
    assert "user" in rows_of(simulation, -1)
    assert len(rows_of(simulation, -1)) in rows
    simulation.run()
    simulation.verify()


def test_the_oldest_request_is_never_retracted() -> None:
    limits = make_limits(slots=4, pages=17, reserve=0.0, prefix_cache=False)
    simulation = Simulation(limits)
    for i in range(4):
        simulation.offer(make_submit(f"r{i}", [i] * 10, max_new=40))
    simulation.run()
    simulation.verify()
    finished = {item.rid: item.preemptions for item in simulation.core.drain_finished()}
    assert finished["r0"] == 0
    assert sum(finished.values()) > 0


def test_the_reserve_prevents_most_retractions() -> None:
    counts = []
    for reserve in (0.0, 1.0):
        simulation = Simulation(make_limits(slots=4, pages=17, reserve=reserve, prefix_cache=False))
        for i in range(12):
            simulation.offer(make_submit(f"r{i}", [i] * 10, max_new=20))
        simulation.run()
        counts.append(simulation.core.stats().preemptions)
    assert counts[0] > 2
    assert counts[1] == 0


def test_retractions_raise_the_reserve() -> None:
    simulation = Simulation(make_limits(slots=4, pages=17, reserve=0.0, prefix_cache=False))
    for i in range(60):
        simulation.offer(make_submit(f"r{i}", [i % 50] * 10, max_new=20))
    simulation.run()
    simulation.verify()
    assert simulation.core.stats().preemptions < 20, "at a constant reserve there are 48"


def test_a_retracted_request_resumes_from_the_cache() -> None:
    simulation = Simulation(make_limits(policy="priority", slots=1, pages=101, patience=1000.0))
    simulation.offer(make_submit("low", PROMPT, max_new=30))
    for _ in range(12):
        simulation.step()
    simulation.offer(make_submit("high", [5] * 8, max_new=4, priority=1))
    simulation.run()
    simulation.verify()
    assert simulation.core.stats().preemptions == 1
    useful = len(PROMPT) + 29 + 8 + 3
    assert simulation.model.computed_tokens <= useful + 4, "more than its last page was computed again"


def cost(tokens: int, pairs: int) -> float:
    return 0.004 + 4e-5 * tokens + 1e-9 * pairs


def test_a_long_prompt_keeps_the_inter_token_target_of_running_streams() -> None:
    target = 0.03
    limits = Limits(
        slots=9,
        groups=[CacheGroup(8000)],
        page_size=16,
        context_len=120_000,
        step_tokens=4096,
        depth=2,
        itl_target=target,
    )
    simulation = Simulation(limits, cost=cost, check=False)
    for i in range(8):
        simulation.offer(make_submit(f"stream{i}", [i] * 700, max_new=2000))
    for _ in range(20):
        simulation.step()
    simulation.seconds.clear()
    simulation.offer(make_submit("long", [i % 49 for i in range(100_000)], max_new=1))
    while simulation.finish("long") is None:
        simulation.step()
    busy = simulation.seconds[10:]
    assert len(simulation.tokens("stream0")) > len(busy)
    assert max(busy) <= 1.2 * target
    assert sum(busy) / len(busy) >= 0.7 * target, "the time that the target leaves is not used"


def test_prompts_with_pictures_are_read_in_as_large_steps_as_others() -> None:
    """Though a tower makes them longer, which smaller steps would not change."""
    seen = 0.0  # seconds of the tower in a step with prompts
    limits = Limits(
        slots=30,
        groups=[CacheGroup(4000)],
        page_size=16,
        context_len=2000,
        step_tokens=4096,
        itl_target=0.03,
    )
    simulation = Simulation(
        limits, lambda tokens, pairs: cost(tokens, pairs) + seen * (tokens > 8), check=False
    )
    for i in range(8):
        simulation.offer(make_submit(f"stream{i}", [i] * 9, max_new=900))
    for _ in range(20):
        simulation.step()

    def steps(name: str, pictures: list[Placed]) -> int:
        before = len(simulation.plans)
        for i in range(20):
            simulation.offer(
                make_submit(f"{name}{i}", [ord(name[0]) % 50, i] * 500, max_new=1, pictures=pictures)
            )
        while any(simulation.finish(f"{name}{i}") is None for i in range(20)):
            simulation.step()
        return len(simulation.plans) - before

    texts = steps("text", [])
    seen = 0.1
    shown = Placed(1, 990, Prepared(b"p", "", [Array("values", "uint8", [1], 0)]))
    assert steps("shown", [shown]) <= texts + limits.depth
    seen = 0.0
    assert steps("behind", []) <= texts + limits.depth


@pytest.mark.parametrize("streams", [60, 200, 255])
@pytest.mark.parametrize(("prompts", "length"), [(1, 100), (1, 300), (1, 1000), (30, 100), (12, 300)])
def test_whole_tiles_hold_no_prompt_back(streams: int, prompts: int, length: int) -> None:
    limits = Limits(
        slots=300,
        groups=[CacheGroup(4000)],
        page_size=16,
        context_len=2000,
        step_tokens=8192,
        costs=[StepCost(tokens=8192, tile=256)],
        itl_target=1.0,
    )
    simulation = Simulation(limits, cost=cost, check=False)
    for i in range(streams):
        simulation.offer(make_submit(f"stream{i}", [i % 50, i // 50], max_new=60))
    for _ in range(10):
        simulation.step()
    for i in range(prompts):
        simulation.offer(make_submit(f"prompt{i}", [i] * length, max_new=1))
    before = len(simulation.plans)
    while any(simulation.finish(f"prompt{i}") is None for i in range(prompts)):
        simulation.step()
    assert len(simulation.plans) - before <= 2 + limits.depth


def test_steps_of_prompts_beside_streams_have_whole_tiles() -> None:
    limits = Limits(
        slots=100,
        groups=[CacheGroup(9000)],
        page_size=16,
        context_len=2000,
        step_tokens=8192,
        costs=[StepCost(tokens=8192, tile=256)],
        itl_target=0.05,
    )
    simulation = Simulation(limits, cost=cost, check=False)
    for i in range(60):
        simulation.offer(make_submit(f"stream{i}", [i % 50, i // 50], max_new=900))
    for _ in range(20):
        simulation.step()
    before = len(simulation.plans)
    for i in range(90):
        simulation.offer(make_submit(f"prompt{i}", [i] * (1000 + 7 * i % 50), max_new=2))
    while any(simulation.finish(f"prompt{i}") is None for i in range(90)):
        simulation.step()
    sizes = [sum(ints(plan.q_lens)) for plan in simulation.plans[before:] if max(ints(plan.q_lens)) > 1]
    assert sum(-size % 256 for size in sizes) < 0.06 * sum(sizes), "of 16 tokens a page 15 may be missing"


def test_short_prompts_do_not_wait_for_a_very_long_one() -> None:
    limits = make_limits(slots=4, pages=600, context_len=2000, step_tokens=32)
    simulation = Simulation(limits)
    simulation.offer(make_submit("long", [i % 49 for i in range(1500)], max_new=1))
    simulation.step()
    for i in range(3):
        simulation.offer(make_submit(f"short{i}", [i] * 10, max_new=1))
    simulation.run()
    simulation.verify()
    order = [item.rid for item in simulation.core.drain_finished()]
    assert order[-1] == "long"


def test_stats_count_what_happened() -> None:
    simulation = Simulation(make_limits(), cost=lambda tokens, pairs: 0.5)
    for i in range(3):
        simulation.offer(make_submit(f"r{i}", PROMPT, max_new=4))
    simulation.step()
    middle = simulation.core.stats()
    assert middle.running == 3
    assert middle.pages_free + middle.pages_cached + middle.pages_private == middle.pages_total == 32
    simulation.run()
    simulation.offer(make_submit("gone", PROMPT))
    simulation.cancel("gone")
    stats = simulation.core.stats()
    assert stats.finished == {"length": 3, "abort": 1}
    assert (stats.prompt_tokens, stats.output_tokens) == (63, 12)
    assert (stats.query_tokens, stats.hit_tokens, stats.prefilled_tokens) == (63, 40, 23)
    assert stats.step_seconds == 0.5 * stats.steps
    times = simulation.core.drain_finished()
    assert [item.rid for item in times] == ["r0", "r1", "r2", "gone"]
    assert times[0].scheduled is not None
    assert times[0].first_token is not None
    assert times[0].arrival <= times[0].scheduled < times[0].first_token < times[0].finished
    assert simulation.core.drain_finished() == []


def test_flush_forgets_what_is_not_in_use() -> None:
    simulation = Simulation(make_limits())
    simulation.offer(make_submit("old", [9] * 16))
    simulation.run()
    simulation.offer(make_submit("running", PROMPT, max_new=30))
    for _ in range(5):
        simulation.step()
    assert not simulation.core.flush_cache()
    assert simulation.core.stats().pages_evictable == 0
    simulation.run()
    assert simulation.core.flush_cache()
    assert simulation.core.stats().pages_free == 32


def test_nothing_is_kept_of_ended_requests() -> None:
    simulation = Simulation(make_limits(), check=False)
    for i in range(500):
        simulation.offer(make_submit(f"r{i}", PROMPT[: 5 + i % 16], max_new=3, deadline=1e9))
        simulation.step()
    simulation.run()
    core = simulation.core
    assert core.rids == []
    assert len(core._queues._deadlines) <= 2 * 1 + 66
    assert len(core._memory.cache._leaves) < 400


def test_prompts_with_other_media_do_not_share_what_comes_behind() -> None:
    simulation = Simulation(make_limits(slots=8, pages=65, step_tokens=64))
    media: list[tuple[str, list[tuple[int, bytes]]]] = [
        ("cat", [(6, b"cat")]),
        ("dog", [(6, b"dog")]),
        ("later", [(7, b"cat")]),
        ("none", []),
        ("two", [(6, b"cat"), (13, b"dog")]),
        ("again", [(6, b"cat")]),
        ("both", [(6, b"cat"), (13, b"dog")]),
    ]
    for rid, seen in media:
        simulation.offer(make_submit(rid, PROMPT, 2, media=seen))
        simulation.run()
    found = {rid: simulation.deltas[rid][0].cached_tokens for rid, _ in media}
    assert found == {"cat": 0, "dog": 4, "later": 4, "none": 4, "two": 12, "again": 20, "both": 20}
    simulation.verify()


def test_no_step_ends_in_a_picture_whose_tokens_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """However steps are cut and pages are short, and where a part of one has been computed for another."""
    simulation = Simulation(make_limits(pages=29, step_tokens=24))
    shown = [Placed(first, first + 17, Prepared(b"p", "", []), True) for first in (5, 30)]
    plan, ends = simulation.core.plan, list[int]()

    def planned(now: float, paused: bool = False) -> StepPlan | None:
        made = plan(now)
        if made is not None:
            ends.extend(sum(row) for row in zip(ints(made.starts), ints(made.q_lens)))
        return made

    monkeypatch.setattr(simulation.core, "plan", planned)
    for i in range(6):
        tokens = [*range(10 + i), *range(50 + i), i][: 52 + i]
        media = [(entry.first, b"p") for entry in shown]
        simulation.offer(make_submit(str(i), tokens, 12, pictures=shown, media=media))
    simulation.run()
    simulation.verify()
    assert len(ends) > 50
    assert not [end for end in ends for entry in shown if entry.first < end < entry.end]
    assert simulation.core.stats().preemptions > 0


@pytest.mark.parametrize(
    ("tokens", "step", "window", "message"),
    [
        (40, 24, 0, "A picture has 25 tokens, which are computed together"),
        (25, 24, 0, "The prompt has 25 tokens, which are computed together"),
        (40, 64, 24, "A picture has 25 tokens, which see each other, and layers .* windows of 24 "),
        (40, 64, 25, ""),
    ],
)
def test_tokens_that_see_each_other_must_fit(tokens: int, step: int, window: int, message: str) -> None:
    """Into a step, and into the windows of layers."""
    windows = [CacheGroup(33, window)] if window else []
    core = Simulation(make_limits(slots=4, step_tokens=step, windows=windows)).core
    first = 5 if tokens > 25 else 0
    shown = Placed(first, first + 25, Prepared(b"p", "", []), True)
    asked = make_submit("r", [*range(tokens)], 4, pictures=[shown])
    with pytest.raises(InvalidField, match=message) if message else nullcontext():
        core.offer(asked, 0.0)


def test_after_a_renewal_nobody_finds_what_was_before() -> None:
    """Requests that run go on; who waits, and who comes, computes all of its prompt."""
    simulation = Simulation(make_limits())
    simulation.offer(make_submit("runs", PROMPT, max_new=30))
    for _ in range(5):
        simulation.step()
    assert not simulation.core.renew("2"), "a step is in flight"
    while simulation.flights:  # and none is planned in a pause
        result = simulation.model.execute(simulation.flights.popleft())
        simulation.take(simulation.core.retire(result, simulation.now))
    assert simulation.core.renew("2")
    before = simulation.core.stats().hit_tokens
    for rid in ("first", "again"):
        simulation.offer(make_submit(rid, PROMPT, max_new=2))
        simulation.run()
        if rid == "first":
            assert simulation.core.stats().hit_tokens == before
    assert simulation.core.stats().hit_tokens > before
    simulation.core.check()
