"""Models on this disk: which revision a path is of."""

from __future__ import annotations

from pathlib import Path


def origin(path: Path) -> tuple[str, str] | None:
    """Hub id and revision of a path inside a snapshot of the hub's cache, ``models--NAME/snapshots/REVISION``."""
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
            return folder.parents[1].name.removeprefix("models--").replace("--", "/"), folder.name
    return None
