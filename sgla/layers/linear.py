"""Linear layers by role. Column-parallel ones (QKV, gate_up) split their outputs over the ranks, row-parallel
ones their inputs and add up the ranks' results, so a block needs one all-reduce after attention and one after
the MLP."""

from __future__ import annotations

from functools import partial
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from sgla.dist import Shard
from sgla.dist.lockstep import Lockstep
from sgla.errors import ConfigError
from sgla.kernels import ops
from sgla.kernels.lora import added
from sgla.layers.build import Build, Reordered, Share, StackPart, drawn, fill, given
from sgla.layers.gather import gathering
from sgla.quant.weight import SourceTensor


class MergedColumnLinear:
    """Several projections of the same input as one matrix; ``parts``: name, full output size, this rank's
    rows of it. ``bias``: of all, or whether each has one. ``fused``: the name under which a checkpoint may
    hold them all, one below the other.
    ``orders``: of the rows of each head, for the first parts."""

    def __init__(
        self,
        build: Build,
        k: int,
        parts: list[tuple[str, int, range]],
        bias: bool | tuple[bool, ...] = False,
        fused: str = "",
        orders: tuple[Tensor | None, ...] = (),
    ) -> None:
        n = sum(len(rows) for _, _, rows in parts)
        modules = *(name for name, _, _ in parts), *((fused,) if fused else ())
        self.weight = build.empty(n, k, *modules, gathers=True)
        self.gather = gathering(build, k, *modules)
        biased = bias if isinstance(bias, tuple) else (bias,) * len(parts)
        self.bias = torch.zeros(n) if any(biased) else None
        self.stack, self.rows = build.stack(k, [(*part, order) for part, order in zip_longest(parts, orders)])
        at = first = 0
        inside: list[tuple[str, range]] = []
        for (name, size, rows), own_bias, order in zip_longest(parts, biased, orders):
            place = at, rows, order
            give = partial(self._give_weight, *place, (size, k)) if self.gather is None else None
            build.declare(f"{name}.weight", (size, k), partial(self._take_weight, *place), give=give)
            if own_bias:
                take = partial(self._take_bias, *place)
                build.declare(f"{name}.bias", (size,), take, give=partial(self._give_bias, *place))
            inside.append((name, range(first, first + size)))
            at, first = at + len(rows), first + size
        if fused:
            build.stacks[f"{fused}.weight"] = (
                (first, k),
                [StackPart(f"{p}.weight", None, rows) for p, rows in inside],
            )
            build.stacks[f"{fused}.bias"] = (
                (first,),
                [StackPart(f"{p}.bias", None, rows) for (p, rows), own in zip(inside, biased) if own],
            )

    def _take_weight(self, at: int, rows: range, order: Tensor | None, source: Share) -> None:
        source = source if self.gather is None else self.gather.sort(source)
        fill(self.weight, at, source, rows, order=order)

    def _take_bias(self, at: int, rows: range, order: Tensor | None, source: SourceTensor) -> None:
        assert self.bias is not None
        source = source if order is None else Reordered(source, order)
        self.bias[at : at + len(rows)].copy_(source.dense(rows))

    def _give_weight(
        self, at: int, rows: range, order: Tensor | None, shape: tuple[int, int], wanted: range
    ) -> Tensor:
        return drawn(self.weight, at, wanted, shape, rows, order=order)

    def _give_bias(self, at: int, rows: range, order: Tensor | None, wanted: range) -> Tensor:
        assert self.bias is not None
        own = self.bias[at : at + len(rows)]
        if order is not None:
            own = own.view(-1, len(order))[:, order.argsort()].flatten()
        return given(own, wanted, rows)

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, k]`` -> ``[T, n]``, the parts side by side."""
        more = added(x, self.stack, self.rows)
        return ops.linear(x if self.gather is None else self.gather(x), self.weight, self.bias, more)


class QKVLinear(MergedColumnLinear):
    """q, k and v of this rank's heads: ``[T, d] -> [T, (Hq + Hkv) * hd + Hkv * vd]``.
    ``order``: of the rows of each head of q and k; ``values``: vd, where it is not hd."""

    def __init__(
        self,
        build: Build,
        name: str,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool | tuple[bool, ...] = False,
        order: Tensor | None = None,
        values: int = 0,
    ) -> None:
        own, own_kv = split_heads(heads, kv_heads, build.shard)
        values = values or head_dim
        parts = [
            (f"{name}.q_proj", heads * head_dim, _rows(own, head_dim)),
            (f"{name}.k_proj", kv_heads * head_dim, _rows(own_kv, head_dim)),
            (f"{name}.v_proj", kv_heads * values, _rows(own_kv, values)),
        ]
        orders = () if order is None else (order, order)
        super().__init__(build, hidden, parts, bias, f"{name}.qkv_proj", orders)


class GateUpLinear(MergedColumnLinear):
    """Gate and up projection of a gated MLP: ``[T, d] -> [T, 2 f]``."""

    def __init__(self, build: Build, name: str, hidden: int, intermediate: int, bias: bool = False) -> None:
        own = build.inside(intermediate, f"{name}.down_proj")
        parts = [(f"{name}.{which}_proj", intermediate, own) for which in ("gate", "up")]
        super().__init__(build, hidden, parts, bias, f"{name}.gate_up_proj")


class RowLinear:
    """``[T, k of this rank] -> [T, n]``, summed over the ranks.
    ``columns`` are this rank's of the ``k`` inputs; ``shard``: its place, if that is another one."""

    def __init__(
        self,
        build: Build,
        name: str,
        n: int,
        k: int,
        columns: range,
        bias: bool = False,
        shard: Shard | None = None,
    ) -> None:
        self.shard = shard or build.shard
        whole = len(columns) == k
        self.weight = build.empty_part(n, k, columns, name, gathers=whole)
        self.gather = gathering(build, k, name) if whole else None

        def take(source: Share) -> None:
            source = source if self.gather is None else self.gather.sort(source)
            fill(self.weight, 0, source, range(n), columns)

        def give(wanted: range) -> Tensor:
            return drawn(self.weight, 0, wanted, (n, k), range(n), columns)

        build.declare(f"{name}.weight", (n, k), take, give=give if self.gather is None else None)
        bias_vector = build.vector(f"{name}.bias", n) if bias else None
        self.bias = bias_vector if self.shard.rank == 0 else None  # it must enter the sum once
        self.stack, self.rows = build.stack(k, [(name, n, range(n), None)], columns)

    def __call__(self, x: Tensor) -> Tensor:
        return self.total(self.part(x))

    def part(self, x: Tensor) -> Tensor:
        """What this rank has of the sum."""
        more = added(x, self.stack, self.rows)
        return ops.linear(x if self.gather is None else self.gather(x), self.weight, self.bias, more)

    def total(self, y: Tensor) -> Tensor:
        """The sum over the ranks of what each has, in the place of y."""
        return y if self.shard.size == 1 else ops.all_reduce(y, self.shard)


class Parted(Protocol):
    """An MLP or a mixture."""

    lockstep: Lockstep | None

    def __call__(self, x: Tensor) -> Tensor: ...
    def part(self, x: Tensor) -> Tensor: ...


def side_by_side(out: RowLinear, x: Tensor, mlp: Parted, y: Tensor) -> Tensor:
    """``out(x) + mlp(y)``, which the ranks add up as one."""
    if mlp.lockstep is not None:
        return out(x) + mlp(y)
    return out.total(out.part(x) + mlp.part(y))


def split_heads(heads: int, kv_heads: int, shard: Shard) -> tuple[range, range]:
    """This rank's query heads and the KV heads they read.

    With fewer KV heads than ranks each one is held by several ranks.
    Raises ConfigError if the heads do not divide.
    """
    group = heads // kv_heads
    if kv_heads >= shard.size:
        kv = shard.range(kv_heads)
        return _rows(kv, group), kv
    if heads % shard.size or shard.size % kv_heads:
        raise ConfigError(
            f"{heads} heads ({kv_heads} of them KV heads) cannot be split over {shard.size} ranks", param="tp"
        )
    own = shard.range(heads)
    return own, range(own.start // group, own.start // group + 1)


def _rows(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)
