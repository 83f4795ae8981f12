"""DeepSeek V4: attention to a window and to entries that are made of several tokens each, a residual stream
that is several wide, and mixtures of experts, of which the first are chosen by a table of tokens."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.compressed import Making, Places, compress, compressed_attention, pick_entries
from sgla.kernels.ops import KVLayer, Layer
from sgla.kernels.routing import Clamped
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear, RowLinear
from sgla.layers.mlp import GatedMLP
from sgla.layers.moe import MoE, SharedExpert
from sgla.layers.norm import RMSNorm
from sgla.model.base import Decoder
from sgla.model.compressed_spec import CompressedSpec
from sgla.model.hyper import Block, Collapse, Streams, through, values
from sgla.model.spec import ModelSpec
from sgla.quant.weight import SourceTensor


class Kept(NamedTuple):
    """What a layer has of tokens: those of its window, and the entries made of all."""

    own: KVLayer
    entries: KVLayer | None


def turned(rotated: int, dim: int) -> Tensor:
    """int64[dim]: the values of a head whose last ones are rotated as neighbours, where those that are
    rotated are expected first, and as halves."""
    dims = torch.arange(dim, device="cpu")
    return torch.cat([dims[dim - rotated :: 2], dims[dim - rotated + 1 :: 2], dims[: dim - rotated]])


class Attention:
    """``[T, d] -> [T, groups * rank]``, which ``out`` brings back to the width. Ranks split the groups of
    heads; each has all keys, entries and the indexer."""

    def __init__(self, model: DeepseekV4, build: Build, name: str, layer: CompressedSpec) -> None:
        hidden, dim, eps = model.spec.hidden, layer.head_dim, model.spec.eps
        groups, each = build.shard.range(layer.groups), layer.heads // layer.groups
        heads = range(groups.start * each, groups.stop * each)
        self.order = order = turned(layer.rotated, dim)
        self.layer, self.eps, self.places = layer, eps, Places(max(layer.rate, 1), layer.together)
        self.cos_sin = model.angles(layer.rope, layer.rotated)
        first = [(f"{name}.wq_a", layer.q_rank, range(layer.q_rank)), (f"{name}.wkv", dim, range(dim))]
        self.down = MergedColumnLinear(build, hidden, first, orders=(None, order))
        self.q_norm = RMSNorm(build, f"{name}.q_norm", layer.q_rank, eps)
        rows = range(heads.start * dim, heads.stop * dim)
        queries = [(f"{name}.wq_b", layer.heads * dim, rows)]
        self.q_up = MergedColumnLinear(build, layer.q_rank, queries, orders=(order,))
        self.unit, self.key_norm = torch.ones(dim), reordered(build, f"{name}.norm.weight", order)
        self.sinks = build.vector(f"{name}.attn_sink", layer.heads, heads)
        self.given: MergedColumnLinear | None = None
        self.makings: tuple[Making, ...] = ()
        self.indexer: Indexer | None = None
        if layer.rate:
            self._make_entries(model, build, name)
        width = each * dim
        dtype = torch.float32 if build.plain == "f32" else torch.bfloat16
        self.narrow = torch.zeros(len(groups), layer.group_rank, width, dtype=dtype)

        def take(source: SourceTensor) -> None:
            """Columns: the values of each head."""
            own = range(groups.start * layer.group_rank, groups.stop * layer.group_rank)
            self.narrow.copy_(source.dense(own).unflatten(1, (each, dim))[..., order].view(self.narrow.shape))

        build.declare(f"{name}.wo_a.weight", (layer.groups * layer.group_rank, width), take)
        columns = range(groups.start * layer.group_rank, groups.stop * layer.group_rank)
        self.out = RowLinear(build, f"{name}.wo_b", hidden, layer.groups * layer.group_rank, columns)

    def _make_entries(self, model: DeepseekV4, build: Build, name: str) -> None:
        """What tokens give to entries, and how these are made of it; of the scored keys the same behind."""
        layer, orders, makings = self.layer, list[Tensor](), list[Making]()
        parts = list[tuple[str, int, range]]()
        kinds = [(f"{name}.compressor", layer.head_dim)]
        if layer.most:
            kinds.append((f"{name}.indexer.compressor", layer.score_dim))
            self.indexer = Indexer(model, build, f"{name}.indexer", layer)
        for kind, dim in kinds:
            width, order = layer.series * dim, turned(layer.rotated, dim)
            first = sum(size for _, size, _ in parts)
            parts += [(f"{kind}.{part}", width, range(width)) for part in ("wkv", "wgate")]
            orders += [order, order]
            bias = values(build, f"{kind}.ape", (layer.rate, width), order)
            norm = reordered(build, f"{kind}.norm.weight", order)
            makings.append(Making(bias, norm, self.eps, self.cos_sin, first, layer.series))
        self.given = MergedColumnLinear(build, model.spec.hidden, parts, orders=tuple(orders))
        self.makings = tuple(makings)

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: Kept) -> Tensor:
        layer, down = self.layer, self.down(x)
        latent = self.q_norm(down[:, : layer.q_rank].contiguous())
        key = ops.rms_norm(down[:, layer.q_rank :].contiguous(), self.key_norm, self.eps)
        q = ops.rms_norm(self.q_up(latent).view(-1, layer.head_dim), self.unit, self.eps)
        heads = torch.cat([q.view(len(x), -1, layer.head_dim), key[:, None]], 1)
        heads = ops.rotate(heads, batch.positions, self.cos_sin)
        given = None if self.given is None else self.given(x)
        counts = compress(heads[:, -1], given, kv.own, kv.entries, batch, self.places, self.makings)
        picked = None
        if self.indexer is not None:
            assert kv.entries is not None
            picked = self.indexer(x, latent, batch, kv.entries, counts, self.places)
        seen = compressed_attention(
            heads[:, :-1].flatten(1),
            kv.own,
            kv.entries,
            batch,
            layer.scale,
            layer.window,
            self.sinks,
            counts,
            self.places,
            picked,
        )
        seen = unrotated(seen.unflatten(1, (-1, layer.head_dim)), batch.positions, self.cos_sin)
        return ops.latent_values(seen.flatten(1), self.narrow)


class Indexer:
    """Picks entries: x ``[T, d]`` and the queries' latent -> int32 ``[T, most]``."""

    def __init__(self, model: DeepseekV4, build: Build, name: str, layer: CompressedSpec) -> None:
        width, order = layer.scorers * layer.score_dim, turned(layer.rotated, layer.score_dim)
        queries = [(f"{name}.wq_b", width, range(width))]
        self.q = MergedColumnLinear(build, layer.q_rank, queries, orders=(order,))
        weights = [(f"{name}.weights_proj", layer.scorers, range(layer.scorers))]
        self.weights = MergedColumnLinear(build, model.spec.hidden, weights)
        self.cos_sin, self.layer = model.angles(layer.rope, layer.rotated), layer
        self.scale = (layer.score_dim * layer.scorers) ** -0.5

    def __call__(
        self, x: Tensor, latent: Tensor, batch: ForwardBatch, entries: KVLayer, counts: Tensor, places: Places
    ) -> Tensor:
        q = ops.rotate(self.q(latent).unflatten(1, (-1, self.layer.score_dim)), batch.positions, self.cos_sin)
        weights = self.weights(x).float() * self.scale
        return pick_entries(q, weights, entries, batch, counts, self.layer.most, places)


