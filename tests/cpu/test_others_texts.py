"""Guesses from what other requests were answered: the text is the same in fewer steps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tiny import VOCAB, make_core, run, submit, tiny_config, tiny_source

from sgla.messages import Submit
from sgla.worker import others
from sgla.worker.cpu import CpuRunner
from sgla.worker.others import Outputs


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def asked(rid: str, namespace: str = "") -> Submit:
    rng = random.Random(8)
    prompt = [rng.randrange(VOCAB) for _ in range(12)]
    return replace(submit(rid, prompt, 70, temperature=0.8, seed=5), namespace=namespace)


def test_a_second_answer_like_the_first_takes_fewer_steps() -> None:
    plain = CpuRunner(tiny_config(), tiny_source(), 0, 1, "", lambda progress: None)
    expected = run(plain, [asked("a")], depth=1).tokens()["a"]
    settings = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 8}
    config = tiny_config(**settings, speculative_adaptive=False)
    runner = CpuRunner(config, tiny_source(), 0, 1, "", lambda progress: None)
    core = make_core(runner.facts, drafts=8, depth=1)
    right = [0]
    for one in (asked("first"), asked("apart", "salt"), asked("second"), asked("apart too", "salt")):
        found = run(runner, [one], core)
        assert found.tokens()[one.rid] == expected
        right.append(sum(core.stats().right_at))
    first, apart, second, apart_too = np.diff(right).tolist()
    assert apart == apart_too == first
    assert second > first + 40


def test_what_comes_behind_a_run() -> None:
    found = Outputs(2)
    found.add(0, [*range(100, 110)])
    assert not len(found.behind(1, ids(100, 101, 102, 103), 3))  # not before there is a part of it
    found.admit(0, False)
    assert found.behind(1, ids(5, 100, 101, 102, 103), 3).tolist() == [104, 105, 106]
    assert found.behind(1, ids(105, 106, 107, 108), 3).tolist() == [109]
    found.add(1, [100, 101, 102, 103, 7])
    found.admit(1, True)
    assert found.behind(0, ids(100, 101, 102, 103), 3).tolist() == [7]  # the latest
    assert not len(found.behind(1, ids(100, 101, 102, 103), 3))


def test_room_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "ROOM", 300)
    found, rng, seen, right = Outputs(3), random.Random(1), set[tuple[int, ...]](), 0
    texts: list[list[int]] = [[], [], []]
    for _ in range(600):
        slot = rng.randrange(3)
        if rng.random() < 0.1:
            found.admit(slot, False)
            texts[slot] = []
        some = [rng.randrange(6) for _ in range(rng.randrange(1, 9))]
        texts[slot] += some
        found.add(slot, some)
        whole = texts[slot]
        seen |= {tuple(whole[i : i + others.RUN + 1]) for i in range(len(whole) - others.RUN)}
        before = rng.choices(range(6), k=others.RUN)
        behind = found.behind(2, ids(*before), 3).tolist()
        assert not behind or (*before, behind[0]) in seen
        right += bool(behind)
    assert right > 50
    assert found.tokens[300:].max() == others.NONE


def test_runs_have_numbers() -> None:
    """The same ones alone and together, which few others have."""
    runs = np.random.default_rng(0).integers(0, 200_000, (20_000, others.RUN)).astype(np.int32)
    numbers = others.numbers_of(runs)
    assert numbers.tolist() == [others.number_of(run) for run in runs.tolist()]
    assert len(set(numbers.tolist())) > 18_000
