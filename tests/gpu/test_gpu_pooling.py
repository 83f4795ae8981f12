"""Vectors, scores of labels and hidden states by a GPU are those of the CPU in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gpu_runner import TINY, new_row, plan, prompt
from test_gpu_runner import make as make_generator

from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.messages import POOL, SAMPLE, StepPlan, StepResult
from sgla.worker.start_cpu import cpu_runner
from sgla.worker.start_gpu import cuda_runner

MINILM: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 5000,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}
ROBERTA = MINILM | {
    "architectures": ["XLMRobertaForSequenceClassification"],
    "hidden_size": 768,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "num_labels": 3,
}
MODERN = {key: value for key, value in MINILM.items() if key != "intermediate_size"}
MODERN |= {"architectures": ["ModernBertModel"], "intermediate_size": 768, "pad_token_id": 0}
GEMMA = MODERN | {
    "architectures": ["Gemma3TextModel"],
    "use_bidirectional_attention": True,
    "hidden_size": 768,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "sliding_window": 64,
}
LENGTHS = [1, 40, 5, 5, 200, 40, 17]
# Relative errors of a vector. Bfloat16 has 8 bits, and rounding adds up over the layers.
BOUNDS = {"float32": 5e-3, "bfloat16": 0.05}


def make(runner: Callable[..., Any], model: dict[str, Any], folder: Path, device: str, dtype: str) -> Any:
    config = Config(
        device=device,
        dtype=dtype,
        load_format="dummy",
        task="auto" if "num_labels" in model else "embed",
        max_running_requests=16,
        step_tokens=512,
        kv_cache_bytes=256 << 20,
        context_length=640 if model is TINY else 500,
    )
    return runner(config, ModelSource("dummy", folder, (), model, {}), 0, 1, "", lambda progress: None)


def pooled_by(folder: Path, kind: str) -> Path:
    """A folder whose files name a way of pooling."""
    modules = [{"type": f"x.{name}", "path": path} for name, path in (("Transformer", ""), ("Pooling", "p"))]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "p").mkdir()
    (folder / "p/config.json").write_text(json.dumps({f"pooling_mode_{kind}": True}))
    return folder


def plans(pieces: int) -> list[StepPlan]:
    """Prompts of all lengths, each in so many pieces."""
    prompts = [prompt(slot, length) for slot, length in enumerate(LENGTHS)]
    new = [new_row(slot, tokens, pool=[]) for slot, tokens in enumerate(prompts)]
    found = []
    for piece in range(pieces):
        bounds = [(n * piece // pieces, n * (piece + 1) // pieces) for n in LENGTHS]
        rows = [(slot, a, b - a, POOL) for slot, (a, b) in enumerate(bounds) if b > a]
        found.append(plan(piece, rows, [] if piece else new))
    return found


def vectors(runner: Any, pieces: int = 1) -> dict[int, Any]:
    """By slot; rows whose prompts are complete answer in the plan's order."""
    found: dict[int, Any] = {}
    for step in plans(pieces):
        result: StepResult = runner.execute(step)
        assert not result.failed
        lens = dict(zip(np.frombuffer(step.slots, np.int32), np.frombuffer(step.q_lens, np.int32)))
        starts = dict(zip(np.frombuffer(step.slots, np.int32), np.frombuffer(step.starts, np.int32)))
        done = [slot for slot in lens if starts[slot] + lens[slot] == LENGTHS[slot]]
        found |= zip(done, (np.frombuffer(vector, np.float32) for vector in result.vectors), strict=True)
    assert len(found) == len(LENGTHS)
    return found


def assert_near(found: dict[int, Any], expected: dict[int, Any], bound: float) -> None:
    errors = [np.linalg.norm(found[s] - expected[s]) / np.linalg.norm(expected[s]) for s in expected]
    assert max(errors) < bound, errors
    assert len({vector.tobytes() for vector in expected.values()}) == len(expected)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (MINILM, "mean_tokens"),
        (MINILM, "cls_token"),
        (MINILM, "max_tokens"),
        (MODERN, "mean_tokens"),
        (GEMMA, "mean_tokens"),
    ],
)
def test_encoders(model: dict[str, Any], kind: str, dtype: str, tmp_path: Path) -> None:
    folder = pooled_by(tmp_path, kind)
    found = vectors(make(cuda_runner, model, folder, "cuda", dtype))
    bound = BOUNDS[dtype] * (2 if model is GEMMA else 1)  # which rounds more: a CPU's bfloat16 is at 0.046
    assert_near(found, vectors(make(cpu_runner, model, folder, "cpu", "float32")), bound)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_classifiers(dtype: str, tmp_path: Path) -> None:
    found = vectors(make(cuda_runner, ROBERTA, tmp_path, "cuda", dtype))
    assert_near(found, vectors(make(cpu_runner, ROBERTA, tmp_path, "cpu", "float32")), BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", ["lasttoken", "mean_tokens"])
def test_decoders(kind: str, dtype: str, tmp_path: Path) -> None:
    """Whole prompts, and in three pieces."""
    folder = pooled_by(tmp_path, kind)
    expected = vectors(make(cpu_runner, TINY, folder, "cpu", "float32"))
    runner = make(cuda_runner, TINY, folder, "cuda", dtype)
    assert runner.facts.pooling is not None
    for pieces in (1, 3):
        assert_near(vectors(runner, pieces), expected, BOUNDS[dtype])


def test_labels_and_hidden_states_beside_text() -> None:
    """Beside rows that generate, in the same steps; the CPU's are in float32."""
    runner = make_generator(enable_return_hidden_states=True)
    tokens = {slot: prompt(slot, 30 + 7 * slot) for slot in range(4)}
    asked: dict[int, dict[str, Any]] = {1: {"pool": [5, 77]}, 2: {"hidden": True}}

    def steps() -> list[StepPlan]:
        new = [new_row(slot, tokens[slot], **asked.get(slot, {})) for slot in tokens]
        rows = [(slot, 0, len(tokens[slot]), POOL if slot == 1 else SAMPLE) for slot in tokens]
        later = [(slot, len(tokens[slot]), 1, SAMPLE) for slot in (0, 2, 3)]
        return [plan(0, rows, new), plan(1, later)]

    first, second = (runner.execute(step) for step in steps())
    config = Config(
        device="cpu",
        dtype="float32",
        load_format="dummy",
        max_running_requests=24,
        context_length=640,
        enable_return_hidden_states=True,
        kv_cache_bytes=256 << 20,
    )
    own = cpu_runner(config, ModelSource("dummy", Path("."), (), TINY, {}), 0, 1, "", lambda progress: None)
    host = own.execute(steps()[0])
    labels, expected = (np.frombuffer(result.vectors[0], np.float32) for result in (first, host))
    np.testing.assert_allclose(labels, expected, atol=0.1)
    (states,), (wanted,) = first.hidden, host.hidden
    found, expected = (np.frombuffer(data, np.float32).reshape(44, -1) for data in (states, wanted))
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() < 0.05
    assert len(second.hidden) == 1
    assert len(np.frombuffer(second.tokens, np.int32)) == 3
    assert len(np.frombuffer(second.hidden[0], np.float32)) == TINY["hidden_size"]
