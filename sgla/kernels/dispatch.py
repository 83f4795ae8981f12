"""Ops: each has one torch body, and a dispatcher may know a faster way.

    @op
    def relu_squared(x: Tensor) -> Tensor:
        return torch.relu(x).square()

A dispatcher belongs to a model, and is active for the calls inside of ``using``. It runs its own function for
an op, if it has one (a *lowering*), and else the body, whose ops come to it again. Without a dispatcher the
bodies compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from inspect import signature
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Dispatcher(Protocol):
    def run(self, op: Op[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R: ...


_active: ContextVar[Dispatcher | None] = ContextVar("dispatcher", default=None)


class Op(Generic[P, R]):
    """``body`` computes in torch, on any device. ``like``: for a body that looks at values on the host, or
    writes to pages, which a recorded one cannot: a function of the same arguments that makes a tensor of the
    result's shape and type, or the name of the argument that has these."""

    def __init__(self, body: Callable[P, R], like: str | Callable[P, R] = "") -> None:
        update_wrapper(self, body)
        self.name, self.body, self._like = body.__name__, body, like

    @property
    def opaque(self) -> bool:
        """Its body may be one call of a program."""
        return bool(self._like)

    def like(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if isinstance(self._like, str):
            like: R = signature(self.body).bind(*args, **kwargs).arguments[self._like]
            return like
        return self._like(*args, **kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        dispatcher = _active.get()
        return self.body(*args, **kwargs) if dispatcher is None else dispatcher.run(self, args, kwargs)


@overload
def op(body: Callable[P, R]) -> Op[P, R]: ...
@overload
def op(*, like: str | Callable[..., Any]) -> Callable[[Callable[P, R]], Op[P, R]]: ...
def op(body: Any = None, *, like: Any = "") -> Any:
    return Op(body) if body is not None else lambda body: Op(body, like)


class Lowerings(dict[Op[..., Any], Callable[..., Any]]):
    """The functions of one kind of dispatcher: op -> ``fn(dispatcher, *args of the op)``, which returns
    NotImplemented for what the body must do."""

    def of(self, op: Op[..., Any]) -> Callable[[F], F]:
        """Decorates the function that takes the place of ``op``."""

        def note(fn: F) -> F:
            self[op] = fn
            return fn

        return note

    def run(self, dispatcher: Any, op: Op[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Returns NotImplemented where there is no function for the op, or none for these arguments."""
        fn = self.get(op)
        made: R = NotImplemented if fn is None else fn(dispatcher, *args, **kwargs)
        return made


@contextmanager
def using(dispatcher: Dispatcher | None) -> Iterator[None]:
    """Ops that are called inside go to ``dispatcher``; None: to their bodies."""
    token = _active.set(dispatcher)
    try:
        yield
    finally:
        _active.reset(token)
