"""Triton's interpreter, faster."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import numpy as np


def patch_once() -> None:
    """Have it put its operations into Triton's language once for each module of kernels, instead of at every
    call from kernel to function, and make a type of tensors once, instead of for every tensor; that takes two
    fifths of the time. Integers that overflow it looks for at every sum and product, and then says nothing of
    what it found, which takes a quarter of the rest. Triton 3.6 takes arrays of one value for numbers, which
    NumPy 2.4 does not."""
    from triton import language
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_lang
    scopes: dict[int, Any] = {}  # by the module's globals

    def patched(fn: FunctionType) -> Any:
        """A scope that has nothing to take back."""
        key = id(fn.__globals__)
        if key not in scopes:
            scopes[key] = type(patch(fn))
            language.tensor.__index__ = lambda self: int(self.handle.data.squeeze())
        return scopes[key]()

    interpreter._patch_lang = patched
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    _guard(interpreter)
    interpreter._get_np_dtype = _kept(interpreter._get_np_dtype)
    language.block_type.with_element_ty = _kept(language.block_type.with_element_ty)
    _share_shapes(interpreter)


def _guard(interpreter: Any) -> None:
    """Refuse a kernel that reads or writes beside the storages of its arguments, as a GPU may or may not."""
    bounds: list[tuple[int, int]] = []
    executor, builder = interpreter.GridExecutor, type(interpreter.interpreter_builder)
    begin = executor._init_args_hst

    def begun(self: Any, *given: Any) -> Any:
        args, named = begin(self, *given)
        every = [getattr(arg, "base", arg) for arg in (*args, *named.values())]  # of a tensor descriptor
        storages = [arg.untyped_storage() for arg in every if hasattr(arg, "untyped_storage")]
        bounds[:] = {(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages}
        return args, named

    def check(pointers: Any, mask: Any) -> None:
        live = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        if live.size:
            low, high = int(live.min()), int(live.max()) + pointers.get_element_ty().primitive_bitwidth // 8
            if not any(start <= low and high <= end for start, end in bounds):
                raise IndexError(f"bytes {low} to {high} are not within one of {bounds}")

    def guarded(function: Callable[..., Any], mask: int) -> Callable[..., Any]:
        def call(self: Any, *given: Any, **named: Any) -> Any:
            check(given[0 if mask < 3 else 1], given[mask])
            return function(self, *given, **named)

        return call

    executor._init_args_hst = begun
    for name, mask in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
        setattr(builder, name, guarded(getattr(builder, name), mask))


def _share_shapes(interpreter: Any) -> None:
    """Have tensors of one shape share it, and do not ask how to broadcast them, which takes a fifth of the
    rest."""
    language, semantic = interpreter.tl, type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def begin(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in shapes:
            constants = language.tuple([language.constexpr(size) for size in sizes])
            shapes[sizes] = constants, language.constexpr(math.prod(sizes))
        self.shape, self.numel = shapes[sizes]

    def joined(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        blocks = left.type.is_block(), right.type.is_block()
        same = left.type.shape.values == right.type.shape.values if all(blocks) else not any(blocks)
        return (left, right) if same else broadcast(self, left, right)

    language.tensor.__init__ = begin
    semantic.broadcast_impl_value = joined


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of types, which is asked once for those of the same names."""
    found: dict[tuple[str, ...], Any] = {}

    def kept(*types: Any) -> Any:
        key = tuple([each.name for each in types])
        if key not in found:
            found[key] = function(*types)
        return found[key]

    return kept
