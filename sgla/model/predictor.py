"""Heads that guess tokens behind the next one from a model's hidden states."""

from __future__ import annotations

from copy import copy
from typing import Protocol

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear
from sgla.layers.vocab import LMHead
from sgla.model.base import Decoder
from sgla.model.family import PredictorNames
from sgla.model.spec import ModelSpec


class Head(Protocol):
    """``width``: values of a hidden state that it goes on with; ``target_width``: of what it reads of the
    target for a token, from which ``read`` makes such a state. ``out``: what makes its logits. ``ids``
    int64[*]: which tokens of the target these are of; None: of all ``vocab``."""

    width: int
    target_width: int
    vocab: int
    out: LMHead
    ids: Tensor | None

    def embed(self, ids: Tensor) -> Tensor:
        """ids int32 ``[T]`` -> ``[T, d]``."""

    def read(self, hidden: Tensor) -> Tensor:
        """``[T, target_width]`` -> ``[T, width]``."""

    def forward(
        self, tokens: Tensor, hidden: Tensor, batch: ForwardBatch, kv: list[KVLayer]
    ) -> tuple[Tensor, Tensor]:
        """Of each position ``hidden`` ``[T, width]`` and the embedding ``tokens`` of the token behind it ->
        its own hidden states, and what its logits are made of."""


class Predictor:
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): a layer like the model's own, on
    the norms of a token's embedding and of what the model has made of the token before, side by side through
    one projection. Embedding and output layer are the model's. ``layer``: its shape, as a model of one. As in
    SGLang's ``deepseek_nextn``, hidden states are those behind the last norm."""

    ids: Tensor | None = None

    def __init__(self, target: Decoder, build: Build, names: PredictorNames, layer: ModelSpec) -> None:
        spec, alike = target.spec, copy(target)
        alike.spec = layer
        self.width = self.target_width = spec.hidden
        self.vocab, self.hidden_first = spec.vocab, names.hidden_first
        self.token_norm = target.norm_of(build, names.token_norm)
        self.hidden_norm = target.norm_of(build, names.hidden_norm)
        self.join = MergedColumnLinear(
            build, 2 * spec.hidden, [(names.join, spec.hidden, range(spec.hidden))]
        )
        self.block = alike.block(build, names.block, 0)
        self.norm = target.norm_of(build, names.norm)
        self.embed, self.out = target.embed, target.lm_head

    def read(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(
        self, tokens: Tensor, hidden: Tensor, batch: ForwardBatch, kv: list[KVLayer]
    ) -> tuple[Tensor, Tensor]:
        both = self.token_norm(tokens), self.hidden_norm(hidden)
        x = self.join(ops.beside(*(both[::-1] if self.hidden_first else both)))
        x, h = self.block(x, None, batch, kv[0], None)
        made = self.norm.add(x, h)[0]
        return made, made
