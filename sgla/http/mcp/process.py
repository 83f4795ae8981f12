"""The process that speaks to one MCP server, by the ``mcp`` package. ``python -m sgla.http.mcp.process SOCKET
PARENT`` reads records of the socket (uint32 length, a msgpack ``Ask``; the first one is the ``Address``) and
answers each by a ``Reply``.

What an MCP server sends may take any memory and time to read, and its schemas any to check: here that holds
up nobody, and the process can be ended. It ends by itself when its session is lost, and with its parent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import httpx2
import msgspec
from mcp import Client, MCPError
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import CallToolResult, Implementation, jsonrpc_message_adapter
from pydantic import ValidationError

from sgla.grammar.llg import load_tokenizer
from sgla.grammar.protocol import Vocabulary
from sgla.grammar.sandbox import compile_grammar
from sgla.http.mcp.address import Address
from sgla.http.mcp.protocol import (
    CANCELLED,
    GONE,
    LENGTH,
    LIST,
    MEMORY,
    MOST,
    NO_ANSWER,
    PROTOCOL,
    TOLD,
    TOO_LARGE,
    TOOL,
    TRANSPORT,
    Ask,
    Failure,
    Reply,
    Tool,
)
from sgla.messages import MAX_GRAMMAR, Grammar
from sgla.processes import die_with, limit_memory, tied
from sgla.version import __version__

DEPTH = 32  # of a schema
MOMENT = 0.1  # seconds
MIB = 1 << 20
ANSWER = 8 * MIB  # bytes of one message of the MCP server
EVENT = MIB - 4096  # and of one in a stream of events, where the package gives up at a MiB
EDGE = 1024  # bytes that are kept of the beginning of a longer message, and of its end
CHUNK = 64 << 10  # bytes that are read at once
PACE = 1000  # messages that are read in a second
LONG = -32013  # the code of our own errors for messages that are too long
SECONDS = 3600.0  # without a word on a stream; calls have limits of their own
# The MCP server's own command is not ours to limit.
UNLIMITED = (
    "import os, resource, sys; hard = resource.getrlimit(resource.RLIMIT_AS)[1]; "
    "resource.setrlimit(resource.RLIMIT_AS, (hard, hard)); os.execvp(sys.argv[1], sys.argv[1:])"
)
BYTES = [bytes([i]) for i in range(256)]


class ToolFailed(Exception):
    """The tool says that it failed."""


class TooMuch(Exception):
    """An answer is larger than it may be."""


class Pace:
    """A flood of messages is read no faster than ``PACE`` a second,
    so whoever writes it waits, and it takes a part of a core."""

    def __init__(self) -> None:
        self._began, self._count = 0.0, 0

    async def one(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._began + 1:
            self._began, self._count = now, 0
        self._count += 1
        if self._count > PACE:
            await asyncio.sleep(self._began + 1 - now)


class Cut:
    """Cuts what an MCP server sends into messages, at ``end``. One of more than ``most`` bytes is not kept:
    in its place comes an error for the call that it answers, as far as that is known. ``lead`` stands before
    the JSON. ``asked``: the id of the only call that is answered."""

    def __init__(self, end: bytes, most: int, lead: bytes = b"", asked: bytes = b"") -> None:
        self._end = end
        self._most = most
        self._lead = lead
        self._asked = asked
        self._rest = bytearray()
        self._seen = 0  # bytes of the rest in which no end begins
        self._head = b""  # of a message that is too long

    def feed(self, data: bytes) -> Iterator[bytes]:
        rest = self._rest
        rest += data
        while (at := rest.find(self._end, self._seen)) >= 0:
            message = bytes(rest[:at])
            del rest[: at + len(self._end)]
            self._seen = 0
            if self._head or at > self._most:
                message, self._head = self._instead(self._head or message[:EDGE], message[-EDGE:]), b""
            if message:
                yield message
        if len(rest) > self._most:
            self._head = self._head or bytes(rest[:EDGE])
            del rest[:-EDGE]
        self._seen = max(0, len(rest) + 1 - len(self._end))

    def _instead(self, head: bytes, tail: bytes) -> bytes:
        """Of a message that begins and ends so; b"" for one that is no answer, or to nobody knows what."""
        answer = ANSWERS.match(head, max(0, head.find(self._lead)) + len(self._lead))
        if answer is None:
            return b""
        last = ID_LAST.search(tail)
        number = self._asked or answer[1] or (last[1] if last else b"")
        return self._lead + too_long(number, self._most) if number else b""


ID = rb'"id"\s*:\s*(\d{1,18}|"[^"\\]{1,64}")'
VERSION = rb'"jsonrpc"\s*:\s*"2\.0"'
ANSWERS = re.compile(rb"\s*\{\s*(?:(?:" + ID + b"|" + VERSION + rb')\s*,\s*)*"(?:result|error)"')
ID_LAST = re.compile(rb",\s*" + ID + rb"\s*(?:,\s*" + VERSION + rb"\s*)?\}\s*$")


def too_long(number: bytes, most: int) -> bytes:
    """The error in place of the answer to the call ``number``, as JSON."""
    told = b"its answer has more than %d MiB" % ((most + MIB - 1) // MIB)
    return b'{"jsonrpc":"2.0","id":%b,"error":{"code":%d,"message":"%b"}}' % (number, LONG, told)


def number_of(request: httpx2.Request) -> bytes:
    """The id of the call in a request; b"" if it has none."""
    if request.method != "POST":
        return b""
    try:
        number = json.loads(request.content)["id"]
    except (ValueError, LookupError, TypeError):
        return b""
    return json.dumps(number).encode()


class Speaker:
    """Answers asks, several at a time."""

    def __init__(self, client: Client, writer: asyncio.StreamWriter) -> None:
        self._client = client
        self._writer = writer
        self._running: dict[int, asyncio.Task[None]] = {}
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, ask: Ask) -> None:
        if ask.verb == "cancel":
            if ask.number in self._running:
                self._running[ask.number].cancel()
            return
        task = self._running[ask.number] = asyncio.ensure_future(self._answer(ask))
        task.add_done_callback(lambda _: self._running.pop(ask.number, None))

    async def _answer(self, ask: Ask) -> None:
        try:
            if ask.verb == "list":
                reply = await self._list()
            elif ask.verb == "ping":
                await self._client.session.send_ping()
                reply = Reply(0)
            else:
                reply = Reply(0, text=await self._call(ask))
        except asyncio.CancelledError:
            reply = Reply(0, failure=Failure(TRANSPORT, CANCELLED, "it was cancelled"))
        except Exception as error:
            reply = Reply(0, failure=failure_of(error))
            if (closed := str(error) == "Connection closed") or str(error) == "Session terminated":
                self.lost.cancel()
            if closed:
                return  # the end of the process tells why
        reply.number = ask.number
        send(self._writer, reply)

    async def _call(self, ask: Ask) -> str:
        try:
            arguments = json.loads(ask.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ToolFailed(f"the arguments are not JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise ToolFailed("the arguments must be a JSON object")
        result = await self._client.call_tool(ask.name, arguments)
        text = text_of(result)
        if len(text.encode("utf-8", "replace")) > MOST:
            raise TooMuch(f"its output has {len(text)} characters, more than {MOST >> 20} MiB")
        if result.is_error:
            raise ToolFailed(text or "the tool failed without a word")
        return text

    async def _list(self) -> Reply:
        tools, wrong, cursor, size = [], [], None, 0
        while True:
            page = await self._client.list_tools(cursor=cursor)
            for each in page.tools:
                tool = Tool(
                    each.name,
                    each.description or "",
                    each.input_schema,
                    each.annotations.model_dump(by_alias=True, exclude_none=True)
                    if each.annotations
                    else None,
                )
                if fault := fault_of(tool):
                    wrong.append(f"{each.name[:100]} ({fault})")
                    continue
                size += len(
                    json.dumps(msgspec.to_builtins(tool), ensure_ascii=False).encode("utf-8", "replace")
                )
                if size > LIST:
                    raise TooMuch(f"its list of tools has more than {LIST >> 10} KiB")
                tools.append(tool)
            cursor = page.next_cursor
            if not cursor:
                return Reply(0, tools=tools, wrong=f"unusable: {', '.join(wrong)}"[:TOLD] if wrong else "")


def fault_of(tool: Tool) -> str:
    """Why a tool cannot be offered to a model; "" if it can."""
    if not tool.name or len(tool.name) > 128:
        return "its name is empty or longer than 128 characters"
    if tool.schema.get("type") != "object":
        return "its schema is not of type object"
    if depth(tool.schema) > DEPTH:
        return f"its schema is nested more than {DEPTH} deep"
    text = json.dumps(tool.schema)
    if len(text) > MAX_GRAMMAR:
        return f"its schema has more than {MAX_GRAMMAR} characters"
    answer = compile_grammar(tokenizer(), {}, Grammar(kind="json_schema", text=text))
    return (answer.error or "")[:200]


def depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level and deepest <= DEPTH:
        deepest += 1
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
    return deepest


_tokenizer: list[Any] = []


def tokenizer() -> Any:
    if not _tokenizer:
        _tokenizer.append(load_tokenizer(Vocabulary([*BYTES, b"</s>"], [256], [256])))
    return _tokenizer[0]


def text_of(result: CallToolResult) -> str:
    """What the model reads of a result: its texts; of other content what it is; else the structured form."""
    parts = []
    for block in result.content:
        resource_ = getattr(block, "resource", None)
        if block.type == "text":
            parts.append(block.text)
        elif resource_ is not None and getattr(resource_, "text", None) is not None:
            parts.append(resource_.text)
        elif block.type == "resource_link":
            parts.append(str(block.uri))
        else:
            kind = getattr(block, "mime_type", None) or getattr(resource_, "mime_type", None) or block.type
            parts.append(f"[{kind}: the model reads text only]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def failure_of(error: BaseException) -> Failure:
    """An exception for the other side."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = str(error)[:TOLD]
    if isinstance(error, ToolFailed):
        return Failure(TOOL, 0, text)
    if isinstance(error, TooMuch):
        return Failure(TRANSPORT, TOO_LARGE, text)
    if isinstance(error, MemoryError):
        return Failure(TRANSPORT, TOO_LARGE, f"its answer takes more than {MEMORY >> 20} MiB of memory")
    if isinstance(error, MCPError) and error.code == LONG:
        return Failure(TRANSPORT, TOO_LARGE, text)
    if isinstance(error, MCPError):
        lost = error.message == "Session terminated"
        return Failure(TRANSPORT, GONE, text) if lost else Failure(PROTOCOL, error.code, text)
    return Failure(TRANSPORT, NO_ANSWER, f"{type(error).__name__}: {text}" if text else type(error).__name__)


