"""Hy 4: GLM-5's layers with sinks and gates, on a residual stream that is several wide and not mixed."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer, Layer
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear
from sgla.model.hyper import Block, Collapse, Streams, through
from sgla.model.indexed import Indexed, IndexedAttention
from sgla.model.indexed_spec import IndexedSpec
from sgla.model.spec import ModelSpec


class Attention(IndexedAttention):
    def __init__(
        self, model: Indexed, build: Build, name: str, layer: IndexedSpec, before: IndexedAttention | None
    ) -> None:
        super().__init__(model, build, name, layer, before)
        own, width = build.shard.range(layer.heads), layer.value
        rows = range(own.start * width, own.stop * width)
        gate = (f"{name}.gate_proj", layer.heads * width, rows)
        self.gate = MergedColumnLinear(build, model.spec.hidden, [gate])

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        return ops.sigmoid_mul(super().__call__(x, batch, kv), self.gate(x))


class Hy4(Indexed):
    ignored = ("model.mtp_layers.",)
    kind = Attention

    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        super().__init__(spec, build, positions)
        assert spec.hyper is not None
        names = ("model.hc_head.hc_head_fn", "model.hc_head.hc_head_base", "model.hc_head.hc_head_scale")
        self.collapse = Collapse(build, names, spec.hidden, spec.hyper, spec.eps)

    def block(self, build: Build, name: str, index: int) -> Block:  # type: ignore[override]
        spec, hyper = self.spec, self.spec.hyper
        assert hyper is not None
        around_attention, around_mlp = (
            Streams(
                build, (f"{own}.hc_fn", f"{own}.hc_base", f"{own}.hc_scale"), spec.hidden, hyper, spec.eps
            )
            for own in (f"{name}.attn_hc", f"{name}.ffn_hc")
        )
        attention = self.attention(build, f"{name}.self_attn", index)
        mlp = self.mlp(build, f"{name}.mlp", index)
        before, behind = (
            self.norm_of(build, f"{name}.{part}_layernorm") for part in ("input", "post_attention")
        )
        return Block(around_attention, before, attention, around_mlp, behind, mlp)

    def forward(self, batch: ForwardBatch, kv: list[Layer], rows: Tensor | None = None) -> Tensor:
        return through(self, self.collapse, batch, kv, rows)
