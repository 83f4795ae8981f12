"""The statements of Python sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator

BLOCKS = "body", "orelse", "finalbody", "handlers", "cases"


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All of a module, without the expressions that they hold: to walk those takes four times as long."""
    ahead: list[ast.AST] = [tree]
    while ahead:
        node = ahead.pop()
        yield node
        for block in BLOCKS:
            ahead += getattr(node, block, ())