def send(writer: asyncio.StreamWriter, reply: Reply) -> None:
    data = msgspec.msgpack.encode(reply)
    writer.write(LENGTH.pack(len(data)) + data)


async def receive(reader: asyncio.StreamReader, kind: type[Any]) -> Any:
    size = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
    return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)


def transport(address: Address) -> Any:
    """What ``Client`` connects to."""
    if address.command:
        return stdio([sys.executable, "-I", "-S", "-c", UNLIMITED, *tied(address.command)])
    headers = {"Authorization": f"Bearer {address.token}"} if address.token else {}
    if address.url.rstrip("/").endswith("/sse"):
        return sse_client(address.url, headers, sse_read_timeout=SECONDS, httpx_client_factory=http_client)
    return streamable(address.url, http_client(headers, httpx2.Timeout(30.0, read=SECONDS)))


@asynccontextmanager
async def stdio(command: list[str]) -> AsyncIterator[Any]:
    """``mcp.client.stdio`` with bounded lines,
    which it reads in time quadratic in their length, and at a bounded pace."""
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    lines, messages = process.stdout, process.stdin
    to_session, from_server = anyio.create_memory_object_stream[Any](0)
    to_server, from_session = anyio.create_memory_object_stream[Any](0)

    async def read() -> None:
        cut, pace = Cut(b"\n", ANSWER), Pace()
        async with to_session:
            while data := await lines.read(CHUNK):
                for line in cut.feed(data):
                    await pace.one()
                    with suppress(ValidationError):  # something that is no message, such as a log line
                        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                        await to_session.send(SessionMessage(message))

    async def write() -> None:
        async with from_session:
            async for each in from_session:
                text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                messages.write(text.encode() + b"\n")
                await messages.drain()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(write)
        try:
            yield from_server, to_server
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            tasks.cancel_scope.cancel()


