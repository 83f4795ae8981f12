"""Answers in one piece.
A long one is made while it is sent: it neither holds the loop nor is there as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from aiohttp import web

from sgla.http.answer.collect import Choice
from sgla.http.wire import encode

INLINE = 4096  # values of an answer that the loop makes itself
# Items that are encoded in one go, since other threads wait for each call of the encoder; fewer where they
# have ``VALUES`` values in all.
PART, VALUES = 256, 1024
TEXT = 64 << 10  # characters that are encoded in one go
PIECE = 128 << 10  # bytes that are sent at once, at least

_threads = ThreadPoolExecutor(2, thread_name_prefix="answers")


class Long:
    """A list, or an object with such ``brackets``, as the JSON of a few of its items after the other, without
    brackets; an item of a list may be a ``Long`` itself."""

    def __init__(self, parts: Iterable[bytes | Long], brackets: bytes = b"[]") -> None:
        self.parts, self.brackets = parts, brackets


def joined(value: Any) -> msgspec.Raw:
    """A ``Long`` within what is encoded at once."""
    if not isinstance(value, Long):
        raise NotImplementedError
    return msgspec.Raw(b"".join(written(value)))


encode_all = msgspec.json.Encoder(enc_hook=joined).encode


def in_parts(count: int, part: Callable[[slice], list[Any]], size: int = PART) -> Any:
    """A list of ``count`` items, of which ``part`` makes a few; if it is long, when they are sent."""
    if count <= size:
        return part(slice(0, count))
    return Long(encode(part(few))[1:-1] for few in slices(count, size))


def each(count: int, item: Callable[[int], Any], size: int = PART) -> Any:
    """``in_parts`` of items that are made one by one."""
    return in_parts(count, lambda part: [item(i) for i in range(part.start, part.stop)], size)


def few(values: int) -> int:
    """How many items of so many values each are encoded in one go."""
    return max(1, VALUES // values)


def slices(count: int, size: int = PART) -> list[slice]:
    return [slice(at, min(count, at + size)) for at in range(0, count, size)]


async def answered(
    request: web.Request, size: int, make: Callable[[], Any], choices: Iterable[Choice] = ()
) -> web.StreamResponse:
    """The JSON of what ``make`` makes, in a thread and a piece at a time if it has more than ``INLINE``
    values (``size``, about). Never refused: its work is done.

    The logprobs of ``choices`` are not needed after that.
    They are freed a few at a time: other threads wait for that, too.
    """
    if size <= INLINE:
        return web.Response(body=encode_all(make()), content_type="application/json")
    text = pieces(make, choices)

    async def following() -> bytes | None:
        return await asyncio.wrap_future(_threads.submit(next, text, None))

    piece, later = await following(), await following()
    if later is None:
        return web.Response(body=piece, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    try:
        while piece is not None:
            await response.write(piece)
            piece, later = later, await following()
    except Exception:  # nobody takes what is cut off for whole
        if request.transport is not None:
            request.transport.abort()
        raise
    await response.write_eof()
    return response


def pieces(make: Callable[[], Any], choices: Iterable[Choice] = ()) -> Iterator[bytes]:
    """The JSON of what ``make`` makes, ``PIECE`` bytes or more at a time."""
    buffer = bytearray()
    for data in written(make()):
        buffer += data
        if len(buffer) >= PIECE:
            yield bytes(buffer)
            buffer.clear()
    for choice in choices:
        for entries in (choice.prompt_logprobs, choice.logprobs):
            while entries:
                del entries[-PART:]
        choice.hidden.clear()
    yield bytes(buffer)


def written(value: Any) -> Iterator[bytes]:
    """The JSON of ``value``, bit by bit."""
    if isinstance(value, Long):
        yield from enclosed(
            value.brackets, (written(part) if isinstance(part, Long) else [part] for part in value.parts)
        )
    elif isinstance(value, dict):
        yield from enclosed(b"{}", (named(name, item) for name, item in value.items()))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from enclosed(b"[]", map(written, value))
    elif isinstance(value, list) and len(value) > PART:
        yield from enclosed(b"[]", ([encode(value[part])[1:-1]] for part in slices(len(value))))
    elif isinstance(value, str) and len(value) > TEXT:
        yield b'"'
        for part in slices(len(value), TEXT):
            yield encode(value[part])[1:-1]
        yield b'"'
    else:
        yield encode(value)


def enclosed(brackets: bytes, items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    yield brackets[:1]
    for i, item in enumerate(items):
        if i:
            yield b","
        yield from item
    yield brackets[1:]


def named(name: str, item: Any) -> Iterator[bytes]:
    yield encode(name) + b":"
    yield from written(item)
