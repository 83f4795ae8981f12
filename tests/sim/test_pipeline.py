"""Steps that go through several stages of a pipeline, on a simulated clock."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from simulation import VOCAB, Simulation, make_limits, make_submit

from sgla.messages import StepPlan

HOST = 0.05  # from a step's end to the beginning of the next one in an idle stage


class Pipeline(Simulation):
    """Each stage computes the steps in order, one at a time, and begins one when the stage before has done
    it. A stage takes 1 for a step, and so much for ``each`` of its tokens."""

    def __init__(self, each: float, **limits: Any) -> None:
        super().__init__(make_limits(**limits))
        self.each = each
        self.free = [0.0] * limits["stages"]
        self.ends: dict[int, float] = {}

    def submit_plans(self) -> None:
        known = len(self.plans)
        super().submit_plans()
        for plan in self.plans[known:]:
            self.ends[plan.step] = self._through(plan)

    def _through(self, plan: StepPlan) -> float:
        tokens = sum(memoryview(plan.q_lens).cast("i"))
        there = self.now + HOST
        for stage, free in enumerate(self.free):
            there = self.free[stage] = max(there, free) + (1 + self.each * tokens) / len(self.free)
        return there

    def step(self, broken: float | None = None) -> bool:
        self.submit_plans()
        if self.flights:
            self.now = max(self.now, self.ends[self.flights[0].step])
        before = self.now
        done = super().step(broken)
        self.now = before
        return done


def rate(depth: int, each: float, stages: int = 2, count: int = 12) -> float:
    """Tokens a second of requests that read short prompts and write long texts."""
    limits = {"slots": count, "pages": 600, "step_tokens": 32, "itl_target": None}
    pipeline = Pipeline(each, stages=stages, depth=depth, **limits)
    random = Random(1)
    for i in range(count):
        pipeline.offer(make_submit(str(i), [random.randrange(VOCAB) for _ in range(6)], 60))
    pipeline.run()
    pipeline.verify()
    return sum(len(pipeline.tokens(rid)) for rid in pipeline.submits) / pipeline.now


@pytest.mark.parametrize("stages", [2, 3])
def test_all_stages_have_work(stages: int) -> None:
    """Where tokens take the time, so many stages give nearly so many times what one step at a time gives.
    Where reading weights takes it, for which a step with few rows needs as long, they lose nothing."""
    assert rate(stages + 1, each=10.0, stages=stages) > 0.88 * stages * rate(1, each=10.0, stages=stages)
    assert rate(stages + 1, each=0.0, stages=stages) > 0.95 * rate(1, each=0.0, stages=stages)


def test_one_request_is_in_one_stage_at_a_time() -> None:
    pipeline = Pipeline(1.0, stages=2, depth=3, step_tokens=8)
    pipeline.offer(make_submit("r", list(range(30)), 5))
    pipeline.submit_plans()
    assert [sum(memoryview(plan.q_lens).cast("i")) for plan in pipeline.plans] == [8, 8, 8]  # its prompt
    pipeline.run()
    pipeline.verify()
    decodes = [plan for plan in pipeline.plans if plan.tokens]
    assert len(decodes) == 4
    told = [token for plan in decodes for token in memoryview(plan.tokens).cast("i")]
    assert told == pipeline.tokens("r")[:-1]
