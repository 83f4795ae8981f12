"""Mixtral (arXiv 2401.04088; HF ``MixtralForCausalLM``): Llama's decoder with a mixture of experts in every layer."""

from __future__ import annotations

from sgla.layers.build import Build
from sgla.layers.mlp import GatedMLP
from sgla.layers.moe import ExpertNames, MoE
from sgla.model.base import mixture
from sgla.model.llama import Llama
from sgla.model.spec import ModelSpec


class Mixtral(Llama):
    """The probabilities of a token's experts always add up to 1."""

    def _mlp(self, build: Build, name: str, spec: ModelSpec, index: int) -> GatedMLP | MoE:
        names = ExpertNames(f"{name}.block_sparse_moe", "w1", "w3", "w2", f"{name}.mlp")
        return mixture(build, names, spec)
