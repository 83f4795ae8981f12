"""What a model keeps of the tokens it has seen: of each layer, in cache groups, and how a budget of memory is
shared out between these. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from sgla.layers.spec import StateTensor
from sgla.model.sizes import BYTES
from sgla.model.spec import ModelSpec


class LayerState(NamedTuple):
    """What a layer keeps, on one rank, of every token that a later one may read. ``window``: tokens that a
    token reads, itself included; 0: all. A layer without tensors keeps nothing, or it reads what the layer
    ``reads`` keeps."""

    window: int
    tensors: tuple[StateTensor, ...]
    reads: int | None = None

    def token_bytes(self, dtype: str) -> float:
        """``dtype``: of the KV cache."""
        return sum(prod(tensor.shape) * BYTES[tensor.dtype or dtype] for tensor in self.tensors)


class KVGroup(NamedTuple):
    """Layers that keep the same tokens share page numbers. ``layers``: indices; ``token_bytes``: of what they
    keep of a token together, on one rank; ``window`` 0: they keep all tokens."""

    window: int
    layers: tuple[int, ...]
    token_bytes: float


class Demand(NamedTuple):
    """What decides how many pages of windows are of use: requests at a time, tokens of a step."""

    rows: int
    step_tokens: int


def state_of(spec: ModelSpec, ranks: int, rank: int | None = None) -> list[LayerState]:
    """Of each layer, on ``rank`` or on the one that has most. The KV heads are split as ``Shard.range`` does;
    with fewer of them than ranks each rank has one."""

    def own(heads: int) -> int:
        if heads < ranks:
            return 1
        if rank is None:
            return -(-heads // ranks)
        return (rank + 1) * heads // ranks - rank * heads // ranks

    state = []
    for layer in spec.attention:
        kept = layer.kept(own(layer.kv_heads)) if layer.reads is None else ()
        state.append(LayerState(layer.window, kept, layer.reads))
    return state


def token_bytes(state: Sequence[LayerState], dtype: str) -> int:
    """Of all layers, on one rank. ``dtype``: of the KV cache."""
    return int(sum(layer.token_bytes(dtype) for layer in state))


def kv_groups(state: Sequence[LayerState], context_len: int, dtype: str) -> list[KVGroup]:
    """The groups of a model, that of whole histories first.
    If no layer needs whole histories, all keep them. ``dtype``: of the KV cache."""
    windows = [layer.window if layer.window < context_len else 0 for layer in state]
    if 0 not in windows:
        windows = [0] * len(windows)
    groups = []
    for window in sorted(set(windows)):
        layers = tuple(i for i, other in enumerate(windows) if other == window)
        groups.append(KVGroup(window, layers, sum(state[i].token_bytes(dtype) for i in layers)))
    return groups


class Pool(NamedTuple):
    """How a budget is shared out between cache groups. Pages of a window are never more than those of whole
    histories, nor than are of use: for every row what it reads, as much again for prefixes in the tree, and a
    step's tokens. Where that is too much, they are three quarters of what they would be if all groups had the
    same number: then short requests, which fill no window, lose a quarter of their places, and long ones win
    what the windows give up."""

    groups: Sequence[KVGroup]
    page_size: int
    demand: Demand

    @property
    def page_bytes(self) -> list[int]:
        """Of a page of each group, on one rank."""
        return [int(group.token_bytes * self.page_size) for group in self.groups]

    def needed(self, context: int) -> int:
        """Bytes for one request of ``context`` tokens."""
        whole = pages_for(context, self.page_size)
        return sum(b * min(whole, self._least(group)) for group, b in zip(self.groups, self.page_bytes))

    def split(self, budget: int) -> list[int]:
        """Pages of each group, without the dummies, in ``budget`` bytes or a page of each more."""
        first, *others = self.page_bytes
        equal = pages_for(budget, first + sum(others))
        windows = []
        for group in self.groups[1:]:
            useful = 2 * self.demand.rows * (self._read(group) + 1) + self._step
            windows.append(min(equal, max(self._least(group), min(useful, equal * 3 // 4))))
        left = budget - sum(n * b for n, b in zip(windows, others))
        return [max(equal, left // first), *windows]

    def tokens(self, budget: int) -> int:
        """Tokens of whole histories that ``budget`` bytes hold for certain."""
        if len(self.groups) == 1:
            return int(budget // self.groups[0].token_bytes)
        return self.split(budget)[0] * self.page_size

    @property
    def _step(self) -> int:
        return pages_for(self.demand.step_tokens, self.page_size)

    def _read(self, group: KVGroup) -> int:
        """Pages that one token reads, at most."""
        return pages_for(group.window - 1, self.page_size) + 1

    def _least(self, group: KVGroup) -> int:
        """Pages with which one request reads its prompt at full speed."""
        return self._read(group) + self._step if group.window else 1 << 40


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that so many tokens take."""
    return -(-tokens // page_size)
