"""Rows for which another model guesses bring the same text, logprobs and ends as rows that do not guess."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import save_checkpoint
from config_cases import gemma3, qwen3_next
from gguf import GGMLQuantizationType as Type
from test_fp8 import quantize_checkpoint
from test_gguf import convert
from tiny import LLAMA, VOCAB, Transcript, check_draws, make_core, run, submit, tiny_config, tiny_source

from sgla.actors.setup import find_model
from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.loading.source import configured_source, drafting, open_source
from sgla.messages import Submit
from sgla.model.drafting import read_draft
from sgla.model.read import read_decoder
from sgla.resolve import resolve
from sgla.worker.cpu import CpuRunner

SIZES = {"vocab_size": VOCAB, "max_position_embeddings": 256}
TARGETS = {
    "grouped": LLAMA,
    "windows": gemma3(num_hidden_layers=3, sliding_window=20, **SIZES),
}


def source_of(config: dict[str, Any], draft: dict[str, Any] | None) -> ModelSource:
    source = replace(tiny_source(), config=config)
    return replace(source, draft=None if draft is None else replace(source, config=draft))


def runner_of(target: str, draft: dict[str, Any] | None, **changes: Any) -> CpuRunner:
    algorithm = "draft_model" if draft else None
    config = tiny_config(
        speculative_algorithm=algorithm, speculative_adaptive=False, speculative_num_draft_tokens=4, **changes
    )
    return CpuRunner(config, source_of(TARGETS[target], draft), 0, 1, "", lambda progress: None)


def requests() -> list[Submit]:
    rng = random.Random(4)
    stem = [rng.randrange(VOCAB) for _ in range(19)]
    return [
        submit("greedy", stem * 2, 18),
        submit("warm", stem * 2 + [9], 14, temperature=0.7, seed=3),
        submit("cut", [*stem, 7], 12, temperature=1.0, seed=5, top_k=9, top_p=0.9),
        submit("ruled", [*stem, 3], 15, repetition=1.01, frequency=0.01, min_tokens=12, stop_ids=[1, 2]),
        submit("logprobs", stem, 10, logprobs=2, prompt_logprobs=1),
        submit("two", stem[::-1], 2),
    ]


def shallow(config: dict[str, Any]) -> dict[str, Any]:
    """The same model without its last layer: random weights go by their names, so it is right at times."""
    kinds = {"layer_types": config["layer_types"][:-1]} if "layer_types" in config else {}
    return config | {"num_hidden_layers": config["num_hidden_layers"] - 1} | kinds


@pytest.mark.parametrize("target", TARGETS)
def test_text_is_the_same(target: str) -> None:
    plain = runner_of(target, None, native_kernels=True)
    check_draws(plain)
    expected = Transcript()
    for request in requests():
        expected |= run(plain, [request], depth=1, prefix_cache=False)
    runner = runner_of(target, shallow(TARGETS[target]), native_kernels=True)
    if "torch" in runner.facts.notes[0]:
        pytest.skip(runner.facts.notes[0])
    for limits in ({"depth": 1}, {"depth": 2, "pages": 6, "reserve": 0.0}, {"depth": 3}):
        core = make_core(runner.facts, drafts=4, **limits)
        for _ in range(1 + (limits["depth"] == 3)):  # the second time behind cached prefixes
            got = run(runner, requests(), core)
            assert got.tokens() == expected.tokens()
            assert got.finish() == expected.finish()
        stats = core.stats()
        assert 0 < sum(stats.right_at) < stats.draft_tokens
        assert (stats.preemptions > 0) == ("pages" in limits)
    pace, chance = runner._drafter._pace, random.Random(5)  # type: ignore[attr-defined]
    pace.adaptive = True
    assert run(runner, requests(), drafts=4, depth=3).tokens() == expected.tokens()
    pace.each = lambda slots, most, tokens: np.array([chance.randrange(most + 1) for _ in slots], np.int32)
    assert run(runner, requests(), drafts=4, depth=3).tokens() == expected.tokens()  # another number each


@pytest.mark.parametrize("limits", [{"step_tokens": 11}, {"pages": 6, "reserve": 0.0, "depth": 3}])
def test_a_model_that_guesses_for_itself_is_always_right(limits: dict[str, Any]) -> None:
    """So it has read all that its target has: parts of prompts, cached prefixes, what was retracted."""
    runner = runner_of("grouped", LLAMA)
    core = make_core(runner.facts, drafts=4, **limits)
    for _ in range(2):
        run(runner, requests(), core)
    stats = core.stats()
    assert sum(stats.right_at) == stats.draft_tokens > 10


@pytest.mark.parametrize("kind", ["gguf", "Q8_0", "fp8", "int8", "int4"])
def test_a_model_that_guesses_may_be_in_another_format(kind: str, tmp_path: Path) -> None:
    """Than the same model's, for which it guesses: rounded weights are right less often."""
    hf = save_checkpoint(tmp_path / "target", "llama", hidden_size=64, num_attention_heads=4)
    path, settings = tmp_path / "draft", {}
    if kind in ("gguf", "Q8_0"):
        path = convert(hf, tmp_path / "draft.gguf", quantized=None if kind == "gguf" else Type[kind])
    elif kind == "fp8":
        shutil.copytree(tmp_path / "target", path)
        quantize_checkpoint(path, "channel", quant_method="fp8", activation_scheme="dynamic")
    else:
        path, settings = tmp_path / "target", {"speculative_quantization": kind}
    target = open_source(tmp_path / "target")
    plain = CpuRunner(tiny_config(native_kernels=True), target, 0, 1, "", lambda progress: None)
    asked = tiny_config(
        native_kernels=True,
        speculative_model=str(path),
        speculative_algorithm="draft_model",
        speculative_adaptive=False,
        speculative_num_draft_tokens=4,
        **settings,
    )
    source = replace(target, draft=configured_source(path, drafting(asked)))
    runner = CpuRunner(asked, source, 0, 1, "", lambda progress: None)
    core = make_core(runner.facts, drafts=4)
    prompts = [submit(f"{i}", [*range(3 + i, 30)], 30) for i in range(3)]
    assert run(runner, prompts, core).tokens() == run(plain, prompts).tokens()
    stats = core.stats()
    assert sum(stats.right_at) / stats.draft_tokens >= (1.0 if kind == "gguf" else 0.2)


