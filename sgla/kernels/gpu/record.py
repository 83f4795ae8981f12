"""The record of a forward pass: the ops it calls, and the torch operations between them, in order.

A node says which values it reads by number (``Ref``). Sizes that differ from step to step are ``Size``, as in
``kernels/trace.py``, whose symbols stand for the values while the model runs once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from inspect import Signature, signature
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sgla.kernels import compressed, crossing, hyper, ops, picking
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.dispatch import Op
from sgla.kernels.lora import lora, lora_embedding
from sgla.kernels.lora_moe import lora_moe
from sgla.kernels.ops import Ranks
from sgla.kernels.sent_moe import sent_moe
from sgla.kernels.trace import (
    STAND_INS,
    Counted,
    NotRecorded,
    Size,
    Symbol,
    changes,
    infer,
    size_of,
    stand_in,
    symbols_in,
    through_body,
)

R = TypeVar("R")
Shapes = list[tuple[tuple[int, ...], torch.dtype]]
# What of a batch a forward may read, beside the whole of it, and what each is counted by.
PARTS: dict[str, Counted] = {
    "ids": "tokens",
    "positions": "tokens",
    "out_loc": "tokens",
    "slots": "rows",
    "kv_len": "rows",
    "sample_rows": "sampled",
}


class Ref(NamedTuple):
    """A value, by its number."""

    number: int


@dataclass(slots=True, eq=False)
class Node:
    """``fn(**given)`` makes the values ``results``. ``op``: what rules look for: an op, or the name that a
    rule gave to what it made. ``rows``: how many it works on. ``overwrites``: a value whose memory one of the
    results takes. ``rule``: which put it here."""

    op: Any
    fn: Callable[..., Any] | None
    given: dict[str, Any]
    results: list[int]
    rows: int | Size = 0
    overwrites: int | None = None
    rule: str = ""
    reads: list[int] = field(init=False)  # numbers of the values, in their order

    def __post_init__(self) -> None:
        self.reads = [x.number for x in self.given.values() if isinstance(x, Ref)]

    def but(self, more: dict[str, Any], results: list[int] | None = None) -> Node:
        """The same with other arguments and results."""
        made = self.results if results is None else results
        return Node(self.op, self.fn, self.given | more, made, self.rows, self.overwrites, self.rule)


@dataclass
class Record:
    """``inputs``: what the values with the first numbers are: ``batch``, parts of it, and ``hidden``;
    ``outputs``: numbers of what the forward returns."""

    nodes: list[Node] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)  # of each value
    views: dict[int, int] = field(default_factory=dict)  # of a value that shares the memory of another: which
    sized: bool = False  # some torch operation depends on the number of rows or tokens

    def memory(self, number: int) -> int:
        """The value whose memory this one has: its own, or that of what it is a view of."""
        while number in self.views:
            number = self.views[number]
        return number

    @cached_property
    def parts(self) -> list[str]:
        """The inputs that are read."""
        read = {number for node in self.nodes for number in node.reads}
        return [name for number, name in enumerate(self.inputs) if number in read]

    @cached_property
    def weights(self) -> list[Any]:
        """Of the linear layers, without that of the logits."""
        return [n.given["w"] for n in self.nodes if n.op is ops.linear]

    @cached_property
    def products(self) -> list[tuple[int, int, str]]:
        """Sides and kinds of the bfloat16 and e4m3 weights of all linear layers, each once."""
        weights = (n.given["w"] for n in self.nodes if n.op in (ops.linear, ops.logits))
        return list(dict.fromkeys((w.n, w.k, w.kind) for w in weights if w.kind in ("bf16", "fp8")))

    @cached_property
    def grouped(self) -> list[tuple[int, int]]:
        """Sides of the e4m3 weights with scales of groups, each once."""
        return list(dict.fromkeys((w.n, w.k) for w in self.weights if w.kind == "fp8g128"))

    @cached_property
    def mixtures(self) -> list[tuple[dict[str, Any], torch.dtype]]:
        """What mixtures of experts are given, each kind once, and the numbers that they see."""
        kinds: dict[Any, Node] = {}
        for node in self.nodes:
            if node.op in (ops.moe, lora_moe):
                weights = (node.given[name] for name in ("router", "gate_up", "down"))
                kinds[node.given["routing"], *((w.n, w.k, w.kind) for w in weights)] = node
        return [(n.given, self.dtypes[n.given["x"].number]) for n in kinds.values()]

    @cached_property
    def ranks(self) -> Ranks | None:
        """Over which layers add up, if they do."""
        return next((n.given["ranks"] for n in self.nodes if n.op is ops.all_reduce), None)


class Recorder:
    """Collects the nodes of one call of a forward. The ops in ``RESULTS`` are nodes; of others the ops and
    torch operations of their bodies are."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.record = Record()
        self._known: dict[int, int] = {}  # number of a value by the identity of its symbol
        self._kept: list[Any] = []  # so that identities stay
        # What rules hand to nodes: the first two to that of the logits, the last to mixtures.
        for name, dtype in (("out", torch.float32), ("draw", torch.float32), ("live", torch.int32)):
            self.record.inputs.append(name)
            self.record.dtypes.append(dtype)

    def input(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.record.inputs.append(name)
        return self._new(shape, dtype)

    def batch(self) -> ForwardBatch:
        """The symbolic batch to record with. Only the first tokens of what it has are meant."""
        number = len(self.record.dtypes)
        self.record.inputs.append("batch")
        self.record.dtypes.append(torch.int32)
        parts: dict[str, Any] = {
            name: self.input(name, (STAND_INS[of],), torch.int32) for name, of in PARTS.items()
        }
        rows, tokens = STAND_INS["rows"], STAND_INS["tokens"]
        unread = torch.empty(0, dtype=torch.int32, device="meta")
        batch = ForwardBatch(
            rows=rows, tokens=tokens, page_size=1, q_start=unread, page_table=unread, **parts
        )
        self._known[id(batch)] = number
        self._kept.append(batch)
        return batch

    def run(self, op: Op[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        shapes = RESULTS.get(op)
        if shapes is not None:
            bound = parameters(op).bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            made = shapes(*given.values())
            if isinstance(made, list):
                return self._node(op, given, made)  # type: ignore[no-any-return]
        made = through_body(op, args, kwargs, self.record.nodes)
        if made is not NotImplemented:
            return made  # type: ignore[no-any-return]
        bound, like = parameters(op).bind(*args, **kwargs), stand_in(op, args, kwargs)
        return self._node(op.body, bound.arguments, [(tuple(like.shape), like.dtype)], op.body)  # type: ignore[no-any-return]

    def operation(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a torch operation on symbols and return the symbols of its results. Raises NotRecorded."""
        if changes(fn, kwargs):
            raise NotRecorded(f"{getattr(fn, '__name__', fn)}: an operation in place")
        like = infer(fn, args, kwargs)
        leaves, form = tree_flatten((args, kwargs))
        given = {f"_{i}": leaf for i, leaf in enumerate(leaves)}

        def call(**leaves: Any) -> Any:
            args, kwargs = tree_unflatten([leaves[name] for name in given], form)
            made = [x for x in tree_flatten(fn(*args, **kwargs))[0] if isinstance(x, Tensor)]
            return made if len(made) > 1 else made[0]

        tensors = [x for x in tree_flatten(like)[0] if isinstance(x, Tensor)]
        made = self._node(fn, given, [(tuple(x.shape), x.dtype) for x in tensors], call, whole=True)
        for symbol, tensor in zip(made, tensors):
            shared = [x for x in symbols_in(leaves) if _same_memory(x, tensor)]
            if shared:
                self.record.views[self.number(symbol)] = self.number(shared[0])
        symbols = iter(made)
        return tree_map(lambda x: next(symbols) if isinstance(x, Tensor) else x, like)

    def _node(
        self,
        op: Any,
        given: dict[str, Any],
        made: Shapes,
        fn: Callable[..., Any] | None = None,
        whole: bool = False,
    ) -> Any:
        """Note a call; the symbols of its results: a list if ``whole`` or there are several."""
        record = self.record
        tensors = [x for x in given.values() if isinstance(x, Symbol)]
        rows = size_of(tensors[0].shape[0]) if tensors and tensors[0].dim() else 0
        node = Node(op, fn, {name: self._stand_in(x) for name, x in given.items()}, [], rows)
        record.nodes.append(node)
        symbols = []
        for shape, dtype in made:
            node.results.append(len(record.dtypes))
            symbols.append(self._new(shape, dtype))
        return symbols if whole or len(symbols) > 1 else symbols[0]

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Symbol:
        symbol = Symbol.of(shape, dtype, self)
        self._known[id(symbol)] = len(self.record.dtypes)
        self._kept.append(symbol)
        self.record.dtypes.append(dtype)
        return symbol

    def number(self, x: Tensor) -> int:
        """Of the value that a symbol stands for."""
        known = self._known.get(id(x))
        if known is None:
            raise NotRecorded(f"a tensor of shape {tuple(x.shape)} from outside of the recording")
        return known

    def _stand_in(self, x: Any) -> Any:
        if isinstance(x, Symbol) or id(x) in self._known:
            return Ref(self.number(x))
        if isinstance(x, slice):
            if symbols_in(x):
                raise NotRecorded("a slice with a tensor")
            return slice(*(self._stand_in(part) for part in (x.start, x.stop, x.step)))
        if isinstance(x, torch.Size):
            return tuple(self._stand_in(int(n)) for n in x)
        found = size_of(x) if type(x) is int else x
        self.record.sized |= isinstance(found, Size)
        return found


def _same_memory(x: Tensor, y: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return x.untyped_storage()._cdata == y.untyped_storage()._cdata


def resolved(x: Any, sizes: dict[str, int]) -> Any:
    """``x`` with numbers in place of ``Size``."""
    if isinstance(x, Size):
        return sizes[x.of] * x.factor
    if isinstance(x, slice):
        return slice(*(resolved(part, sizes) for part in (x.start, x.stop, x.step)))
    if type(x) is tuple:
        return tuple(resolved(part, sizes) for part in x)
    return x


@cache
def parameters(op: Op[..., Any]) -> Signature:
    return signature(op.body)


def _like(x: Tensor, *_: Any) -> Shapes:
    return [(tuple(x.shape), x.dtype)]


def _wide(x: Tensor, width: int) -> Shapes:
    return [((*x.shape[:-1], width), x.dtype)]


def _embedding(ids: Tensor, weight: Any, scale: float) -> Shapes:
    if isinstance(weight, Tensor):
        return [((ids.shape[0], weight.shape[1]), weight.dtype)]
    return [((ids.shape[0], weight.k), torch.float32 if weight.kind == "f32" else torch.bfloat16)]


def _queries(qkv: Tensor, *rest: Any) -> Shapes | None:
    kv: ops.KVLayer = rest[5]
    alike = kv.k.shape[3] == kv.v_dim  # else there is no kernel
    return _wide(qkv, qkv.shape[1] - 2 * kv.k.shape[2:].numel()) if alike else None


def _joined_queries(qkv: Tensor, *rest: Any) -> Shapes | None:
    kv, joined = rest[5], rest[7]
    alike = kv.k.shape[3] == kv.v_dim
    return _wide(qkv, qkv.shape[1] - (1 if joined else 2) * kv.k.shape[2:].numel()) if alike else None


def _sum(x: Tensor, y: Tensor) -> Shapes | None:
    return _like(x) if x.shape == y.shape and x.dtype == y.dtype else None


# The shapes and types of what an op makes, from its arguments.
RESULTS: dict[Op[..., Any], Callable[..., Shapes | None]] = {
    ops.embedding: _embedding,
    ops.rms_norm: _like,
    ops.rms_norm_beside: _like,
    ops.add_rms_norm: lambda x, residual, *_: _like(x) + _like(residual),
    ops.add: _sum,
    ops.scaled_add: _like,
    ops.linear: lambda x, w, *_: _wide(x, w.n),
    ops.logits: lambda x, w, *_: [((x.shape[0], w.n), torch.float32)],
    ops.qk_norm_rope_store: _queries,
    ops.scale_queries: _like,
    ops.qkv_norm_rope_store: _joined_queries,
    ops.latent_queries: lambda q, latent, k_up, *_: _wide(q, k_up.shape[0] * latent.shape[1]),
    ops.latent_values: lambda seen, v_up: _wide(seen, v_up.shape[0] * v_up.shape[1]),
    ops.attention: lambda q, kv, *_: _wide(q, q.shape[1] // kv.k.shape[3] * kv.v_dim),
    crossing.cross_attention: _like,
    picking.pick: lambda q, key, weights, kv, batch, most: [((q.shape[0], most), torch.int32)],
    picking.picked_attention: lambda q, kv, *_: _wide(q, q.shape[1] // kv.k.shape[3] * kv.v_dim),
    compressed.compress: lambda key, *_: [((key.shape[0],), torch.int32)],
    compressed.pick_entries: lambda q, weights, entries, batch, counts, most, places: [
        ((q.shape[0], most), torch.int32)
    ],
    compressed.compressed_attention: _like,
    hyper.stream_weights: _like,
    ops.causal_conv: _like,
    ops.gated_delta: lambda q, k, v, *_: _like(v),
    ops.selective_scan: _like,
    ops.decay_rates: lambda a, b, *_: [(tuple(a.shape), torch.float32), (tuple(b.shape), torch.float32)],
    ops.gated_rms_norm: _like,
    ops.gated_group_norm: _like,
    ops.act_mul: lambda x, _: _wide(x, x.shape[-1] // 2),
    ops.gated_add: _like,
    ops.sigmoid_mul: _like,
    ops.layer_norm: _like,
    ops.add_layer_norm: lambda x, residual, *_: _like(x) + _like(residual),
    ops.activate: _like,
    ops.moe: _like,
    ops.gather: lambda x, rows: [((rows.shape[0], *x.shape[1:]), x.dtype)],
    ops.all_reduce: _like,
    ops.gathered: lambda x, _: [((STAND_INS["gathered"], x.shape[1]), x.dtype)],
    ops.reduce_scatter: lambda y, x, _: _like(x),
    lora_moe: lambda _, x, *more: _like(x),
    sent_moe: lambda ranks, slots, x, *_: _like(x),
    lora: lambda x, stack, *_: _wide(x, stack.n),
    lora_embedding: lambda ids, stack, *_: [((ids.shape[0], stack.n), torch.float32)],
    ops.arriving: lambda _, ids, width, dtype: [((ids.shape[0], width), dtype)],
    ops.inplace: lambda _, x: _like(x),
    ops.copied: _like,
    ops.call: lambda _, x, width: _wide(x, width),
}
