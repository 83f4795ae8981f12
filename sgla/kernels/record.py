"""The recorder: ops as instructions of the native kernels,
and all else on symbolic tensors as torch operations between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.dispatch import Lowerings, Op, using
from sgla.kernels.fuse import ACTIVATIONS, Body, Buffer, Node
from sgla.kernels.native import Opcode
from sgla.kernels.ops import NO_BIASES, Biases
from sgla.kernels.panels import FORMATS, Kind, Panels
from sgla.kernels.routing import Activation, Clamped, Gating, Routing
from sgla.kernels.trace import (
    STAND_INS,
    BatchPart,
    NotRecorded,
    Region,
    Result,
    Rows,
    Running,
    Size,
    Symbol,
    TorchCall,
    changes,
    infer,
    size_of,
    stand_in,
    symbols_in,
    through_body,
)

if TYPE_CHECKING:
    from sgla.kernels.ops import KVLayer, Ranks
    from sgla.quant.weight import Weight

R = TypeVar("R")
INPUTS = ("ids", "positions", "slots", "q_start", "kv_len", "out_loc", "page_table", "sample_rows")
MAX_HEAD_DIM = 512  # the kernels' scratch is made for this


ADDITIONS = {torch.add, Tensor.add, Tensor.__add__}
LOWERINGS = Lowerings()


@dataclass(slots=True, eq=False)
class Value:
    """What a symbol stands for. ``buffer``: its place in the program's memory, once it needs one."""

    symbol: Symbol
    number: int
    buffer: Buffer | None = None

    @property
    def rows(self) -> Rows | None:
        """What its first dimension counts, if that alone depends on the step."""
        first, *rest = (size_of(n) for n in self.symbol.shape) if self.symbol.shape else (0,)
        ours = isinstance(first, Size) and first.factor == 1 and first.of != "rows"
        return first.of if ours and all(isinstance(n, int) for n in rest) else None  # type: ignore[union-attr]

    def place(self) -> Buffer | None:
        """None: the program's memory cannot hold it."""
        if self.buffer is None and self.symbol.dtype == torch.float32 and (rows := self.rows):
            self.buffer = Buffer(self.symbol.shape[1:].numel(), rows == "sampled")
        return self.buffer

    @property
    def matrix(self) -> bool:
        """Whether instructions can read it: float32 ``[T or S, width]``."""
        return self.symbol.dim() == 2 and self.symbol.dtype == torch.float32 and self.rows is not None


