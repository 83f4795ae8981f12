"""In the place of the package ``deep_ep`` where there is no GPU: what its documentation says of
``ElasticBuffer``, by gloo. What it says nothing of is as bad as it may be: tokens come in any order, and
weights of experts that are elsewhere are no numbers.

As there, a token is sent once to each rank that has one of its experts. Those of a rank lie behind each
other, as many on each; it is told the numbers that they have there, -1 in the place of all others.
``combine`` takes what a rank has made of each token that came, in that order, and gives the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

topk_idx_t = torch.int64
WIDE = {torch.bfloat16}  # what tokens may be of; a test that computes in another type adds that


@dataclass
class EPHandle:
    order: Tensor  # of the tokens that have come, as they came
    tokens: Tensor  # that were sent, rank by rank
    there: list[int]
    here: list[int]
    count: int


class ElasticBuffer:
    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        *,
        prefer_overlap_with_compute: bool = True,
    ) -> None:
        assert num_bytes is None
        assert not num_cpu_bytes
        assert not use_fp8_dispatch
        assert num_max_tokens_per_rank > 0
        assert 0 < num_topk <= 32
        self._group, self._most, self._hidden = group, num_max_tokens_per_rank, hidden
        self._top_k, self._mixed = num_topk, torch.Generator().manual_seed(group.rank())

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, EPHandle, Any]:
        assert topk_idx is not None
        assert topk_weights is not None
        assert num_experts is not None
        ranks, rank = self._group.size(), self._group.rank()
        assert x.is_contiguous()
        assert topk_idx.is_contiguous()
        assert topk_weights.is_contiguous()
        assert x.dtype in WIDE
        assert (topk_idx.dtype, topk_weights.dtype) == (topk_idx_t, torch.float32)
        assert x.shape[1] == self._hidden
        assert x.shape[1] * x.element_size() % 16 == 0
        assert topk_idx.shape == topk_weights.shape == (len(x), self._top_k)
        assert 0 < len(x) <= self._most
        assert num_experts % ranks == 0
        each = num_experts // ranks
        sent = [((topk_idx // each == to) & (topk_idx >= 0)).any(1).nonzero()[:, 0] for to in range(ranks)]
        tokens, there = torch.cat(sent), [len(found) for found in sent]
        here = torch.empty(ranks, dtype=torch.int64)
        dist.all_to_all_single(here, torch.tensor(there), group=self._group)
        found = []
        for part in (x, topk_idx, topk_weights):
            received = part.new_empty(int(here.sum()), part.shape[1])
            dist.all_to_all_single(received, part[tokens], here.tolist(), there, self._group)
            found.append(received)
        order = torch.randperm(len(found[0]), generator=self._mixed)
        came, ids, weights = (part[order] for part in found)
        ids = torch.where((ids >= 0) & (ids // each == rank), ids % each, -1)
        weights = weights.masked_fill(ids < 0, torch.nan)
        return came, ids, weights, EPHandle(order, tokens, there, here.tolist(), len(x)), None

    def combine(
        self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Any]:
        assert x.is_contiguous()
        assert x.dtype in WIDE
        assert len(x) == len(handle.order)
        assert topk_weights is None
        made = torch.empty_like(x)
        made[handle.order] = x
        returned = x.new_empty(len(handle.tokens), x.shape[1])
        dist.all_to_all_single(returned, made, handle.there, handle.here, self._group)
        total = torch.zeros(handle.count, x.shape[1])
        total.index_add_(0, handle.tokens, returned.float())
        return total.to(x.dtype), None, None
