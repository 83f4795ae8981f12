"""Latent attention on a GPU over a cache whose tokens ranks share out: see ``shared_cache.py``. What they
exchange is part of the graphs of steps."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sgla.attention import DeviceBatch
from sgla.dist.lockstep import PlannedLockstep
from sgla.kernels.gpu.ops import Attend
from sgla.kernels.ops import KVLayer, Part, Scoring
from sgla.kernels.triton import latent


class Shares:
    """An ``Attend``. Each of ``ranks`` has q of its own heads of the same tokens."""

    in_place = False

    def __init__(self, ranks: PlannedLockstep, attend: Attend) -> None:
        self.ranks, self._attend = ranks, attend

    def over(self, attend: Attend) -> Shares:
        """The same with another attention to a rank's own tokens."""
        return Shares(self.ranks, attend)

    def __call__(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring) -> Tensor:
        (tokens, width), ranks = q.shape, self.ranks
        every = ranks.gather(q).view(ranks.size, tokens, width).transpose(0, 1).reshape(tokens, -1)
        told = q.new_empty(tokens, every.shape[1] // kv.k.shape[3], 2)
        own = replace(kv, part=Part(ranks.size, ranks.rank, told))
        seen = self._attend(every, own, batch, scoring)
        sums = ranks.gather(told.flatten(1))
        return ranks.reduce_scatter(latent.share(seen, sums, ranks.size, ranks.rank), q)
