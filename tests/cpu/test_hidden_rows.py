"""Hidden states that a worker answers with, against those of transformers."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from forked import ForkedExecutor
from numpy.typing import NDArray
from tiny import Transcript, make_core, run, run_executor, submit, tiny_config, tiny_source

from sgla.hub.source import open_source
from sgla.messages import Submit
from sgla.worker.cpu import CpuRunner
from sgla.worker.facts import STATE_BYTES

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3 mixture": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    ),
    "gemma3 softcap": (
        "gemma3_text",
        {
            "head_dim": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 30,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
}


def requests(vocab: int) -> list[Submit]:
    """Two share a long prefix; one wants nothing but tokens, and one logprobs of its prompt too."""
    random = Random(3)

    def prompt(count: int) -> list[int]:
        return [random.randrange(vocab) for _ in range(count)]

    shared = prompt(70)
    return [
        submit("short", prompt(3), 9, hidden=True),
        submit("a", [*shared, *prompt(2)], 7, hidden=True, temperature=1.0, seed=4),
        submit("plain", [*shared, *prompt(3)], 8),
        submit("b", [*shared, *prompt(5)], 6, hidden=True, prompt_logprobs=1, logprobs=2),
        submit("prompt alone", prompt(20), 0, hidden=True),
    ]


def states(found: Transcript, rid: str, width: int) -> NDArray[np.float32]:
    data = b"".join(part for delta in found[rid] for part in delta.hidden or [])
    return np.frombuffer(data, np.float32).reshape(-1, width)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dense", [[], [1]])
def test_experts_are_those_of_transformers(dense: list[int], native: bool, tmp_path: Path) -> None:
    """Of each token that was computed, in layers that are mixtures; beside rows that bring hidden states."""
    model_type, changes = LAYOUTS["qwen3 mixture"]
    hf = save_checkpoint(tmp_path, model_type, **changes, mlp_only_layers=dense, num_hidden_layers=3)
    config = tiny_config(
        native_kernels=native, enable_return_hidden_states=True, enable_return_routed_experts=True
    )
    runner = CpuRunner(config, open_source(tmp_path), 0, 1, "", lambda progress: None)
    assert runner.facts.experts == [3, 2]
    wanted = requests(runner.facts.vocab_size)
    for request in wanted[1:4]:
        request.sampling.hidden, request.sampling.experts = False, request.sampling.hidden
    for limits in ({}, {"step_tokens": 13, "depth": 1}, {"pages": 12, "reserve": 0.0}):
        found = run(runner, wanted, **limits)
        assert not found["plain"][-1].hidden
        assert states(found, "short", runner.facts.hidden).shape[0] > 3
        for rid in "ab":
            data = b"".join(part for delta in found[rid] for part in delta.hidden or [])
            chosen = np.frombuffer(data, np.int32).reshape(-1, 3, 2)
            [request] = [each for each in wanted if each.rid == rid]
            tokens = [*request.tokens, *found.tokens()[rid]][:-1]
            with torch.inference_mode():
                logits = hf(torch.tensor([tokens]), output_router_logits=True).router_logits
            for layer in range(3):
                if layer in dense:
                    assert not chosen[:, layer].any()
                    continue
                best = logits[layer - sum(one < layer for one in dense)].topk(2).indices
                assert (np.sort(chosen[:, layer]) == np.sort(best.numpy())).all()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_are_those_of_transformers(layout: str, native: bool, tmp_path: Path) -> None:
    model_type, changes = LAYOUTS[layout]
    hf = save_checkpoint(tmp_path, model_type, **changes)
    config = tiny_config(native_kernels=native, enable_return_hidden_states=True)
    runner = CpuRunner(config, open_source(tmp_path), 0, 1, "", lambda progress: None)
    if native and "torch" in runner.facts.notes[0]:
        pytest.skip(runner.facts.notes[0])
    width = runner.facts.hidden
    wanted = requests(runner.facts.vocab_size)
    for limits in ({}, {"step_tokens": 13, "depth": 1}, {"pages": 12, "reserve": 0.0}):
        found = run(runner, wanted, **limits)
        assert not any(delta.hidden for delta in found["plain"])
        for request in wanted:
            if request.sampling.hidden:
                tokens = request.tokens + found.tokens()[request.rid]
                computed = tokens[:-1] if request.max_new else tokens
                with torch.inference_mode():
                    expected = hf.model(torch.tensor([computed])).last_hidden_state[0].numpy()
                np.testing.assert_allclose(states(found, request.rid, width), expected, atol=2e-5, rtol=1e-4)


def test_states_beside_rows_that_guess() -> None:
    """Rows of requests that want states do not guess; the others do, and no state changes."""
    runner = CpuRunner(
        tiny_config(enable_return_hidden_states=True), tiny_source(), 0, 1, "", lambda progress: None
    )
    stem = [5, 9, 2, 7, 11]
    wanted = [
        submit("states", stem * 4, 30, hidden=True),
        submit("warm", stem * 3 + [4], 20, hidden=True, temperature=0.7, seed=3),
        submit("guesses", stem * 4, 40, allowed=[6]),
    ]
    width = runner.facts.hidden
    alone = run(runner, wanted, depth=1)
    for limits in (
        {"drafts": 4, "depth": 1},
        {"drafts": 8, "depth": 3},
        {"drafts": 6, "pages": 12, "reserve": 0.0},
    ):
        core = make_core(runner.facts, **limits)
        found = run(runner, wanted, core)
        assert core.stats().right_at
        assert found.tokens() == alone.tokens()
        for rid in ("states", "warm"):
            np.testing.assert_allclose(
                states(found, rid, width), states(alone, rid, width), atol=2e-5, rtol=1e-4
            )


async def test_ranks_and_alone(tmp_path: Path) -> None:
    """Alone, and of two ranks in processes of their own."""
    one = CpuRunner(
        tiny_config(enable_return_hidden_states=True), tiny_source(), 0, 1, "", lambda progress: None
    )
    wanted = requests(one.facts.vocab_size)
    executor = ForkedExecutor(tiny_config(tp=2, enable_return_hidden_states=True), tiny_source())
    try:
        facts = await executor.start(lambda progress: None)
        assert facts.hidden == one.facts.hidden == 64
        both = await run_executor(executor, facts, wanted)
    finally:
        await executor.close()
    for request in wanted:
        alone = run(one, [request])
        assert alone.tokens() == {request.rid: both.tokens()[request.rid]}
        np.testing.assert_allclose(
            states(both, request.rid, 64), states(alone, request.rid, 64), atol=2e-5, rtol=1e-4
        )


def test_as_many_run_as_have_room_in_a_result() -> None:
    source = tiny_source(
        hidden_size=STATE_BYTES // 4 // 3, vocab_size=8, intermediate_size=16, num_hidden_layers=1
    )
    runner = CpuRunner(tiny_config(enable_return_hidden_states=True), source, 0, 1, "", lambda progress: None)
    assert runner.facts.slots == 3
