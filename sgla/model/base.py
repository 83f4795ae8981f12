"""What every causal language model offers to the worker, and what decoders have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from sgla.hub.source import ModelSource
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.expert_counts import ExpertCounts
from sgla.kernels.ops import Layer
from sgla.layers.attention import HeadNorms, LayerAttention, SelfAttention
from sgla.layers.build import Build, Moves
from sgla.layers.mlp import GatedMLP, PlainMLP
from sgla.layers.moe import MoE, SharedExpert
from sgla.layers.norm import LayerNorm, Norm, RMSNorm
from sgla.layers.rope import rope_table
from sgla.layers.spec import RopeSpec
from sgla.layers.stage import Arriving, Leaving
from sgla.layers.vocab import LMHead, PositionEmbedding, VocabEmbedding
from sgla.model.spec import ModelSpec
from sgla.model.state import LayerState, state_of

JOINED = 1024  # experts, at most, with a shared one that is one of them: their numbers are 10 bits in kernels
EACH = 9  # of a token, at most, where it is several: kernels sort as many pairs for 256 tokens


class Refills(Protocol):
    """Brings weights to where those of a model are."""

    def load(self, source: ModelSource, on_progress: Any = None, sound: bool = False) -> None:
        """All that are in files. ``sound``: they must be finite. Raises WeightError."""

    def part(self, source: ModelSource, prefixes: Sequence[str]) -> None:
        """Those whose names begin so, in place. Raises WeightError."""

    def look(self, source: ModelSource) -> None:
        """Whether they fit and are finite. Raises WeightError."""

    def scramble(self, source: ModelSource) -> None:
        """Random numbers in place of all of ``source``."""

    def take(self, tensors: Mapping[str, Tensor], look: bool = False) -> None:
        """Some, by their names in files, or only ``look`` whether they fit. Raises WeightError; then nothing
        has changed."""

    def shape(self, raw: str) -> tuple[int, ...] | None:
        """Of the tensor that files call so. None: it is not here, or cannot be told."""

    def show(self, raw: str, rows: range) -> Tensor:
        """Rows of a tensor with a ``shape``, as the model computes with them: float32 on the CPU, NaN where
        other ranks have them."""


class CausalLM(ABC):
    """Layers declare their checkpoint tensors in ``build`` while the model is constructed.

    ``positions`` is the largest number of tokens in a sequence. ``ignored`` names (prefixes of) tensors that
    checkpoints of this architecture may hold and the model does not need.
    """

    ignored: tuple[str, ...] = ()
    unrecorded: ClassVar[str] = ""  # why its forward pass is not made of ops, which can be recorded
    embed: VocabEmbedding | Arriving
    lm_head: LMHead  # of the last stage
    tied: VocabEmbedding | None = None  # the embedding that this is
    blocks: list[Block]
    cache_scales: list[tuple[float, float]] | None = None  # of k and v of each layer, if the file has them
    declared: Refills | None = None  # what brings other weights; None: nothing does
    counts: Mapping[str, ExpertCounts] = MappingProxyType({})  # of mixtures, by name
    mixtures: Mapping[int, Moves] = MappingProxyType({})  # those whose experts may move, by layer

    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        self.spec, self.shard, self.positions = spec, build.shard, positions
        self.counts, self.mixtures = build.counts, build.mixtures

    @property
    def width(self) -> int:
        """Values of what ``forward`` gives of a token."""
        return self.spec.hidden

    @abstractmethod
    def forward(self, batch: ForwardBatch, kv: list[Layer], rows: Tensor | None = None) -> Tensor:
        """Final hidden states ``[S, d]`` of the batch's tokens ``rows`` int32[S], or ``[T, d]`` of all; what
        a stage hands on, of all. The KV of all is written to ``kv``, one entry a layer."""

    def logits(self, hidden: Tensor) -> Tensor:
        """``[S, d]`` -> float32 ``[S, vocab]``, the same on every rank."""
        return self.lm_head(hidden)

    def logits_part(self, hidden: Tensor) -> Tensor:
        """The columns ``lm_head.own`` of ``logits``, which this rank computes alone."""
        return self.lm_head.part(hidden)

    def seat(self, slots: int, dtype: torch.dtype) -> None:  # noqa: B027  (most do nothing)
        """Make the tables of what requests hear, where layers attend to it."""

    def hear(self, slot: int, heard: Tensor) -> None:  # noqa: B027
        """``heard`` ``[spec.heard, d]``, of the type of activations: what the request in this slot hears."""

    def state(self) -> list[LayerState]:
        """Of each layer."""
        return state_of(self.spec, self.shard.size, self.shard.rank)


class Block(Protocol):
    """One layer. The residual stream ``h`` and the pending update ``x`` travel apart, so that add and norm
    are one op. The last layer goes on with ``rows`` alone once every token has left its KV. ``kv``: what the
    layer keeps, a KVLayer or a StateLayer."""

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: Any, rows: Tensor | None
    ) -> tuple[Tensor, Tensor | None]: ...


def scaled(x: Tensor, by: float) -> Tensor:
    """What joins the residual stream (``ModelSpec.residual_scale``)."""
    return x if by == 1.0 else x * by


def elsewhere(spec: ModelSpec) -> Iterator[str]:
    """Prefixes of tensors that other stages have, or nobody: those of ``spec.predictors``."""
    for layer in range(spec.layers + spec.predictors):
        if layer not in spec.held:
            yield f"model.layers.{layer}."
    if not (spec.first or (spec.last and spec.tied)):
        yield "model.embed_tokens."
    if not spec.first:
        yield "model.embed_positions."
    if not spec.last:
        yield from ("model.norm.", "lm_head.")


class Decoder(CausalLM):
    """Embedding, blocks, norm, output layer; or a stage of these.
    A family says what its ``block`` is made of; the parts come as the ``spec`` has them."""

    mixture: ClassVar[type[MoE]] = MoE
    unused_positions: ClassVar[int] = 0  # vectors that a checkpoint has before the first position's
    plain_names: ClassVar[tuple[str, str]] = ("up_proj", "down_proj")  # of MLPs without a gate

    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        super().__init__(spec, build, positions)
        self.ignored = (*self.ignored, *elsewhere(spec))
        self._angles: dict[tuple[RopeSpec | None, int], Tensor] = {}
        self.embed = self.embedding(build) if spec.first else Arriving(build, spec.hidden)
        self.position_embed: PositionEmbedding | None = None
        if spec.learned and spec.first:
            name = "model.embed_positions"
            self.position_embed = PositionEmbedding(
                build, name, spec.learned, spec.hidden, self.unused_positions
            )
        self.blocks: list[Block] = [self.block(build, f"model.layers.{i}", i) for i in spec.held]
        self.norm: Norm | Leaving = self.norm_of(build, "model.norm") if spec.last else Leaving(build)
        if spec.last:
            self.lm_head = self._head(build)

    def embedding(self, build: Build) -> VocabEmbedding:
        """Of tokens, declared to ``build``."""
        spec = self.spec
        return VocabEmbedding(build, "model.embed_tokens", spec.vocab, spec.hidden, spec.embedding_scale)

    def _head(self, build: Build) -> LMHead:
        spec = self.spec
        if spec.tied:
            self.tied = self.embed if isinstance(self.embed, VocabEmbedding) else self.embedding(build)
        return LMHead(
            build,
            "lm_head",
            spec.vocab,
            spec.hidden,
            self.tied,
            spec.final_softcap,
            spec.logit_scale,
            spec.head_bias,
        )

    @abstractmethod
    def block(self, build: Build, name: str, index: int) -> Block: ...

    def norm_of(self, build: Build, name: str) -> Norm:
        spec = self.spec
        if spec.norm == "layer":
            return LayerNorm(build, name, spec.hidden, spec.eps, spec.norm_offset, spec.norm_bias)
        return RMSNorm(build, name, spec.hidden, spec.eps, spec.norm_offset)

    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        return self.self_attention(build, name, index, SelfAttention)

    def self_attention(self, build: Build, name: str, index: int, kind: type[SelfAttention]) -> SelfAttention:
        spec, layer = self.spec, self.spec.attention[index]
        return kind(
            build,
            name,
            spec.hidden,
            layer,
            self.angles(layer.rope, layer.head_dim),
            norms=HeadNorms(spec.qk_norm, spec.eps, spec.norm_offset, spec.late_norm),
            qkv_bias=spec.qkv_bias,
            out_bias=spec.out_bias,
            growth=None if layer.growth is None else self._growths(*layer.growth),
            interleaved=spec.interleaved,
        )

    def mlp(self, build: Build, name: str, index: int) -> GatedMLP | PlainMLP | MoE:
        spec, moe = self.spec, self.spec.moe
        if not spec.gated:
            return PlainMLP(
                build, name, spec.hidden, spec.intermediate, spec.activation, spec.mlp_bias, self.plain_names
            )
        assert spec.activation == "silu" or spec.activation == "gelu_tanh"  # of those with a gate
        if moe is None or index not in moe.layers:
            return GatedMLP(build, name, spec.hidden, spec.intermediate, spec.activation, spec.mlp_bias)
        shared, routing = None, moe.routing
        if self._joins(build, name):
            parts = moe.shared // moe.intermediate
            routing = replace(routing, shared="gated" if moe.shared_gate else "always", parts=parts)
        elif moe.shared:
            mlp = GatedMLP(
                build, f"{name}.shared_experts", spec.hidden, moe.shared, spec.activation, spec.mlp_bias
            )
            shared = SharedExpert(build, name, spec.hidden, mlp, moe.shared_gate)
        return self.mixture(
            build,
            name,
            hidden=spec.hidden,
            intermediate=moe.intermediate,
            experts=moe.experts,
            routing=routing,
            activation=moe.clamped or spec.activation,
            bias=moe.bias,
            correction=moe.correction,
            crossed=moe.crossed,
            halves=moe.halves,
            shared=shared,
        )

    def _joins(self, build: Build, name: str) -> bool:
        """Whether the shared expert of a mixture becomes one of the others, or several."""
        spec, moe = self.spec, self.spec.moe
        if (
            moe is None
            or not moe.shared
            or moe.shared % moe.intermediate
            or build.shard.of_mlps.whole_experts
        ):
            return False
        parts = moe.shared // moe.intermediate
        if moe.experts + parts > JOINED or (parts > 1 and moe.routing.top_k + parts > EACH):
            return False
        if moe.crossed or moe.bias or moe.clamped or spec.mlp_bias:
            return False
        return build.joins(f"{name}.experts.0.gate_proj", f"{name}.shared_experts.gate_proj")

    def forward(self, batch: ForwardBatch, kv: list[Layer], rows: Tensor | None = None) -> Tensor:
        x = self.embedded(batch)
        if self.position_embed is not None:
            x = x + self.position_embed(batch.positions).to(x.dtype)
        h: Tensor | None = None
        for i, (block, layer) in enumerate(zip(self.blocks, kv)):
            if batch.media is not None and 0 < i <= len(batch.media.deep):
                x = x.index_add(0, batch.media.tokens, batch.media.deep[i - 1].to(x.dtype))
            x, h = block(x, h, batch, layer, rows if layer is kv[-1] else None)
        return self.norm.add(x, h)[0]

    def embedded(self, batch: ForwardBatch) -> Tensor:
        """``[T, d]``: features in place of the embeddings of tokens that stand for parts of pictures."""
        media = batch.media
        if media is None:
            return self.embed(batch.ids)
        x = self.embed(batch.ids.index_fill(0, media.tokens, 0))  # their ids may lie beyond the vocabulary
        return x.index_copy(0, media.tokens, media.values.to(x.dtype))

    def _growths(self, beta: float, length: int, more: int) -> Tensor:
        """float32 ``[positions]``: by what queries are multiplied."""
        before = torch.arange(self.positions) + more
        return 1 + beta * torch.log(1 + torch.floor(before / length))

    def angles(self, rope: RopeSpec | None, dims: int) -> Tensor:
        """``cos_sin`` of a layer; without ``rope`` ``dims`` stay as they are."""
        if rope is not None:
            dims = rope.dim
        if (rope, dims) not in self._angles:
            ones = torch.ones(self.positions, dims // 2)
            table = torch.cat([ones, torch.zeros_like(ones)], dim=1)
            if rope is not None:
                table = rope_table(rope.theta, rope.dim, rope.kind, rope.scaling, self.positions)
            self._angles[rope, dims] = table
        return self._angles[rope, dims]
