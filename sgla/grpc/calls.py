"""One call: who it is of, what it holds, and how it ends."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message
from multidict import CIMultiDict

from sgla import clock
from sgla.errors import BadRequest, Overloaded, SglaError
from sgla.grpc.proto import message
from sgla.grpc.shape import check
from sgla.http.access import Tally
from sgla.http.bodies import BODY_SECONDS, BodyTimeout, Share
from sgla.http.clients import Client
from sgla.http.ids import random_id
from sgla.http.request.work import check_sizes
from sgla.http.server import Server, unique
from sgla.per_client import PerClient

Code = grpc.StatusCode
CODES = {
    400: Code.INVALID_ARGUMENT,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.NOT_FOUND,
    408: Code.DEADLINE_EXCEEDED,
    409: Code.FAILED_PRECONDITION,
    413: Code.RESOURCE_EXHAUSTED,
    429: Code.RESOURCE_EXHAUSTED,
    503: Code.UNAVAILABLE,
}
MOST_DETAILS = 1024  # characters of an error: it travels in a header
LONGEST = 10 * 365 * 86400.0  # seconds: a deadline beyond that is none


class Call:
    """``deadline``: on ``clock.now()``. ``rid``: the id that the client gave, or one that is made."""

    def __init__(
        self,
        server: Server,
        client: Client,
        share: Share,
        send: Callable[[Message], Awaitable[None]],
        deadline: float | None = None,
    ) -> None:
        self.server, self.client, self.share, self.send = server, client, share, send
        self.deadline = deadline
        self.rid = random_id()
        self.uid = self.rid  # unique among all requests of this server
        self.tally: Tally | None = None

    def name(self, rid: str) -> None:
        """The request has this id; "" keeps the one that was made. Raises InvalidField."""
        if rid:
            check_sizes(1, 1, request_id=rid)
            self.rid, self.uid = rid, unique(rid)


def decoded(kind: str, data: bytes) -> Any:
    """A message of the type with this full name. Raises BadRequest, TooLarge."""
    check(message(kind).DESCRIPTOR, data)
    try:
        return message(kind).FromString(data)
    except DecodeError as error:
        name = kind.rpartition(".")[2]
        raise BadRequest(f"the message is no {name}, or a part of one: {error}") from error


def code_of(error: SglaError) -> grpc.StatusCode:
    return CODES.get(error.status, Code.INTERNAL)


async def end_with(context: Any, error: SglaError) -> None:
    """The status of an error, and behind it what HTTP tells in its body and headers."""
    trailing = [("sgla-error-code", error.code)]
    if error.param is not None and error.param.isascii():
        trailing.append(("sgla-error-param", error.param[:200]))
    if error.status in (429, 503):
        pushback = math.ceil(1000 * (error.retry_after or 1.0))
        trailing.append(("grpc-retry-pushback-ms", str(pushback)))
    await context.abort(code_of(error), error.message[:MOST_DETAILS], tuple(trailing))


def headers_of(context: Any) -> CIMultiDict[str]:
    """Metadata of texts, as HTTP's headers."""
    return CIMultiDict(
        (name, value) for name, value in context.invocation_metadata() or () if isinstance(value, str)
    )


def address_of(context: Any) -> str:
    """Where the connection comes from, with its port; "" where that is no host."""
    kind, _, rest = context.peer().partition(":")
    return unquote(rest) if kind in ("ipv4", "ipv6") else ""


def deadline_of(context: Any) -> float | None:
    left = context.time_remaining()
    return None if left is None or left > LONGEST else clock.now() + left


class Places:
    """So many calls of one message receive it at a time, half of them of one client."""

    def __init__(self, most: int) -> None:
        self._all = asyncio.Semaphore(most)
        self._own = PerClient(max(1, most // 2))

    async def read(self, context: Any, client: Client) -> bytes | None:
        """The next message; None: there are no more. Raises BodyTimeout."""
        try:
            async with self._own.of(client.name), self._all, asyncio.timeout(BODY_SECONDS):
                return await next_message(context)
        except TimeoutError as error:
            raise BodyTimeout(f"the message did not arrive within {BODY_SECONDS} s") from error


async def next_message(context: Any) -> bytes | None:
    """However long the client takes; None: there are no more."""
    data = await context.read()
    return None if data is grpc.aio.EOF else data


class Open:
    """So many calls of several messages are open at a time, half of them of one client: each may receive one
    at any time, and none is hurried."""

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._own: Counter[str] = Counter()

    @contextmanager
    def one(self, client: Client) -> Iterator[None]:
        """Raises Overloaded."""
        own = max(1, self._most // 2)
        if self._own[client.name] >= own:
            raise Overloaded(
                f"you have {own} calls of {self._name} open, which is the limit", retry_after=1.0
            )
        if self._own.total() >= self._most:
            raise Overloaded(
                f"{self._most} calls of {self._name} are open, which is the limit", retry_after=1.0
            )
        self._own[client.name] += 1
        try:
            yield
        finally:
            self._own[client.name] -= 1
            if not self._own[client.name]:
                del self._own[client.name]
