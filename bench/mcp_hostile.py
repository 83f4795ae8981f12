"""An MCP server on stdin and stdout that does what it should not: ``python mcp_hostile.py [first]``;
``first``: the id stands first in answers, else last, as SDKs differ in that."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

TOOLS = ("add", "slow", "long", "nameless", "notify", "unasked", "garbage", "deaf", "die")
writing = threading.Lock()


def write(data: str) -> None:
    with writing:
        sys.stdout.write(data + "\n")
        sys.stdout.flush()


def answer(number: Any, result: Any, kind: str = "result") -> None:
    ids = {"jsonrpc": "2.0", "id": number}
    write(json.dumps({**ids, kind: result} if "first" in sys.argv else {kind: result, **ids}))


def said(number: Any, text: str) -> None:
    answer(number, {"content": [{"type": "text", "text": text}]})


def flood(make: Any) -> None:
    """For ever."""
    while True:
        write("\n".join(make() for _ in range(100)))


def call(number: Any, name: str, arguments: dict[str, Any]) -> None:
    if name == "slow":
        time.sleep(arguments.get("seconds", 1))
        said(number, "slept")
    elif name == "long":
        said(number, "x" * arguments.get("size", 9_000_000))
    elif name == "nameless":  # the id stands where nobody looks for it
        write(json.dumps({"result": {"a": "x" * 9_000_000}, "id": number, "extra": "x" * 2000}))
    elif name == "notify":
        note = json.dumps(
            {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}}
        )
        flood(lambda: note)
    elif name == "unasked":
        flood(lambda: json.dumps({"jsonrpc": "2.0", "id": 10**6, "result": {"content": []}}))
    elif name == "garbage":
        flood(lambda: "[" * 5000 + "\x00" + "9" * 5000)
    elif name == "die":
        write('{"jsonrpc": "2.0", "id": ')
        os._exit(1)
    else:
        said(number, str(sum(arguments.values())))


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        number, method = message.get("id"), message.get("method")
        if method == "initialize":
            about = {"name": "hostile", "version": "1"}
            version = message["params"]["protocolVersion"]
            answer(number, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about})
        elif method == "tools/list":
            schema = {"type": "object", "properties": {}}
            answer(
                number,
                {
                    "tools": [
                        {
                            "name": name,
                            "inputSchema": schema,
                            "annotations": {"readOnlyHint": name in ("add", "slow")},
                        }
                        for name in TOOLS
                    ]
                },
            )
        elif method == "tools/call":
            params = message["params"]
            if params["name"] == "deaf":
                time.sleep(3600)
            threading.Thread(
                target=call, args=(number, params["name"], params["arguments"]), daemon=True
            ).start()
        elif number is not None:
            answer(number, {"code": -32601, "message": "no such method"}, "error")


main()
