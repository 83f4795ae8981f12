"""Hyper-connections (mHC, arXiv 2512.24880): the op and its body. On GPUs: ``kernels/triton/hyper.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from sgla.kernels.dispatch import op


@op
def stream_weights(
    x: Tensor, scale: Tensor, base: Tensor, streams: int, iterations: int, eps: float
) -> Tensor:
    """How a layer reads and writes n ``streams``, of x float32 ``[T, (2 + n) * n]``: how much of each it
    reads, how much each is given of what it makes, and, n times n, how much of the first goes over to the
    second. The last is doubly stochastic, by so many ``iterations`` (Sinkhorn-Knopp). scale float32[3], base
    float32 ``[(2 + n) * n]``."""
    n = streams
    scales = torch.cat([part.expand(count) for part, count in zip(scale.split(1), (n, n, n * n))])
    reads, writes, mixed = (x * scales + base).split([n, n, n * n], 1)
    mixed = mixed.unflatten(1, (n, n)).softmax(-1) + eps
    mixed = mixed / (mixed.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mixed = mixed / (mixed.sum(2, keepdim=True) + eps)
        mixed = mixed / (mixed.sum(1, keepdim=True) + eps)
    return torch.cat([reads.sigmoid() + eps, 2 * writes.sigmoid(), mixed.flatten(1)], 1)
