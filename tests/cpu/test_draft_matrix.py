"""What else a request may ask for, beside each drafter: the text, the logprobs and the end are those without
guesses, and a grammar is never left."""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec
import pytest
from test_draft_heads import DEEP, EAGLE, source_of
from tiny import VOCAB, Transcript, check_draws, make_core, run, submit, tiny_config

from sgla.grammar.protocol import Vocabulary
from sgla.grammar.source import source_of as grammar_source
from sgla.messages import Control, Grammar, Submit, ThinkLimit
from sgla.worker.cpu import CpuRunner

END = VOCAB - 1
LETTERS = Vocabulary([bytes([i]) for i in range(256)] + [b""] * (END - 256) + [b"</s>"], [END], [END])
PATTERN = "[ab]{3}(xyzw){2}[c-e]+f"
REGEX = grammar_source(Grammar(kind="regex", text=PATTERN), {"</s>": END})
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "ngram": None,
    "draft_model": DEEP | {"num_hidden_layers": 3},
    "eagle3": EAGLE,
}


def runner_of(algorithm: str | None, folder: Any) -> CpuRunner:
    settings = {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": 4} if algorithm else {}
    source = source_of(DEEP, DRAFTERS[algorithm] if algorithm else None)
    runner = CpuRunner(
        tiny_config(native_kernels=True, speculative_adaptive=False, **settings),
        source,
        0,
        1,
        "",
        lambda progress: None,
    )
    (folder / "vocabulary").write_bytes(msgspec.msgpack.encode(LETTERS))
    runner.control(Control(verb="vocabulary", args={"path": str(folder / "vocabulary")}))
    return runner


def requests() -> list[Submit]:
    rng = random.Random(5)
    stem = [rng.randrange(256) for _ in range(5)]
    guided = {"grammar": REGEX, "stop_ids": [END], "seed": 6}
    think = ThinkLimit(open=7, close=8, tokens=6, opened=True)
    return [
        submit("guided", stem * 3, 30, temperature=1.0, **guided),
        submit("greedy", [*stem, 3], 30, **guided),
        submit("told", stem * 2, 20, temperature=0.8, logprobs=2, **guided),
        submit("late", stem * 2, 20, temperature=0.8, min_tokens=15, **guided),
        submit("thinks", stem * 3, 18, thinking=think),
        submit("biased", stem * 3, 15, logit_bias=[(9, 4.0), (11, 4.0)], presence=0.2, repetition=1.1),
        submit("words", stem * 3, 15, bad_words=[[9], [stem[0], stem[1]]], temperature=0.5, seed=1),
        submit("one of two", stem * 4, 12, temperature=0.9, seed=21),
        submit("two of two", stem * 4, 12, temperature=0.9, seed=22),
    ]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Transcript:
    runner = runner_of(None, tmp_path_factory.mktemp("plain"))
    check_draws(runner)
    found = Transcript()
    for request in requests():
        found |= run(runner, [request], depth=1, prefix_cache=False)
    return found


@pytest.mark.parametrize("algorithm", DRAFTERS)
def test_everything_is_the_same(algorithm: str, expected: Transcript, tmp_path: Any) -> None:
    runner = runner_of(algorithm, tmp_path)
    for depth in (1, 3):
        core = make_core(runner.facts, drafts=4, depth=depth, guided_drafts=runner.facts.guided_drafts)
        got = run(runner, requests(), core)
        assert got.tokens() == expected.tokens()
        assert got.finish() == expected.finish()
        for rid in ("guided", "greedy", "told"):
            text = bytes(token for token in got.tokens()[rid] if token != END).decode()
            assert re.fullmatch(PATTERN, text) or got.finish()[rid] == "length"
        ranks = [[entry.rank for entry in entries(found, "told")] for found in (got, expected)]
        assert ranks[0] == ranks[1]
        guided = [delta for rid in ("guided", "greedy") for delta in got[rid]]
        assert max(delta.right for delta in guided) >= 3  # that of x, y and z at least


def entries(transcript: Transcript, rid: str) -> list[Any]:
    return [entry for delta in transcript[rid] for entry in delta.logprobs or []]
