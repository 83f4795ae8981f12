"""A family with latent attention, as a package outside might bring it: heads read one latent of each token,
which is their key and their value, and nothing is rotated."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.dispatch import op
from sgla.kernels.ops import KVLayer
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear, RowLinear
from sgla.model.llama import Llama


@op(like="q")
def keep_latent(q: Tensor, latent: Tensor, kv: KVLayer, out_loc: Tensor) -> Tensor:
    """q as it is, once the latent ``[T, r]`` is in the pages."""
    kv.put_keys(latent[:, None], ops.places(kv, out_loc))
    return q.clone()


class ToyAttention:
    """``[T, d] -> [T, Hq * r]``. Ranks split the heads; each has the whole latent."""

    def __init__(self, model: ToyLatent, build: Build, name: str, index: int) -> None:
        hidden, layer = model.spec.hidden, model.spec.attention[index]
        own, self.dim, self.scale = build.shard.range(layer.heads), layer.head_dim, layer.scale
        rows, width = range(own.start * self.dim, own.stop * self.dim), layer.heads * self.dim
        parts = [(f"{name}.q_proj", width, rows), (f"{name}.k_proj", self.dim, range(self.dim))]
        self.down = MergedColumnLinear(build, hidden, parts)
        self.out = RowLinear(build, f"{name}.o_proj", hidden, width, rows)

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        down = self.down(x)
        q = keep_latent(down[:, : -self.dim], down[:, -self.dim :], kv, batch.out_loc)
        return ops.attention(q, kv.latent(self.dim), batch, self.scale)


class ToyLatent(Llama):
    def attention(self, build: Build, name: str, index: int) -> ToyAttention:
        return ToyAttention(self, build, name, index)
