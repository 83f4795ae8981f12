"""``deterministic`` on the CPU, where it is always so: logprobs are the same bits in any batch, chunking and
cache."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tiny import VOCAB, make_core, run, submit, tiny_config, tiny_source

from sgla.errors import ConfigError
from sgla.kernels.build import BuildError
from sgla.messages import Submit, TokenLogprob
from sgla.worker import start_cpu
from sgla.worker.cpu import CpuRunner


@pytest.fixture(scope="module", params=[("float32", None), ("bfloat16", None), ("bfloat16", "int8")], ids=str)
def runner(request: pytest.FixtureRequest) -> CpuRunner:
    dtype, quantization = request.param
    config = tiny_config(
        native_kernels=True, threads=2, dtype=dtype, quantization=quantization, deterministic=True
    )
    source = tiny_source(hidden_size=128, intermediate_size=192, max_position_embeddings=1024)
    return CpuRunner(config, source, 0, 1, "", lambda progress: None)


def prompt(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def subject(seed: int = 1) -> Submit:
    return submit("subject", prompt(330, seed), 8, temperature=0.7, seed=5, logprobs=3, prompt_logprobs=1)


def scores(result: Any) -> list[list[TokenLogprob | None]]:
    deltas = result["subject"]
    prompts = next(d.prompt_logprobs for d in deltas if d.prompt_logprobs)
    return [prompts, [entry for d in deltas for entry in d.logprobs or []]]


@pytest.mark.native
def test_batch_chunks_and_cache_do_not_show(runner: CpuRunner) -> None:
    alone = scores(run(runner, [subject()], prefix_cache=False))
    assert len(alone[1]) == 8
    others = [submit(f"other-{i}", prompt(20 * i + 1, i), 12, temperature=1.0, seed=i) for i in range(5)]
    assert scores(run(runner, [*others, subject()])) == alone
    assert scores(run(runner, [subject(), *others], depth=2)) == alone
    for step_tokens in (7, 33):
        assert scores(run(runner, [others[2], subject()], step_tokens=step_tokens)) == alone
    core = make_core(runner.facts)
    run(runner, [submit("first", subject().tokens[:200], 3)], core)
    sampled = submit("subject", subject().tokens, 8, temperature=0.7, seed=5, logprobs=3)
    warm = run(runner, [others[1], sampled], core)
    assert max(d.cached_tokens for d in warm["subject"]) >= 192
    assert [entry for d in warm["subject"] for entry in d.logprobs or []] == alone[1]


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize("what", ["mixtures", "vectors", "no native kernels"])
def test_refuses_what_torch_computes(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(
        native_kernels=True, deterministic=True, task="embed" if what == "vectors" else "generate"
    )

    def nothing() -> None:
        raise BuildError("g++ is too old")

    if what == "no native kernels":
        monkeypatch.setattr(start_cpu, "library", nothing)
    with pytest.raises(ConfigError, match=f"deterministic.*{what}"):
        start_cpu.cpu_runner(config, tiny_source(**MIXTURE if what == "mixtures" else {}), 0, 1, "", print)
