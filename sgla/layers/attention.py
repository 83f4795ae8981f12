"""Self-attention over paged KV."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.build import Build
from sgla.layers.linear import QKVLinear, RowLinear, split_heads
from sgla.layers.norm import RMSNorm


class LayerAttention(Protocol):
    """Attention of a layer: what it sees of the tokens before, which ``out`` brings back to the width."""

    out: RowLinear

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor: ...


class SelfAttention:
    """Grouped-query attention with rotary positions: ``[T, d] -> [T, Hq * hd]``, which ``out`` brings back to
    the width; KV is written to and read from the pages.

    ``cos_sin`` float32 ``[positions, rot]``. ``interleaved``: the checkpoint rotates dims 2i and 2i + 1
    together, and its rows are brought to the NeoX order. ``qk_norm``: RMSNorm of q and k before the rotation,
    of each ``head`` or of the whole ``width``, with the weights' offset ``norm_offset``, or of each head
    without weights (``unit``). ``late_norm``: that
    of heads comes behind the rotation, which keeps lengths, so the products of both weights multiply q alone.
    ``growth`` float32 ``[positions]`` multiplies q. ``window`` 0 is full attention. ``sinks``: a score of
    each head that has no value (``ops.attention``).
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
        sinks: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: Literal["", "head", "width", "unit"] = "",
        late_norm: bool = False,
        growth: Tensor | None = None,
        norm_offset: float = 0.0,
        interleaved: bool = False,
    ) -> None:
        own, _ = split_heads(heads, kv_heads, build.shard)
        columns = range(own.start * head_dim, own.stop * head_dim)
        order = neox_order(cos_sin.shape[1], head_dim) if interleaved else None
        self.qkv = QKVLinear(build, name, hidden, heads, kv_heads, head_dim, qkv_bias, order)
        self.out = RowLinear(build, f"{name}.o_proj", hidden, heads * head_dim, columns, out_bias)
        self.q_norm = self.k_norm = None
        self.wide_norms: tuple[RMSNorm, RMSNorm] | None = None
        self.late: tuple[Tensor, Tensor] | None = None
        if qk_norm == "head":
            self.q_norm = RMSNorm(build, f"{name}.q_norm", head_dim, eps, norm_offset).weight
            self.k_norm = RMSNorm(build, f"{name}.k_norm", head_dim, eps, norm_offset).weight
            if late_norm:
                self.late = self.q_norm, self.k_norm
                self.q_norm = self.k_norm = torch.ones(head_dim)
        elif qk_norm == "unit":
            self.q_norm = self.k_norm = torch.ones(head_dim)
        elif qk_norm == "width":
            if build.shard.size > 1:
                raise ConfigError(
                    f"{name}: a norm over all heads is not split over ranks yet; use --tp 1", param="tp"
                )
            self.wide_norms = (
                RMSNorm(build, f"{name}.q_norm", heads * head_dim, eps, norm_offset),
                RMSNorm(build, f"{name}.k_norm", kv_heads * head_dim, eps, norm_offset),
            )
            self.widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        self.growth = growth
        self.sinks = build.vector(f"{name}.sinks", heads, own) if sinks else None
        self.cos_sin, self.scale, self.eps, self.window, self.softcap = cos_sin, scale, eps, window, softcap

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        qkv = self.qkv(x)
        if self.wide_norms is not None:
            q, k, v = qkv.split(self.widths, dim=1)
            qkv = torch.cat([self.wide_norms[0](q), self.wide_norms[1](k), v], dim=1)
        q = ops.qk_norm_rope_store(
            qkv, batch.positions, self.cos_sin, self.q_norm, self.k_norm, self.eps, kv, batch.out_loc
        )
        if self.late is not None:
            weight = self.late[0] * self.late[1]
            q = (q.unflatten(1, (-1, len(weight))) * weight).to(q.dtype).flatten(1)
        if self.growth is not None:
            q = (q * self.growth[batch.positions.long()][:, None]).to(q.dtype)
        return self.attend(q, batch, kv)

    def attend(self, q: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        """What each token sees: ``[T, Hq * hd]``, of q as wide."""
        return ops.attention(q, kv, batch, self.scale, self.window, self.softcap, self.sinks)


def neox_order(rotated: int, head_dim: int) -> Tensor:
    """int64 ``[head_dim]``:
    the dims of a head that rotates 2i and 2i + 1 together, where i and i + rotated / 2 are expected."""
    dims = torch.arange(head_dim, device="cpu")
    return torch.cat([dims[:rotated:2], dims[1:rotated:2], dims[rotated:]])