class ClampedMLP(GatedMLP):
    """With an activation that is bounded."""

    def __init__(self, build: Build, name: str, hidden: int, width: int, clamped: Clamped) -> None:
        super().__init__(build, name, hidden, width, "silu")
        self.clamped = clamped

    def part(self, x: Tensor) -> Tensor:
        return self.down.part(ops.gated(self.gate_up(x), self.clamped))


class DeepseekV4(Decoder):
    ignored = ("mtp.", "model.mtp.")

    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        super().__init__(spec, build, positions)
        assert spec.hyper is not None
        names = ("model.hc_head_fn", "model.hc_head_base", "model.hc_head_scale")
        self.collapse = Collapse(build, names, spec.hidden, spec.hyper, spec.eps)

    def block(self, build: Build, name: str, index: int) -> Block:  # type: ignore[override]
        spec, layer = self.spec, self.spec.attention[index]
        assert isinstance(layer, CompressedSpec)
        assert spec.hyper is not None
        around_attention, around_mlp = (
            Streams(
                build,
                (f"{name}.hc_{part}_fn", f"{name}.hc_{part}_base", f"{name}.hc_{part}_scale"),
                spec.hidden,
                spec.hyper,
                spec.eps,
            )
            for part in ("attn", "ffn")
        )
        attention = Attention(self, build, f"{name}.attn", layer)
        mlp, hashed = self.experts(build, f"{name}.ffn", index)
        before, behind = (self.norm_of(build, f"{name}.{part}_norm") for part in ("attn", "ffn"))
        return Block(around_attention, before, attention, around_mlp, behind, mlp, hashed)

    def experts(self, build: Build, name: str, index: int) -> tuple[MoE, Tensor | None]:
        """Those of a layer, and the table int64 ``[vocab, top_k]`` by which tokens have them, if there is
        one."""
        spec, moe = self.spec, self.spec.moe
        assert moe is not None
        assert moe.clamped is not None
        mlp = ClampedMLP(build, f"{name}.shared_experts", spec.hidden, moe.shared, moe.clamped)
        hashed = index in moe.hashed
        made = MoE(
            build,
            name,
            hidden=spec.hidden,
            intermediate=moe.intermediate,
            experts=moe.experts,
            routing=moe.routing,
            activation=moe.clamped,
            correction=not hashed,
            shared=SharedExpert(build, name, spec.hidden, mlp, False),
        )
        if not hashed:
            return made, None
        shape = spec.vocab, moe.routing.top_k
        table = torch.arange(shape[0] * shape[1]).view(shape) % moe.experts

        def check(source: SourceTensor) -> None:
            found = source.dense()
            if not bool(((found >= 0) & (found < moe.experts)).all()):
                raise ValueError(f"it names experts that are not among the {moe.experts}")

        def take(source: SourceTensor) -> None:
            found = source.dense()
            if found.is_floating_point():  # as made up weights are
                return
            check(source)
            table.copy_(found)

        build.declare(f"{name}.gate.tid2eid", shape, take, check)
        return made, table

    def forward(self, batch: ForwardBatch, kv: list[Layer], rows: Tensor | None = None) -> Tensor:
        beside = iter(kv[len(self.blocks) :])
        kept = []
        for layer, spec in zip(kv, self.spec.attention):
            entries = next(beside) if spec.beside() else None
            kept.append(Kept(cast(KVLayer, layer), cast(KVLayer | None, entries)))
        return through(self, self.collapse, batch, kept, rows)


def unrotated(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """x ``[T, H, hd]`` with the rotation of its positions undone: a key, which is a value as well, was
    rotated by its own, so what is left is how far it is away."""
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    a, b = a.float(), b.float()
    return torch.cat([(a * cos + b * sin).to(x.dtype), (b * cos - a * sin).to(x.dtype), rest], dim=-1)


def reordered(build: Build, name: str, order: Tensor) -> Tensor:
    """A float32 vector ``name`` with its values in another order."""
    made = torch.zeros(len(order))

    def take(source: SourceTensor) -> None:
        made.copy_(source.dense()[order])

    build.declare(name, (len(order),), take)
    return made
