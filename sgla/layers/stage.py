"""The ends of a stage of a pipeline: what stands there in the place of the embedding and of the last norm."""

from __future__ import annotations

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.layers.build import Build


class Arriving:
    """ids int32 ``[T]`` -> ``[T, d]``: the residual stream that the stage before hands on."""

    def __init__(self, build: Build, hidden: int) -> None:
        assert build.shard.pipe is not None
        self._receive, self._hidden = build.shard.pipe.receive, hidden
        # On a CPU the residual stream is float32 whatever the weights are.
        self.dtype = torch.bfloat16 if build.plain == "bf16" and build.device != "cpu" else torch.float32

    def __call__(self, ids: Tensor) -> Tensor:
        return ops.arriving(self._receive, ids, self._hidden, self.dtype)


class Leaving:
    """Hands the residual stream on to the stage behind."""

    def __init__(self, build: Build) -> None:
        assert build.shard.pipe is not None
        self._send = build.shard.pipe.send

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As that of ``RMSNorm``, without a norm."""
        h = ops.inplace(self._send, x if residual is None else ops.add(residual, x))
        return h, h
