"""The recorder: ops on symbolic tensors as instructions of the native kernels (``instructions.py``),
and all else as torch operations between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch, StateRows
from sgla.kernels.cpu.fuse import Body, Buffer, Node
from sgla.kernels.cpu.native import Opcode
from sgla.kernels.dispatch import Lowerings, Op, using
from sgla.kernels.trace import (
    STAND_INS,
    BatchPart,
    Counted,
    NotRecorded,
    Region,
    Result,
    Running,
    Size,
    Symbol,
    TorchCall,
    changes,
    infer,
    rebuilt,
    size_of,
    stand_in,
    symbols_in,
    through_body,
)

R = TypeVar("R")
INPUTS = ("ids", "positions", "slots", "q_start", "kv_len", "out_loc", "page_table", "sample_rows")
ADDITIONS = {torch.add, Tensor.add, Tensor.__add__}


@dataclass(slots=True, eq=False)
class Value:
    """What a symbol stands for. ``buffer``: its place in the program's memory, once it needs one."""

    symbol: Symbol
    number: int
    buffer: Buffer | None = None

    @property
    def rows(self) -> Counted | None:
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
    """Collects nodes. ``lowerings``: the ops that are instructions; another is the ops and torch
    operations of its body. ``isa``: level of the kernels; ``bodies``: in place of those of ops that are one
    call."""

    device = torch.device("cpu")

    def __init__(
        self,
        lowerings: Lowerings,
        isa: str = "",
        bodies: Mapping[Op[..., Any], Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        self._lowerings, self.isa, self._bodies = lowerings, isa, bodies
        self.nodes: list[Node] = []
        self.running = Running()
        self.taps: list[tuple[Callable[[Tensor], None], Buffer]] = []
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
        tensors: dict[str, Any] = {}
        for name, shape in shapes.items():
            tensors[name] = symbol = Symbol.of(shape, torch.int32, self)
            self._parts[id(symbol)] = name
        unit = Symbol.of((rows,), torch.int32, self)
        states = StateRows(unit, unit, unit)  # read at run time alone
        self._batch = ForwardBatch(
            rows=rows, tokens=tokens, page_size=1, draws=None, states=states, **tensors
        )
        return self._batch

    def run(self, op: Op[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        if all(self._readable(x) for x in (*args, *kwargs.values()) if isinstance(x, Symbol)):
            made = self._lowerings.run(self, op, args, kwargs)
            if made is not NotImplemented:
                return made
        made = through_body(op, args, kwargs, self.nodes)
        if made is not NotImplemented:
            return made  # type: ignore[no-any-return]
        like = stand_in(op, args, kwargs)
        return self.note(self._bodies.get(op, op.body), args, kwargs, like)  # type: ignore[no-any-return]

    def operation(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a torch operation on symbols and return the symbols of its results. Raises NotRecorded."""
        if fn in ADDITIONS and not kwargs and self._adds(*args):
            return self._lowerings.run(self, ops.add, args, {})
        if any(self._parts.get(id(x)) in ("out_loc", "page_table") for x in symbols_in((args, kwargs))):
            raise NotRecorded("a torch operation on a page table")
        if not changes(fn, kwargs):
            return self.note(fn, args, kwargs, infer(fn, args, kwargs))
        target = kwargs.get("out", args[0] if args else None)
        if symbols_in(target):
            raise NotRecorded(f"{getattr(fn, '__name__', fn)}: an operation in place")
        self.note(fn, args, kwargs, None)
        return target

    def note(self, fn: Callable[..., Any], args: Any, kwargs: Any, like: Any) -> Any:
        """Note a call whose results are like ``like``."""

        def stand_in(x: Any) -> Any:
            if x is self._batch and x is not None:
                return BatchPart("")
            if isinstance(x, Symbol):
                name = self._parts.get(id(x))
                return BatchPart(name) if name is not None else Result(self._value(x).number)
            if isinstance(x, torch.Size):
                return tuple(map(size_of, x))
            return size_of(x) if type(x) is int else rebuilt(x, stand_in)

        def made(x: Any) -> Any:
            return self._new(tuple(x.shape), x.dtype).symbol if isinstance(x, Tensor) else rebuilt(x, made)

        given, result = rebuilt((args, kwargs), stand_in), made(like)
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

    def make(self, width: int, sampled: bool) -> tuple[Tensor, Buffer]:
        """A new value, float32 ``[T or S, width]``."""
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

    def has(self, batch: ForwardBatch) -> bool:
        """Whether it is the one that is recorded with."""
        return batch is self._batch

    def part(self, tensor: Tensor) -> str | None:
        """Its name, if it is a tensor of the batch."""
        return self._parts.get(id(tensor))

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

    def body(self, width: int, fn: Callable[[Tensor], Tensor]) -> Body:
        """What ``fn`` makes of rows of this width, as a program of its own."""
        inner = Recorder(self._lowerings, self.isa)
        x, given = inner.make(width, False)
        with using(inner):
            made = inner.buffer(fn(x))
        return Body(inner.nodes, given, made)