class Recorder:
    """Collects nodes. ``isa``: level of the kernels.
    An op without a function here is the ops and torch operations of its body."""

    device = torch.device("cpu")

    def __init__(self, isa: str = "") -> None:
        self._isa = isa
        self.nodes: list[Node] = []
        self.running = Running()
        self._values: dict[int, Value] = {}  # by number
        self._known: dict[int, Value] = {}  # by identity of the symbol
        self._parts: dict[int, str] = {}  # names in the batch, by identity
        self._batch: ForwardBatch | None = None

    def batch(self) -> ForwardBatch:
        """The symbolic batch to record with."""
        tokens, sampled, rows = (STAND_INS[of] for of in ("tokens", "sampled", "rows"))
        shapes: dict[str, tuple[int, ...]] = {
            "ids": (tokens,),
            "positions": (tokens,),
            "slots": (rows,),
            "q_start": (rows + 1,),
            "kv_len": (rows,),
            "out_loc": (tokens,),
            "page_table": (rows, 1),
            "sample_rows": (sampled,),
        }
        tensors: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            tensors[name] = symbol = Symbol.of(shape, torch.int32, self)
            self._parts[id(symbol)] = name
        self._batch = ForwardBatch(rows=rows, tokens=tokens, page_size=1, draws=None, **tensors)
        return self._batch

    def run(self, op: Op[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        if all(self._readable(x) for x in (*args, *kwargs.values()) if isinstance(x, Symbol)):
            made = LOWERINGS.run(self, op, args, kwargs)
            if made is not NotImplemented:
                return made
        made = through_body(op, args, kwargs, self.nodes)
        if made is not NotImplemented:
            return made  # type: ignore[no-any-return]
        like = stand_in(op, args, kwargs)
        return self._record(op.body, args, kwargs, like)  # type: ignore[no-any-return]

    def operation(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a torch operation on symbols and return the symbols of its results. Raises NotRecorded."""
        if fn in ADDITIONS and not kwargs and self._adds(*args):
            return self.add(*args)
        if any(self._parts.get(id(x)) in ("out_loc", "page_table") for x in symbols_in((args, kwargs))):
            raise NotRecorded("a torch operation on a page table")
        if not changes(fn, kwargs):
            return self._record(fn, args, kwargs, infer(fn, args, kwargs))
        target = kwargs.get("out", args[0] if args else None)
        if symbols_in(target):
            raise NotRecorded(f"{getattr(fn, '__name__', fn)}: an operation in place")
        self._record(fn, args, kwargs, None)
        return target

    def _record(self, fn: Callable[..., Any], args: Any, kwargs: Any, like: Any) -> Any:
        """Note a call whose results are like ``like``."""

        def stand_in(x: Any) -> Any:
            if x is self._batch and x is not None:
                return BatchPart("")
            if isinstance(x, Symbol):
                name = self._parts.get(id(x))
                return BatchPart(name) if name is not None else Result(self._value(x).number)
            if isinstance(x, slice):
                return slice(stand_in(x.start), stand_in(x.stop), stand_in(x.step))
            if isinstance(x, torch.Size):
                return tuple(map(size_of, x))
            return size_of(x) if type(x) is int else x

        def made(x: Any) -> Any:
            return self._new(tuple(x.shape), x.dtype).symbol if isinstance(x, Tensor) else x

        given = tree_map(stand_in, (args, kwargs))
        result = tree_map(made, like)
        numbers = [self._value(x).number for x in symbols_in(result)]
        self.nodes.append(
            Node(
                Opcode.PYTHON,
                False,
                [],
                [],
                fn=Region(self.running, [TorchCall(fn, given[0], given[1], numbers)]),
            )
        )
        return result

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Value:
        symbol = Symbol.of(shape, dtype, self)
        value = Value(symbol, len(self._values))
        self._values[value.number] = self._known[id(symbol)] = value
        return value

    def _value(self, x: Tensor) -> Value:
        known = self._known.get(id(x))
        if known is None:
            raise TypeError(f"an op got a tensor of shape {tuple(x.shape)} from outside of this recording")
        return known

    def buffer(self, x: Tensor) -> Buffer:
        """The place of a symbolic tensor. Raises NotRecorded."""
        found = self._value(x).place()
        if found is None:
            raise NotRecorded(
                f"an op got {x.dtype} of shape {tuple(map(size_of, x.shape))}, not float32 [T, width]"
            )
        return found

    def _make(self, width: int, sampled: bool) -> tuple[Tensor, Buffer]:
        value = self._new((STAND_INS["sampled" if sampled else "tokens"], width))
        return value.symbol, self.buffer(value.symbol)

    def _readable(self, x: Symbol) -> bool:
        return id(x) in self._parts or self._value(x).matrix

    def _adds(self, x: Any, y: Any, *more: Any) -> bool:
        """Whether a sum is an instruction: between torch operations it is rather one of them."""
        if more or not (isinstance(x, Symbol) and isinstance(y, Symbol)) or x.shape != y.shape:
            return False
        values = [value for z in (x, y) if (value := self._known.get(id(z))) is not None and value.matrix]
        return len(values) == 2 and any(value.buffer is not None for value in values)

    def _is(self, tensor: Tensor, name: str) -> bool:
        """Whether it is this tensor of the batch."""
        return self._parts.get(id(tensor)) == name

    def finish(self) -> list[Node]:
        """The nodes, of which neighbours with torch operations are one."""
        nodes: list[Node] = []
        for node in self.nodes:
            before = nodes[-1].fn if nodes else None
            if isinstance(node.fn, Region) and isinstance(before, Region):
                before.calls += node.fn.calls
            else:
                nodes.append(node)
        regions = [(node, node.fn) for node in nodes if isinstance(node.fn, Region)]
        makers = {number: region for _, region in regions for number in region.writes}
        for node, region in regions:
            for number in region.reads:
                value = self._values[number]
                if (buffer := value.place()) is None:
                    makers[number].passed.append(number)
                    continue
                region.given.append((number, tuple(value.symbol.shape[1:])))
                node.inputs.append(buffer)
        for node, region in regions:
            for number in region.writes:
                value = self._values[number]
                if value.buffer is not None:
                    region.made.append((number, tuple(value.symbol.shape[1:])))
                    node.outputs.append(value.buffer)
            node.inputs += [None, None]
        return nodes

    @LOWERINGS.of(ops.embedding)
    def embedding(self, ids: Tensor, weight: Tensor | Weight, scale: float = 1.0) -> Tensor:
        if not self._is(ids, "ids"):
            return NotImplemented
        if isinstance(weight, Tensor):
            kind: Kind = "bf16" if weight.dtype == torch.bfloat16 else "f32"
            panels = Panels.of(kind, weight.shape[1], weight, isa=self._isa)
        else:
            moved = weight.to_panels(self._isa)
            if moved is None:
                taken = torch.empty(ids.shape[0], weight.k, device="meta")
                found: Tensor = self._record(ops.embedding.body, (ids, weight, scale), {}, taken)
                return found
            panels = moved
        out, y = self._make(panels.k, False)
        self.nodes.append(
            Node(
                Opcode.EMBEDDING, False, [None, None], [y], [panels.data], panels.n, panels.k,
                a=[FORMATS.index(panels.kind)], f=[scale],
            )
        )  # fmt: skip
        return out

    @LOWERINGS.of(ops.rms_norm)
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        source = self.buffer(x)
        out, y = self._make(source.width, source.sampled)
        node = Node(
            Opcode.RMS_NORM,
            source.sampled,
            [source, None],
            [y],
            [_floats(weight)],
            k=source.width,
            a=[0],
            f=[eps],
        )
        self.nodes.append(node)
        return out

    @LOWERINGS.of(ops.add_rms_norm)
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        a, b = self.buffer(x), self.buffer(residual)
        assert a.sampled == b.sampled
        out, y = self._make(a.width, a.sampled)
        total, h = self._make(a.width, a.sampled)
        node = Node(
            Opcode.ADD_RMS_NORM, a.sampled, [a, b], [y, h], [_floats(weight)], k=a.width, a=[0], f=[eps]
        )
        self.nodes.append(node)
        return out, total

    @LOWERINGS.of(ops.add)
    def add(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:
            return NotImplemented
        a, b = self.buffer(x), self.buffer(y)
        out, total = self._make(a.width, a.sampled)
        self.nodes.append(Node(Opcode.ADD, a.sampled, [a, b], [total], k=a.width))
        return out

    @LOWERINGS.of(ops.linear)
    def linear(
        self, x: Tensor, w: Weight, bias: Tensor | None = None, addend: Tensor | None = None
    ) -> Tensor:
        panels = w.to_panels(self._isa)
        if panels is None:  # a call, or the program would keep what the storage holds now, in float32
            like = torch.empty(x.shape[0], w.n, device="meta")
            made: Tensor = self._record(ops.linear.body, (x, w, bias, addend), {}, like)
            return made
        source = self.buffer(x)
        assert source.width == w.k
        out, y = self._make(w.n, source.sampled)
        tensors = [panels.data, None if bias is None else _floats(bias)]
        a = [FORMATS.index(panels.kind), ACTIVATIONS["none"], 0, 0]
        added = None if addend is None else self.buffer(addend)
        self.nodes.append(Node(Opcode.LINEAR, source.sampled, [source, added], [y], tensors, w.n, w.k, a))
        return out

    @LOWERINGS.of(ops.qk_norm_rope_store)
    def qk_norm_rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv: KVLayer,
        out_loc: Tensor,
    ) -> Tensor:
        if not (self._is(positions, "positions") and self._is(out_loc, "out_loc") and _native(kv)):
            return NotImplemented
        source, dim, kv_heads = self.buffer(qkv), kv.k.shape[3], kv.k.shape[2]
        heads = source.width // dim - 2 * kv_heads
        out, q = self._make(heads * dim, source.sampled)
        norms = [None if w is None else _floats(w) for w in (q_norm, k_norm)]
        a = [kv_heads, cos_sin.shape[1], *_layout(kv), 0, kv.group]
        tensors = [_floats(cos_sin), *norms]
        self.nodes.append(
            Node(
                Opcode.ROPE_STORE, source.sampled, [source, None], [q], tensors, heads, dim, a, [eps], keep=kv
            )
        )
        return out

    @LOWERINGS.of(ops.attention)
    def attention(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: ForwardBatch,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if batch is not self._batch or not _native(kv):
            return NotImplemented
        source, dim, kv_heads = self.buffer(q), kv.k.shape[3], kv.k.shape[2]
        out, y = self._make(source.width, source.sampled)
        a = [kv_heads, window, *_layout(kv), 0, kv.group]
        heads = source.width // dim
        self.nodes.append(
            Node(
                Opcode.ATTENTION,
                source.sampled,
                [source, None],
                [y],
                [None if sinks is None else _floats(sinks)],
                heads,
                dim,
                a,
                [scale, softcap],
                keep=kv,
            )
        )
        return out

    @LOWERINGS.of(ops.act_mul)
    def act_mul(self, x: Tensor, kind: Activation) -> Tensor:
        source = self.buffer(x)
        out, y = self._make(source.width // 2, source.sampled)
        self.nodes.append(
            Node(Opcode.ACT_MUL, source.sampled, [source, None], [y], n=y.width, a=[0, ACTIVATIONS[kind]])
        )
        return out

    @LOWERINGS.of(ops.moe)
    def moe(
        self,
        x: Tensor,
        router: Weight,
        gate_up: Weight,
        down: Weight,
        routing: Routing,
        activation: Gating,
        biases: Biases = NO_BIASES,
    ) -> Tensor:
        """Routing with torch, between native segments; each expert is a body, or two with an activation
        between them that is torch's."""
        if not (gate_up.native and down.native):
            return NotImplemented
        count = router.n
        widths = x.shape[1], down.k
        first = [(w, _row(biases.gate_up, e)) for e, w in enumerate(gate_up.split(count))]
        second = [(w, _row(biases.down, e)) for e, w in enumerate(down.split(count))]
        if isinstance(activation, Clamped):
            layers = [self._body(width, partial(ops.linear, w=w, bias=bias))
                      for width, part in zip(widths, (first, second)) for w, bias in part]  # fmt: skip
        else:
            kind = activation

            def mlp(x: Tensor, expert: int) -> Tensor:
                return ops.linear(ops.act_mul(ops.linear(x, *first[expert]), kind), *second[expert])

            layers = [self._body(widths[0], partial(mlp, expert=e)) for e in range(count)]

        def run(views: list[Tensor], parts: list[Callable[[Tensor], Tensor]]) -> None:
            def expert(index: int, rows: Tensor) -> Tensor:
                made = parts[index](rows)
                return made if len(parts) == count else parts[count + index](ops.gated(made, activation))

            views[1].copy_(ops.mix(views[0], router, expert, routing, biases))

        source = self.buffer(x)
        out, y = self._make(source.width, source.sampled)
        self.nodes.append(Node(Opcode.PYTHON, source.sampled, [source, None], [y], fn=run, bodies=layers))
        return out

    def _body(self, width: int, fn: Callable[[Tensor], Tensor]) -> Body:
        inner = Recorder(self._isa)
        x, given = inner._make(width, False)
        with using(inner):
            made = inner.buffer(fn(x))
        return Body(inner.nodes, given, made)

    @LOWERINGS.of(ops.self_attention)
    def self_attention(self, qkv: Tensor, batch: ForwardBatch, heads: int, scale: float) -> Tensor:
        source = self.buffer(qkv)
        dim = source.width // (3 * heads)
        if batch is not self._batch or dim > MAX_HEAD_DIM:
            return NotImplemented
        out, y = self._make(heads * dim, source.sampled)
        self.nodes.append(
            Node(Opcode.SELF_ATTENTION, source.sampled, [source, None], [y], n=heads, k=dim, f=[scale])
        )
        return out

    @LOWERINGS.of(ops.layer_norm)
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        source = self.buffer(x)
        out, y = self._make(source.width, source.sampled)
        tensors: list[Tensor | None] = [_floats(weight), _floats(bias)]
        self.nodes.append(
            Node(Opcode.LAYER_NORM, source.sampled, [source, None], [y], tensors, k=source.width, f=[eps])
        )
        return out

    @LOWERINGS.of(ops.activate)
    def activate(self, x: Tensor, kind: str) -> Tensor:
        if kind not in ACTIVATIONS:
            return NotImplemented
        source = self.buffer(x)
        out, y = self._make(source.width, source.sampled)
        self.nodes.append(
            Node(Opcode.ACTIVATE, source.sampled, [source, None], [y], k=source.width, a=[ACTIVATIONS[kind]])
        )
        return out

    @LOWERINGS.of(ops.gather)
    def gather(self, x: Tensor, rows: Tensor) -> Tensor:
        if not self._is(rows, "sample_rows"):
            return NotImplemented
        source = self.buffer(x)
        out, y = self._make(source.width, True)
        self.nodes.append(Node(Opcode.GATHER, True, [source, None], [y], k=source.width))
        return out

    @LOWERINGS.of(ops.all_reduce)
    def all_reduce(self, x: Tensor, ranks: Ranks) -> Tensor:
        return self.inplace(ranks.all_reduce, x)

    @LOWERINGS.of(ops.inplace)
    def inplace(self, fn: Callable[[Tensor], None], x: Tensor) -> Tensor:
        buffer = self.buffer(x)
        self.nodes.append(
            Node(Opcode.PYTHON, buffer.sampled, [buffer, None], [buffer], fn=lambda views: fn(views[0]))
        )
        return x

    @LOWERINGS.of(ops.call)
    def call(self, fn: Callable[[Tensor, Tensor], None], x: Tensor, width: int) -> Tensor:
        source = self.buffer(x)
        out, y = self._make(width, source.sampled)
        self.nodes.append(
            Node(Opcode.PYTHON, source.sampled, [source, None], [y], fn=lambda views: fn(*views))
        )
        return out


def _floats(weight: Tensor) -> Tensor:
    return weight.to(torch.float32).contiguous()


def _row(table: Tensor | None, index: int) -> Tensor | None:
    return None if table is None else table[index]


def _native(kv: KVLayer) -> bool:
    """Whether the kernels read and write such pages."""
    k, v = kv.k, kv.v
    types = k.dtype == v.dtype and k.dtype in (torch.float32, torch.bfloat16)
    alike = k.shape == v.shape and k.stride() == v.stride() and k.stride(3) == 1
    return types and alike and k.shape[3] <= MAX_HEAD_DIM


def _layout(kv: KVLayer) -> list[int]:
    """Places 2 to 7 of ``a`` in rope_store and attention: type, strides in elements, addresses."""
    page, token, head, _ = kv.k.stride()
    return [int(kv.k.dtype == torch.bfloat16), page, token, head, kv.k.data_ptr(), kv.v.data_ptr()]
