"""A model that breaks for one input: its requests end with a typed error, and nobody else notices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from config_cases import RUN
from forked import ForkedExecutor
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tiny import VOCAB, make_core, run, run_executor, submit, tiny_config

from sgla.hub.source import ModelSource, open_source
from sgla.messages import Submit
from sgla.worker.cpu import CpuRunner
from sgla.worker.start_cpu import cpu_runner

POISON = 13  # its embedding is NaN
BAD = [40, POISON, 41, 42]


def poison(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[name][POISON] = torch.nan
    save_file(tensors, file, {"format": "pt"})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("poisoned")
    save_checkpoint(folder, "llama", vocab_size=VOCAB)
    poison(folder)
    return open_source(folder)


@pytest.fixture(scope="module", params=["torch", pytest.param("native", marks=pytest.mark.native)])
def runner(request: pytest.FixtureRequest, source: ModelSource) -> CpuRunner:
    config = tiny_config(native_kernels=request.param == "native", max_running_requests=12)
    return CpuRunner(config, source, 0, 1, "", lambda progress: None)


def good() -> list[Submit]:
    return [
        submit("greedy", [5, 6, 7], 8),
        submit("sampled", [9] * 20, 8, temperature=0.8, top_k=20, seed=3),
        submit("scored", [21, 22, 23], 8, temperature=1.0, seed=5, logprobs=2, prompt_logprobs=1),
        submit("biased", [31], 8, logit_bias=[(7, 1.5), (POISON, -100.0)]),
    ]


def bad() -> list[Submit]:
    return [
        submit("bad greedy", BAD, 8),
        submit("bad sampled", BAD, 8, temperature=0.8, top_p=0.9, seed=3),
        submit("bad scored", BAD, 8, logprobs=3),
        submit("bad prompt", BAD, 0, prompt_logprobs=2),
        submit("bad long", [50] * 100 + BAD, 4, prompt_logprobs=0),
        submit("bad choice", [51, *BAD], 1, logit_bias=[(3, 2.0)], allowed=[3, 4]),
        submit("bad score", BAD, 0, pool=[1, 2]),
    ]


def exact(runner: CpuRunner) -> bool:
    """The batch does not change bits."""
    return "torch" not in runner.facts.notes[0]


def same(found: dict[str, list[int]], expected: dict[str, list[int]], runner: CpuRunner) -> bool:
    """Whether outputs are equal: in length alone where bits differ, for a draw may be a close one."""
    if exact(runner):
        return found == expected
    return {name: len(tokens) for name, tokens in found.items()} == {
        name: len(tokens) for name, tokens in expected.items()
    }


@pytest.mark.parametrize("depth", [1, 3])
def test_requests_of_a_broken_input_end_alone(runner: CpuRunner, depth: int) -> None:
    names = [request.rid for request in good()]
    alone = run(runner, good(), depth=depth)
    assert not any(POISON in tokens for tokens in alone.tokens().values())
    core = make_core(runner.facts, depth=depth)
    both = [request for pair in zip(good() + good()[:3], bad()) for request in pair]
    found = run(runner, list({request.rid: request for request in both}.values()), core)
    assert same(found.tokens(), alone.tokens() | {request.rid: [] for request in bad()}, runner)
    for name in names if exact(runner) else ():  # in other steps, perhaps, but with the same numbers
        assert [t for d in found[name] for t in d.logprobs or []] == [
            t for d in alone[name] for t in d.logprobs or []
        ]
    for request in bad():
        error = found[request.rid][-1].error
        assert error is not None, request.rid
        assert (error.status, error.code, error.type) == (500, "invalid_logits", "server_error")
        assert "NaN" in error.message
    stats = core.stats()
    assert (stats.invalid_logits, stats.finished["error"]) == (len(bad()), len(bad()))


@pytest.mark.parametrize("algorithm", ["ngram", "draft_model"])
def test_a_wrong_guess_that_breaks_changes_nothing(
    runner: CpuRunner, source: ModelSource, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is guessed is read together with the token before it."""
    expected = run(runner, good()).tokens()
    settings = {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": 4}
    config = replace(runner.config, **settings, speculative_adaptive=False)
    draft = source if algorithm == "draft_model" else None
    guessing = CpuRunner(config, dataclasses.replace(source, draft=draft), 0, 1, "", lambda progress: None)
    sampler: Any = guessing.sampler

    def guess(logits: Any, slots: Any, positions: Any, draws: Any) -> None:
        sampler._tokens[slots, positions] = POISON

    monkeypatch.setattr(sampler, "guess", guess)

    def wrong(tokens: Any, most: int, *shortest: int) -> Any:
        return np.full(max(most, 0), POISON)

    monkeypatch.setattr(guessing._drafter, "propose", wrong, False)
    found = run(guessing, good() + bad()[:3], make_core(guessing.facts, drafts=4))
    assert sum(delta.guesses[1] for request in good() for delta in found[request.rid]) > 20
    assert found.tokens() == expected | {request.rid: [] for request in bad()[:3]}


def test_a_wrong_guess_that_breaks_changes_nothing_where_tokens_are_picked() -> None:
    config = RUN["DeepSeek-V3.2"].config | {"vocab_size": VOCAB}
    source = ModelSource("dummy", Path("tiny"), (), config, {})
    guesses = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 4}
    settings = tiny_config(**guesses, speculative_adaptive=False)
    guessing: Any = CpuRunner(settings, source, 0, 1, "", lambda progress: None)
    expected = run(guessing, good()[:2]).tokens()
    guessing.model.embed.weight.tensors[0][POISON] = torch.nan
    guessing._drafter.propose = lambda _, most, *shortest: np.full(max(most, 0), POISON)
    assert run(guessing, good()[:2], make_core(guessing.facts, drafts=4)).tokens() == expected


