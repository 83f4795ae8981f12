"""Triton's interpreter, faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any


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
    interpreter._get_np_dtype = _kept(interpreter._get_np_dtype)
    language.block_type.with_element_ty = _kept(language.block_type.with_element_ty)


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of types, which is asked once for those of the same names."""
    found: dict[tuple[str, ...], Any] = {}

    def kept(*types: Any) -> Any:
        key = tuple([each.name for each in types])
        if key not in found:
            found[key] = function(*types)
        return found[key]

    return kept
