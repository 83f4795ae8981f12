"""Gated delta nets (arXiv 2412.06464), as Qwen3-Next, Qwen3.5 and OLMo's hybrid have them. Qwen's have
attention with a gate in every fourth layer."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.lora import added
from sgla.kernels.ops import KVLayer, StateLayer
from sgla.layers.attention import LayerAttention
from sgla.layers.build import (
    Build,
    Gathered,
    Piece,
    Share,
    StackPart,
    blocks,
    drawn,
    fill,
    gather,
    given,
    run,
    together,
)
from sgla.layers.linear import RowLinear, split_heads
from sgla.layers.norm import RMSNorm
from sgla.model.delta_spec import DeltaSpec
from sgla.model.llama import Llama
from sgla.quant.weight import SourceTensor

Form = Literal["apart", "joined", "each"]
_PARTS: dict[Form, tuple[str, ...]] = {
    "joined": ("in_proj_qkvz", "in_proj_ba"),
    "apart": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "each": ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
}


class DeltaNet:
    """``[T, d] -> [T, Hv * dv]`` of this rank's heads, which ``out`` brings back to the width. ``form``: a
    checkpoint has all rows of a key head together (``joined``), q, k and v apart from z, and b from a
    (``apart``), or each of these by itself, by OLMo's names (``each``). b and a, which are never quantized,
    are more rows of the others' matrix where that pays."""

    def __init__(
        self, build: Build, name: str, hidden: int, layer: DeltaSpec, eps: float, form: Form
    ) -> None:
        if layer.keys % build.shard.size:
            raise ConfigError(
                f"{layer.keys} heads of keys (linear_num_key_heads) cannot be split over "
                f"{build.shard.size} ranks",
                param="tp",
            )
        own, share = build.shard.range(layer.keys), layer.share
        self.layer, self.eps = layer, eps
        key, value = len(own) * layer.key_dim, len(own) * share * layer.value_dim
        self.widths, self.value, self.rates = [key, key, value], value, len(own) * share
        names = [f"{name}.{part}" for part in _PARTS[form]]
        wide, large = 2 * key + 2 * value, names[: -1 if form == "joined" else -2]
        one = build.joins(*names) and build.kind_of(*large) == build.plain
        self.inputs = build.empty(wide + (2 * self.rates if one else 0), hidden, *large)
        self.ba = None if one else build.empty_plain(2 * self.rates, hidden)
        self._rates = (self.inputs, wide) if self.ba is None else (self.ba, 0)
        declare = {"joined": self._declare_joined, "apart": self._declare_apart, "each": self._declare_each}
        layers = declare[form](build, name, hidden, own)
        rates = [] if one else layers[len(large) :]
        self.added = build.stack_of(hidden, layers[: len(layers) - len(rates)])
        self.added_rates = build.stack_of(hidden, rates)
        heads = range(own.start * share, own.stop * share)
        self.conv = torch.zeros(sum(self.widths), layer.taps)
        (self._declare_convs if form == "each" else self._declare_conv)(build, name, own)
        self.a_log = build.vector(f"{name}.A_log", layer.values, heads)
        self.dt_bias = build.vector(f"{name}.dt_bias", layer.values, heads)
        norm, out = ("o_norm", "o_proj") if form == "each" else ("norm", "out_proj")
        self.norm = build.vector(f"{name}.{norm}.weight", layer.value_dim)
        columns = range(heads.start * layer.value_dim, heads.stop * layer.value_dim)
        self.out = RowLinear(build, f"{name}.{out}", hidden, layer.values * layer.value_dim, columns)

    def _declare_joined(self, build: Build, name: str, hidden: int, own: range) -> list[Gathered]:
        layer, share = self.layer, self.layer.share
        dk, dv = layer.key_dim, share * layer.value_dim
        block, at, first = 2 * dk + 2 * dv, 0, 0
        pieces: list[Piece] = []
        for width in (dk, dk, dv, dv):
            pieces += blocks(own, width, block, first, at)
            first, at = first + width, at + width * len(own)
        large = gather(build, self.inputs, f"{name}.in_proj_qkvz", (block * layer.keys, hidden), pieces)
        rates, at = self._rates
        pieces = [
            *blocks(own, share, 2 * share, 0, at),
            *blocks(own, share, 2 * share, share, at + self.rates),
        ]
        return [large, gather(build, rates, f"{name}.in_proj_ba", (2 * layer.values, hidden), pieces)]

    def _declare_apart(self, build: Build, name: str, hidden: int, own: range) -> list[Gathered]:
        layer, (key, _, value) = self.layer, self.widths
        keys, values = layer.keys * layer.key_dim, layer.values * layer.value_dim
        dv = layer.share * layer.value_dim
        pieces, gates = self._runs(own), [run(own, dv, 0, 2 * key + value)]
        found = [
            gather(build, self.inputs, f"{name}.in_proj_qkv", (2 * keys + values, hidden), pieces),
            gather(build, self.inputs, f"{name}.in_proj_z", (values, hidden), gates),
        ]
        rates, at = self._rates
        for i, part in enumerate("ba"):
            pieces = [run(own, layer.share, 0, at + i * self.rates)]
            found.append(gather(build, rates, f"{name}.in_proj_{part}", (layer.values, hidden), pieces))
        return found

    def _declare_each(self, build: Build, name: str, hidden: int, own: range) -> list[Gathered]:
        layer, (key, _, value) = self.layer, self.widths
        dv, at = layer.share * layer.value_dim, 0
        found: list[Gathered] = []
        for part, width, size in (
            ("q", layer.key_dim, key),
            ("k", layer.key_dim, key),
            ("v", dv, value),
            ("g", dv, value),
        ):
            pieces, shape = [run(own, width, 0, at)], (layer.keys * width, hidden)
            found.append(gather(build, self.inputs, f"{name}.{part}_proj", shape, pieces))
            at += size
        rates, at = self._rates
        for i, part in enumerate("ba"):
            pieces = [run(own, layer.share, 0, at + i * self.rates)]
            found.append(gather(build, rates, f"{name}.{part}_proj", (layer.values, hidden), pieces))
        return found

    def _runs(self, own: range) -> list[Piece]:
        """This rank's q, k and v of all, in their order."""
        layer, key = self.layer, self.widths[0]
        keys, dv = layer.keys * layer.key_dim, layer.share * layer.value_dim
        q, k = (run(own, layer.key_dim, i * keys, i * key) for i in (0, 1))
        return [q, k, run(own, dv, 2 * keys, 2 * key)]

    def _declare_conv(self, build: Build, name: str, own: range) -> None:
        shape = self.layer.channels(self.layer.keys), 1, self.layer.taps
        runs = self._runs(own)
        take, give = partial(self._take_conv, runs), partial(self._give_conv, runs)
        build.declare(f"{name}.conv1d.weight", shape, take, give=give)

    def _declare_convs(self, build: Build, name: str, own: range) -> None:
        """Of q, k and v apart, or stacked as transformers has them."""
        layer, first = self.layer, 0
        parts: list[StackPart] = []
        for part, (rows, at) in zip("qkv", self._runs(own)):
            width = layer.values * layer.value_dim if part == "v" else layer.keys * layer.key_dim
            inside = range(rows.start - first, rows.stop - first)
            conv = f"{name}.{part}_conv1d.weight"
            runs = [(inside, at)]
            take, give = partial(self._take_conv, runs), partial(self._give_conv, runs)
            build.declare(conv, (width, 1, layer.taps), take, give=give)
            parts.append(StackPart(conv, None, range(first, first + width)))
            first += width
        build.stacks[f"{name}.conv1d.weight"] = (first, 1, layer.taps), parts

    def _take_conv(self, pieces: list[Piece], source: SourceTensor) -> None:
        for rows, at in pieces:
            self.conv[at : at + len(rows)] = source.dense(rows)[:, 0]

    def _give_conv(self, pieces: list[Piece], wanted: range) -> Tensor:
        return together(given(self.conv[at : at + len(rows), None], wanted, rows) for rows, at in pieces)

    def __call__(self, x: Tensor, batch: ForwardBatch, state: StateLayer) -> Tensor:
        layer, widths = self.layer, [sum(self.widths), self.value]
        made = ops.linear(x, self.inputs, None, added(x, *self.added))
        if self.ba is None:
            qkv, z, b, a = made.split([*widths, self.rates, self.rates], dim=1)
        else:
            qkv, z = made.split(widths, dim=1)
            b, a = ops.linear(x, self.ba, None, added(x, *self.added_rates)).chunk(2, dim=1)
        q, k, v = ops.causal_conv(qkv, self.conv, None, state, batch).split(self.widths, dim=1)
        q, k = (y.unflatten(1, (-1, layer.key_dim)) for y in (q, k))
        v, z = (y.unflatten(1, (-1, layer.value_dim)) for y in (v, z))
        decay, beta = ops.decay_rates(a, b, self.a_log, self.dt_bias)
        beta = beta * 2 if layer.signed else beta
        seen = ops.gated_delta(q, k, v, decay, beta, state, batch)
        return ops.gated_rms_norm(seen, z, self.norm, self.eps).flatten(1)


