"""Random scenarios: whatever happens around it, a request produces the text it produces alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
from examples import examples
from msgspec.structs import replace
from simulation import Simulation, brief, of_any_kind, random_limits, random_submits

from sgla.sched import hurry, prefill
from sgla.sched.request import Request

SCENARIOS = 1_600  # four hundred in .ci/run, sixteen thousand in .ci/full
GUESSING = 1_000  # two hundred and fifty, ten thousand
HURRIED = 600  # a hundred and fifty, six thousand


def play(random: Random, stages: int = 1, guesses: bool = False, **changes: Any) -> Simulation:
    """A scenario: arrivals, ends of holds and copies, cancels and deadlines at random times while steps go
    on. ``guesses``: rows may guess, of which any share is right; ``changes``: of the limits."""
    forced, acceptance, second = random.choice((0, 0, 2, 9)), random.choice((0.0, 0.5, 0.9, 1.0)), 0.0
    limits = random_limits(random, hidden=2, **changes)
    if guesses:
        acceptance, limits = random.random(), replace(limits, drafts=random.choice((1, 2, 3, 8)))
        second = random.choice((0.0, 0.6))
    if stages > 1:
        forced, depth = 0, random.randint(1, stages + 1)
        drafts, second = (limits.drafts if guesses else 0), 0.0
        limits = replace(
            limits, stages=stages, depth=depth, brief_depth=0, drafts=drafts, padded_drafts=False
        )
    simulation = Simulation(
        limits, brief if limits.brief_depth else None, forced=forced, acceptance=acceptance, second=second
    )
    pending = [of_any_kind(random, submit) for submit in random_submits(random, random.randint(2, 9))[::-1]]
    bound = 400 + 80 * len(pending)
    for _ in range(bound):
        while pending and pending[-1].arrival <= simulation.now:
            submit = pending.pop()
            if len(submit.tokens) <= min(simulation.limits.context_len - 1, simulation.limits.pool_tokens):
                simulation.offer(submit)
        if random.random() < 0.2:
            simulation.end_a_hold(random)
        if random.random() < 0.2:
            simulation.end_a_copy(random, failures=0.3)
        if simulation.submits and random.random() < 0.03:
            rid = random.choice(list(simulation.submits))
            simulation.cancel(rid, random.choice(("client", "stop")))
        if random.random() < 0.02:
            simulation.core.flush_cache()
        if simulation.limits.tiers and random.random() < 0.1:
            simulation.evict()
        if random.random() < 0.3:
            simulation.submit_plans()
        simulation.step(broken=random.random() if random.random() < 0.01 else None)
        if simulation.core.idle and not pending:
            return simulation
    raise AssertionError(f"not done after {bound} steps")


def verify_logprobs(simulation: Simulation) -> None:
    """One entry a token; prompt entries come once, with the first output or at the end."""
    for rid, submit in simulation.submits.items():
        deltas = simulation.deltas[rid]
        for delta in deltas:
            if delta.tokens and submit.sampling.logprobs >= 0:
                assert delta.logprobs is not None
                assert [entry.token for entry in delta.logprobs] == delta.tokens
                assert all(len(entry.top) == submit.sampling.logprobs for entry in delta.logprobs)
            else:
                assert delta.logprobs is None
        prompts = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
        if submit.sampling.prompt_logprobs >= 0 and (rid not in simulation.cut or simulation.tokens(rid)):
            assert len(prompts) == 1
            assert prompts[0] is not None
            first = min(max(1, submit.sampling.logprob_start), len(submit.tokens))
            assert prompts[0][:first] == [None] * first
            assert [entry.token for entry in prompts[0][first:] if entry] == submit.tokens[first:]
        else:
            assert len(prompts) <= (submit.sampling.prompt_logprobs >= 0)


@pytest.mark.parametrize(("stages", "count"), [(1, GUESSING), (2, GUESSING // 4), (3, GUESSING // 4)])
def test_guesses_change_no_text(stages: int, count: int) -> None:
    """Pages are conserved, and no grammar is left."""
    guessed = right = 0
    for simulation in scenarios(count, stages, guesses=True):
        stats = simulation.core.stats()
        guessed, right = guessed + stats.draft_tokens, right + sum(stats.right_at)
    assert guessed > (2 if stages < 3 else 1) * examples(count)
    assert 0.2 * guessed < right < 0.8 * guessed


@pytest.mark.parametrize(("stages", "count"), [(1, SCENARIOS), (2, SCENARIOS // 8), (3, SCENARIOS // 8)])
def test_text_is_the_same_as_alone(stages: int, count: int) -> None:
    for _ in scenarios(count, stages):
        pass


def test_text_is_the_same_where_short_prompts_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all end, though short ones that have no place meet long ones that are read."""
    monkeypatch.setattr(hurry, "LONG", 12)
    for module in (hurry, prefill):
        monkeypatch.setattr(module, "SHORT", 6)
    monkeypatch.setattr(hurry.Hurry, "_often", lambda *_: True)
    begin, hurried = hurry.Hurry.begin, 0

    def counted(self: hurry.Hurry, waiting: Sequence[Request], now: float) -> None:
        nonlocal hurried
        begin(self, waiting, now)
        hurried += self.on

    monkeypatch.setattr(hurry.Hurry, "begin", counted)
    for _ in scenarios(HURRIED, itl_target=2.0):
        pass
    assert hurried > 10 * examples(HURRIED)


def scenarios(count: int, stages: int = 1, guesses: bool = False, **changes: Any) -> Iterator[Simulation]:
    """That have been played, and looked at."""
    for seed in range(examples(count)):
        try:
            simulation = play(Random(seed), stages, guesses, **changes)
            for rid in simulation.submits:
                last = simulation.deltas[rid][-1] if simulation.deltas[rid] else None
                if last is not None and last.finish == "stop" and not last.tokens and last.vector is None:
                    # A cancel for a stop string cuts like any other.
                    last.finish = "abort"
            simulation.verify()
            verify_logprobs(simulation)
        except AssertionError as error:
            raise AssertionError(f"scenario {seed}: {error}") from error
        yield simulation