@pytest.mark.parametrize("kept", [True, False])
def test_nothing_of_a_broken_request_is_left_in_the_cache(runner: CpuRunner, kept: bool) -> None:
    """Its tokens were computed beside those of a prefix that others have, and its pages go to others."""
    shared = list(range(60, 100))
    after = [submit("after", [*shared, 3], 8), submit("other", [4] * 70, 30)]
    alone = run(runner, after, depth=2).tokens()
    core = make_core(runner.facts, depth=2, pages=14, prefix_cache=kept)
    broken = run(runner, [submit("bad", [*shared, *BAD, *shared], 8)], core)
    assert broken["bad"][-1].error is not None
    assert same(run(runner, after, core).tokens(), alone, runner)


@pytest.mark.native
@pytest.mark.parametrize("ranks", [1, 2])
async def test_worker_processes_go_on(source: ModelSource, ranks: int) -> None:
    config = tiny_config(tp=ranks, native_kernels=True)
    executor = ForkedExecutor(config, source)
    try:
        facts = await executor.start(lambda progress: None)
        alone = await run_executor(executor, facts, good(), depth=2)
        found = await run_executor(executor, facts, good() + bad()[:3], depth=2)
        assert found.tokens() == alone.tokens() | {request.rid: [] for request in bad()[:3]}
        assert all(found[request.rid][-1].error is not None for request in bad()[:3])
    finally:
        await executor.close()


@pytest.mark.parametrize("kind", ["BertModel", "LlamaModel"])
def test_a_vector_that_is_not_finite_fails_alone(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel

    encoder = kind == "BertModel"
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = AutoConfig.for_model("bert" if encoder else "llama", vocab_size=VOCAB, **sizes)
    model = AutoModel.from_config(config, dtype=torch.float32)
    table = model.embeddings.word_embeddings if encoder else model.embed_tokens
    with torch.no_grad():
        table.weight[POISON] = torch.nan
    model.save_pretrained(tmp_path)
    runner = cpu_runner(tiny_config(task="embed"), open_source(tmp_path), 0, 1, "", lambda progress: None)
    rows = {"a": [5, 6, 7], "bad": BAD, "b": [8, 9, 10, 11]}
    requests = [submit(name, tokens, 0, pool=[]) for name, tokens in rows.items()]
    found = run(runner, requests, encoder=encoder)
    alone = run(runner, [requests[0], requests[2]], encoder=encoder)
    assert found["bad"][-1].error.code == "invalid_logits"
    for name in ("a", "b"):  # torch's products may differ in the last bits with the number of rows
        beside, by_itself = (
            torch.frombuffer(bytearray(run[name][-1].vector), dtype=torch.float32) for run in (found, alone)
        )
        torch.testing.assert_close(beside, by_itself)
