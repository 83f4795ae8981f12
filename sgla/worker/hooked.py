"""A look at what goes into a layer as an op, so that it is recorded with the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.layers.stage import Arriving
from sgla.model.base import Block, Decoder

Look = Callable[[Tensor], Tensor]


class Hooked:
    """A block whose input, a hidden state, goes through ``look`` first, an op that returns it:
    ``ops.copied``, or on a CPU ``ops.tap``."""

    def __init__(self, block: Block, look: Look) -> None:
        self._block, self._look = block, look

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: Any, rows: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x = self._look(x if h is None else ops.add(h, x))
        return self._block(x, None, batch, kv, rows)


def show(target: Decoder, layers: Sequence[int], looks: Sequence[Look]) -> None:
    """Have what goes into each of these ``layers`` go through one of the ``looks``. Where ``target`` is the
    last stage of a pipeline, those of other stages come beside the residual stream, which these hand on."""
    pipe, held = target.shard.pipe, target.spec.held
    order = sorted(range(len(layers)), key=layers.__getitem__)
    if pipe is not None:
        before, within = (sum(layer < end for layer in layers) for end in (held.start, held.stop))
        pipe.carry(before, 0 if pipe.last else within)
    for place in order:
        layer = layers[place]
        look = looks[place] if target.spec.last else None
        if layer in held:
            look = partial(ops.inplace, pipe.keep) if look is None and pipe is not None else look
            assert look is not None
            target.blocks[layer - held.start] = Hooked(target.blocks[layer - held.start], look)
        elif layer < held.start and look is not None:
            assert isinstance(target.embed, Arriving)
            target.embed.looks.append(look)
