"""JSON out of aiohttp: msgspec responses, and large ones a piece at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import payload, web
from aiohttp.abc import AbstractStreamWriter

PIECE = 256 << 10  # bytes that are written in one go

encode = msgspec.json.Encoder().encode
encode_into = msgspec.json.Encoder().encode_into


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode(body), status=status, headers=headers, content_type="application/json")


class Pieces(payload.Payload):
    """A body of which a piece is written in each turn of the loop:
    at once, all of it would be copied together with the headers."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return str(self._value, encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for at in range(0, len(self._value), PIECE):
            await writer.write(self._value[at : at + PIECE])
            await asyncio.sleep(0)


def in_pieces(response: web.StreamResponse) -> bool:
    """Have the body of a large response written so; whether it is one."""
    if isinstance(response, web.Response) and isinstance(response.body, bytes) and len(response.body) > PIECE:
        response.body = Pieces(response.body)
        return True
    return False
