"""Rows that guess bring the text of rows that do not, on a GPU: with graphs and without, many steps in
flight, beside prompts."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from test_gpu_runner import TINY, make
from test_gpu_states import MODEL as STATES
from test_gpu_windows import MODEL as WINDOWS
from test_gpu_windows import answers, run
from tiny import make_core, submit

from sgla.grammar.protocol import Vocabulary
from sgla.grammar.source import source_of
from sgla.messages import Control, Grammar, Submit, TokenLogprob
from sgla.worker.medusa_chains import MedusaChains

NEAR = 0.1  # nats between logprobs that rounding to bfloat16 may swap; a token at random costs more than 1
GUESSING: dict[str, Any] = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 8}
BY_MODEL = GUESSING | {"speculative_algorithm": "draft_model", "speculative_adaptive": False}
EAGLE = {
    key: value
    for key, value in TINY.items()
    if key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
} | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "vocab_size": 5000,
    "draft_vocab_size": 3000,
    "max_position_embeddings": 1024,
}
MEDUSA = {"medusa_num_heads": 5, "medusa_num_layers": 1}
BLOCKS = TINY | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "block_size": 9,
    "dflash_config": {"target_layer_ids": [0], "mask_token_id": 7},
}
BY_HEAD = BY_MODEL | {"speculative_algorithm": "eagle3", "draft": EAGLE}
# Heads beside a model whose steps of one row are one kernel, which has to keep what they read.
FOUR = TINY | {"num_hidden_layers": 4}
BY_LAYERS = {
    "speculative_algorithm": "eagle3",
    "draft": EAGLE | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
}
BY_LAST = {"speculative_algorithm": "medusa", "draft": MEDUSA}
ROUNDED = {"speculative_head_quantization": "int4"}
# Model, settings, those of who guesses. One that guesses for itself is right where no rule is in the way.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "float32": (TINY, {"dtype": "float32"}, GUESSING),
    "the same bits": (TINY, {"deterministic": True}, GUESSING),
    "windows": (WINDOWS, {"dtype": "float32"}, GUESSING),
    "windows, the same bits": (WINDOWS, {"deterministic": True}, GUESSING),
    "a model": (TINY, {"dtype": "float32"}, BY_MODEL | {"draft": TINY}),
    "a model, the same bits": (TINY, {"deterministic": True}, BY_MODEL | {"draft": TINY}),
    "a model, windows": (WINDOWS, {"dtype": "float32"}, BY_MODEL | {"draft": TINY}),
    "a head": (TINY, {"dtype": "float32"}, BY_HEAD),
    "a head of 4 bits": (TINY, {"dtype": "float32"}, BY_HEAD | ROUNDED),
    "a head of 4 bits, the same bits": (TINY, {"deterministic": True}, BY_HEAD | ROUNDED),
    "blocks": (TINY, {"dtype": "float32"}, BY_MODEL | {"speculative_algorithm": "dflash", "draft": BLOCKS}),
    "medusa": (TINY, {"dtype": "float32"}, BY_MODEL | {"speculative_algorithm": "medusa", "draft": MEDUSA}),
    "states": (STATES, {"dtype": "float32"}, GUESSING),
    "states, their own layer": (STATES, {"dtype": "float32"}, BY_MODEL | {"speculative_algorithm": "mtp"}),
}


def requests(**more: Any) -> list[Submit]:
    """Prompts that repeat themselves, and outputs that have little choice, so that there is much to guess."""
    rng = random.Random(4)
    stem = [rng.randrange(5000) for _ in range(40)]
    few = [rng.randrange(5000) for _ in range(3)]
    return [
        submit("greedy", stem * 4, 60, **more),
        submit("always", stem[:5], 90, allowed=few[:1]),
        submit("drawn", stem * 3, 80, allowed=few, temperature=1.0, seed=2, **more),
        submit("warm", stem * 2 + few, 40, temperature=0.7, seed=3),
        submit("cut", stem + few, 40, allowed=few, temperature=1.0, seed=5, top_k=2, top_p=0.9),
        submit(
            "ruled",
            stem * 3,
            40,
            allowed=[*few, *stem],
            repetition=1.1,
            frequency=0.5,
            min_tokens=9,
            stop_ids=few,
        ),
        submit("stops", stem, 50, allowed=few, temperature=1.0, seed=8, stop_ids=few[2:]),
        submit("once", stem * 3, 40, ngram=2),
        submit("logprobs", stem * 2, 40, allowed=few, logprobs=2),
        submit("prompt", stem * 3, 25, prompt_logprobs=1),
        submit("one", stem, 1),
        submit("two", stem * 2, 2, allowed=few[:1]),
    ]


@pytest.fixture(scope="module", params=list(CASES))
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    model, settings, guessing = CASES[request.param]
    yield make(model, **settings), make(model, **settings | guessing)
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "limits",
    [
        {"depth": 1},
        {"depth": 3},
        {"drafts": 2},
        {"step_tokens": 60},
        {"pages": 30, "reserve": 0.0, "depth": 3},
    ],
)
def test_text_is_the_same(both: tuple[Any, Any], limits: dict[str, Any]) -> None:
    """The second time behind cached prefixes."""
    plain, guessing = both
    limits = limits if len(plain.facts.groups) == 1 else limits | {"pages": 0}
    heads = MEDUSA["medusa_num_heads"] if isinstance(guessing.chains, MedusaChains) else 8
    assert guessing.facts.drafts == heads
    expected = run(plain, requests(), make_core(plain.facts, depth=1))
    core = make_core(guessing.facts, **{"drafts": heads} | limits)
    for _ in range(2):
        assert run(guessing, requests(), core) == expected
    stats = core.stats()
    right = sum(stats.right_at)
    assert stats.verified_tokens == stats.verifies + right
    least = 40 if wise(guessing) else 0
    assert stats.draft_tokens > right >= least
    assert stats.preemptions > 0 or not limits.get("pages")


def test_without_graphs(both: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, guessing = both
    expected = run(plain, requests(), make_core(plain.facts))
    monkeypatch.setattr(guessing, "_captures", False)
    for depth in (1, 3):
        assert run(guessing, requests(), make_core(guessing.facts, drafts=8, depth=depth)) == expected


def test_rows_with_a_grammar_guess(both: tuple[Any, Any], tmp_path: Path) -> None:
    """Texts are those without guesses, and the grammar is never left."""
    letters = Vocabulary([bytes([i]) for i in range(256)] + [b""] * (5000 - 257) + [b"</s>"], [4999], [4999])
    (tmp_path / "vocabulary").write_bytes(letters.encoded())
    grammar = source_of(Grammar(kind="regex", text="[ab]{3}(xyzw){5,}[c-f]{4}"), {"</s>": 4999})
    stem, found = list(b"aabxyzwxyzwxyzw"), []
    asked = [
        submit("greedy", stem * 2, 40, grammar=grammar, stop_ids=[4999]),
        submit("drawn", stem, 40, grammar=grammar, stop_ids=[4999], temperature=1.0, seed=4, logprobs=1),
        submit("free", stem * 3, 30),
    ]
    for runner in both:
        runner.control(Control(verb="vocabulary", args={"path": str(tmp_path / "vocabulary")}))
        guided = runner.facts.guided_drafts
        core = make_core(runner.facts, drafts=runner.facts.drafts, guided_drafts=guided, depth=2)
        found.append(run(runner, asked, core))
    assert found[0] == found[1]
    for rid in ("greedy", "drawn"):
        text = bytes(token for token in found[1][rid] if token < 256).decode()
        assert re.fullmatch("[ab]{3}(xyzw){5,}([c-f]{4})?.*", text)
    assert not wise(both[1]) or sum(core.stats().right_at) > 10


def test_alone_and_together(both: tuple[Any, Any]) -> None:
    _, guessing = both
    together = run(guessing, requests(), make_core(guessing.facts, drafts=8))
    for request in requests()[:6]:
        alone = run(guessing, [request], make_core(guessing.facts, drafts=8, prefix_cache=False))
        assert alone[request.rid] == together[request.rid]


def test_a_second_answer_like_the_first_is_guessed(both: tuple[Any, Any]) -> None:
    """Not where texts are apart."""
    plain, guessing = both
    if guessing.chains is not None:
        pytest.skip("a model guesses")
    rng, right = random.Random(8), [0]
    asked = submit("first", [rng.randrange(5000) for _ in range(30)], 100, temperature=0.8, seed=5)
    expected = run(plain, [asked], make_core(plain.facts))["first"]
    core = make_core(guessing.facts, drafts=8)
    for namespace in ("", "salt", "", "salt"):
        (found,) = run(guessing, [replace(asked, namespace=namespace)], core).values()
        assert found == expected
        right.append(sum(core.stats().right_at))
    first, apart, second, apart_too = (after - before for before, after in pairwise(right))
    assert apart == apart_too == first
    assert second > first + 40


def wise(runner: Any) -> bool:
    """Whether guesses are right at times, as those of another model with random weights are not."""
    return runner.chains is None or (len(runner.facts.groups) == 1 and runner.steps.hidden is None)


def test_guesses_that_are_right_save_steps(both: tuple[Any, Any]) -> None:
    if not wise(both[1]):
        pytest.skip("what guesses has other weights")
    ruled = both[1].chains is None

    def steps(drafts: int) -> int:
        core = make_core(both[1].facts, drafts=drafts, depth=1)
        run(both[1], requests()[ruled : 1 + ruled], core)
        return core.stats().steps

    assert steps(8) < 0.3 * steps(0)


@pytest.mark.parametrize(
    ("settings", "guesses"),
    [({}, GUESSING), ({"kv_cache_dtype": "fp8"}, GUESSING), ({}, BY_MODEL | {"draft": TINY})],
    ids=["ngram", "ngram, fp8", "model"],
)
def test_kernels_of_bfloat16(settings: dict[str, Any], guesses: dict[str, Any]) -> None:
    """Their sums depend on the batch, so a near tie may fall the other way. What greedy rows that guess bring
    is then nearly the best that rows which do not guess find behind the same text."""
    plain, guessing = make(**settings), make(**settings | guesses)
    for depth in (1, 3):
        core = make_core(guessing.facts, drafts=8, depth=depth)
        found = run(guessing, requests(), core)
        assert sum(core.stats().right_at) > 40
        for request in requests():
            if request.rid in ("greedy", "prompt"):
                brought = scored(plain, request.tokens + found[request.rid])[-len(found[request.rid]) :]
                assert max(place.top[0][1] - place.logprob for place in brought) < NEAR


@pytest.mark.parametrize("guesses", [BY_LAYERS, BY_LAST], ids=["eagle3", "medusa"])
def test_heads_beside_steps_of_one_kernel(guesses: dict[str, Any]) -> None:
    """Greedy texts of one row are nearly the best."""
    plain, guessing = make(FOUR), make(FOUR, **guesses)
    for runner in (plain, guessing):
        assert any(program.work.taken["whole step"] for program in runner.steps.forward._programs.values())
    core = make_core(guessing.facts, drafts=guessing.facts.drafts, depth=2)
    for _ in range(2):
        for request in requests():
            if request.rid in ("greedy", "prompt"):
                text = run(guessing, [request], core)[request.rid]
                brought = scored(plain, request.tokens + text)[-len(text) :]
                assert max(place.top[0][1] - place.logprob for place in brought) < NEAR


def scored(runner: Any, text: list[int]) -> list[TokenLogprob]:
    """Each token of the text behind the first, beside the best in its place."""
    request = submit("scored", text, 1, prompt_logprobs=1)
    (deltas,) = answers(runner, [request], make_core(runner.facts)).values()
    places = next(delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs)
    return [place for place in places if place is not None]


def test_many_rows_of_which_none_may_guess() -> None:
    """They have graphs of their own, until few are left. What they bring is nearly the best."""
    rng = random.Random(7)
    asked = [submit(str(i), [rng.randrange(5000)] * 9, 6 + i) for i in range(44)]
    plain, guessing = (make(max_running_requests=48, **guesses) for guesses in ({}, GUESSING))
    assert len(guessing.graphs._alone) > len(plain.graphs._alone) == 0
    core = make_core(guessing.facts, drafts=guessing.facts.drafts)
    found = run(guessing, asked, core)
    assert core.stats().draft_tokens > 0
    for request in asked[::6]:
        brought = scored(plain, request.tokens + found[request.rid])[-len(found[request.rid]) :]
        assert max(place.top[0][1] - place.logprob for place in brought) < NEAR
