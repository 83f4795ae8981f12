"""Self-attention over paged KV."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.build import Build
from sgla.layers.linear import QKVLinear, RowLinear, split_heads
from sgla.layers.norm import HeadLayerNorms, RMSNorm, SplitRMSNorms
from sgla.layers.spec import AttentionSpec, QKNorm


class LayerAttention(Protocol):
    """Attention of a layer, or what stands in its place: what it sees of the tokens before, which ``out``
    brings back to the width. ``kv``: what it keeps of them, a KVLayer or a StateLayer."""

    out: RowLinear

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: Any, /) -> Tensor: ...


class HeadNorms(NamedTuple):
    """RMSNorm of q and k before the rotation: ``of`` each ``head`` or of the whole ``width``, with what is
    added to the weights of a file (``offset``), or of each head without weights (``unit``). ``heads``:
    LayerNorm of each head, with weights of its own. ``late``: that of heads comes behind the rotation, which
    keeps lengths, so the products of both weights multiply q alone."""

    of: QKNorm
    eps: float
    offset: float = 0.0
    late: bool = False


class SelfAttention:
    """Grouped-query attention with rotary positions: ``[T, d] -> [T, Hq * vd]``, which ``out`` brings back to
    the width; KV is written to and read from the pages.

    ``cos_sin`` float32 ``[positions, rot]``. ``interleaved``: the checkpoint rotates dims 2i and 2i + 1
    together, and its rows are brought to the NeoX order. ``growth`` float32 ``[positions]`` multiplies q.
    ``inputs``: the width of x, where it is not ``hidden``.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        hidden: int,
        layer: AttentionSpec,
        cos_sin: Tensor,
        *,
        norms: HeadNorms,
        qkv_bias: bool | tuple[bool, ...] = False,
        out_bias: bool = False,
        growth: Tensor | None = None,
        interleaved: bool = False,
        inputs: int = 0,
    ) -> None:
        heads, kv_heads, head_dim = layer.heads, layer.kv_heads, layer.head_dim
        own, _ = split_heads(heads, kv_heads, build.shard)
        columns = range(own.start * layer.v_dim, own.stop * layer.v_dim)
        order = neox_order(cos_sin.shape[1], head_dim) if interleaved else None
        self.qkv = QKVLinear(
            build, name, inputs or hidden, heads, kv_heads, head_dim, qkv_bias, order, layer.v_dim
        )
        self.out = RowLinear(build, f"{name}.o_proj", hidden, heads * layer.v_dim, columns, out_bias)
        self.layer, self.cos_sin, self.eps, self.growth = layer, cos_sin, norms.eps, growth
        self.sinks = build.vector(f"{name}.sinks", heads, own) if layer.sinks else None
        self.slopes = torch.tensor(layer.slopes[own.start : own.stop]) if layer.slopes else None
        self._make_norms(build, name, norms, order)

    def _make_norms(self, build: Build, name: str, norms: HeadNorms, order: Tensor | None) -> None:
        self.q_norm = self.k_norm = None
        self.head_norms: HeadLayerNorms | None = None
        self.wide_norms: SplitRMSNorms | None = None
        self.late: tuple[Tensor, Tensor] | None = None
        heads, kv_heads, head_dim = self.layer.heads, self.layer.kv_heads, self.layer.head_dim
        if norms.of == "head":
            self.q_norm = RMSNorm(build, f"{name}.q_norm", head_dim, *norms[1:3]).weight
            self.k_norm = RMSNorm(build, f"{name}.k_norm", head_dim, *norms[1:3]).weight
            if norms.late:
                self.late = self.q_norm, self.k_norm
                self.q_norm = self.k_norm = torch.ones(head_dim)
        elif norms.of == "unit":
            self.q_norm = self.k_norm = torch.ones(head_dim)
        elif norms.of == "heads":
            own, own_kv = split_heads(heads, kv_heads, build.shard)
            both = (f"{name}.q_norm", heads, own), (f"{name}.k_norm", kv_heads, own_kv)
            self.head_norms = HeadLayerNorms(build, both, head_dim, norms.eps, order)
        elif norms.of == "width":
            own, own_kv = split_heads(heads, kv_heads, build.shard)
            q, kv = (range(part.start * head_dim, part.stop * head_dim) for part in (own, own_kv))
            parts = [
                (f"{name}.q_norm", heads * head_dim, q, 1),
                (f"{name}.k_norm", kv_heads * head_dim, kv, max(build.shard.size // kv_heads, 1)),
            ]
            self.wide_norms = SplitRMSNorms(build, parts, *norms[1:3])

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        return self.attend(self.store(x, batch, kv), batch, kv)

    def store(self, x: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        """q ``[T, Hq * hd]`` for attention; k and v go to the pages."""
        qkv = self.projected(x)
        if self.wide_norms is not None:
            qkv = self.wide_norms.beside(qkv)
        if self.head_norms is not None:
            qkv = self.head_norms(qkv)
        positions, cos_sin = batch.turns(self.cos_sin)
        q = ops.qk_norm_rope_store(
            qkv, positions, cos_sin, self.q_norm, self.k_norm, self.eps, kv, batch.out_loc
        )
        if self.late is not None:
            q = ops.scale_queries(q, *self.late)
        if self.growth is not None:
            q = ops.scale_queries(q, self.growth[batch.positions.long()][:, None])
        return q

    def projected(self, x: Tensor) -> Tensor:
        """``[T, (Hq + Hkv) * hd + Hkv * vd]``."""
        return self.qkv(x)

    def attend(self, q: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        """What each token sees: ``[T, Hq * vd]``, of q ``[T, Hq * hd]``."""
        layer = self.layer
        seen = ops.attention(
            q, kv, batch, layer.scale, layer.window, layer.softcap, self.sinks, layer.chunked, self.slopes
        )
        return seen if layer.value_scale == 1.0 else (seen * layer.value_scale).to(seen.dtype)


def neox_order(rotated: int, head_dim: int) -> Tensor:
    """int64 ``[head_dim]``:
    the dims of a head that rotates 2i and 2i + 1 together, where i and i + rotated / 2 are expected."""
    dims = torch.arange(head_dim, device="cpu")
    return torch.cat([dims[:rotated:2], dims[1:rotated:2], dims[rotated:]])
