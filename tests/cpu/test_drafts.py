"""Rows that guess their next tokens bring the same text, logprobs and ends as rows that do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from config_cases import gemma3
from tiny import VOCAB, Transcript, check_draws, make_core, run, submit, tiny_config, tiny_source

from sgla.messages import StepPlan, Submit
from sgla.worker.cpu import CpuRunner
from sgla.worker.ngrams import NGrams


def make_runner(**changes: Any) -> CpuRunner:
    return CpuRunner(tiny_config(**changes), tiny_source(), 0, 1, "", lambda progress: None)


@pytest.fixture(scope="module", params=["torch", "native"])
def runner(request: pytest.FixtureRequest) -> CpuRunner:
    runner = make_runner(native_kernels=request.param == "native")
    if request.param == "native" and "torch" in runner.facts.notes[0]:
        pytest.skip(runner.facts.notes[0])
    return runner


def make_requests() -> list[Submit]:
    """Prompts that repeat themselves, so that there is much to guess; a random model repeats itself when it
    is greedy."""
    rng = random.Random(4)
    stem = [rng.randrange(VOCAB) for _ in range(7)]
    return [
        submit("greedy", stem * 4, 60),
        submit("cold", stem * 3 + [5], 50, temperature=0.02, seed=2),
        submit("warm", stem * 2 + [9], 40, temperature=0.7, seed=3),
        submit("ruled", stem * 3 + [3], 40, repetition=1.01, frequency=0.01, min_tokens=12, stop_ids=[1, 2]),
        submit("once", stem * 3, 40, ngram=2),
        submit("logprobs", stem * 2, 40, logprobs=2),
        submit("prompt", stem * 3, 25, prompt_logprobs=1),
        submit("short", stem, 1),
        submit("two", stem * 2, 2),
    ]


@pytest.fixture(scope="module")
def alone() -> Transcript:
    runner = make_runner()
    check_draws(runner)
    found = Transcript()
    for request in make_requests():
        found |= run(runner, [request], depth=1, prefix_cache=False)
    return found


@pytest.mark.parametrize(
    "limits",
    [
        {"drafts": 1, "depth": 1},
        {"drafts": 4},
        {"drafts": 4, "padded_drafts": True},
        {"drafts": 4, "padded_drafts": True, "step_tokens": 11, "depth": 3},
        {"drafts": 30, "depth": 3, "step_tokens": 40},
        {"drafts": 5, "pages": 12, "reserve": 0.0},
        # Of what was retracted a chunk leaves one token.
        {"drafts": 5, "pages": 12, "reserve": 0.0, "step_tokens": 16},
        {"drafts": 3, "pages": 14, "reserve": 0.0, "step_tokens": 24},
    ],
)
def test_text_is_the_same(runner: CpuRunner, alone: Transcript, limits: dict[str, Any]) -> None:
    core = make_core(runner.facts, **limits)
    for _ in range(2):  # the second time behind cached prefixes
        got = run(runner, make_requests(), core)
        assert got.tokens() == alone.tokens()
        assert got.finish() == alone.finish()
        for mine, theirs in zip(entries(got["logprobs"]), entries(alone["logprobs"]), strict=True):
            assert (mine.token, mine.rank) == (theirs.token, theirs.rank)
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    if "pages" in limits:
        assert core.stats().preemptions > 0


def test_runs_that_come_once_do_so(alone: Transcript) -> None:
    tokens = alone.tokens()
    runs = {rid: list(zip(tokens[rid], tokens[rid][1:])) for rid in ("once", "greedy")}
    assert len(set(runs["once"])) == len(runs["once"]) == 39
    assert len(set(runs["greedy"])) < 59


def entries(deltas: list[Any]) -> list[Any]:
    return [entry for delta in deltas for entry in delta.logprobs or []]


def test_guesses_that_are_right_save_steps(runner: CpuRunner) -> None:
    greedy = make_requests()[0]
    always = submit("always", [5, 6, 7], 60, allowed=[9])

    def steps(request: Submit, drafts: int) -> int:
        core = make_core(runner.facts, drafts=drafts, depth=1)
        run(runner, [request], core)
        return core.stats().steps

    assert steps(greedy, 8) < steps(greedy, 0)
    assert steps(always, 8) < 0.3 * steps(always, 0)


@pytest.mark.parametrize("wrong", [True, False])
def test_padding_for_guesses_that_are_wrong_becomes_rare(runner: CpuRunner, wrong: bool) -> None:
    core = make_core(runner.facts, drafts=8, depth=1, padded_drafts=True)
    rows: list[int] = []

    def plan(now: float, wanted: Callable[[float], StepPlan | None] = core.plan) -> StepPlan | None:
        if (made := wanted(now)) is not None:
            rows.extend(np.frombuffer(made.drafts, np.int32) if made.drafts else [-1])
        return made

    core.plan = plan  # type: ignore[method-assign]
    few = {} if wrong else {"allowed": [9]}
    run(runner, [submit("one", [5, 6, 7], 150, temperature=50.0, seed=1, **few)], core)
    assert (sum(most > 0 for most in rows) < 0.25 * len(rows)) == wrong
    assert (rows.count(-1) > 0.7 * len(rows)) == wrong  # as plain rows
    assert len(rows) > (120 if wrong else 10)


def test_guesses_are_counted(runner: CpuRunner) -> None:
    core = make_core(runner.facts, drafts=6, depth=2)
    found = run(runner, make_requests(), core)
    stats = core.stats()
    right = sum(stats.right_at)
    assert 0 < right < stats.draft_tokens
    assert 0 < stats.drafts < stats.verifies
    assert stats.verified_tokens == stats.verifies + right
    assert len(stats.right_at) <= 6
    assert stats.right_at == sorted(stats.right_at, reverse=True)
    assert sum(max(delta.guesses for delta in found[rid])[0] for rid in found.tokens()) == stats.verifies
    assert make_core(runner.facts).stats().verifies == 0


def test_a_request_may_end_in_the_middle_of_what_a_row_brings(runner: CpuRunner, alone: Transcript) -> None:
    tokens = alone.tokens()["greedy"]
    for at in (20, 33, 34, 35):
        first = tokens.index(tokens[at])
        stopping = submit("greedy", list(make_requests()[0].tokens), 60, stop_ids=[tokens[at]])
        got = run(runner, [stopping], drafts=8, depth=3)
        assert got.tokens()["greedy"] == tokens[: first + 1]
        assert got.finish()["greedy"] == "stop"


def test_windows_slide_behind_what_is_certain() -> None:
    source = tiny_source()
    source.config.clear()
    source.config.update(
        gemma3(vocab_size=VOCAB, num_hidden_layers=3, sliding_window=20, max_position_embeddings=512)
    )
    runner = CpuRunner(tiny_config(), source, 0, 1, "", lambda progress: None)
    check_draws(runner)
    expected = run(runner, make_requests(), depth=1).tokens()
    for depth in (1, 3):
        assert run(runner, make_requests(), drafts=8, depth=depth).tokens() == expected


def test_guesses_are_what_came_behind_the_same_tokens_the_last_time() -> None:
    def guess(tokens: list[int], most: int) -> list[int]:
        return NGrams.propose(np.array(tokens, np.int32), most).tolist()

    assert guess([1, 2, 3, 4, 9, 1, 2, 3, 4], 3) == [9, 1, 2]
    assert guess([7, 1, 2, 5, 8, 1, 2, 6, 3, 1, 2], 2) == [6, 3]  # the latest
    assert guess([4, 1, 2, 5, 3, 1, 2, 6, 4, 1, 2], 1) == [5]  # the longest goes before the latest
    assert guess([1, 2, 3], 4) == []
    assert guess([5], 4) == []
    assert guess([3, 3, 3, 3], 4) == [3, 3, 3, 3]
    assert guess([8, 1, 2, 3, 1, 2, 3], 5) == [1, 2, 3, 1, 2]
    assert guess([1, 2, 1, 2], 0) == []
