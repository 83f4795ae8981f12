"""What a model keeps of the tokens it has seen: of each layer, in cache groups, and how a budget of memory is
shared out between these. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, prod
from typing import NamedTuple

from sgla.config import Config
from sgla.kernels.kept import int4_dims
from sgla.layers.spec import StateTensor
from sgla.model.sharing import TENSOR, Slab, least_pages, longest, read_pages
from sgla.model.sizes import BYTES
from sgla.model.spec import ModelSpec

FEWEST, MOST = 512, 4096  # tokens between checkpoints
FREE = 1 << 18  # pages, where tokens take no bytes


class Stored(NamedTuple):
    """How a KV cache has a tensor: numbers of type ``dtype``, so many values a number, and so many ``scales``
    of type ``scale`` beside each head of a token."""

    dtype: str
    together: int = 1
    scale: str = ""
    scales: int = 0

    @classmethod
    def of(cls, tensor: StateTensor, dtype: str) -> Stored:
        """``dtype``: of the KV cache. In one of int4 the keys are int8: in 4 bits they lose too much."""
        kind, width = tensor.dtype or dtype, tensor.shape[-1]
        if kind == "int4" and tensor.name == "v":
            return cls("int4", 2, "bfloat16", 2 * (width // int4_dims(width)))
        return cls("int8", 1, "float32", 1) if kind in ("int8", "int4") else cls(kind)

    def token_bytes(self, shape: Sequence[int]) -> float:
        """Of a token with values of this shape."""
        scales = prod(shape[:-1]) * self.scales
        return prod(shape) * BYTES[self.dtype] + (scales * BYTES[self.scale] if scales else 0)


def scaled(tensors: Sequence[StateTensor], dtype: str) -> list[StateTensor]:
    """Those that have scales. ``dtype``: of the KV cache."""
    return [tensor for tensor in tensors if Stored.of(tensor, dtype).scales]


class LayerState(NamedTuple):
    """What a layer keeps, on one rank, of every token that a later one may read, or its ``unit``: what it
    keeps of all tokens together; some layers have both. ``window``: tokens that a token reads, itself
    included; 0: all. A layer without tensors keeps nothing, or it reads what the layer ``reads`` keeps. Each
    of ``holders`` ranks has one of so many tokens."""

    window: int
    tensors: tuple[StateTensor, ...]
    reads: int | None = None
    unit: tuple[StateTensor, ...] = ()
    holders: int = 1

    def token_bytes(self, dtype: str) -> float:
        """``dtype``: of the KV cache."""
        whole = sum(Stored.of(tensor, dtype).token_bytes(tensor.shape) for tensor in self.tensors)
        return whole / self.holders

    def unit_bytes(self, dtype: str) -> float:
        return sum(prod(tensor.shape) * BYTES[unit_dtype(tensor, dtype)] for tensor in self.unit)


class KVGroup(NamedTuple):
    """Layers that keep the same tokens share page numbers. ``layers``: indices; ``token_bytes``: of what they
    keep of a token together, on one rank; ``window`` 0: they keep all tokens. Or layers that keep a state of
    ``unit_bytes`` together."""

    window: int
    layers: tuple[int, ...]
    token_bytes: float
    unit_bytes: float = 0.0

    def page_bytes(self, page_size: int) -> int:
        """Of a page, or of a state."""
        return int(self.unit_bytes or self.token_bytes * page_size)


class Demand(NamedTuple):
    """What decides how many pages of windows and how many states are of use: requests at a time, tokens of a
    step, and whether prefixes are kept. ``ratio``: pages of windows for each of whole histories, if somebody
    says so."""

    rows: int
    step_tokens: int
    prefixes: bool = True
    ratio: float | None = None


def own_heads(heads: int, rank: int, ranks: int) -> range:
    """Which of so many heads a rank keeps: they are split as ``Shard.range`` does; with fewer of them than
    ranks each rank has one."""
    if heads < ranks:
        only = rank * heads // ranks
        return range(only, only + 1)
    return range(rank * heads // ranks, (rank + 1) * heads // ranks)


def state_of(spec: ModelSpec, ranks: int, rank: int | None = None) -> list[LayerState]:
    """Of each layer of a stage, on ``rank`` or on the one that has most; behind these what some keep beside
    (``ModelSpec.keepers``)."""

    def own(heads: int) -> int:
        return max(len(own_heads(heads, one, ranks)) for one in (range(ranks) if rank is None else [rank]))

    state = []
    for layer in spec.attention_held:
        kept = layer.kept(own(layer.kv_heads)) if layer.reads is None else ()
        state.append(LayerState(layer.window, kept, layer.reads, layer.unit(own)))
    beside = (layer.beside() for layer in spec.keepers[len(state) :])
    return [*state, *(LayerState(0, tensors) for tensors in beside)]


def shared_out(state: Sequence[LayerState], ranks: int) -> list[LayerState]:
    """Each of the ranks has its part of the tokens (``--dcp``)."""
    return [layer._replace(holders=ranks) for layer in state]


def with_draft(state: Sequence[LayerState], draft: Sequence[LayerState]) -> list[LayerState]:
    """Of the layers of a model and of one that guesses for it, which keep whole histories, in pages of the
    same numbers."""
    return [
        *state,
        *(
            layer._replace(window=0, reads=None if layer.reads is None else layer.reads + len(state))
            for layer in draft
        ),
    ]


def unit_dtype(tensor: StateTensor, dtype: str) -> str:
    """That of a part of a state beside a KV cache of ``dtype``, whose scales it does not have."""
    return tensor.dtype or ("bfloat16" if dtype in ("fp8", "int8", "int4") else dtype)


def token_bytes(state: Sequence[LayerState], dtype: str) -> int:
    """Of all layers, on one rank. ``dtype``: of the KV cache."""
    return int(sum(layer.token_bytes(dtype) for layer in state))


def unit_bytes(state: Sequence[LayerState], dtype: str) -> int:
    """Of a state in all layers, on one rank."""
    return int(sum(layer.unit_bytes(dtype) for layer in state))


def kv_groups(state: Sequence[LayerState], context_len: int, dtype: str) -> list[KVGroup]:
    """The groups of a model, that of whole histories first, that of states last. If no layer needs whole
    histories, those with windows keep them. ``dtype``: of the KV cache."""
    paged = [i for i, layer in enumerate(state) if layer.tensors or not layer.unit]
    windows = {i: state[i].window if state[i].window < context_len else 0 for i in paged}
    if 0 not in windows.values():
        windows = dict.fromkeys(paged, 0)
    groups = []
    for window in sorted({0, *windows.values()}):
        layers = tuple(i for i in paged if windows[i] == window)
        groups.append(KVGroup(window, layers, sum(state[i].token_bytes(dtype) for i in layers)))
    if recurrent := tuple(i for i, layer in enumerate(state) if layer.unit):
        units = sum(state[i].unit_bytes(dtype) for i in recurrent)
        groups.append(KVGroup(0, recurrent, 0.0, units))
    return groups


class Pool(NamedTuple):
    """How a budget is shared out between cache groups.

    Groups of pages that share one memory (``sharing.py``) have all of it, each of them; between pages are a
    multiple of ``shared`` bytes then. Else pages of a window are never more than those of whole histories,
    nor than are of use: for every row what it reads, as much again for prefixes in the tree, and a step's
    tokens. Where that is too much, they are three quarters of what they would be if all groups had the same
    number: then short requests, which fill no window, lose a quarter of their places, and long ones win what
    the windows give up. Who knows that texts are long can say how many there are (``Demand.ratio``).

    States get half of the budget, as long as more than one for each row and one more is of use: for a
    checkpoint every so many tokens of those that the other half holds."""

    groups: Sequence[KVGroup]
    page_size: int
    demand: Demand
    shared: int = 0

    @property
    def slab(self) -> Slab | None:
        """Of the memory that the groups share, if they do."""
        return Slab.of(self.page_bytes, self.shared) if self.shared else None

    @property
    def page_bytes(self) -> list[int]:
        """Of a page of each group, on one rank."""
        return [group.page_bytes(self.page_size) for group in self.groups]

    @property
    def every(self) -> int:
        """After how many tokens a text leaves a checkpoint: those take as many bytes as it does. 0: there are
        no states."""
        if not self.groups[-1].unit_bytes:
            return 0
        tokens = self.groups[-1].unit_bytes / max(self._token_bytes, 1)
        return pages_for(int(min(max(tokens, FEWEST), MOST)), self.page_size) * self.page_size

    def needed(self, context: int) -> int:
        """Bytes for one request of ``context`` tokens."""
        whole = pages_for(context, self.page_size)
        pages = [min(whole, self._least(group)) for group in self.groups]
        if (slab := self.slab) is not None:
            return slab.count(pages) * slab.bytes
        return sum(count * size for count, size in zip(pages, self.page_bytes))

    def taken(self, pages: Sequence[int]) -> int:
        """Bytes of so many pages of each group, with the dummies."""
        if (slab := self.slab) is not None:
            return slab.total(pages)
        return sum(count * size for count, size in zip(pages, self.page_bytes))

    def one(self, pages: Sequence[int]) -> int:
        """Tokens that one request can have of so many pages of each group, without the dummies."""
        if (slab := self.slab) is None:
            return pages[0] * self.page_size
        least = [self._least(group) for group in self.groups[1:]]
        return longest(pages[0] // slab.pages[0], slab.pages, least) * self.page_size

    def split(self, budget: int) -> list[int]:
        """Pages of each group, without the dummies, in ``budget`` bytes or a page of each more; at the end
        states."""
        if not self.groups[-1].unit_bytes:
            return self._pages(budget)
        states = self._states(budget)
        return [*self._pages(max(budget - states * self.page_bytes[-1], 1)), states]

    def _pages(self, budget: int) -> list[int]:
        if (slab := self.slab) is not None:
            slabs = max(pages_for(budget, slab.bytes), len(slab.pages))
            return [slabs * count for count in slab.pages]
        sizes = [group.page_bytes(self.page_size) for group in self.groups if not group.unit_bytes]
        first, *others = sizes
        if not first:
            return [FREE]
        equal = pages_for(budget, first + sum(others))
        step, windows = pages_for(self.demand.step_tokens, self.page_size), []
        for group in self.groups[1 : len(sizes)]:
            wanted = 2 * self.demand.rows * (read_pages(group.window, self.page_size) + 1) + step
            wanted = min(wanted, equal * 3 // 4)
            if self.demand.ratio is not None:
                wanted = int(self.demand.ratio * budget / (first + self.demand.ratio * sum(others)))
            windows.append(min(equal, max(self._least(group), wanted)))
        left = budget - sum(n * b for n, b in zip(windows, others))
        return [max(equal, left // first), *windows]

    def _states(self, budget: int) -> int:
        """Those of rows come before tokens, up to three quarters of the budget; two are the least that a
        request and its checkpoint need."""
        size, token, rows = self.page_bytes[-1], self._token_bytes, self.demand.rows
        if not token:
            return max(2, budget // size)
        useful = min(budget // 2 // size, 2 * rows + int(budget // 2 // token) // self.every)
        wanted = max(rows + 1, useful) if self.demand.prefixes else rows + 1
        return max(2, min(wanted, budget * 3 // 4 // size))

    @property
    def _token_bytes(self) -> float:
        """Of a token in all groups."""
        return sum(group.token_bytes for group in self.groups)

    def tokens(self, budget: int) -> int:
        """Tokens of whole histories that ``budget`` bytes hold: where groups share a memory, of one text."""
        if len(self.groups) == 1 and self.groups[0].token_bytes:
            return int(budget // self.groups[0].token_bytes)
        return self.one(self.split(budget))

    def least(self, budget: int) -> int:
        """Tokens that it would hold of texts shorter than a window, where groups share a memory."""
        assert self.slab is not None
        each = sum(1 / count for count in self.slab.pages)
        return int(self.split(budget)[0] // self.slab.pages[0] / each) * self.page_size

    def whole(self, budget: int) -> int:
        """Tokens that it would hold if layers with windows kept all, as others do."""
        return int(budget // self._token_bytes)

    def _least(self, group: KVGroup) -> int:
        """Pages with which one request reads its prompt at full speed, or states."""
        if group.unit_bytes:
            return 2
        if not group.window:
            return 1 << 40
        return least_pages(group.window, self.demand.step_tokens, self.page_size)


def apart(config: Config, spec: ModelSpec, state: Sequence[LayerState], dtype: str) -> str:
    """Why cache groups of pages, of which there are several, have a memory each; "": they share one.
    ``state``: of a rank; ``dtype``: of the KV cache."""
    kept = [tensor for layer in state for tensor in layer.tensors]
    host = config.kv_host_bytes is not None or config.kv_host_ratio is not None
    heads, ranks = {layer.kv_heads for layer in spec.attention}, config.heads_over
    found = {
        "--window-ratio says how large": config.window_ratio is not None,
        "with --pp ranks have other layers": config.pp > 1,
        "with --dcp or --cp ranks have parts of the tokens": config.dcp > 1 or config.cp > 1,
        "tiers copy pages of each": host or config.kv_disk is not None or config.kv_store is not None,
        "servers with a --role copy pages of each": config.role != "both",
        "layers that keep states are beside them": any(layer.unit for layer in state),
        f"pages in {dtype} have scales": bool(scaled(kept, dtype)),
        "layers keep more than keys and values": any(
            tensor.dtype or tensor.name not in ("k", "v") for tensor in kept
        )
        or len(spec.keepers) > len(spec.attention_held),
        "ranks have other numbers of heads": any(count > ranks and count % ranks for count in heads),
        "pages are too small": any(
            prod(tensor.shape) * config.page_size * BYTES[Stored.of(tensor, dtype).dtype] % TENSOR
            for tensor in kept
        ),
    }
    return next((reason for reason, true in found.items() if true), "")


def whole_heads(
    config: Config, spec: ModelSpec, state: Sequence[LayerState], groups: Sequence[KVGroup], dtype: str
) -> int:
    """Bytes of a head of a page, of which the GPU's copies see whole ones between pages, if ``groups`` share
    one memory; 0: they do not. See ``apart``."""
    if len(groups) < 2 or apart(config, spec, state, dtype):
        return 0
    kept = [tensor for layer in state for tensor in layer.tensors]
    return lcm(*(int(config.page_size * t.shape[-1] * BYTES[Stored.of(t, dtype).dtype]) for t in kept))


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that so many tokens take."""
    return -(-tokens // page_size)
