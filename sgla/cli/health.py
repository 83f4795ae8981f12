"""``sgla health``: whether a server is ready, for the health checks of containers."""

from __future__ import annotations

import argparse
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from sgla.cli.args import parse
from sgla.cli.settings import load_config
from sgla.config import Config
from sgla.errors import ConfigError
from sgla.nodes import at

ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
PROCESSES = Path("/proc")


def run(args: argparse.Namespace) -> int:
    """0: ready. 1: not ready, with what the server says."""
    config = config_of(next(serving(), []))
    url = args.url or address(config)
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=args.timeout, context=tls(config)):
            print(f"ready: {url}")
            return 0
    except urllib.error.HTTPError as error:
        print(f"not ready: {url}: {error.read(1000).decode(errors='replace')}")
    except OSError as error:
        print(f"not ready: {url}: {error}")
    return 1


def serving() -> Iterator[list[str]]:
    """The words behind ``sgla serve`` of every server that runs here, the oldest first."""
    for process in sorted(int(path.name) for path in PROCESSES.iterdir() if path.name.isdigit()):
        try:
            words = (
                (PROCESSES / str(process) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            )
        except OSError:  # it has ended, or is not ours to look at
            continue
        for place, word in enumerate(words[:-1]):
            if Path(word).name == "sgla" and words[place + 1] == "serve":
                yield words[place + 2 :]
                break


def config_of(words: Sequence[str]) -> Config:
    """The settings that ``sgla serve`` has with these words and this environment."""
    args = parse(["serve", *words])
    return load_config(args.flags, args.config, os.environ)


def address(config: Config) -> str:
    """Raises ConfigError for a port that the system has chosen."""
    if not config.port:
        raise ConfigError("the server chose its port; say where it is with --url", param="port")
    host = ANY.get(config.host, config.host)
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://{at(host, config.port)}"


def tls(config: Config) -> ssl.SSLContext:
    """It is our own server, so its certificate is not checked;
    if it wants one of clients, it sees its own."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if config.ssl_certfile and config.ssl_ca_certs:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    return context
