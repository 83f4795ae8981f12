"""Triton's interpreter, faster."""

from __future__ import annotations

from types import FunctionType
from typing import Any


def patch_once() -> None:
    """Have it put its operations into Triton's language once for each module of kernels, instead of at every call from
    kernel to function, which takes a third of the time. Triton 3.6 takes arrays of one value for numbers, which NumPy 2.4 does not."""
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
