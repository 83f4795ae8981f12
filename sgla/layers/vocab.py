"""Embedding and output layer. Every rank holds the whole embedding (a row look-up reads next to nothing, and
a split one would cost an all-reduce a step); the output layer is split over the vocabulary."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from sgla.dist import Shard
from sgla.kernels import ops
from sgla.kernels.lora import added, lora_embedding
from sgla.layers.build import Build, drawn, fill


class VocabEmbedding:
    """ids int32 ``[T]`` -> ``[T, d]``, times ``scale``."""

    def __init__(self, build: Build, name: str, vocab: int, hidden: int, scale: float = 1.0) -> None:
        self.weight = build.empty_vocab(vocab, hidden, name)
        self.scale = scale
        build.declare(
            f"{name}.weight",
            (vocab, hidden),
            lambda source: fill(self.weight, 0, source, range(vocab)),
            give=lambda wanted: drawn(self.weight, 0, wanted, (vocab, hidden), range(vocab)),
        )
        # Adapters are for what has no scale, on which implementations differ.
        self.stack, self.rows = None, None
        if scale == 1.0:
            self.stack, self.rows = build.table_stack(name, self.weight, vocab, range(vocab), embedding=True)

    @property
    def dtype(self) -> torch.dtype:
        """Of what it makes on a GPU."""
        return torch.float32 if self.weight.kind == "f32" else torch.bfloat16

    def __call__(self, ids: Tensor) -> Tensor:
        x = ops.embedding(ids, self.weight, self.scale)
        if self.stack is None or self.rows is None or not self.rows.active:
            return x
        return (x + lora_embedding(ids, self.stack, self.rows)).to(x.dtype)


class PositionEmbedding:
    """Positions int32 ``[T]`` -> ``[T, d]``. ``unused``: rows of a checkpoint before the first one's."""

    def __init__(self, build: Build, name: str, positions: int, hidden: int, unused: int = 0) -> None:
        self.weight, own = build.empty_plain(positions, hidden), range(unused, unused + positions)
        build.declare(
            f"{name}.weight",
            (unused + positions, hidden),
            lambda source: fill(self.weight, 0, source, own),
            give=None if unused else lambda wanted: drawn(self.weight, 0, wanted, (positions, hidden), own),
        )

    def __call__(self, positions: Tensor) -> Tensor:
        return ops.embedding(positions, self.weight)


class LMHead:
    """Hidden states ``[S, d]`` -> logits float32 ``[S, vocab]`` on every rank.

    ``tied`` is the embedding whose rows it uses instead of its own. The logits are multiplied by ``scale``,
    then ``softcap > 0`` bounds them by tanh. ``bias``: is added before.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        vocab: int,
        hidden: int,
        tied: VocabEmbedding | None = None,
        softcap: float = 0.0,
        scale: float = 1.0,
        bias: bool = False,
    ) -> None:
        self.shard, self.vocab, self.softcap, self.scale = build.shard, vocab, softcap, scale
        self.own = own = build.shard.range(vocab)
        if tied is not None:
            self.weight = tied.weight.rows(own.start, own.stop)
        else:
            self.weight = build.empty_vocab(len(own), hidden, name)
            build.declare(
                f"{name}.weight",
                (vocab, hidden),
                lambda source: fill(self.weight, 0, source, own),
                give=lambda wanted: drawn(self.weight, 0, wanted, (vocab, hidden), own),
            )

        self.bias = build.vector(f"{name}.bias", vocab, own) if bias else None
        self.stack, self.rows = build.table_stack(name, self.weight, vocab, own, embedding=False)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.part(hidden)
        return logits if self.shard.size == 1 else ops.call(self.shard.all_gather, logits, self.vocab)

    def only(self, ids: Tensor) -> LMHead:
        """A layer of its own, for those of the tokens ``ids`` int64[n], which rise, that this rank has; no
        other rank is asked."""
        made, rows = copy(self), ids[(ids >= self.own.start) & (ids < self.own.stop)] - self.own.start
        made.weight, made.shard, made.stack = self.weight.pick(rows), Shard(), None
        made.bias = None if self.bias is None else self.bias[rows.to(self.bias.device)]
        made.own, made.vocab = range(len(rows)), len(rows)
        return made

    def stored_as(self, kind: str) -> LMHead:
        """The same layer with its weight in another storage."""
        made = copy(self)
        made.weight = self.weight.stored_as(kind)
        return made

    def part(self, hidden: Tensor) -> Tensor:
        """The logits of this rank's part ``own`` of the vocabulary."""
        logits = ops.logits(hidden, self.weight, None, added(hidden, self.stack, self.rows))
        return logits if self.plain else ops.inplace(self._adjust, logits)

    @property
    def plain(self) -> bool:
        """Whether the product is the logits already."""
        return not self.softcap and self.scale == 1.0 and self.bias is None

    def _adjust(self, logits: Tensor) -> None:
        if self.bias is not None:
            logits.add_(self.bias)
        logits.mul_(self.scale)
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
