"""``sgla.grpc.Scheduler/Exchange``: many requests over one call, their answers as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message

from sgla import clock
from sgla.errors import BadRequest, InvalidField, SglaError
from sgla.grpc import sglang
from sgla.grpc.calls import Call, code_of, decoded
from sgla.grpc.proto import OWN, make
from sgla.http.bodies import Share

MOST = 1024  # requests of one call at a time; the next message is read when one of them has ended

Read = Callable[[], Awaitable[bytes | None]]


class Exchange:
    """One such call. ``read`` gives the next message, None at the end."""

    def __init__(self, call: Call, read: Read) -> None:
        self._call, self._read = call, read
        self._writing = asyncio.Lock()  # in the order of those who wait
        self._room = asyncio.Semaphore(MOST)
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until the client has sent all and has all answers. Raises BadRequest for what is no message."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while (data := await self._read()) is not None:
                    ask = decoded(f"{OWN}.Ask", data)
                    if ask.WhichOneof("ask") == "abort":
                        await self._abort(ask.abort.request_id)
                        continue
                    await self._room.acquire()
                    await self._begin(tasks, ask, len(data))
        except BaseExceptionGroup as group:  # of which one task is enough to tell why
            raise group.exceptions[0] from group

    async def _begin(self, tasks: asyncio.TaskGroup, ask: Any, size: int) -> None:
        call = self._call
        share = Share(call.server.memory, call.client.name)
        kind = ask.WhichOneof("ask")
        if kind is None:
            raise BadRequest("an Ask has no generate, embed or abort")
        request = getattr(ask, kind)
        rid = request.request_id
        deadline = clock.now() + ask.timeout if ask.timeout > 0 else call.deadline
        one = Call(call.server, call.client, share, self._sender(rid, kind), deadline)
        try:
            if not rid or rid in self._running:
                raise InvalidField(
                    "request_id must be given, and differ from those that run in this call",
                    param="request_id",
                )
            share.take(size)
            share.body = size
        except SglaError as error:
            self._room.release()
            await self._refuse(rid, error)
            return
        task = self._running[rid] = tasks.create_task(self._answer(one, kind, request))
        # By itself one that is cancelled before its first step would give nothing back.
        task.add_done_callback(lambda _: share.close())

    async def _answer(self, call: Call, kind: str, request: Any) -> None:
        rid = request.request_id
        try:
            await call.server.door.enter(call.client.name)
            call.server.ingress.require_ready()
            if kind == "generate":
                await sglang.generate(call, request)
            else:
                await call.send(await sglang.embed(call, request))
        except SglaError as error:
            await self._refuse(rid, error)
        finally:
            self._room.release()
            self._running.pop(rid, None)

    async def _abort(self, rid: str) -> None:
        """A request of this call alone. It ends with finish ``abort``."""
        count = await self._call.server.abort(rid, self._call.client) if rid in self._running else 0
        told = make(sglang.SGLANG, "AbortResponse", success=count > 0)
        await self._write(make(OWN, "Answer", request_id=rid, abort=told))

    def _sender(self, rid: str, kind: str) -> Callable[[Message], Awaitable[None]]:
        async def send(message: Message) -> None:
            await self._write(make(OWN, "Answer", request_id=rid, **{kind: message}))

        return send

    async def _refuse(self, rid: str, error: SglaError) -> None:
        told = make(
            OWN,
            "Error",
            status=code_of(error).value[0],
            code=error.code,
            message=error.message,
            param=error.param or "",
            retry_after=(error.retry_after or 1.0) if error.status in (429, 503) else 0.0,
        )
        await self._write(make(OWN, "Answer", request_id=rid, error=told))

    async def _write(self, answer: Message) -> None:
        async with self._writing:
            await self._call.send(answer)
