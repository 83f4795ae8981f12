"""What the server and the process of an MCP server (``process.py``) say to each other,
and what either may take."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")  # before each record
MOST = 1 << 20  # bytes of the output of one call
LIST = 256 << 10  # bytes of the names, descriptions and schemas of one MCP server's tools
RECORD = MOST + (64 << 10)  # bytes
MEMORY = 1 << 30  # bytes that the process may need beside its code
TOLD = 2000  # characters of an error

# Kinds of errors that OpenAI's API knows.
TRANSPORT, PROTOCOL, TOOL = "http_error", "mcp_protocol_error", "mcp_tool_execution_error"
GONE, TOO_LARGE, CANCELLED, NO_ANSWER, LATE = (
    410,
    413,
    499,
    502,
    504,
)  # codes of TRANSPORT; GONE: of a session that was lost


class Ask(msgspec.Struct):
    """``verb``: list, call, ping, or cancel what was asked under ``number``. ``arguments``: JSON."""

    number: int
    verb: str
    name: str = ""
    arguments: str = ""


class Tool(msgspec.Struct):
    name: str
    description: str
    schema: dict[str, Any]  # of its arguments
    annotations: dict[str, Any] | None = None

    @property
    def read_only(self) -> bool:
        return bool(self.annotations and self.annotations.get("readOnlyHint") is True)


class Failure(msgspec.Struct):
    kind: str
    code: int
    message: str


class Reply(msgspec.Struct):
    """To the ask of this number; 0: the process ends, and why.
    ``tools`` that cannot be used are not in it, and ``wrong`` names them."""

    number: int
    text: str = ""
    tools: list[Tool] = []
    wrong: str = ""
    failure: Failure | None = None
