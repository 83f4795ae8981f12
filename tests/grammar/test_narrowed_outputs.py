"""Bad words, allowed tokens, limits of reasoning and logprobs of asked tokens through the whole engine."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sgla import Engine
from sgla.messages import Grammar, SamplingParams, Thinking

TAGS: dict[str, Any] = {"open": "<think>", "close": "</think>"}


def tag(engine: Engine, text: str) -> int:
    found = engine.tokenizer.backend.token_to_id(text)
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("opened", [True, False])
def test_reasoning_within_its_budget_then_what_the_grammar_wants(
    engine: Engine, budget: int, opened: bool
) -> None:
    likes = {tag(engine, text): -100.0 for text in ("</think>", "<|end|>")}
    likes |= {} if opened else {tag(engine, "<think>"): 100.0}
    params = SamplingParams(
        max_tokens=40,
        seed=budget,
        logit_bias=likes,
        skip_special_tokens=False,
        thinking=Thinking(tokens=budget, **TAGS),
        grammar=Grammar(kind="regex", text="[0-9]{3}", after=("</think>",), opener="<think>"),
    )
    out = engine.generate("a<think>\n" if opened else "a", params)
    assert out.finish == "stop"
    assert re.fullmatch(r"[0-9]{3}", out.text.partition("</think>")[2])
    assert opened or out.tokens[0] == tag(engine, "<think>")
    assert out.tokens.index(tag(engine, "</think>")) == budget + (not opened)


def test_bad_words_never_come_and_other_tokens_than_allowed_neither(engine: Engine) -> None:
    ids = [engine.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("a", "b", "c")]
    free = SamplingParams(max_tokens=60, seed=1, temperature=3.0, allowed_token_ids=ids)
    seen = engine.generate("x", free)
    assert set(seen.tokens) <= set(ids)
    assert re.search("ab", seen.text)
    words = SamplingParams(
        max_tokens=60, seed=1, temperature=3.0, allowed_token_ids=ids, bad_words=["ab", "cc"]
    )
    assert not re.search("ab|cc", engine.generate("x", words).text)


def test_logprobs_of_tokens_that_are_asked_for(engine: Engine) -> None:
    """They are those of the whole list of alternatives, in prompts and outputs."""
    size, asked = 300, [7, 300, 7]
    everything = SamplingParams(max_tokens=3, temperature=0.0, logprobs=size, prompt_logprobs=size)
    some = SamplingParams(
        max_tokens=3, temperature=0.0, logprobs=1, prompt_logprobs=0, logprob_token_ids=asked
    )
    whole, part = (engine.generate("some prompt", params) for params in (everything, some))
    for name, top in (("logprobs", 1), ("prompt_logprobs", 0)):
        checked = 0
        for expected, got in zip(getattr(whole, name), getattr(part, name)):
            if expected is None:
                assert got is None
                continue
            assert (got.token, list(got.top)) == (expected.token, list(expected.top[:top]))
            assert [token for token, _ in got.asked] == asked
            known = dict(expected.top)
            for token, value in got.asked:
                if token in known:
                    assert value == pytest.approx(known[token], abs=1e-5)
                    checked += 1
        assert checked > 2
