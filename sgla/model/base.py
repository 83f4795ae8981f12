"""What every causal language model offers to the worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from sgla.kernels.cuda.decode_step import DecodeStep
from sgla.kernels.ops import KVLayer
from sgla.layers.batch import ForwardBatch
from sgla.layers.build import Build
from sgla.layers.moe import ExpertNames, MoE
from sgla.layers.rope import rope_table
from sgla.layers.vocab import LMHead, VocabEmbedding
from sgla.model.spec import ModelSpec, RopeSpec
from sgla.model.state import LayerState, state_of


class CausalLM(ABC):
    """Layers declare their checkpoint tensors in ``build`` while the model is constructed.

    ``positions`` is the largest number of tokens in a sequence. ``ignored`` names (prefixes of) tensors that
    checkpoints of this architecture may hold and the model does not need.
    """

    ignored: ClassVar[tuple[str, ...]] = ()
    embed: VocabEmbedding
    lm_head: LMHead

    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        self.spec, self.shard, self.positions = spec, build.shard, positions

    @abstractmethod
    def forward(self, batch: ForwardBatch, kv: list[KVLayer], rows: Tensor | None = None) -> Tensor:
        """Final hidden states ``[S, d]`` of the batch's tokens ``rows`` int32[S], or ``[T, d]`` of all. The KV of all is written to
        ``kv``, one entry a layer."""

    def decode_step(self, kv: list[KVLayer]) -> DecodeStep | None:
        """The whole of a decode step of one row as one kernel, if there is one for this model and it pays."""
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        """``[S, d]`` -> float32 ``[S, vocab]``, the same on every rank."""
        return self.lm_head(hidden)

    def logits_part(self, hidden: Tensor) -> Tensor:
        """The columns ``lm_head.own`` of ``logits``, which this rank computes alone."""
        return self.lm_head.part(hidden)

    def state(self) -> list[LayerState]:
        """Of each layer."""
        return state_of(self.spec, self.shard.size, self.shard.rank)

    def rope(self, rope: RopeSpec) -> Tensor:
        return rope_table(rope.theta, rope.dim, rope.kind, rope.scaling, self.positions)


def mixture(build: Build, names: ExpertNames, spec: ModelSpec) -> MoE:
    """A layer's mixture of experts, in the shape of ``spec.moe``."""
    assert spec.moe is not None
    return MoE(
        build,
        names,
        hidden=spec.hidden,
        intermediate=spec.moe.intermediate,
        experts=spec.moe.experts,
        top_k=spec.moe.top_k,
        normalize=spec.moe.normalize,
        activation=spec.activation,
    )
