"""Rows guess with the layers split over ranks, too: texts, logprobs and ends are those of one rank without
guesses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from forked import ForkedExecutor
from test_data_attention import parted
from test_draft_heads import DEEP, DFLASH, EAGLE, HYBRID, source_of
from test_draft_matrix import LETTERS
from test_draft_matrix import requests as with_adapters
from tiny import LLAMA, Transcript, check_draws, make_core, run, run_executor, tiny_config

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.messages import Control, Submit
from sgla.model.drafting import check_settings, read_guessing
from sgla.model.read import read_decoder
from sgla.worker.cpu import CpuRunner

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "ngram": ("ngram", DEEP, None),
    "draft_model": ("draft_model", DEEP, DEEP | {"num_hidden_layers": 3}),
    "eagle3": ("eagle3", DEEP, EAGLE),
    "mtp": ("mtp", HYBRID, None),
    "medusa": ("medusa", DEEP, {"medusa_num_heads": 3}),
    "dflash": ("dflash", DEEP, DFLASH),
}


def requests() -> list[Submit]:
    return [request for request in with_adapters() if not request.adapter]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Control:
    path = tmp_path_factory.mktemp("vocabulary") / "vocabulary"
    path.write_bytes(msgspec.msgpack.encode(LETTERS))
    return Control(verb="vocabulary", args={"path": str(path)})


@pytest.fixture(scope="module")
def expected(vocabulary: Control) -> dict[str, Transcript]:
    """By the model's name."""
    found = {}
    for model in (DEEP, HYBRID):
        runner = CpuRunner(tiny_config(), source_of(model, None), 0, 1, "", lambda progress: None)
        runner.control(vocabulary)
        check_draws(runner)
        found[model["model_type"]] = run(runner, requests(), depth=1)
    return found


@pytest.fixture(scope="module")
def right_alone(vocabulary: Control) -> Callable[[str], list[int]]:
    """How many guesses of one rank are right in each place, by the case."""

    @cache
    def found(case: str) -> list[int]:
        _, model, draft = CASES[case]
        runner = CpuRunner(guessing(case), source_of(model, draft), 0, 1, "", lambda progress: None)
        runner.control(vocabulary)
        core = make_core(runner.facts, drafts=3, depth=1, guided_drafts=True)
        run(runner, requests(), core)
        assert sum(core.stats().right_at) > 5
        return core.stats().right_at

    return found


@pytest.mark.parametrize(
    ("case", "way"),
    [
        *((case, {"tp": 2}) for case in CASES),
        ("draft_model", {"tp": 2, "speculative_adaptive": True}),
        ("ngram", {"cp": 2}),
        ("eagle3", {"cp": 2, "native_kernels": False}),
        pytest.param("ngram", {"cp": 2, "speculative_adaptive": True}, marks=pytest.mark.slow),
        pytest.param("draft_model", {"cp": 2, "speculative_adaptive": True}, marks=pytest.mark.slow),
        ("medusa", {"cp": 2}),
        ("ngram", {"pp": 2}),
        ("draft_model", {"pp": 2, "tp": 2}),
        ("eagle3", {"pp": 2, "tp": 2}),
        pytest.param("dflash", {"pp": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param("eagle3", {"pp": 2, "tp": 2, "dp_attention": True}, marks=pytest.mark.slow),
        pytest.param("medusa", {"pp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("draft_model", {"pp": 2, "speculative_adaptive": True}, marks=pytest.mark.slow),
        pytest.param("ngram", {"pp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("ngram", {"pp": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param("ngram", {"pp": 2, "tp": 2, "dp_attention": True}, marks=pytest.mark.slow),
        ("ngram", {"tp": 2, "dp_attention": True}),
        ("draft_model", {"tp": 2, "dp_attention": True}),
        ("mtp", {"tp": 2, "ep": 2, "dp_attention": True}),
        ("eagle3", {"tp": 2, "dp_attention": True}),
        pytest.param("ngram", {"tp": 2, "dp_attention": True, "cp": 2}, marks=pytest.mark.slow),
        pytest.param("eagle3", {"tp": 2, "dp_attention": True, "cp": 2}, marks=pytest.mark.slow),
        pytest.param(
            "draft_model",
            {"tp": 2, "dp_attention": True, "speculative_adaptive": True},
            marks=pytest.mark.slow,
        ),
        pytest.param("medusa", {"tp": 2, "dp_attention": True}, marks=pytest.mark.slow),
        pytest.param("dflash", {"tp": 2, "dp_attention": True}, marks=pytest.mark.slow),
        pytest.param("dflash", {"cp": 2}, marks=pytest.mark.slow),
    ],
)
async def test_text_is_that_of_one_rank(
    case: str,
    way: dict[str, Any],
    expected: dict[str, Transcript],
    right_alone: Callable[[str], list[int]],
    vocabulary: Control,
) -> None:
    name, model, draft = CASES[case]
    config = guessing(case, **way)
    executor, wanted = ForkedExecutor(config, source_of(model, draft)), expected[model["model_type"]]
    try:
        facts = await executor.start(lambda progress: None)
        await executor.control(vocabulary)
        for depth in (1, 3) if case == "ngram" else (3, 1):  # n-grams know of what came before
            limits = {"drafts": 3, "depth": depth, "guided_drafts": facts.guided_drafts, "stages": config.pp}
            core = parted(facts, **limits) if config.dp_attention else make_core(facts, **limits)
            found = await run_executor(executor, facts, requests(), core)
            assert found.tokens() == wanted.tokens()
            assert found.finish() == wanted.finish()
            assert ranks_of(found) == ranks_of(wanted)
            assert core.stats().draft_tokens > 20
            alike = depth == 1 and config.pp == 1  # with stages no row guesses right behind its prompt
            if alike and not config.speculative_adaptive:  # heads see what they see on one rank
                assert core.stats().right_at == right_alone(case)
    finally:
        await executor.close()


def guessing(case: str, **way: Any) -> Config:
    settings = {"speculative_algorithm": CASES[case][0], "speculative_num_draft_tokens": 3}
    return tiny_config(**{"native_kernels": True, "speculative_adaptive": False} | settings | way)


def ranks_of(transcript: Transcript) -> list[int]:
    return [entry.rank for delta in transcript["told"] for entry in delta.logprobs or []]


@pytest.mark.parametrize("case", CASES)
def test_nothing_that_guesses_is_refused_on_gpus(case: str) -> None:
    config = guessing(case, speculative_adaptive=True, speculative_model=CASES[case][2] and "x")
    for way in ({"pp": 2}, {"cp": 2}, {"tp": 2, "dp_attention": True}, {"tp": 2, "ep": 2, "cp": 2, "pp": 2}):
        check_settings(msgspec.structs.replace(config, **way), "cuda")


def test_second_guesses_beside_attention_by_data_are_refused() -> None:
    config = tiny_config(tp=2, dp_attention=True, speculative_algorithm="mtp", speculative_eagle_topk=2)
    with pytest.raises(ConfigError, match="2 cannot be honoured with --dp-attention"):
        check_settings(config, "cuda")


def test_heads_that_cannot_be_split_are_refused() -> None:
    target, draft = read_decoder(DEEP), LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 2}
    config = tiny_config(tp=4, speculative_algorithm="draft_model", speculative_model="x")
    with pytest.raises(ConfigError, match="6 heads cannot be split over --tp 4"):
        read_guessing(config, draft, target)
