"""Tables for people: by rich on a terminal, plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as what is in them; on a terminal those that do not fit are folded."""
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(head, *rows)]
        for row in (head, *rows):
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold", show_header=any(head))
    for name in head:
        shown.add_column(name, overflow="fold")
    for row in rows:
        shown.add_row(*map(Text, row))
    Console().print(shown)
