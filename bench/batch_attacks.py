"""Attacks by files of batches, and by MCP servers that do what they should not. Another client's small batch,
or its call of another MCP server, comes while they run. What was stored is removed, so that memory can come
back."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from hostile import KEY, OTHER, RESPONSES, TEXT, Attack, Outcome, Target, exchange, listed, request

FILES, BATCHES = "/v1/files", "/v1/batches"
ENDED = ("completed", "failed", "expired", "cancelled")
PATIENCE = 60.0  # seconds after which a batch that goes on is cancelled
SLOW = 30.0  # seconds that the other client's batch may take
HOSTILE = Path(__file__).parent / "mcp_hostile.py"
SERVERS = [
    *("--tool-timeout", "5", "--tool-server"),
    *(f"{label}={sys.executable} {HOSTILE} first" for label in ("bad", "good")),
]
WRONG = ("long", "nameless", "notify", "unasked", "garbage", "deaf", "die")

Make = Callable[[Target], bytes]


def line(i: int, **body: Any) -> bytes:
    return raw(i, json.dumps({"prompt": f"{i}", "max_tokens": 1, **body}).encode())


def raw(i: int, body: bytes) -> bytes:
    return b'{"custom_id":"%d","method":"POST","url":"%b","body":%b}\n' % (i, TEXT.encode(), body)


class User:
    """One that stores files and begins batches."""

    def __init__(self, target: Target, key: str) -> None:
        self.http = aiohttp.ClientSession(
            f"http://127.0.0.1:{target.port}", headers={"Authorization": f"Bearer {key}"}
        )
        self.statuses: Counter[int] = Counter()
        self.files: list[str] = []
        self.begun = asyncio.Event()  # the first batch

    async def call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """The answer; the status counts."""
        try:
            async with self.http.request(method, path, **options) as response:
                self.statuses[response.status] += 1
                return dict(await response.json())
        except aiohttp.ClientError:
            self.statuses[0] += 1
            return {}

    async def upload(self, data: bytes) -> str | None:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", data, filename="in.jsonl")
        uid = (await self.call("POST", FILES, data=form)).get("id")
        if uid is not None:
            self.files.append(uid)
        return uid

    async def begin(self, file: str | None) -> str | None:
        if file is None:
            return None
        body = {"input_file_id": file, "endpoint": TEXT, "completion_window": "24h"}
        uid = (await self.call("POST", BATCHES, json=body)).get("id")
        self.begun.set()
        return uid

    async def wait(self, uid: str, seconds: float) -> dict[str, Any]:
        """The batch when it has ended; it is cancelled after that time."""
        end = time.monotonic() + seconds
        while True:
            batch = await self.call("GET", f"{BATCHES}/{uid}")
            if batch.get("status") in ENDED or not batch:
                return batch
            if time.monotonic() > end + SLOW:
                raise TimeoutError(f"batch {uid} does not end: {batch}")
            if time.monotonic() > end:
                await self.call("POST", f"{BATCHES}/{uid}/cancel")
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        for batch in (await self.call("GET", f"{BATCHES}?limit=100")).get("data", []):
            self.files += filter(None, (batch["output_file_id"], batch["error_file_id"]))
        known = {each["id"] for each in (await self.call("GET", FILES)).get("data", [])}
        for file in known.intersection(self.files):
            await self.call("DELETE", f"{FILES}/{file}")
        await self.http.close()


async def beside(target: Target, attack: Callable[[User], Awaitable[None]]) -> Outcome:
    """What ``attack`` does, and what another client's small batch meets beside it."""
    user, other = User(target, KEY), User(target, OTHER)
    attacking = asyncio.ensure_future(attack(user))
    try:
        file = await other.upload(b"".join(line(i) for i in range(3)))
        begun = asyncio.ensure_future(user.begun.wait())
        await asyncio.wait([begun, attacking], return_when=asyncio.FIRST_COMPLETED)
        began = time.monotonic()
        uid = await other.begin(file)
        batch = await other.wait(uid, SLOW) if uid else {}
        served = batch.get("status") == "completed" and batch["request_counts"]["completed"] == 3
        more = {"other_s": round(time.monotonic() - began, 2), "other": {200: 1} if served else {0: 1}}
        await attacking
    finally:
        attacking.cancel()
        await user.close()
        await other.close()
    return Outcome(user.statuses + other.statuses, more)


def batches(*files: Make) -> Attack:
    """A batch of each."""

    async def attack(target: Target) -> Outcome:
        async def run(user: User) -> None:
            begun = [await user.begin(await user.upload(make(target))) for make in files]
            for uid in filter(None, begun):
                await user.wait(uid, PATIENCE * target.scale)

        return await beside(target, run)

    return attack


