"""Clients without manners, for the attacks: each request on a connection of its own, in any shape, whatever
comes back."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

KEY, OTHER = "attacker", "bystander"
PATIENCE = 600.0  # seconds for an answer
GONE = 499  # stands for the status where the client did not wait for an answer; nginx's number
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"


@dataclass
class Target:
    """The server at ``port`` of 127.0.0.1, its process, and the share of each attack's size that is used (1:
    all)."""

    port: int
    scale: float = 1.0
    pid: int = 0

    def many(self, count: int) -> int:
        return max(1, int(count * self.scale))


@dataclass
class Outcome:
    """Answers by status (0: the connection ended without one), and what else an attack found out."""

    statuses: Counter[int] = field(default_factory=Counter)
    more: dict[str, Any] = field(default_factory=dict)


Attack = Callable[[Target], Coroutine[Any, Any, Outcome]]


def head(path: str, length: int, key: str, method: str = "POST", more: str = "") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n{more}\r\n"
    ).encode()


async def exchange(
    target: Target, data: bytes | Iterable[bytes], patience: float = PATIENCE
) -> tuple[int, bytes]:
    """Send a request on a connection of its own; its status (0 for none, GONE after ``patience`` seconds) and
    what came after the first line."""
    status, answer = 0, b""
    writer = None
    try:
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1 << 20)
            writing = asyncio.ensure_future(write(writer, [data] if isinstance(data, bytes) else data))
            first = await reader.readline()
            status = int(first.split()[1]) if first else 0
            answer = await whole(reader)
            writing.cancel()
    except TimeoutError:
        status = GONE
    except (OSError, asyncio.IncompleteReadError, ValueError):
        pass
    finally:
        if writer is not None:
            writer.close()
    return status, answer


async def write(writer: asyncio.StreamWriter, parts: Iterable[bytes]) -> None:
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
    except OSError:
        pass  # a refusal may close the connection before the body is sent


async def whole(reader: asyncio.StreamReader) -> bytes:
    """The rest of an answer, its headers too. Raises IncompleteReadError where it breaks off."""
    headers = await reader.readuntil(b"\r\n\r\n")
    lowered = headers.lower()
    if b"transfer-encoding: chunked" in lowered:
        body = bytearray(headers)
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size + 2)
        await reader.readexactly(2)
        return bytes(body)
    length = (
        int(lowered.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in lowered else 0
    )
    return headers + await reader.readexactly(length)


def request(path: str, body: Any, key: str = KEY) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return head(path, len(data), key) + data


async def send(target: Target, *requests: bytes, patience: float = PATIENCE) -> Outcome:
    """All at once, each on a connection of its own."""
    answers = await asyncio.gather(*(exchange(target, data, patience) for data in requests))
    return Outcome(Counter(status for status, _ in answers))


def one(path: str, body: Callable[[Target], Any], copies: int = 1, patience: float = PATIENCE) -> Attack:
    async def attack(target: Target) -> Outcome:
        return await send(target, *[request(path, body(target))] * copies, patience=patience)

    return attack


def listed(count: int, item: bytes) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"
