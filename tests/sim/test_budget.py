"""The cost model and the budget for prefill beside decode rows."""

from __future__ import annotations

import math
from random import Random

import pytest
from simulation import Simulation, make_limits, make_submit

from sgla.messages import LONGEST, StepCost
from sgla.sched.budget import Budget, CostModel, pairs
from sgla.sched.step import Step


def truth(tokens: int, work: int) -> float:
    return 0.004 + 3e-5 * tokens + 2e-9 * work


def test_model_recovers_the_costs_and_remembers_prefill_through_a_long_decode_phase() -> None:
    random = Random(0)
    model = CostModel(0.05, 8192)
    for _ in range(100):
        tokens, work = random.randint(100, 8000), random.randint(10**5, 10**8)
        model.observe(tokens, work, truth(tokens, work) * random.uniform(0.97, 1.03))
    for _ in range(5000):
        model.observe(16, 16 * 2000, truth(16, 16 * 2000) * random.uniform(0.97, 1.03))
    for tokens, work in ((16, 32000), (1000, 10**6), (4000, 10**8)):
        assert model.predict(tokens, work) == pytest.approx(truth(tokens, work), rel=0.1)


def test_coefficients_are_never_negative() -> None:
    random = Random(1)
    for _ in range(200):
        model = CostModel(0.05, 512)
        for _ in range(random.randint(0, 6)):
            model.observe(random.randint(1, 600), random.randint(1, 10**6), random.uniform(1e-4, 1.0))
        assert min(model.coefficients) >= 0
        assert max(model.coefficients) > 0


def test_grant_is_the_largest_chunk_that_keeps_the_time() -> None:
    random = Random(2)
    for _ in range(500):
        b, c = random.choice((0.0, 1e-5)), random.choice((1e-9, 1e-7))
        start, seconds = random.randrange(100_000), random.uniform(0.001, 0.1)
        count = Budget(8192, seconds, (0.0, b, c), 0).grant(start, 100_000)
        assert b * count + c * pairs(start, count) <= seconds * (1 + 1e-9)
        more = count + 1
        assert count == 8192 or b * more + c * pairs(start, more) > seconds * (1 - 1e-9)


def test_steps_that_are_to_last_so_long_beside_decode_rows_follow_what_such_took() -> None:
    random, model = Random(4), CostModel(0.03, 8192)
    for _ in range(200):
        tokens = random.choice((100, 250, 450, 8000))
        mixed = tokens == 450
        model.observe(tokens, tokens * 100, truth(tokens, tokens * 100) * (1.25 if mixed else 1.0), mixed)
    predicted = model.predict(450, 45_000)
    took = 1.25 * truth(450, 45_000)
    assert predicted < 0.9 * took
    assert model.beside(0, predicted) == predicted
    assert model.beside(4, took) == pytest.approx(predicted, rel=0.05)


def test_what_is_kept_for_others_is_in_the_last_tile() -> None:
    budget = Budget(8192, math.inf, (0.0, 0.0, 0.0), 0, tile=256)
    budget.keep(100)
    assert budget.whole_tiles(0, 300, others=False) == 156
    budget.spend(0, 156)
    budget.give_back(0)
    assert budget.whole_tiles(0, 100, others=False) == 100


def test_prefill_goes_on_even_when_decode_alone_misses_the_target() -> None:
    model = CostModel(0.001, 512)
    for _ in range(50):
        model.observe(64, 64 * 100, 0.01)
        model.observe(512, 512 * 100, 0.05)
    assert model.prefill_seconds(64, 6400) == pytest.approx(0.1 * model.predict(64, 6400))
    budget = Budget(448, model.prefill_seconds(64, 6400), model.coefficients, 16)
    assert budget.grant(0, 1000) >= 16
    budget.spend(0, 16)
    assert budget.grant(0, 1000) <= 32


