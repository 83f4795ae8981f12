"""Models through transformers' own module: the CPU's logits, from graphs as from eager steps."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_runner import SAMPLE, agreement, generate, make, new_row, plan, prompt, twice
from transformers import AutoConfig

from sgla.hub.source import ModelSource
from sgla.loading.load import load_model
from sgla.model.generic import Generic, probe
from sgla.model.generic_spec import FACTS

from checkpoints import Eager  # isort: skip

SHAPE = {
    "vocab_size": 5000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,  # so that logits are far apart
}
WINDOWS = {
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
WIDER = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "olmo": ("OlmoForCausalLM", {"clip_qkv": 0.9}),
    "granite_swa": ("GraniteSWAForCausalLM", WINDOWS),  # with sinks
    "youtu": ("YoutuForCausalLM", WIDER),  # v of another width than k
    "afmoe": ("AfmoeForCausalLM", EXPERTS | {"head_dim": 64}),
}
PROMPTS = {slot: prompt(slot, 20 + 13 * slot) for slot in range(8)}


@cache
def shown(name: str) -> dict[str, Any]:
    architecture, changes = MODELS[name]
    config = AutoConfig.for_model(name, **SHAPE | changes).to_dict() | {"architectures": [architecture]}
    return config | {FACTS: probe(config, Path("."))}


@cache
def runner_of(name: str) -> Any:
    return make(shown(name), window_ratio=0.75)  # rows have pages of the same numbers in all groups


def logprobs_on_gpu(runner: Any, tokens: list[int]) -> torch.Tensor:
    """float32 [T, V]: of a prompt in slot 0."""
    new = [new_row(0, tokens)]
    new[0].pages *= len(runner.steps.groups)
    runner.execute(plan(0, [(0, 0, len(tokens), SAMPLE)], new))
    columns = (np.array([column], np.int32) for column in (0, 0, len(tokens)))
    with torch.inference_mode():
        batch = runner.steps.extend_batch(*columns)
        return runner.steps.forward.logits(runner.steps.forward.hidden(batch)).log_softmax(-1).cpu()


def off(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Nats [T], of all but the least probable tokens."""
    likely = expected.topk(50).indices
    return (found.gather(1, likely) - expected.gather(1, likely)).abs().amax(1)


def on_cpu(model: Any, dtype: str, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return Eager(model, dtype=getattr(torch, dtype)).prompt_logprobs([tokens])


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_a_cpu(name: str) -> None:
    source = ModelSource("dummy", Path("."), (), shown(name), {})
    cpu, runner = load_model(source), make(shown(name), dtype="float32")
    for tokens in (prompt(1, 7), prompt(2, 200)):
        each = off(logprobs_on_gpu(runner, tokens), on_cpu(cpu, "float32", tokens))
        assert each.max() < 0.02, each


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_near_to_float32_as_on_a_cpu(name: str) -> None:
    """With the same weights. What rounding does differs from model to model, and an expert may be another at
    a near tie, so half of the places and nine of ten are compared."""
    source = ModelSource("dummy", Path("."), (), shown(name), {})
    cpu, exact = load_model(source, "bfloat16"), load_model(source)
    exact.module.load_state_dict(cpu.module.state_dict())
    places = []
    for tokens in (prompt(1, 7), prompt(2, 200)):
        expected = on_cpu(exact, "float32", tokens)
        made = logprobs_on_gpu(runner_of(name), tokens), on_cpu(cpu, "bfloat16", tokens)
        places.append(torch.stack([off(each, expected) for each in made]))
    found, rounding = torch.cat(places, 1).quantile(torch.tensor([0.5, 0.9]), 1).T
    assert (found < 2 * rounding + 0.01).all(), (found, rounding)


@pytest.mark.parametrize("name", ["llama", "olmo", "youtu", "afmoe"])
def test_graphs_equal_eager_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(name)
    assert runner._captures, runner.notes
    assert any("transformers" in note for note in runner.notes)
    kept = twice(runner.graphs, monkeypatch, "_graphs", runner.graphs._forward)
    mixed = twice(runner.prompts, monkeypatch, "_graphs", runner.prompts._forward)
    for rows in (1, 3, 8):
        kept.clear()
        mixed.clear()
        generate(runner, {slot: PROMPTS[slot] for slot in range(rows)}, 4, True, logprobs=2)
        assert (len(kept), len(mixed)) == (3, 1)
        for both in kept + mixed:
            replayed, eager = (logits[:rows] for logits, _ in both)
            torch.testing.assert_close(replayed, eager, rtol=0.02, atol=0.05)
            assert (replayed.argmax(1) == eager.argmax(1)).float().mean() >= 0.8


def test_batching_does_not_change_the_tokens() -> None:
    runner = runner_of("llama")
    together = generate(runner, PROMPTS, 12, True)
    assert agreement(together, generate(runner, PROMPTS, 12, False)) >= 0.7
    assert len({tuple(tokens) for tokens in together.values()}) == len(PROMPTS)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_module_that_cannot_be_captured_runs_eagerly(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at a value on the host: always, or where that cannot be seen before the capture."""
    expected, run = generate(runner_of("llama"), PROMPTS, 6, True), Generic._run

    def looks(self: Generic, attends: Any, ids: torch.Tensor, *given: Any) -> torch.Tensor:
        if not capturing or torch.cuda.is_current_stream_capturing():
            assert int(ids.max()) >= 0
        return run(self, attends, ids, *given)

    monkeypatch.setattr(Generic, "_run", looks)
    runner = make(shown("llama"))
    assert not runner._captures
    assert sum("cannot be captured" in note for note in runner.notes) == 1
    assert agreement(expected, generate(runner, PROMPTS, 6, True)) >= 0.7
    assert torch.rand(9, device="cuda").min() >= 0


def test_compiled_steps_equal_others() -> None:
    runner = make(shown("llama"), enable_torch_compile=True, torch_compile_max_bs=4)
    assert runner._captures, runner.notes
    for rows in (1, 3, 8):
        prompts = {slot: PROMPTS[slot] for slot in range(rows)}
        expected = generate(runner_of("llama"), prompts, 12, True)
        assert agreement(expected, generate(runner, prompts, 12, True)) >= 0.7
