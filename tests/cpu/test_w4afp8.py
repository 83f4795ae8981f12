"""Mixtures in W4AFP8: experts in 4 bits, the rest in fp8 with blocks, against the matrices that they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Eager, random_prompts, rounded
from quantized import check, pair
from torch import Tensor

from sgla.config import Config
from sgla.dist import Shard
from sgla.errors import ConfigError
from sgla.loading.load import load_model
from sgla.observe.machine import detect
from sgla.quant.methods import method_of
from sgla.resolve import resolve

SAID = {"quant_method": "w4afp8", "activation_scheme": "dynamic", "group_size": 128, "ignored_layers": []}
SHAPE = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
}


def in_four_bits(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of an expert's random matrix like ``w``, by suffix, and what they mean."""
    n, k = w.shape
    q = torch.randint(-8, 8, (n, k))
    scale = (torch.rand(n, k // 128) * 0.02 + 0.01).half().float()
    pairs = (q[:, 0::2] & 15 | (q[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    parts = {"weight": pairs, "weight_scale_inv": scale, "input_scale": torch.ones(1)}
    return parts, q * scale.repeat_interleave(128, 1)


def test_an_expert_means_its_matrix() -> None:
    method = method_of({"quantization_config": SAID})
    assert method is not None
    experts: Any = method._of("model.layers.0.mlp.experts.3.up_proj")  # type: ignore[attr-defined]
    check(experts, *in_four_bits(torch.zeros(96, 256)))
    assert method.kept("model.layers.0.mlp.experts.3.up_proj", "cuda") == "int4g128"
    assert method.kept("model.layers.0.mlp.shared_experts.up_proj", "cuda") == "fp8g128"
    assert method.kept("model.layers.0.self_attn.q_proj", "cuda") == "fp8g128"


@torch.no_grad()
def test_a_mixture_equals_what_it_means(tmp_path: Path) -> None:
    def of(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if ".experts." in name:
            return in_four_bits(tensor)
        parts, dense = rounded(tensor, "block of 128")
        return {f"weight{suffix}": part for suffix, part in parts.items()}, dense

    packed, plain = pair(tmp_path, SAID, of, model_type="qwen3_moe", **SHAPE)
    resolved = resolve(Config(device="cpu"), detect(), packed.config)
    assert resolved.config.quantization == "checkpoint"
    assert any("experts are not rounded" in note for note in resolved.notes)
    model, prompts = load_model(packed, quantization="checkpoint"), random_prompts([9, 17])
    assert model.blocks[0].mlp.gate_up.kind == "q4_0"  # type: ignore[attr-defined]
    expected = Eager(load_model(plain)).prompt_logprobs(prompts)
    torch.testing.assert_close(Eager(model).prompt_logprobs(prompts), expected, rtol=1e-3, atol=1e-3)
    part = load_model(packed, quantization="checkpoint", shard=Shard(1, 2))
    assert part.blocks[0].mlp.down.k == 128  # type: ignore[attr-defined]


def test_what_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="moe_weight_format"):
        method_of({"quantization_config": SAID | {"moe_weight_format": "mxfp4"}})
    with pytest.raises(ConfigError, match="linear_weight_format"):
        method_of({"quantization_config": SAID | {"linear_weight_format": "bf16"}})
