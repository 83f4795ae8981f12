"""POST /parse_function_call and /separate_reasoning:
what chats do with outputs, for any text. SGLang's shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from sgla.actors.base import in_thread
from sgla.actors.lanes import INLINE_SIZE
from sgla.errors import ConfigError, InvalidField
from sgla.http import answer_types as to
from sgla.http.answer.reading import server_dialect
from sgla.http.lanes import beside
from sgla.http.operation import operation
from sgla.http.request.chat import check_tool_list
from sgla.http.request.intake import intake
from sgla.http.request.schema import Schema
from sgla.http.server import ASKED, Server
from sgla.http.wire import json_response
from sgla.text.process import Parse, parse
from sgla.text.tools.cursor import CALL, CONTENT, REASONING, Piece
from sgla.text.tools.families import Family, named
from sgla.text.tools.parser import parser_of


class ParseCallRequest(msgspec.Struct, kw_only=True):
    text: str
    tools: list[dict[str, Any]] | None = None
    tool_call_parser: str | None = None


class SeparateRequest(msgspec.Struct, kw_only=True):
    text: str
    reasoning_parser: str | None = None


CALLS = Schema(ParseCallRequest)
SEPARATE = Schema(SeparateRequest)


@operation("SGLang: the tool calls in a text", ParseCallRequest, to.ParsedCalls)
async def parse_function_call(request: web.Request) -> web.Response:
    server = request[ASKED]
    fields = await intake(request, CALLS)
    check_tool_list(fields.tools)
    family = chosen(server, fields.tool_call_parser, "tool_call_parser")
    return await parsed(
        request, Parse(fields.text, tools=family.name, functions=fields.tools or []), calls_and_text
    )


def calls_and_text(pieces: list[Piece]) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.kind == CALL:
            calls.append({"tool_index": len(calls), "name": piece.text, "parameters": ""})
        elif piece.kind != CONTENT:
            calls[-1]["parameters"] += piece.text
    return {"normal_text": joined(pieces, CONTENT), "calls": calls}


@operation("SGLang: the reasoning in a text", SeparateRequest, to.SeparatedReasoning)
async def separate_reasoning(request: web.Request) -> web.Response:
    """A text that only closes reasoning is taken for one whose prompt has opened it."""
    server = request[ASKED]
    fields = await intake(request, SEPARATE)
    family = chosen(server, fields.reasoning_parser, "reasoning_parser")
    think = family.think
    opened = think is not None and think.open not in fields.text and think.close in fields.text
    return await parsed(request, Parse(fields.text, reasoning=family.name, opened=opened), reasoning_and_text)


def reasoning_and_text(pieces: list[Piece]) -> dict[str, Any]:
    return {"reasoning_text": joined(pieces, REASONING), "text": joined(pieces, CONTENT)}


def chosen(server: Server, name: str | None, field: str) -> Family:
    """The family that the request names, or the model's own. Raises InvalidField."""
    if name is None:
        dialect = server_dialect(server)
        family = dialect.tools if field == "tool_call_parser" else dialect.reasoning
        if family is None:
            raise InvalidField(f"{field} is required: the model has none of its own", param=field)
        return family
    try:
        family = named(name, field.replace("_", "-"))
    except ConfigError as error:
        raise InvalidField(error.message.removeprefix("--"), param=field) from error
    if family is None:
        raise InvalidField(f"{field} must name a format", param=field)
    return family


async def parsed(
    request: web.Request, task: Parse, answer: Callable[[list[Piece]], dict[str, Any]]
) -> web.Response:
    """Long texts are read in a process of its own, which has limits, and answers about them are made in a
    thread, since they may have hundred thousand pieces."""
    if len(task.text) <= INLINE_SIZE:
        parser = parser_of(task)
        return json_response(answer(parser.feed(task.text) + parser.close()))
    pieces = await beside(request, len(task.text), lambda: parse(task))
    return await in_thread(lambda: json_response(answer([Piece(*piece) for piece in pieces])))


def joined(pieces: list[Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)
