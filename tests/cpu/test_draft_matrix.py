"""What else a request may ask for, beside each drafter: the text, the logprobs and the end are those without
guesses, and a grammar is never left."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from adapters import invent
from config_cases import decoder
from test_draft_heads import DEEP, DFLASH, EAGLE, HYBRID, LATENT, SIZES, WINDOWS, source_of
from test_draft_models import requests as texts
from tiny import LLAMA, VOCAB, Transcript, check_draws, make_core, run, submit, tiny_config

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
    "mtp": None,
    "eagle": LLAMA | {"num_hidden_layers": 1},
    "eagle3": EAGLE,
    "medusa": {"medusa_num_heads": 3, "medusa_num_layers": 1},
    "dflash": DFLASH | {"block_size": 6},
}


def runner_of(algorithm: str, folder: Any, guesses: bool = True) -> CpuRunner:
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
    if guesses:
        settings |= {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": 4}
    target = LATENT if algorithm == "mtp" else DEEP
    runner = CpuRunner(
        tiny_config(native_kernels=True, speculative_adaptive=False, **settings),
        source_of(target, DRAFTERS[algorithm] if guesses else None),
        0,
        1,
        "",
        lambda progress: None,
    )
    (folder / "vocabulary").write_bytes(msgspec.msgpack.encode(LETTERS))
    runner.control(Control(verb="vocabulary", args={"path": str(folder / "vocabulary")}))
    for number in (1, 2):
        invent(runner, number, rank=2 * number)
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
        with_adapter(submit("adapted", stem * 3, 15), 1),
        with_adapter(submit("adapted and guided", stem * 3, 20, temperature=0.7, **guided), 2),
    ]


def with_adapter(asked: Submit, number: int) -> Submit:
    return msgspec.structs.replace(asked, adapter=number, namespace=str(number))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Transcript]:
    """What the target of a drafter answers without it."""

    @cache
    def answered(target: str) -> Transcript:
        runner = runner_of(target, tmp_path_factory.mktemp("plain"), guesses=False)
        check_draws(runner)
        found = Transcript()
        for request in requests():
            found |= run(runner, [request], depth=1, prefix_cache=False, adapters=2)
        assert (
            found.tokens()["adapted"]
            != run(runner, [submit("base", requests()[-2].tokens, 15)]).tokens()["base"]
        )
        return found

    return lambda algorithm: answered("mtp" if algorithm == "mtp" else "ngram")


@pytest.mark.parametrize("algorithm", DRAFTERS)
def test_everything_is_the_same(algorithm: str, plain: Callable[[str], Transcript], tmp_path: Any) -> None:
    runner, expected = runner_of(algorithm, tmp_path), plain(algorithm)
    for depth in (1, 3):
        guided_drafts = runner.facts.guided_drafts
        core = make_core(runner.facts, drafts=4, depth=depth, guided_drafts=guided_drafts, adapters=2)
        got = run(runner, requests(), core)
        assert got.tokens() == expected.tokens()
        assert got.finish() == expected.finish()
        for rid in ("guided", "greedy", "told"):
            text = bytes(token for token in got.tokens()[rid] if token != END).decode()
            assert re.fullmatch(PATTERN, text) or got.finish()[rid] == "length"
        ranks = [[entry.rank for entry in entries(found, "told")] for found in (got, expected)]
        assert ranks[0] == ranks[1]
        guided = [delta for rid in ("guided", "greedy") for delta in got[rid]]
        assert max(delta.guesses[2] for delta in guided) >= 3  # that of x, y and z at least


def entries(transcript: Transcript, rid: str) -> list[Any]:
    return [entry for delta in transcript[rid] for entry in delta.logprobs or []]


EXPERTS = {
    "rms_norm_eps": 1e-5,
    "head_dim": 8,
    "rope_theta": 10000,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "attention_bias": False,
    "use_qk_norm": True,
    "tie_word_embeddings": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "grouped": DEEP,
    "latent": LATENT,
    "windows": WINDOWS,
    "hybrid": HYBRID,
    "mixture": decoder("Glm4MoeForCausalLM", "glm4_moe", **EXPERTS, **SIZES, num_nextn_predict_layers=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ["ngram", "draft_model", "mtp", "eagle", "eagle3", "medusa", "dflash"])
def test_every_drafter_on_every_kind_of_layers(kind: str, algorithm: str) -> None:
    target = KINDS[kind]
    if algorithm == "mtp" and kind not in ("latent", "hybrid", "mixture"):
        pytest.skip("the family has no layer that guesses")
    width = {"hidden_size": target["hidden_size"]}
    eagle = LLAMA | width | {"num_hidden_layers": 1}
    table = {"target_layer_ids": [0], "mask_token_id": 7}
    drafts: dict[str, dict[str, Any]] = {
        "draft_model": LLAMA,
        "eagle": eagle,
        "eagle3": EAGLE | width,
        "medusa": {"medusa_num_heads": 3},
        "dflash": DFLASH | width | {"num_target_layers": target["num_hidden_layers"], "dflash_config": table},
    }
    draft = drafts.get(algorithm)
    made: list[CpuRunner] = []
    for name, source in ((None, source_of(target, None)), (algorithm, source_of(target, draft))):
        settings = {"speculative_algorithm": name, "speculative_num_draft_tokens": 3} if name else {}
        config = tiny_config(native_kernels=True, speculative_adaptive=False, **settings)
        made.append(CpuRunner(config, source, 0, 1, "", lambda progress: None))
    plain, runner = made
    check_draws(plain)
    asked = [*texts(), submit("loops", [5, 6, 7] * 4, 20, allowed=[9, 11])]
    expected = run(plain, asked, depth=1, prefix_cache=False)
    for depth in (1, 2, 3):
        for pages in (0, 5):
            core = make_core(runner.facts, drafts=3, depth=depth, pages=pages, reserve=0.0)
            for _ in range(2):  # the second time behind cached prefixes
                got = run(runner, asked, core)
                assert got.tokens() == expected.tokens()
                assert got.finish() == expected.finish()
            assert core.stats().draft_tokens > 20
            assert core.stats().preemptions > 0 or not pages
