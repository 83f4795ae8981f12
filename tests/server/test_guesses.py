"""What a request may ask for, beside guesses: texts, tokens, logprobs and ends are those without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgla import Engine, SamplingParams
from sgla.messages import Grammar, Repetition, Thinking

PROMPT = "one two one two one two"  # repeats itself, so that there is something to guess
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeds": {"temperature": 0.8, "seed": 7},
    "cut": {"temperature": 1.0, "seed": 3, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "logprobs of a draw": {"logprobs": 1, "temperature": 0.7, "seed": 5, "logprob_token_ids": [3]},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {70: 3.0}, "bad_words": ["a"]},
    "some tokens": {"allowed_token_ids": [70, 71, 72], "temperature": 1.0, "seed": 2},
    "n": {"n": 3, "temperature": 0.9, "seed": 1},
    "regex": {"grammar": Grammar(kind="regex", text="[ab]{4}(cdef)+g"), "temperature": 1.0, "seed": 4},
    "schema": {"grammar": Grammar(kind="json_schema", text='{"type": "array", "items": {"const": "abab"}}')},
    "min_tokens": {"min_tokens": 12, "ignore_eos": False},
    "runs that come once": {"no_repeat_ngram_size": 2},
    "an end to loops": {"repetition_detection": Repetition(max_pattern_size=4, min_count=3)},
    "thinking": {"thinking": Thinking(open="", close="a", tokens=6)},
    "hidden states": {"hidden_states": True},
}


def sampling(**asked: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True} | asked)


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), dtype="float32", device="cpu", enable_return_hidden_states=True) as engine:
        yield engine


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def guessing(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    asked: dict[str, Any] = {"speculative_algorithm": request.param, "speculative_adaptive": False}
    if request.param == "draft_model":  # which is right where no rule is in the way
        asked["speculative_model"] = str(tiny_model)
    with Engine(
        str(tiny_model), dtype="float32", device="cpu", enable_return_hidden_states=True, **asked
    ) as engine:
        yield engine


def answers(engine: Engine, asked: list[SamplingParams]) -> list[Any]:
    """What each request is told, without floats that depend on the rows of a step."""
    found = []
    for output in engine.generate([PROMPT] * len(asked), asked):
        for choice in output if isinstance(output, list) else [output]:
            ranks = [
                [entry.rank for entry in found or () if entry]
                for found in (choice.logprobs, choice.prompt_logprobs)
            ]
            found.append((choice.text, list(choice.tokens), choice.finish, choice.matched, ranks))
    return found


def test_everything_is_the_same(plain: Engine, guessing: Engine) -> None:
    asked = [sampling(**each) for each in ASKED.values()]
    assert answers(guessing, asked) == answers(plain, asked)
    assert sum(guessing.stats().right_at) > 20


def test_stop_strings_end_in_the_middle_of_what_a_row_brings(plain: Engine, guessing: Engine) -> None:
    ((text, *_),) = answers(plain, [sampling()])
    stops = [text[at : at + size] for at in range(3, len(text) - 3, 4) for size in (1, 3)]
    kinds: list[dict[str, Any]] = [{}, {"include_stop_str_in_output": True}]
    asked = [sampling(stop=[stop], **kind) for stop in stops for kind in kinds]
    asked.append(sampling(stop_regex=["[a-f][g-z]"]))
    found = answers(guessing, asked)
    assert found == answers(plain, asked)
    assert {finish for _, _, finish, *_ in found} >= {"stop"}
