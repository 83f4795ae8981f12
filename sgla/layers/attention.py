"""Self-attention over paged KV."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.ops import KVLayer
from sgla.layers.batch import ForwardBatch
from sgla.layers.build import Build
from sgla.layers.linear import QKVLinear, RowLinear, split_heads
from sgla.layers.norm import RMSNorm


class SelfAttention:
    """Grouped-query attention with rotary positions: ``[T, d] -> [T, Hq * hd]``, which ``out`` brings back to the width; KV is
    written to and read from the pages.

    ``cos_sin`` float32 ``[positions, rot]``. ``qk_norm``: per-head RMSNorm of q and k before the rotation, with the
    weights' offset ``norm_offset``. ``window`` 0 is full attention.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        cos_sin: Tensor,
        scale: float,
        eps: float,
        window: int = 0,
        softcap: float = 0.0,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        norm_offset: float = 0.0,
    ) -> None:
        own, _ = split_heads(heads, kv_heads, build.shard)
        columns = range(own.start * head_dim, own.stop * head_dim)
        self.qkv = QKVLinear(build, name, hidden, heads, kv_heads, head_dim, qkv_bias)
        self.out = RowLinear(build, f"{name}.o_proj", hidden, heads * head_dim, columns, out_bias)
        self.q_norm = self.k_norm = None
        if qk_norm:
            self.q_norm = RMSNorm(build, f"{name}.q_norm", head_dim, eps, norm_offset).weight
            self.k_norm = RMSNorm(build, f"{name}.k_norm", head_dim, eps, norm_offset).weight
        self.cos_sin, self.scale, self.eps, self.window, self.softcap = cos_sin, scale, eps, window, softcap

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        q = ops.qk_norm_rope_store(
            self.qkv(x), batch.positions, self.cos_sin, self.q_norm, self.k_norm, self.eps, kv, batch.out_loc
        )
        return ops.attention(q, kv, batch, self.scale, self.window, self.softcap)
