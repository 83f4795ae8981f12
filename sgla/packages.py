"""What other packages bring: objects that they register as entry points of a group of ours, by a name."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TypeVar

from sgla.errors import ConfigError

T = TypeVar("T")


def brought(group: str, name: str, kind: type[T], asked: str, instead: str, param: str) -> T | None:
    """The object that a package registers in ``group`` under ``name``, or None. Raises ConfigError for one
    that cannot be loaded or is no ``kind``: ``asked`` begins the message, ``instead`` ends it."""
    entry = next(iter(entry_points(group=group, name=name)), None)
    if entry is None:
        return None
    package = f"{entry.value} of the package {entry.dist.name}" if entry.dist else entry.value
    try:
        found = entry.load()
    except Exception as error:
        raise ConfigError(
            f"{asked}: {package} cannot be loaded: {type(error).__name__}: {error}; {instead}", param=param
        ) from error
    if not isinstance(found, kind):
        raise ConfigError(
            f"{asked}: {package} is no {kind.__module__}.{kind.__name__} but of type "
            f"{type(found).__name__}; {instead}",
            param=param,
        )
    return found