def http_client(
    headers: dict[str, str] | None = None, timeout: Any = None, auth: Any = None
) -> httpx2.AsyncClient:
    """It follows no redirects: they may lead anywhere."""
    return httpx2.AsyncClient(headers=headers, timeout=timeout, auth=auth, transport=Bounded())


class Bounded(httpx2.AsyncHTTPTransport):
    """Answers are bounded, and each event of streams of them."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        response.stream = BoundedStream(response.stream, events, number_of(request))
        return response


class BoundedStream(httpx2.AsyncByteStream):
    """``asked``: the id of the call that is answered, if it is one."""

    def __init__(self, stream: httpx2.AsyncByteStream, events: bool, asked: bytes) -> None:
        self._stream = stream
        self._events = events
        self._asked = asked

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._each() if self._events else self._whole()

    async def _whole(self) -> AsyncIterator[bytes]:
        body = bytearray()
        async for data in self._stream:
            body += data
            if len(body) > ANSWER:
                yield too_long(self._asked or b"null", ANSWER)
                return
        yield bytes(body)

    async def _each(self) -> AsyncIterator[bytes]:
        cut, pace, after = Cut(b"\n\n", EVENT, b"data:", self._asked), Pace(), b""
        async for data in self._stream:
            data, after = after + data, b""
            if data.endswith(b"\r"):  # maybe of a line end of two characters
                data, after = data[:-1], b"\r"
            for event in cut.feed(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")):
                await pace.one()
                yield event + b"\n\n"

    async def aclose(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def streamable(url: str, http: httpx2.AsyncClient) -> AsyncIterator[Any]:
    async with http, streamable_http_client(url, http_client=http) as streams:
        yield streams


async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the session or the server is gone."""
    address = await receive(reader, Address)
    lost = Failure(TRANSPORT, NO_ANSWER, "the connection to it was lost")
    try:
        async with Client(
            transport(address), cache=None, client_info=Implementation(name="sgla", version=__version__)
        ) as client:
            speaker = Speaker(client, writer)
            while True:
                asking = asyncio.ensure_future(receive(reader, Ask))
                await asyncio.wait([asking, speaker.lost], return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    await asyncio.sleep(MOMENT)  # in which what ended the session ends this, too
                    break
                speaker.take(asking.result())
            await end(writer, lost)
    except BaseException as error:
        await end(writer, failure_of(error))


async def end(writer: asyncio.StreamWriter, why: Failure) -> None:
    """Without waiting for what a lost session has left behind."""
    with suppress(OSError):
        send(writer, Reply(0, failure=why))
        await writer.drain()
    os._exit(0)


async def main() -> None:
    await speak(
        *await asyncio.open_unix_connection(sock=socket.socket(fileno=int(sys.argv[1])), limit=1 << 20)
    )


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    logging.disable(logging.CRITICAL)
    limit_memory(MEMORY)
    asyncio.run(main())