def test_steps_with_prompts_beside_decode_rows_last_no_longer_than_the_target() -> None:
    """Where a few tokens behind a long history cost more each than whole steps of them, and times differ."""
    random, model, times = Random(3), CostModel(0.03, 8192), []

    def took(tokens: int, work: int) -> float:
        dear = 1 + 75 / max(tokens - 32, 75)
        return (0.0048 + 2e-5 * (tokens - 32) + 8e-10 * work * dear) * random.gauss(1, 0.03)

    for start in range(0, 98_000, 8192):
        work = pairs(start, 8192)
        model.observe(8192, work, took(8192, work))
    for _ in range(300):
        model.observe(32, 32 * 600, took(32, 32 * 600))
    start = 0
    while start < 100_000:
        budget = Budget(8192, model.prefill_seconds(32, 32 * 600), model.coefficients, 16)
        count = budget.grant(start, 100_000)
        work = pairs(start, count) + 32 * 600
        times.append(took(32 + count, work))
        model.observe(32 + count, work, times[-1], mixed=True)
        start += count
    times.sort()
    assert times[-len(times) // 100] < 1.03 * 0.03
    assert times[len(times) // 2] > 0.85 * 0.03


def test_without_target_or_decode_rows_only_tokens_count() -> None:
    assert CostModel(None, 512).prefill_seconds(10, 100) == math.inf
    assert CostModel(0.01, 512).prefill_seconds(0, 0) == math.inf
    budget = Budget(100, math.inf, (1.0, 1.0, 1.0), 4)
    assert budget.grant(0, 1000) == 100
    assert budget.grant(0, 7) == 7
    assert budget.grant(0, 1000, share=0.5) == 50


@pytest.mark.parametrize(
    ("used", "count", "whole"),
    [
        (64, 900, 704),
        (64, 100, 100),
        (300, 100, 100),
        (300, 300, 300),
        (255, 100, 100),
        (255, 258, 257),
        (0, 512, 512),
    ],
)
def test_a_cut_leaves_whole_tiles(used: int, count: int, whole: int) -> None:
    budget = Budget(1024, math.inf, (1.0, 1.0, 1.0), 4, used, 256)
    assert budget.whole_tiles(0, count, others=False) == whole
    room = 1024 - count >= 256 - (used + count) % 256
    assert budget.whole_tiles(0, count, others=True) == (count if room else whole)


def test_the_table_says_how_large_a_step_is() -> None:
    costs = [StepCost(tokens=40, prompts=2, longest=9, tile=4), StepCost(tokens=256, tile=8)]
    simulation = Simulation(make_limits(slots=8, pages=200, step_tokens=256, costs=costs))
    core = simulation.core

    def budget(decodes: int) -> tuple[int, float, int]:
        step = Step(1)
        step.set_decodes(core._queues.running[:1] * decodes, [0] * decodes, [0] * decodes)
        made = core._prefill.budget(step, yields=False)
        return made.tokens, made._rows, made._tile

    simulation.offer(make_submit("long", [1] * 30, 60))
    for _ in range(3):
        simulation.step()
    assert budget(0) == (256, LONGEST, 8)
    assert budget(1) == (40 - 1, 2, 4)
    assert budget(30) == (60 - 30, 2, 4)  # as many prompt tokens as decode rows
    simulation.offer(make_submit("prompt", [2] * 10, 2))  # longer than the first row of the table has them
    assert budget(1) == (256 - 1, LONGEST, 8)


def test_nothing_is_left_where_more_than_all_is_kept_for_others() -> None:
    budget = Budget(16_384, 0.03, (0.0, 2e-5, 1e-9), 16)
    budget.keep(16_000)
    assert budget.grant(0, 100) == 16
    budget.give_back(256)
    assert budget.grant(0, 16_000) > 1000


def test_nothing_is_learned_from_a_prediction_of_nothing() -> None:
    model = CostModel(None, 1024, asked=True)
    model.observe(64, 64, 0.01, mixed=True)
    assert model.predict(64, 64) > 0
