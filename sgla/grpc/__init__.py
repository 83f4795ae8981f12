"""gRPC (``--grpc-port``): the scheduler protocols of SGLang and vLLM on the loop, the engine and the limits
that HTTP has. ``protos/`` has them as clients compile them."""

from __future__ import annotations

from importlib.util import find_spec

from sgla.errors import ConfigError

NEEDED = ("grpc", "grpc_reflection", "google.protobuf")


def require() -> None:
    """Raise ConfigError without the packages for it."""
    for name in NEEDED:
        try:
            found = find_spec(name)
        except ModuleNotFoundError:  # not even what it is a part of
            found = None
        if found is None:
            raise ConfigError(
                f"--grpc-port needs the package {name}; install it with: pip install 'sgla[grpc]'",
                param="grpc_port",
            )
