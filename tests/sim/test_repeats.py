"""Rows get drafts that n-grams are looked for in while their texts repeat what came before, and rarely while
what is guessed is wrong."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from simulation import make_limits, make_submit

from sgla.messages import SAMPLE, StepResult, int32
from sgla.sched.core import Core
from sgla.sched.runs import Text, number_of, numbers_of
from sgla.worker.state import column

DRAFTS, TOKENS = 5, 512
# Milliseconds of a step of Qwen3-0.6B with so many rows, and what each that guesses costs beside it.
NOBODY = int32([-1])
MS, BESIDE = {1: 0.44, 2: 0.6, 3: 0.65, 6: 0.83}, 0.3


def test_a_text_knows_whether_its_latest_pair_came_before() -> None:
    """Several pairs share a bit, so that it may seem so where it did not."""
    rng, wrong = np.random.default_rng(0), 0
    for vocab, step in ((3, 1), (40, 1), (40, 7), (5000, 3), (60, 90)):
        tokens, text, seen = array("I"), Text(), set[tuple[int, int]]()
        for _ in range(300):
            for token in rng.integers(0, vocab, rng.integers(1, step + 1)).tolist():
                again = bool(tokens) and (tokens[-1], token) in seen
                if tokens:
                    seen.add((tokens[-1], token))
                tokens.append(token)
            found = text.read(tokens)
            assert found == text.read(tokens)
            assert found or not again
            wrong += found != again
    assert wrong <= 4


def drafts_of(
    draw: Callable[[int], int], depth: int, share: float = 0.0, prompt: range = range(20), **limits: int
) -> list[int]:
    return steps_of(draw, depth, share, prompt, **limits)[0]


def steps_of(
    draw: Callable[[int], int], depth: int, share: float, prompt: range, **limits: int
) -> tuple[list[int], list[int]]:
    """Of each step of a request: how many guesses it has room for, of which a ``share`` is right, each if
    those before it are; -1: it knows of none. The ``draw``-n token of its output is told. And of each
    plan with guesses, behind how many steps in flight it is made (0: of others)."""
    random, behind = Random(depth), list[int]()
    core = Core(make_limits(
        pages=400, depth=depth, drafts=DRAFTS, context_len=1024, step_tokens=64, padded_drafts=True, **limits
    ))  # fmt: skip
    core.offer(make_submit("a", list(prompt), TOKENS), 0.0)
    flights, found, count = deque(), [], 0
    while not core.idle:
        while (plan := core.plan(0.0)) is not None:
            flights.append(plan)
            assert len(flights) <= depth or not any(plan.drafts for plan in [*flights][:-1])
            behind.append(len(flights) - 1 if max(column(plan.drafts or NOBODY)) > 0 else 0)
        plan = flights.popleft()
        most = int(column(plan.drafts).max()) if plan.drafts else -1
        found.append(most)
        took = int(np.frombuffer(plan.flags, np.uint8)[0] & SAMPLE)
        while 0 < took <= min(most, TOKENS - count - 1) and random.random() < share:
            took += 1
        tokens = int32([draw(count + i) for i in range(took)])
        count += took
        told = {"counts": int32([took]), "guessed": int32([most])} if most >= 0 else {}
        seconds = (MS[1] if most <= 0 else MS[6] + BESIDE) / 1000
        core.retire(StepResult(step=plan.step, tokens=tokens, seconds=seconds, **told), 0.0)
    return found, behind


def test_guesses_behind_plain_brief_steps_are_planned_as_early_as_those() -> None:
    found, behind = steps_of(lambda i: 1000 + i, 2, 0.0, range(20), brief_depth=3)
    assert behind.count(2) > 0.5 * sum(most > 0 for most in found)
    _, behind = steps_of(lambda i: 1000 + i, 2, 0.0, range(20))
    assert max(behind) == 1


@pytest.mark.parametrize(("depth", "brief"), [(2, 0), (2, 3), (3, 0)])
def test_guesses_that_are_never_right_cost_little(depth: int, brief: int) -> None:
    found = drafts_of(lambda i: 1000 + i, depth, brief_depth=brief)
    cost = sum(MS[1 + max(most, 0)] + BESIDE * (most > 0) for most in found)
    assert 4 < sum(most > 0 for most in found) < 10
    assert cost < 1.03 * MS[1] * TOKENS


@pytest.mark.parametrize(("depth", "brief"), [(1, 0), (2, 0), (2, 3), (3, 0)])
def test_guesses_that_are_often_right_go_on(depth: int, brief: int) -> None:
    """Though now and then several rows have none."""
    found = drafts_of(lambda i: 1000 + i, depth, share=0.8, brief_depth=brief)
    assert len(found) < TOKENS / 3
    assert found.count(DRAFTS) > 0.9 * len(found)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_are_for_texts_that_repeat(depth: int) -> None:
    """They begin two steps in flight behind the pair that came before, and end with the repetition."""
    found = drafts_of(lambda i: 1000 + i, depth, searched_drafts=True)
    assert sum(most > 0 for most in found) <= 2
    begin, end = 100, 160

    def draw(i: int) -> int:
        return 1000 + i - (begin - 40) * (begin <= i < end)

    found = drafts_of(draw, depth, searched_drafts=True)
    places = [step for step, most in enumerate(found) if most > 0 and begin <= step <= 2 * end]
    assert begin < places[0] <= begin + 2 + depth
    assert places[-1] <= end + 1 + depth
    assert len(places) > 3


def test_what_others_were_answered_repeats() -> None:
    limits = make_limits(
        pages=400, depth=1, drafts=DRAFTS, context_len=1024, padded_drafts=True, searched_drafts=True
    )
    core = Core(limits)
    for rid, space, guesses in (("first", "", False), ("again", "", True), ("apart", "x", False)):
        core.offer(make_submit(rid, list(range(len(rid))), 40, namespace=space), 0.0)
        count, most = 0, -1
        while not core.idle:
            plan = core.plan(0.0)
            assert plan is not None
            most = max(most, int(column(plan.drafts).max()) if plan.drafts else -1)
            told = {"counts": int32([1]), "guessed": int32([0])} if plan.drafts else {}
            core.retire(StepResult(step=plan.step, tokens=int32([1000 + count]), **told), 0.0)
            count += 1
        assert (most > 0) == guesses


def test_a_run_has_one_number() -> None:
    tokens = np.random.default_rng(0).integers(0, 1 << 18, 60).astype(np.uint32)
    for length, bits in ((2, 19), (4, 20)):
        runs = [tokens[i : i + length].tolist() for i in range(len(tokens) - length + 1)]
        assert numbers_of(tokens, length, bits).tolist() == [number_of(run, bits) for run in runs]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_whose_guesses_are_wrong_is_left_out_beside_others(depth: int) -> None:
    """Whoever guesses: another request, all of whose guesses are right, has them in every step."""
    core = Core(make_limits(
        pages=400, depth=depth, drafts=DRAFTS, context_len=1024, step_tokens=64, padded_drafts=True
    ))  # fmt: skip
    rids, tokens = ("wrong", "right"), {"wrong": 100, "right": 500}
    for rid in rids:
        core.offer(make_submit(rid, list(range(20)), tokens[rid]), 0.0)
    flights, of, count = deque(), dict[int, str](), dict.fromkeys(rids, 0)
    tried, both = dict.fromkeys(rids, 0), 0
    while not core.idle:
        while (plan := core.plan(0.0)) is not None:
            flights.append(plan)
        plan = flights.popleft()
        of |= {new.slot: rids[len(of) + i] for i, new in enumerate(plan.new)}
        slots, flags = column(plan.slots).tolist(), np.frombuffer(plan.flags, np.uint8)
        most = column(plan.drafts).tolist() if plan.drafts else [-1] * len(slots)
        both += len(slots) == 2
        counts = []
        for slot, drafts, flag in zip(slots, most, flags):
            rid = of[slot]
            tried[rid] += drafts > 0 and len(slots) == 2
            if flag & SAMPLE:
                right = drafts if rid == "right" else 0
                counts.append(1 + max(0, min(right, tokens[rid] - count[rid] - 1)))
                count[rid] += counts[-1]
        guessed = [max(drafts, 0) for drafts, flag in zip(most, flags) if flag & SAMPLE]
        told = {"counts": int32(counts), "guessed": int32(guessed)} if plan.drafts else {}
        core.retire(StepResult(step=plan.step, tokens=int32(range(sum(counts))), **told), 0.0)
    assert both > 60
    assert tried["right"] > 0.9 * both
    assert 2 <= tried["wrong"] <= 8