def repeated(count: int, make: Callable[[int], bytes]) -> Make:
    return lambda target: b"".join(make(i) for i in range(target.many(count)))


def long_lines(target: Target) -> bytes:
    """Eight near the limit of a body, of what is dear to look at."""
    bodies = (
        b'{"prompt":"' + rb"\u00e9" * target.many(2_000_000) + b'"}',
        b'{"prompt":' + listed(target.many(500_000), b"2147483647") + b"}",
        b'{"prompt":"' + b"a" * target.many(16_000_000) + b'"}',
        b'{"max_tokens":1,"prompt":"a","more":' + listed(target.many(65_000), b"{}") + b"}",
    )
    return b"".join(raw(i, body) for i, body in enumerate(bodies * 2))


def hostile_lines(target: Target) -> bytes:
    """Of each kind a few."""
    size = target.many(1_000_000)
    bodies = (
        b"[" * size,
        b'{"a":' * size,
        b"9" * size,
        b'{"prompt":' + b"-" * size + b"}",
        b'{"prompt":"\xff' + b"\x00" * size + b'"}',
        b'{"prompt":"' + b"\\" * size,
        b'"' * size,
        b" " * size,
        b'{"prompt":"a","n":1e999999,"max_tokens":1' + b"0" * size + b"}",
        b"a" * (17 * size),
    )
    return b"".join(raw(i, body) for i, body in enumerate(bodies)) + b"\n".join(bodies) + b"\n" + line(0)


def too_many_bytes(target: Target) -> bytes:
    return line(0) * target.many(4_000_000)


def large(target: Target) -> bytes:
    """Just below the limit of a file, in lines just below that of a body."""
    body = b'{"max_tokens":1,"prompt":"' + b"word " * target.many(3_300_000) + b'"}'
    return b"".join(raw(i, body) for i in range(12))


async def many_batches(target: Target) -> Outcome:
    """As many as a client may have, and more, begun and cancelled at once, again and again."""

    async def run(user: User) -> None:
        file = await user.upload(repeated(2000, line)(target))
        for _ in range(target.many(20)):
            begun = await asyncio.gather(*(user.begin(file) for _ in range(40)))
            found = list(filter(None, begun))
            await asyncio.gather(*(user.call("POST", f"{BATCHES}/{uid}/cancel") for uid in found))
            await asyncio.gather(*(user.wait(uid, 0.0) for uid in found))

    return await beside(target, run)


# MCP servers


def asking(label: str, tool: str, key: str) -> bytes:
    named = {"type": "mcp", "server_label": label}
    body = {
        "input": "a",
        "max_output_tokens": 128,
        "max_tool_calls": 1,
        "temperature": 0,
        "tools": [{**named, "allowed_tools": [tool], "require_approval": "never"}],
        "tool_choice": {**named, "name": tool},
    }
    return request(RESPONSES, body, key)


async def tools(target: Target) -> Outcome:
    """Calls of all tools that do harm, a few of each, and those of another client to another MCP server
    meanwhile."""
    copies = target.many(8)
    attacking = [
        asyncio.ensure_future(exchange(target, asking("bad", name, KEY)))
        for name in WRONG
        for _ in range(copies)
    ]
    await asyncio.sleep(0.5)
    began, served = time.monotonic(), Counter[int]()
    for _ in range(3):
        status, answer = await exchange(target, asking("good", "add", OTHER))
        served[200 if status == 200 and b'"output":"0"' in answer else 0] += 1
    more = {
        "other_s": round(time.monotonic() - began, 2),
        "other": {200: 1} if served == {200: 3} else {0: 1},
    }
    return Outcome(Counter(status for status, _ in await asyncio.gather(*attacking)), more)


ATTACKS: dict[str, Attack] = {
    "batch, lines near the limit": batches(long_lines),
    "batch, hostile lines": batches(hostile_lines),
    "batch, 50,000 lines that are none": batches(repeated(50_000, lambda i: b"x\n")),
    "batch, 50,000 lines that are refused": batches(repeated(50_000, lambda i: line(i, temperature=-1))),
    "batch, 1M empty lines": batches(
        repeated(999_000, lambda i: b"\r\n"), repeated(1_100_000, lambda i: b"\n")
    ),
    "batch of 200 MB": batches(too_many_bytes, large),
    "batches, begun and cancelled": many_batches,
    "MCP servers": tools,
}
