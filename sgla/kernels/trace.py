"""Torch operations of a recorded forward: calls on symbolic tensors, replayed in every step on real ones.

A ``Symbol`` is a tensor on the meta device whose sizes may be stand-ins for what differs from step to step: T
tokens, S sampled rows, R rows, A tokens of ranks that compute together. Calls on symbols that follow each
other are one ``Region``. Not every forward can be recorded: an operation in place, or one that looks at
values on the host (``x.tolist()``, ``if x > 0``), raises NotRecorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from sgla.kernels.batch import ForwardBatch
from sgla.kernels.dispatch import Op

K = TypeVar("K")
# The tokens of a rank that shares out rows (own) are no size while a model is recorded.
Counted = Literal["tokens", "sampled", "rows", "gathered", "own"]
# Large primes: a size that one of them divides is that many times the number it stands for.
STAND_INS: dict[Counted, int] = {
    "tokens": 15485863,
    "sampled": 32452843,
    "rows": 49979687,
    "gathered": 67867967,
}
NEAR = 4096  # a size this near to a multiple is a sum that cannot be replayed
LOOKS = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.__len__,
    Tensor.__repr__,
    Tensor.__hash__,
}
DEVICE, ON_GPU = Tensor.device.__get__, Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class NotRecorded(Exception):
    """A forward does what a program cannot replay."""


class Tracer(Protocol):
    """Who records the calls. ``device``: where they will run."""

    device: torch.device

    def operation(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Symbol(Tensor):
    tracer: Tracer

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, tracer: Tracer) -> Symbol:
        symbol = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        symbol.tracer = tracer
        return symbol

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func == DEVICE:
                return symbols_in((args, kwargs))[0].tracer.device
            if func == ON_GPU:
                return symbols_in((args, kwargs))[0].tracer.device.type == "cuda"
            if func in LOOKS:
                return func(*args, **(kwargs or {}))
        return symbols_in((args, kwargs))[0].tracer.operation(func, args, kwargs or {})


class Size(NamedTuple):
    """``factor`` times the T, S, R or A of a step."""

    of: Counted
    factor: int


class Result(NamedTuple):
    """The value that the call with this number in the program made, or one of the values."""

    number: int


@dataclass(frozen=True)
class BatchPart:
    """A tensor of the step's batch, or, without a name, the batch."""

    name: str


@dataclass(slots=True)
class TorchCall:
    """``fn(*args)`` with Size, Result and BatchPart in place of what they stand for;
    ``results``: numbers of the tensors it returns."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int]


class Running:
    """What regions of a program share during a step:
    its batch, and the values that they pass on to each other."""

    batch: ForwardBatch
    values: dict[int, Tensor]

    def __init__(self) -> None:
        self.values = {}

    def size(self, size: Size) -> int:
        batch = self.batch
        counts = {"tokens": batch.tokens, "rows": batch.rows, "sampled": batch.sample_rows.shape[0]}
        return counts[size.of] * size.factor


@dataclass(slots=True, eq=False)
class Region:
    """Calls in their order. ``given``: numbers of the values that come as views of the program's memory;
    ``made``: of those that go there; both with the shapes of one row. ``passed``: values that later regions
    read and the program's memory cannot hold."""

    running: Running
    calls: list[TorchCall] = field(default_factory=list)
    given: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    made: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)

    @property
    def reads(self) -> dict[int, None]:
        """Values that other parts of the program made."""
        own: set[int] = set()
        found: dict[int, None] = {}
        for call in self.calls:
            for result in leaves((call.args, call.kwargs), Result):
                if result.number not in own:
                    found[result.number] = None
            own.update(call.results)
        return found

    @property
    def writes(self) -> list[int]:
        return [number for call in self.calls for number in call.results]

    def __call__(self, views: list[Tensor]) -> None:
        """``views``: float32 ``[rows, width]`` of ``given``, then of ``made``."""
        values = {number: view.view(-1, *shape) for (number, shape), view in zip(self.given, views)}
        running = self.running

        def real(x: Any) -> Any:
            kind = type(x)
            if kind is Result:
                return values[x.number] if x.number in values else running.values[x.number]
            if kind is Size:
                return running.size(x)
            if kind is BatchPart:
                return getattr(running.batch, x.name) if x.name else running.batch
            return rebuilt(x, real)

        for call in self.calls:
            kwargs = {name: real(value) for name, value in call.kwargs.items()}
            values.update(zip(call.results, leaves(call.fn(*map(real, call.args), **kwargs), Tensor)))
        for (number, shape), view in zip(self.made, views[len(self.given) :]):
            view.view(-1, *shape).copy_(values[number])
        running.values.update((number, values[number].clone()) for number in self.passed)


def rebuilt(x: Any, f: Callable[[Any], Any]) -> Any:
    """A tuple, list, dictionary or slice with ``f`` of what it holds; anything else as it is. Every call of a
    step asks for it, and torch's tree_map takes longer than most of these calls."""
    if isinstance(x, tuple):
        inner = [f(one) for one in x]
        return type(x)(*inner) if hasattr(x, "_fields") else type(x)(inner)
    if isinstance(x, list):
        return [f(one) for one in x]
    if isinstance(x, dict):
        return {key: f(value) for key, value in x.items()}
    if isinstance(x, slice):
        return slice(f(x.start), f(x.stop), f(x.step))
    return x


def leaves(tree: Any, kind: type[K]) -> list[K]:
    """What is of this kind in tuples, lists, dictionaries and slices."""
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif isinstance(tree, slice):
        tree = tree.start, tree.stop, tree.step
    elif not isinstance(tree, tuple | list):
        return []
    return [found for inner in tree for found in leaves(inner, kind)]


def symbols_in(tree: Any) -> list[Symbol]:
    return leaves(tree, Symbol)


def size_of(n: int) -> int | Size:
    """What a size stands for. Raises NotRecorded."""
    for rows, prime in STAND_INS.items():
        if n >= prime - NEAR:
            if n % prime == 0:
                return Size(rows, n // prime)
            if min(n % prime, prime - n % prime) < NEAR:
                raise NotRecorded(f"a size that is a sum with the number of {rows}")
    return n


def infer(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``fn`` would return, on the meta device. Raises NotRecorded."""

    def meta(x: Any) -> Any:
        return x.to("meta") if isinstance(x, Tensor) else rebuilt(x, meta)

    try:
        with torch._C.DisableTorchFunctionSubclass():
            return fn(*meta(args), **meta(kwargs))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise NotRecorded(f"{getattr(fn, '__name__', fn)}: {str(error).splitlines()[0]}") from error


def through_body(op: Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], nodes: list[Any]) -> Any:
    """What the body of ``op`` makes, whose ops and torch operations are added to ``nodes``. NotImplemented
    for an opaque op whose body cannot be recorded: it is one call."""
    count = len(nodes)
    try:
        return op.body(*args, **kwargs)
    except NotRecorded:
        if not op.opaque:
            raise
    del nodes[count:]
    return NotImplemented


def stand_in(op: Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Something with the shape and type of what an opaque op makes of symbols."""
    with torch._C.DisableTorchFunctionSubclass():
        return op.like(*args, **kwargs)


def changes(fn: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether it is an operation in place."""
    name = getattr(fn, "__name__", "")
    inside = name.endswith("_") and not name.endswith("__")
    return inside or name in ("__setitem__", "__delitem__") or name.startswith("__i") or "out" in kwargs
