"""Whole models through the GPU's operations, in Triton's interpreter: what they hold back must come out as the oracle says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoints import SMALL, Eager, random_prompts
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from pathlib import Path

from sgla.hub.source import ModelSource
from sgla.kernels import gpu, ops
from sgla.model.load import load_model

MODELS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"model_type": "qwen3"},
    "Gemma3ForCausalLM": {"model_type": "gemma3_text", "sliding_window": 10, "query_pre_attn_scalar": 16},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}
SHAPE = SMALL | {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 1}


def attend(q: Tensor, kv: Any, batch: Any, scale: float, window: int, softcap: float) -> Tensor:
    kept, ops.recorder = ops.recorder, None
    try:
        return ops.attention(q, kv, batch, scale, window, softcap)
    finally:
        ops.recorder = kept


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """e4m3 products in float32, and no trace left of the installed operations."""

    def scaled_mm(a: Tensor, b: Tensor, by_row: Tensor, by_column: Tensor, bias: Any, **_: Any) -> Tensor:
        return (a.float() * by_row) @ (b.float() * by_column) + (0 if bias is None else bias)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    yield
    ops.recorder = None


def prepare(architecture: str, quantization: str | None) -> tuple[Eager, list[list[list[int]]]]:
    config = SHAPE | {"architectures": [architecture]} | MODELS[architecture]
    source = ModelSource("dummy", Path("dummy"), (), config, {})
    few, many = random_prompts([2]), random_prompts([1, 3])
    return Eager(load_model(source, quantization=quantization)), [few, many]


needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu has the same on the device"
)


@needs_interpreter
@pytest.mark.parametrize("architecture", MODELS)
def test_models_equal_the_oracle(architecture: str, exact: None) -> None:
    driver, batches = prepare(architecture, None)
    expected = [driver.prompt_logprobs(prompts) for prompts in batches]
    gpu.install(attend, mixtures="Moe" in architecture)
    for prompts, wanted in zip(batches, expected):
        torch.testing.assert_close(driver.prompt_logprobs(prompts), wanted, rtol=0, atol=1e-3)


@needs_interpreter
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_rounding_on_the_way_equals_rounding_apart(architecture: str, exact: None) -> None:
    driver, batches = prepare(architecture, "fp8")
    plain = [driver.prompt_logprobs(prompts) for prompts in batches]
    gpu.install(attend)
    apart = [driver.prompt_logprobs(prompts) for prompts in batches]
    gpu.install(attend, e4m3=True, mixtures="Moe" in architecture)
    for prompts, wanted, exactly in zip(batches, apart, plain):
        found = driver.prompt_logprobs(prompts)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)
        assert 1e-3 < (found - exactly).abs().max() < 1.5  # it was rounded