def test_what_it_keeps_comes_back_from_a_disk(tmp_path: Path) -> None:
    """Beside what its target keeps: after a restart it is right as often as before, so nothing is missing.
    The texts have 15 pages of 64, for no more than a fourth is on its way to the disk at a time."""
    texts, told = [[*range(40 + i, 120 + i)] for i in range(3)], []
    for start in range(2):
        runner = runner_of("grouped", LLAMA, kv_disk=f"{tmp_path}:4M")
        core = make_core(runner.facts, drafts=4)
        got = run(runner, [submit(f"{i}", text, 9) for i, text in enumerate(texts)], core)
        stats = core.stats()
        assert sum(stats.right_at) == stats.draft_tokens > 10
        assert stats.hits.get("disk", 0) == start * 3 * 64
        told.append(got.tokens())
        runner.close()
    assert told[0] == told[1]


@pytest.mark.parametrize("size", [VOCAB - 90, VOCAB + 90])
def test_tables_of_a_vocabulary_may_have_other_lengths(size: int) -> None:
    """Of the tokens that one of them lacks nobody guesses any; the rest are guessed as ever."""
    runner = runner_of("grouped", LLAMA | {"vocab_size": size})
    few = {"allowed": [5, 7, VOCAB - 1], "temperature": 1.0}
    asked = [*requests(), *(submit(f"few {seed}", [VOCAB - 1, 4], 20, seed=seed, **few) for seed in range(3))]
    guessed: list[int] = []

    def spy(logits: Any, slots: Any, positions: Any, draws: Any, guess: Any = runner.sampler.guess) -> None:
        guess(logits, slots, positions, draws)
        guessed.extend(runner.tables.tokens[slots, positions])

    runner.sampler.guess = spy  # type: ignore[method-assign]
    found = run(runner, asked, drafts=4, depth=2).tokens()
    assert found == run(runner_of("grouped", None), asked, depth=1).tokens()
    assert any(VOCAB - 1 in tokens for tokens in found.values())
    assert len(guessed) > 50
    assert max(guessed) < min(size, VOCAB)


def test_what_has_waited_is_read_before_the_next_guess() -> None:
    """Two steps of three have no guesses, which costs no reading."""
    runner, steps, passes = runner_of("grouped", LLAMA), iter(range(10_000)), [0, 0]
    drafter: Any = runner._drafter
    drafter._pace.adaptive, forward, follow = True, drafter._forward, drafter.follow
    drafter._pace.each = lambda slots, most, tokens: np.full(len(slots), 0 if next(steps) % 3 else most)

    def count(batch: Any) -> Any:
        passes[0] += batch.sample_rows.numel() < batch.rows
        return forward(batch)

    def count_steps(*given: Any) -> None:
        passes[1] += 1
        follow(*given)

    drafter._forward, drafter.follow = count, count_steps
    core = make_core(runner.facts, drafts=4, depth=3)
    run(runner, requests(), core)
    stats = core.stats()
    assert sum(stats.right_at) == stats.draft_tokens > 10
    assert passes[0] < passes[1] / 2


def test_a_model_that_guesses_is_found_beside_its_target(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    asked = tiny_config(model=str(tmp_path), speculative_model=str(tmp_path), load_format="dummy")
    config, source, _ = find_model(asked, lambda progress: None)
    assert (config.speculative_algorithm, config.speculative_num_draft_tokens) == ("draft_model", 4)
    assert source.draft is not None
    assert source.draft.config == source.config == LLAMA


def test_models_that_cannot_guess_are_refused() -> None:
    target = read_decoder(LLAMA)
    for change, said in (
        ({"vocab_size": 200}, "it has 200 tokens and the model 331: another vocabulary"),
        (qwen3_next(vocab_size=VOCAB), "cannot go back behind a wrong guess"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            read_draft(change if "architectures" in change else LLAMA | change, target)
        assert caught.value.param == "speculative_model"
    asked = tiny_config(speculative_model="a/b")
    with pytest.raises(ConfigError, match="has a context of 99 tokens; give --context-length 99"):
        resolve(asked, model=LLAMA, draft=LLAMA | {"max_position_embeddings": 99})
    assert resolve(asked, model=LLAMA, draft=LLAMA).config.speculative_algorithm == "draft_model"
