"""Grammars of a worker that samples as a GPU does, a step ahead of the host, against the CPU's worker with
the same weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_engine import FORBIDDEN, FORCED, MIXED, check_ends_alone, outputs, params

pytest.importorskip("triton")
from sgla import Engine
from sgla.device import PLATFORMS, Platform
from sgla.messages import Grammar


@pytest.fixture(scope="module")
def ahead(folder: Path) -> Iterator[Engine]:
    """Its memory is small: requests are preempted. Its worker has the environment that it has beside a
    GPU."""
    patch = pytest.MonkeyPatch()
    patch.delenv("TRITON_INTERPRET", raising=False)
    patch.setitem(PLATFORMS, "cpu", Platform("device_like:DeviceLike"))
    patch.syspath_prepend(str(Path(__file__).parent))
    engine = Engine(
        str(folder),
        device="cpu",
        load_format="dummy",
        dtype="float32",
        kv_cache_bytes=24 << 10,
        context_length=128,
        max_running_requests=32,
        threads=1,
        random_seed=3,
        depth=3,
    )
    engine.generate("x", params(engine, None, max_tokens=1))
    patch.undo()
    yield engine
    engine.shutdown()


def both(ahead: Engine, engine: Engine, grammars: list[Any], **changes: Any) -> None:
    made = [
        [
            (out.tokens, out.finish, out.logprobs)
            for out in outputs(each, grammars, temperature=0.0, **changes)
        ]
        for each in (ahead, engine)
    ]
    assert made[0] == made[1]


@pytest.mark.native
def test_outputs_are_those_of_the_cpu(ahead: Engine, engine: Engine) -> None:
    both(ahead, engine, [*MIXED[::2], None], max_tokens=40, min_tokens=5)


@pytest.mark.parametrize("changes", FORBIDDEN, ids=str)
def test_a_request_that_forbids_all_that_its_grammar_leaves_ends_alone(
    ahead: Engine, changes: dict[str, Any]
) -> None:
    check_ends_alone(ahead, changes)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_of_a_grammar_comes_before_the_least_number_of_tokens(
    ahead: Engine, temperature: float
) -> None:
    grammar = Grammar(kind="regex", text="ab")
    out = ahead.generate("x", params(ahead, grammar, min_tokens=6, max_tokens=20, temperature=temperature))
    assert (out.text, out.finish, len(out.tokens)) == ("ab", "stop", 7)


@pytest.mark.native
def test_preempted_outputs_go_on_where_they_were(ahead: Engine, engine: Engine) -> None:
    before = ahead.stats().preemptions
    both(ahead, engine, [Grammar(kind="regex", text="[ab]{60}")] * 5, max_tokens=60)
    assert ahead.stats().preemptions > before


@pytest.mark.native
def test_forced_tokens_come_at_once(ahead: Engine, engine: Engine) -> None:
    before = ahead.stats()
    both(ahead, engine, [FORCED], max_tokens=80)
    after = ahead.stats()
    assert after.forced_tokens > before.forced_tokens
    tokens = len(outputs(engine, [FORCED], temperature=0.0, max_tokens=80)[0].tokens)
    assert after.steps - before.steps < 0.8 * tokens


def test_logprobs_with_grammars(ahead: Engine, engine: Engine) -> None:
    wish: dict[str, Any] = {"logprobs": 2, "logprob_token_ids": [9, 5], "temperature": 0.0, "max_tokens": 12}
    asked = [params(each, FORCED, **wish) for each in (ahead, engine)]
    made = [each.generate("x", sampling) for each, sampling in zip((ahead, engine), asked)]
    assert made[0].tokens == made[1].tokens
    for got, expected in zip(*(out.logprobs for out in made)):
        assert (got.token, got.rank) == (expected.token, expected.rank)
        assert dict(got.top) == pytest.approx(dict(expected.top), abs=1e-5)
        assert dict(got.asked) == pytest.approx(dict(expected.asked), abs=1e-5)
        assert [token for token, _ in got.asked] == [9, 5]


def test_draws_fit_too(ahead: Engine) -> None:
    made = outputs(
        ahead, [FORCED, None, *[Grammar(kind="regex", text="[a-c]{3}-[0-9]{2}")] * 4], max_tokens=80
    )
    assert json.loads(made[0].text)
    assert made[1].finish == "length" or made[1].finish == "stop"
    assert all(re.fullmatch("[a-c]{3}-[0-9]{2}", out.text) for out in made[2:])
    assert len({out.text for out in made[2:]}) > 1
