"""An MCP server for tests, by the ``mcp`` package: ``python mcp_tools.py stdio``, or ``http PORT``, or ``sse
PORT``."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

server = MCPServer("tools")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fail() -> str:
    raise ToolError("the disk is on fire")


@server.tool()
async def hang(mark: str = "") -> str:
    """Never answers; writes to the file ``mark`` when it begins and when it is cancelled."""
    try:
        if mark:
            Path(mark).write_text("begun")
        await asyncio.sleep(3600)
    except BaseException:
        if mark:
            Path(mark).write_text("cancelled")
        raise
    return ""


@server.tool()
def huge(size: int) -> str:
    return "x" * size


@server.tool()
def crash() -> str:
    os._exit(3)


@server.tool()
def strange(value: str) -> str:
    """Its schema is one that no grammar can be made of."""
    return value


broken: Any = server._tool_manager.get_tool("strange")
broken.parameters = {"type": "object", "properties": {"value": {"pattern": "(?<=x)y"}}}

if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        kind: Any = {"http": "streamable-http", "sse": "sse"}[sys.argv[1]]
        server.run(kind, host="127.0.0.1", port=int(sys.argv[2]))
