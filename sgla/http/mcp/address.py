"""Where an MCP server is: what ``--tool-server`` takes."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

import msgspec

from sgla.config import TOOL_TOKEN
from sgla.errors import ConfigError

LABELED = re.compile(r"([A-Za-z][\w-]{0,63})=(.+)", re.DOTALL | re.ASCII)
HOST = re.compile(r"[\w.-]+:\d+|\[[0-9A-Fa-f:]+\]:\d+", re.ASCII)


class Address(msgspec.Struct):
    """``url`` or ``command`` is given."""

    label: str
    url: str = ""
    command: list[str] = []
    token: str = ""


def addresses(texts: Iterable[str], environ: Mapping[str, str] = os.environ) -> list[Address]:
    """Raises ConfigError."""
    found: dict[str, Address] = {}
    for text in texts:
        address = parse(text.strip())
        if address.label in found:
            raise ConfigError(
                f"--tool-server: two are labeled {address.label!r}; give one another label: LABEL={text}",
                param="tool_server",
            )
        address.token = environ.get(TOOL_TOKEN + address.label.upper().replace("-", "_"), "")
        found[address.label] = address
    return list(found.values())


def parse(text: str) -> Address:
    """``URL``, ``HOST:PORT`` (SSE, as vLLM has it) or a command,
    with ``LABEL=`` before it, which a command needs."""
    labeled = LABELED.fullmatch(text)
    label, place = (labeled[1], labeled[2].strip()) if labeled else ("", text)
    if HOST.fullmatch(place):
        place = f"http://{place}/sse"
    if place.startswith(("http://", "https://")):
        host = urlsplit(place).netloc.rpartition("@")[2]
        return Address(label or re.sub(r"[^A-Za-z0-9]+", "_", host).strip("_"), url=place)
    try:
        command = shlex.split(place)
    except ValueError as error:
        raise ConfigError(f"--tool-server {text}: {error}", param="tool_server") from error
    if not label or not command:
        raise ConfigError(
            f"--tool-server {text}: write URL, HOST:PORT, LABEL=URL or 'LABEL=COMMAND ARGUMENTS'",
            param="tool_server",
        )
    return Address(label, command=command)
