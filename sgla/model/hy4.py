"""Hy 4: GLM-5's layers with sinks and gates, on a residual stream that is several wide and not mixed."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer, Layer
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear
from sgla.model.hyper import Collapse, Streams
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


class Block:
    def __init__(self, model: Hy4, build: Build, name: str, index: int) -> None:
        spec, hyper = model.spec, model.spec.hyper
        assert hyper is not None
        self.around_attention, self.around_mlp = (
            Streams(
                build, (f"{own}.hc_fn", f"{own}.hc_base", f"{own}.hc_scale"), spec.hidden, hyper, spec.eps
            )
            for own in (f"{name}.attn_hc", f"{name}.ffn_hc")
        )
        self.attention_norm = model.norm_of(build, f"{name}.input_layernorm")
        self.attention = model.attention(build, f"{name}.self_attn", index)
        self.mlp_norm = model.norm_of(build, f"{name}.post_attention_layernorm")
        self.mlp = model.mlp(build, f"{name}.mlp", index)

    def __call__(self, h: Tensor, batch: ForwardBatch, kv: KVLayer, rows: Tensor | None) -> Tensor:
        taken = self.around_attention.read(h)
        seen = self.attention(self.attention_norm(taken.x), batch, kv)
        if rows is not None:
            seen, h, taken = ops.gather(seen, rows), ops.gather(h, rows), taken.of(rows.long())
        h = self.around_attention.write(h, taken, self.attention.out(seen))
        taken = self.around_mlp.read(h)
        return self.around_mlp.write(h, taken, self.mlp(self.mlp_norm(taken.x)))


class Hy4(Indexed):
    ignored = ("model.mtp_layers.",)
    kind = Attention

    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        super().__init__(spec, build, positions)
        assert spec.hyper is not None
        names = ("model.hc_head.hc_head_fn", "model.hc_head.hc_head_base", "model.hc_head.hc_head_scale")
        self.collapse = Collapse(build, names, spec.hidden, spec.hyper, spec.eps)

    def block(self, build: Build, name: str, index: int) -> Block:  # type: ignore[override]
        return Block(self, build, name, index)

    def forward(self, batch: ForwardBatch, kv: list[Layer], rows: Tensor | None = None) -> Tensor:
        assert self.spec.hyper is not None
        blocks = cast(list[Block], self.blocks)
        h: Tensor = self.embed(batch.ids).repeat(1, self.spec.hyper.streams)
        for block, layer in zip(blocks, kv):
            h = block(h, batch, cast(KVLayer, layer), rows if block is blocks[-1] else None)
        return self.norm.add(self.collapse(h), None)[0]
