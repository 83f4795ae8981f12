"""Tensor-parallel ranks: who holds which part, and the collectives between them."""

from sgla.dist.shard import Shard, join

__all__ = ["Shard", "join"]
