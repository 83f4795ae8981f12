"""A model on this disk, of any family, as ``hub/source.py`` describes it. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from sgla.hub import source
from sgla.model.registry import layouts


def open_source(path: str | Path, load_format: str = "auto") -> source.ModelSource:
    """See ``hub/source.py``; GGUF files may have the architectures of all families. Raises ConfigError."""
    return source.open_source(path, load_format, layouts())
