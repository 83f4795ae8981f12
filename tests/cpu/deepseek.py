"""DeepSeek-MoE (arXiv 2401.06066), the reference of its family: transformers has no such class, and the code
of its checkpoints is theirs. Attention is Llama's. ``register`` makes transformers know it."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


@strict
class DeepseekConfig(LlamaConfig):  # type: ignore[misc]
    model_type = "deepseek"
    vocab_size: int = 102400
    hidden_size: int = 4096
    intermediate_size: int = 11008
    moe_intermediate_size: int = 1407
    num_hidden_layers: int = 30
    num_attention_heads: int = 32
    n_shared_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_layer_freq: int = 1
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return made


class Mixture(nn.Module):
    """Every token's shared experts, and those with its highest shares of a softmax over all."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = nn.Linear(hidden, config.n_routed_experts, bias=False)
        self.experts = nn.ModuleList(Mlp(hidden, inner) for _ in range(config.n_routed_experts))
        shared = config.n_shared_experts
        self.shared_experts = Mlp(hidden, inner * shared) if shared else None
        self.top_k, self.normalize = config.num_experts_per_tok, config.norm_topk_prob

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(self.top_k, -1)
        if self.normalize and self.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        shares = torch.zeros(*x.shape[:-1], len(self.experts)).scatter(-1, chosen, weights)
        made = sum(shares[..., e, None] * expert(x) for e, expert in enumerate(self.experts))
        return made if self.shared_experts is None else made + self.shared_experts(x)


class DeepseekForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = DeepseekConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            behind = index >= config.first_k_dense_replace and index % config.moe_layer_freq == 0
            if config.n_routed_experts is not None and behind:
                layer.mlp = Mixture(config)


def register() -> None:
    AutoConfig.register("deepseek", DeepseekConfig, exist_ok=True)
    AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM, exist_ok=True)
    sys.modules["transformers"].DeepseekForCausalLM = DeepseekForCausalLM  # type: ignore[attr-defined]
