"""Certificates of a server."""

from __future__ import annotations

import ssl
from typing import Protocol

from sgla.errors import ConfigError


class Files(Protocol):
    """Settings that name PEM files."""

    @property
    def ssl_certfile(self) -> str | None: ...

    @property
    def ssl_keyfile(self) -> str | None: ...

    @property
    def ssl_ca_certs(self) -> str | None: ...


def tls_context(config: Files) -> ssl.SSLContext | None:
    """None: plain HTTP. Raises ConfigError for files that cannot be used."""
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        files = ", ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)))
        raise ConfigError(f"the TLS files cannot be used ({files}): {error}", param="ssl_certfile") from error
    return context
