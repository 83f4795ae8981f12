"""Send sessions to a server and time every chunk of every answer.

The read loop only notes when bytes came;
JSON is parsed after an answer has ended, so that the client stays cheap.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from sgla.bench.workloads import Prompt, Session
from sgla.clock import now
from sgla.messages import Usage
from sgla.streams import Choice, decode_event
from sgla.streams import Usage as Told

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=600)


class Target(msgspec.Struct, kw_only=True):
    """A server and how to ask it. ``api``: completions | chat. ``extra`` goes into every body, unless a
    request says otherwise."""

    url: str
    model: str = ""
    api: str = "completions"
    key: str | None = None
    extra: dict[str, Any] = {}

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self.key}"} if self.key else {}
        )


class Record(msgspec.Struct):
    """One request, times in seconds on the monotonic clock. ``chunks``: when each chunk with output came."""

    start: float
    end: float = 0.0
    chunks: list[float] = []
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens)


async def run(
    target: Target,
    sessions: Sequence[Session],
    concurrency: int,
    rate: float | None = None,
    seed: int = 0,
    on_end: Callable[[Record], None] = lambda record: None,
) -> tuple[list[Record], float]:
    """Run all sessions, at most ``concurrency`` at once, arriving at ``rate`` a second if given.
    ``on_end`` is called with each request that has ended.

    Returns the records in order of sessions, and the seconds from the first request to the last answer.
    """
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT, auto_decompress=False) as client:
        gate, rng, began, due = asyncio.Semaphore(concurrency), random.Random(seed), now(), 0.0

        async def one(session: Session, at: float) -> list[Record]:
            await asyncio.sleep(max(0.0, began + at - now()))
            async with gate:
                return await converse(client, target, session, on_end)

        tasks = []
        for session in sessions:
            tasks.append(asyncio.ensure_future(one(session, due)))
            due += rng.expovariate(rate) if rate else 0.0
        results = await asyncio.gather(*tasks)
    records = [record for session in results for record in session]
    return records, max(record.end for record in records) - min(record.start for record in records)


async def converse(
    client: aiohttp.ClientSession, target: Target, session: Session, on_end: Callable[[Record], None]
) -> list[Record]:
    """The turns of one session, each with the history of those before; stops at an error."""
    records: list[Record] = []
    messages: list[dict[str, str]] = []
    history = ""
    for turn in session:
        if target.api == "chat":
            messages.append({"role": "user", "content": str(turn.prompt)})
            record = await ask(client, target, {"messages": messages} | turn.extra, turn.max_tokens)
            messages.append({"role": "assistant", "content": record.text})
        else:
            prompt: Prompt = history + turn.prompt if isinstance(turn.prompt, str) else turn.prompt
            record = await ask(client, target, {"prompt": prompt} | turn.extra, turn.max_tokens)
            history = prompt + record.text if isinstance(prompt, str) else ""
        records.append(record)
        on_end(record)
        if record.error:
            break
    return records


async def ask(
    client: aiohttp.ClientSession, target: Target, prompt: dict[str, Any], max_tokens: int
) -> Record:
    """One streamed request. Failures are noted in the record."""
    body = {"model": target.model, "max_tokens": max_tokens, "stream": True} | target.extra | prompt
    route = "/v1/chat/completions" if target.api == "chat" else "/v1/completions"
    data = msgspec.json.encode(body)
    record = Record(start=now())
    pieces: list[tuple[float, bytes]] = []
    try:
        async with client.post(target.url + route, data=data, headers=target.headers) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            else:
                async for piece in response.content.iter_any():
                    pieces.append((now(), piece))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.end = now()
    read_stream(record, pieces)
    if record.error is None and not record.chunks:
        record.error = "no output"
    return record


def read_stream(record: Record, pieces: Sequence[tuple[float, bytes]]) -> None:
    """Fill ``record`` from the pieces of an SSE body; an event belongs to the piece that completed it."""
    rest = b""
    for when, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            message = decode_event(data)
            if message is None:
                record.error = f"malformed event: {data[:300]!r}"
                continue
            if message.error:
                record.error = str(message.error)
                continue
            if message.usage is not None:
                _read_usage(record, message.usage)
            choices = message.choices or []
            if any(map(_has_output, choices)):
                record.chunks.append(when)
                record.text += "".join(choice.output for choice in choices)
    record.completion_tokens = record.completion_tokens or len(record.chunks)


def _read_usage(record: Record, usage: Told) -> None:
    details = usage.prompt_tokens_details
    record.prompt_tokens = usage.prompt_tokens or 0
    record.completion_tokens = usage.completion_tokens or 0
    record.cached_tokens = (details.cached_tokens if details is not None else None) or 0


def _has_output(choice: Choice) -> bool:
    """False for the chunk that only announces the role,
    and for a last chunk that only has the finish reason."""
    return bool(choice.output) or (choice.text is not None and choice.finish_reason is None)
