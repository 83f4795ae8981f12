"""The backend of programs that are given none."""

from __future__ import annotations

from typing import Any

from sgla.errors import ConfigError, InvalidField
from sgla.lang.backends.base import Backend
from sgla.lang.backends.server import RuntimeEndpoint

_default: list[Backend] = []


def set_default_backend(backend: Any) -> None:
    """``backend``: a Backend, an ``sgla.Engine``, or the address of a server."""
    _default[:] = [] if backend is None else [backend_of(backend)]


def backend_of(given: Any) -> Backend:
    """What ``given`` stands for; None: the default. Raises ConfigError if there is none."""
    if isinstance(given, Backend):
        return given
    if isinstance(given, str):
        return RuntimeEndpoint(given)
    if given is None:
        if not _default:
            raise ConfigError(
                "no backend: call set_default_backend(RuntimeEndpoint('http://127.0.0.1:30000')), or give "
                "one as backend=",
                param="backend",
            )
        return _default[0]
    from sgla.engine import Engine
    from sgla.lang.backends.local import EngineBackend

    if isinstance(given, Engine):
        return EngineBackend(given)
    raise InvalidField(
        f"a backend is a Backend, an Engine or an address, not a value of type {type(given).__name__}",
        param="backend",
    )
