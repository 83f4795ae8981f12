"""Mixtures of experts on the GPU against the torch oracle in float32, and a whole model through the runner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu_runner import agreement, generate, prompt

from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.kernels import mixture, ops
from sgla.quant import pack

pytest.importorskip("triton")
BF16 = torch.bfloat16
TINY: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "bench/models/qwen3-30b-a3b/config.json").read_text()
) | {"num_hidden_layers": 2, "vocab_size": 5000}


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def experts() -> Any:
    """Router, gate_up and down of 32 experts in the shapes of Qwen3-30B-A3B."""
    shapes = [(32, 2048), (32 * 2 * 768, 2048), (32 * 2048, 768)]
    return [torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5 for n, k in shapes]


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 17, 100, 256, 1000])
def test_mixture_equals_the_oracle(experts: Any, tokens: int, kind: Any) -> None:
    router, gate_up, down = pack(experts[0], "bf16"), pack(experts[1], kind), pack(experts[2], kind)
    x, norm = torch.randn(tokens, 2048, dtype=BF16, device="cuda"), torch.rand(2048, device="cuda") + 0.5
    result = mixture.run(x, (norm, 1e-6), router, gate_up, down, 4, True, "silu")
    recorder, ops.recorder = ops.recorder, None
    try:
        normed = ops.rms_norm(x, norm, 1e-6)  # rounded, or near ties route otherwise
        expected = ops.moe(normed.float(), router, gate_up, down, 4, True, "silu")
    finally:
        ops.recorder = recorder
    bound = 0.01 if kind == "bf16" else 0.06  # e4m3 has 3 bits of mantissa
    assert relative(result.force(), expected) < bound
    residual = torch.randn_like(x)
    total = residual.clone()
    normed = result.add_norm(total, norm, 1e-6)
    assert relative(total, residual.float() + expected) < bound
    assert relative(normed, ops.rms_norm(total.float(), norm, 1e-6)) < 0.01
    result.add(residual)
    assert torch.equal(residual, total)


def make(quantization: str | None) -> Any:
    from sgla.worker.cuda import CudaRunner

    config = Config(
        device="cuda", load_format="dummy", max_running_requests=24, step_tokens=1024, kv_cache_bytes=256 << 20,
        context_length=640, quantization=quantization,
    )  # fmt: skip
    return CudaRunner(config, ModelSource("dummy", Path("."), (), TINY, {}), 0, 1, "", lambda progress: None)


def test_batching_does_not_change_the_tokens() -> None:
    recorder = ops.recorder
    try:
        runner = make(None)
        prompts = {slot: prompt(slot, 20 + 13 * slot) for slot in range(20)}
        together = generate(runner, prompts, 12, True)
        assert agreement(together, generate(runner, prompts, 12, False)) >= 0.5
        assert len({tuple(tokens) for tokens in together.values()}) == 20
    finally:
        ops.recorder = recorder
        torch.cuda.empty_cache()