class GatedAttention:
    """``[T, d] -> [T, Hq * hd]``, which ``out`` brings back to the width. A checkpoint has the rows of each
    head's gate behind those of its query; here they stand behind all others, or by themselves."""

    def __init__(self, model: Delta, build: Build, name: str, index: int) -> None:
        spec, layer = model.spec, model.spec.attention[index]
        dim, hidden = layer.head_dim, spec.hidden
        own, own_kv = split_heads(layer.heads, layer.kv_heads, build.shard)
        parts = [f"{name}.{part}_proj" for part in "qkv"]
        width, kv_width = len(own) * dim, len(own_kv) * dim
        self.widths = [width + 2 * kv_width, width]
        one = build.joins(*parts)
        self.qkv = build.empty(sum(self.widths) if one else self.widths[0], hidden, *parts)
        self.gate = None if one else build.empty(width, hidden, parts[0])
        gate, top = (self.qkv, self.widths[0]) if self.gate is None else (self.gate, 0)

        halves, shape = ((self.qkv, 0, 0), (gate, dim, top)), (2 * layer.heads * dim, hidden)

        def take_queries(source: Share) -> None:
            for weight, first, to in halves:
                for rows, at in blocks(own, dim, 2 * dim, first, to):
                    fill(weight, at, source, rows)

        def give_queries(wanted: range) -> Tensor:
            return together(
                drawn(weight, at, wanted, shape, rows)
                for weight, first, to in halves
                for rows, at in blocks(own, dim, 2 * dim, first, to)
            )

        build.declare(f"{parts[0]}.weight", shape, take_queries, give=give_queries)
        layers, gates = (
            [Gathered(parts[0], shape[0], blocks(own, dim, 2 * dim, first, to))] for _, first, to in halves
        )
        for i, part in enumerate(parts[1:]):
            pieces = [run(own_kv, dim, 0, width + i * kv_width)]
            layers.append(gather(build, self.qkv, part, (layer.kv_heads * dim, hidden), pieces))
        self.added = build.stack_of(hidden, layers + gates if one else layers)
        self.added_gate = build.stack_of(hidden, [] if one else gates)
        self.q_norm = RMSNorm(build, f"{name}.q_norm", dim, spec.eps, spec.norm_offset)
        self.k_norm = RMSNorm(build, f"{name}.k_norm", dim, spec.eps, spec.norm_offset)
        columns = range(own.start * dim, own.stop * dim)
        self.out = RowLinear(build, f"{name}.o_proj", hidden, layer.heads * dim, columns)
        self.cos_sin, self.scale, self.eps = model.angles(layer.rope, dim), layer.scale, spec.eps

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        qkv = ops.linear(x, self.qkv, None, added(x, *self.added))
        if self.gate is None:
            qkv, gate = qkv.split(self.widths, dim=1)
        else:
            gate = ops.linear(x, self.gate, None, added(x, *self.added_gate))
        positions, cos_sin = batch.turns(self.cos_sin)
        q = ops.qk_norm_rope_store(
            qkv,
            positions,
            cos_sin,
            self.q_norm.weight,
            self.k_norm.weight,
            self.eps,
            kv,
            batch.out_loc,
        )
        seen = ops.attention(q, kv, batch, self.scale)
        return ops.sigmoid_mul(seen, gate)


class Delta(Llama):
    """Qwen3.5 (also 3.6). The layers that guess further tokens are left out, and the vision tower."""

    ignored = ("mtp.", "model.visual.", "visual.", "model.vision_tower.", "model.merger.")
    form: Form = "apart"

    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        layer = self.spec.attention[index]
        if isinstance(layer, DeltaSpec):
            name = name.replace(".self_attn", ".linear_attn")
            return DeltaNet(build, name, self.spec.hidden, layer, self.spec.eps, self.form)
        return GatedAttention(self, build, name, index)


class JoinedDelta(Delta):
    """Qwen3-Next."""

    form = "joined"
