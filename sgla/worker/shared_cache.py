"""Latent attention over a KV cache whose tokens ranks share out (``--dcp``): each has one in so many places
of a page. The queries of all heads go to all ranks, each attends to its own tokens, and the owner of a head
merges what they have seen by the logarithms of their sums."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sgla.dist.shard import Shard
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch, out_loc_of
from sgla.kernels.dispatch import Op, using
from sgla.kernels.ops import KVLayer
from sgla.worker.features import threads
from sgla.worker.forward import Forward

R = TypeVar("R")


def sharing(forward: Forward, shard: Shard, count: int) -> Forward:
    """``forward`` with so many threads, where the ranks of ``shard`` share out the cache."""

    def run(batch: ForwardBatch) -> Tensor:
        with threads(count), using(_Sharing(shard)):
            return forward(batch)

    return run


class _Sharing:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def run(self, op: Op[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        result: Any
        if op is ops.latent_queries:
            result = store_own(self._shard, *args, **kwargs)
        elif op is ops.attention:
            result = attend(self._shard, *args, **kwargs)
        else:
            result = op.body(*args, **kwargs)
        return result


def store_own(
    shard: Shard,
    q: Tensor,
    latent: Tensor,
    k_up: Tensor,
    norm: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    kv: KVLayer,
    out_loc: Tensor,
) -> Tensor:
    """``ops.latent_queries``, which stores this rank's tokens alone."""
    tokens, width = len(latent), kv.k.shape[3]
    every = KVLayer(latent.new_empty(1, tokens, 1, width), latent.new_empty(1, tokens, 1, 0))
    order = torch.arange(tokens, device=latent.device)
    q = ops.latent_queries.body(q, latent, k_up, norm, eps, positions, cos_sin, every, order)
    places = out_loc_of(out_loc, kv.group).long()
    own = (places % shard.size == shard.rank).nonzero()[:, 0]
    places = places[own] // shard.size
    kv.put_keys(every.k[0, own], (places // kv.k.shape[1], places % kv.k.shape[1]))
    return q


def attend(shard: Shard, q: Tensor, kv: KVLayer, batch: ForwardBatch, scale: float) -> Tensor:
    """``ops.attention`` of latents: q ``[T, Hq * hd]`` of this rank's heads -> ``[T, Hq * vd]``."""
    every = [torch.empty_like(q) for _ in range(shard.size)]
    dist.all_gather(every, q.contiguous(), shard.group)
    seen = torch.stack([see(shard, part, kv, batch, scale) for part in every])  # [ranks, T, Hq, vd + 1]
    got = torch.empty_like(seen)
    dist.all_to_all_single(got, seen, group=shard.group)
    out, weights = got[..., :-1], got[..., -1:].softmax(0)
    return (out * weights).sum(0).flatten(1).to(q.dtype)


def see(shard: Shard, q: Tensor, kv: KVLayer, batch: ForwardBatch, scale: float) -> Tensor:
    """What heads see of this rank's tokens, and the logarithm of the sum of their weights: float32 ``[T, Hq,
    vd + 1]``."""
    own, vd = kv.k.shape[1], kv.v_dim
    heads = q.unflatten(1, (-1, kv.k.shape[3])).float()
    made = heads.new_empty(*heads.shape[:2], vd + 1)
    starts, pages = batch.q_start.tolist(), batch.pages(kv.group)
    for row, length in enumerate(batch.kv_len[: batch.rows].tolist()):
        begin, end = starts[row : row + 2]
        count = -(-length // (own * shard.size))
        keys = kv.keys(pages[int(batch.slots[row]), :count].long()).flatten(0, 2)
        place = torch.arange(len(keys), device=q.device) * shard.size + shard.rank
        position = torch.arange(length - (end - begin), length, device=q.device)
        keys = keys.masked_fill((place >= length)[:, None], 0.0)  # what is not the row's may be no number
        scores = torch.einsum("thd,nd->thn", heads[begin:end], keys) * scale
        scores.masked_fill_((place > position[:, None])[:, None], float("-inf"))
        sums = scores.logsumexp(-1, keepdim=True)
        shares = (scores - sums.masked_fill(sums.isinf(), 0.0)).exp()
        made[begin:end] = torch.cat([shares @ keys[:, :vd], sums], -1)
    return made
