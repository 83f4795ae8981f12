"""Tensors that are computed when somebody looks at them,
so that an op that comes after may do the work on its way."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

OPERATORS = [
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "floordiv",
    "mod",
    "pow",
    "rpow",
    "matmul",
    "rmatmul",
    "neg",
    "abs",
    "invert",
    "and",
    "or",
    "xor",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "getitem",
    "setitem",
    "len",
    "iadd",
    "isub",
    "imul",
    "itruediv",
]


class Lazy:
    """A subclass says in ``compute`` how. Ops look inside; to everybody else it is the tensor."""

    __slots__ = ("_made",)
    _made: Tensor | None

    def __new__(cls, *_: Any, **__: Any) -> Lazy:
        self = super().__new__(cls)
        self._made = None
        return self

    def compute(self) -> Tensor:
        raise NotImplementedError

    def force(self) -> Tensor:
        if self._made is None:
            self._made = self.compute()
        return self._made

    def __getattr__(self, name: str) -> Any:
        return getattr(self.force(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*tree_map(force, args), **tree_map(force, kwargs or {}))


def force(x: Any) -> Any:
    """The tensor behind a held-back value; anything else is itself."""
    return x.force() if isinstance(x, Lazy) else x


def _operator(name: str) -> Any:
    def run(self: Lazy, *others: Any) -> Any:
        return getattr(self.force(), name)(*map(force, others))

    return run


for _name in OPERATORS:
    setattr(Lazy, f"__{_name}__", _operator(f"__{_name}__"))
