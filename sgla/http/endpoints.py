"""The README's table of endpoints, made of the routes.
``python -m sgla.http.endpoints README.md`` brings it up to date."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgla.http.app import ROUTES
from sgla.http.openapi import OPERATIONS

BEGIN, END = "<!-- endpoints: python -m sgla.http.endpoints README.md -->\n", "<!-- end of endpoints -->"


def table(routes: Mapping[str, Mapping[str, Any]]) -> str:
    """One row for each handler, with all its paths."""
    paths: dict[Any, dict[str, list[str]]] = {}
    for path, methods in routes.items():
        for method, handler in methods.items():
            paths.setdefault(handler, {}).setdefault(path, []).append(method)
    rows = [f"| {named(found)} | {OPERATIONS[handler].summary} |\n" for handler, found in paths.items()]
    return "".join(["| endpoint | what it does |\n", "|---|---|\n", *rows])


def named(paths: Mapping[str, list[str]]) -> str:
    """The first path with its method, and the others behind it."""
    (first, methods), *others = paths.items()
    also = f" (also {', '.join(f'`{path}`' for path, _ in others)})" if others else ""
    return f"`{methods[0]} {first}`{also}"


def updated(text: str, routes: Mapping[str, Mapping[str, Any]]) -> str:
    """``text`` with the table between its marks. Raises ValueError if it has none."""
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:before] + table(routes) + text[after:]


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(updated(page.read_text(), ROUTES))
