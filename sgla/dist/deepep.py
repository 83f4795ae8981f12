"""Tokens go to their experts' ranks, and sums come back, by the kernels of DeepEP 2
(https://github.com/deepseek-ai/DeepEP): by NVLink inside of a host and by RDMA between hosts. Nothing of it is
loaded before somebody asks for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels.rehearsal import under_way
from sgla.kernels.sent_moe import Sent


class Back(NamedTuple):
    """What DeepEP wants to know of tokens that it has brought, and how many of this rank it had to send."""

    handle: Any
    tokens: int


class DeepEP:
    """Between the ranks of ``group``, all of whose GPUs DeepEP reaches. Its numbers of experts are our slots,
    of which each rank has as many; what it gives as theirs is their place on the rank, or -1."""

    def __init__(self, size: int, group: dist.ProcessGroup | None = None) -> None:
        self._size, self._group = size, group
        self._buffer: Any = None
        self._ids = torch.int64  # as it was built to take numbers of experts

    def open(self, hidden: int, top_k: int, tokens: int) -> None:
        """Raises ConfigError where DeepEP is not there, is an older one, or cannot reach the other GPUs."""
        try:
            import deep_ep

            self._ids = deep_ep.topk_idx_t
            # Nothing is computed beside it, so it may have the multiprocessors that it gains by.
            self._buffer = deep_ep.ElasticBuffer(
                self._group or dist.group.WORLD,
                num_max_tokens_per_rank=tokens,
                hidden=hidden,
                num_topk=top_k,
                prefer_overlap_with_compute=False,
            )
        except Exception as error:  # its checks are assertions, its kernels' errors of many kinds
            raise ConfigError(
                f"--moe-a2a-backend deepep: {type(error).__name__}: {error}; DeepEP 2 is needed, built as its "
                "README says; or give alltoall",
                param="moe_a2a_backend",
            ) from error

    def dispatch(self, x: Tensor, slots: Tensor, weights: Tensor, width: int) -> Sent:
        if under_way():
            return Sent(x, slots, weights, None)
        tokens = len(x)
        if not tokens:  # one that goes nowhere, since it says nothing of none
            x, weights = x.new_zeros(1, x.shape[1]), weights.new_zeros(1, weights.shape[1])
            slots = slots.new_full((1, slots.shape[1]), -1)
        received, places, theirs, handle, _ = self._buffer.dispatch(
            x.contiguous(),
            topk_idx=slots.to(self._ids),
            topk_weights=weights.contiguous(),
            num_experts=self._size * width,
        )
        return Sent(received, places.long(), theirs, Back(handle, tokens))

    def combine(self, y: Tensor, sent: Sent) -> Tensor:
        if sent.back is None:
            return y
        combined: Tensor = self._buffer.combine(y.contiguous(), handle=sent.back.handle)[0]
        return combined[: sent.back.tokens]
