"""Qwen 3 with a mixture of experts (arXiv 2505.09388; HF ``Qwen3MoeForCausalLM``)."""

from __future__ import annotations

from sgla.layers.build import Build
from sgla.layers.mlp import GatedMLP
from sgla.layers.moe import ExpertNames, MoE
from sgla.model.base import mixture
from sgla.model.qwen import Qwen3
from sgla.model.spec import ModelSpec


class Qwen3MoE(Qwen3):
    """Qwen 3 whose MLPs are mixtures in the layers ``spec.moe`` names, without shared experts."""

    def _mlp(self, build: Build, name: str, spec: ModelSpec, index: int) -> GatedMLP | MoE:
        assert spec.moe is not None
        if index not in spec.moe.layers:
            return super()._mlp(build, name, spec, index)
        names = ExpertNames(f"{name}.mlp", "gate_proj", "up_proj", "down_proj", f"{name}.mlp")
        return mixture(build, names, spec)
