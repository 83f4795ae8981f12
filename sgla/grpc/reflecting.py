"""gRPC's reflection service, by its stable name and by the one that it had before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha.reflection import aio
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from sgla.errors import BadRequest, TooLarge
from sgla.grpc.calls import Call
from sgla.grpc.exchange import Read
from sgla.grpc.proto import pool

NAMES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
MOST = 64  # calls
LARGEST = 4096  # bytes of a question


class Reflection:
    """Tells of ``services``."""

    def __init__(self, services: Iterable[str]) -> None:
        self._servicer = aio.ReflectionServicer(services, pool())

    async def run(self, call: Call, read: Read) -> None:
        async for answer in self._servicer.ServerReflectionInfo(_asked(read), None):
            await call.send(answer)


async def _asked(read: Read) -> AsyncIterator[Any]:
    """Raises TooLarge, BadRequest."""
    while (data := await read()) is not None:
        if len(data) > LARGEST:
            raise TooLarge(f"a question to reflection has {len(data)} bytes, of {LARGEST} at most")
        try:
            yield ServerReflectionRequest.FromString(data)
        except DecodeError as error:
            raise BadRequest(f"the message is no ServerReflectionRequest: {error}") from error
