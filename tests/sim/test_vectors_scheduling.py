"""Requests for vectors: what the scheduler does with them, against the fake model."""

from __future__ import annotations

from random import Random

import pytest
from simulation import VOCAB, Simulation, make_limits, make_submit

from sgla.executor.fake import FakeModel
from sgla.messages import Facts, Pooling, RowSampling, Submit
from sgla.sched.limits import Limits


def wanting(rid: str, tokens: list[int], **changes: object) -> Submit:
    return make_submit(rid, tokens, 0, sampling=RowSampling(pool=[]), **changes)


class Vectors(Simulation):
    """The model answers with vectors; ``encoder`` as in the limits."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        facts = Facts(
            groups=limits.groups,
            page_size=limits.page_size,
            slots=limits.slots,
            context_len=limits.context_len,
            vocab_size=VOCAB,
            step_tokens=limits.step_tokens,
            dtype="none",
            device="fake",
            pooling=Pooling(task="embed", kind="mean", size=4, encoder=limits.encoder),
        )
        self.model = FakeModel(facts)

    def verify_vectors(self) -> None:
        """Each request that was not cut short has the vector of its own prompt, once."""
        for rid, submit in self.submits.items():
            if rid not in self.cut:
                (delta,) = self.deltas[rid]
                assert (delta.finish, delta.tokens) == ("stop", [])
                assert delta.vector == self.model.vector(submit.tokens), rid
        self.assert_released()


@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_every_prompt_gets_its_own_vector(encoder: bool, seed: int) -> None:
    random = Random(seed)
    changes = {"encoder": True, "pages": 1, "prefix_cache": False} if encoder else {}
    simulation = Vectors(
        make_limits(
            slots=random.randint(1, 5),
            context_len=24,
            step_tokens=random.choice((1, 8, 24, 40)) if encoder else random.choice((3, 16)),
            depth=random.randint(1, 3),
            policy=random.choice(("fcfs", "lpm", "priority")),
            **changes,
        )
    )
    stem = [random.randrange(VOCAB) for _ in range(20)]
    for i in range(25):
        tokens = stem[: random.randint(1, 20)] + [random.randrange(3) for _ in range(random.randint(0, 4))]
        deadline = simulation.now + random.uniform(0, 4) if random.random() < 0.1 else None
        simulation.offer(wanting(f"r{i}", tokens, deadline=deadline, priority=random.randint(0, 2)))
        if random.random() < 0.4:
            simulation.step()
        if random.random() < 0.2:
            simulation.cancel(f"r{random.randint(0, i)}")
    simulation.run()
    simulation.verify_vectors()
    if encoder:
        assert not any(any(plan.page_ids) for plan in simulation.plans)


def test_vectors_and_text_share_steps() -> None:
    """Of a model that generates: rows for scores of labels beside rows for tokens."""
    simulation = Simulation(make_limits(slots=6, step_tokens=24))
    prompts = [[1, 2, 3, i, i + 1] for i in range(6)]
    for i, prompt in enumerate(prompts):
        simulation.offer(wanting(f"v{i}", prompt) if i % 2 else make_submit(f"t{i}", prompt, 5))
    simulation.run()
    for i, prompt in enumerate(prompts):
        if i % 2:
            (delta,) = simulation.deltas[f"v{i}"]
            assert delta.vector == simulation.model.vector(prompt)
        else:
            assert (simulation.tokens(f"t{i}"), simulation.finish(f"t{i}")) == simulation.alone(f"t{i}")
    simulation.assert_released()
