"""A model on this disk, of any family, as ``hub/source.py`` describes it. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from sgla.config import Config
from sgla.hub import source
from sgla.model.generic_spec import settled
from sgla.model.registry import layouts


def open_source(
    path: str | Path, load_format: str = "auto", impl: str = "auto", trusted: bool = False
) -> source.ModelSource:
    """See ``hub/source.py``; GGUF files may have the architectures of all families. ``impl``, ``trusted``:
    see ``generic_spec.settled``. Raises ConfigError."""
    return settled(source.open_source(path, load_format, layouts()), impl, trusted)


def configured_source(path: str | Path, config: Config) -> source.ModelSource:
    """``open_source`` as the settings say."""
    return open_source(path, config.load_format, config.model_impl, config.trust_remote_code)
