"""The ends of a stage of a pipeline: what stands there in the place of the embedding and of the last norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.layers.build import Build


class Arriving:
    """ids int32 ``[T]`` -> ``[T, d]``: the residual stream that the stage before hands on. Hidden states that
    come beside it go through ``looks``, each through one, an op that returns them."""

    def __init__(self, build: Build, hidden: int) -> None:
        assert build.shard.pipe is not None
        self._pipe, self._hidden = build.shard.pipe, hidden
        self.looks: list[Callable[[Tensor], Tensor]] = []
        # On a CPU the residual stream is float32 whatever the weights are.
        self.dtype = torch.bfloat16 if build.plain == "bf16" and build.device != "cpu" else torch.float32

    def __call__(self, ids: Tensor) -> Tensor:
        x = ops.arriving(self._pipe.receive, ids, self._hidden, self.dtype)
        for place, look in enumerate(self.looks):
            look(ops.arriving(partial(self._pipe.bring, place), ids, self._hidden, self.dtype))
        return x


class Leaving:
    """Hands the residual stream on to the stage behind."""

    def __init__(self, build: Build) -> None:
        assert build.shard.pipe is not None
        self._send = build.shard.pipe.send

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As that of ``RMSNorm``, without a norm."""
        h = ops.inplace(self._send, x if residual is None else ops.add(residual, x))
        return h, h
