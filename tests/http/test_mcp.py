"""Tools of MCP servers that /v1/responses calls, with servers made by the ``mcp`` package on the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio
from aiohttp import web
from http_fake import ScriptedIngress
from http_site import Site

from sgla.config import Config
from sgla.errors import ConfigError, InvalidField
from sgla.http.app import make_app
from sgla.http.connections import Runner
from sgla.http.mcp import process, servers
from sgla.http.mcp.address import addresses
from sgla.http.mcp.servers import ToolError, ToolServer, ToolServers
from sgla.http.responses.input import ResponsesRequest, chat_messages
from sgla.http.responses.mcp import offers
from sgla.http.responses.output import OutputItems
from sgla.http.server import SERVER
from sgla.messages import Job
from sgla.observe.metrics import Metrics
from sgla.processes import tied

HERMES = "<think></think> <tool_call>"  # enough of a chat template to know the family by
TOOLS = Path(__file__).parent / "mcp_tools.py"
HOSTILE = Path(__file__).parents[2] / "bench" / "mcp_hostile.py"
STDIO = f"two={sys.executable} {TOOLS} stdio"


class Played(ScriptedIngress):
    """A model that answers one turn after the other with ``scripts``, then says "done"."""

    def __init__(self, *scripts: str, pace: float = 0.0) -> None:
        super().__init__("", HERMES, cut=7)
        self.scripts = list(scripts)
        self.pace = pace

    async def _run(self, job: Job) -> None:
        self.script = self.scripts.pop(0) if self.scripts else "done"
        await super()._run(job)

    async def room(self, job: Job) -> None:
        pass


def call(name: str, label: str = "local", **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{label}__{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def mcp(label: str = "local", **fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": label, "require_approval": "never", **fields}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def listening(transport: str) -> Iterator[str]:
    """The URL of an MCP server over HTTP."""
    port = free_port()
    process = subprocess.Popen(
        tied([sys.executable, str(TOOLS), transport, str(port)]), stderr=subprocess.DEVNULL
    )
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
        yield f"http://127.0.0.1:{port}/{'sse' if transport == 'sse' else 'mcp'}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def remote() -> Iterator[str]:
    """Over streamable HTTP."""
    with listening("http") as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(remote: str) -> AsyncIterator[Site]:
    """A server with three MCP servers, one of which is not there. All tests use it: to connect takes a second
    of CPU time each."""
    ingress, metrics = Played(), Metrics("fake")
    gone = f"gone=http://127.0.0.1:{free_port()}/mcp"
    config = Config(tool_server=[f"local={remote}", STDIO, gone], tool_timeout=100.0)
    runner = Runner(make_app(ingress, config, metrics), shutdown_timeout=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "START", 120.0)  # on a busy machine
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        site = Site(ingress, runner.app, metrics, runner.addresses[0][1], "none", runner.cleanup)
        yield site
    await site.close()
    await runner.cleanup()


Start = Callable[..., Site]


@pytest.fixture
def start(running: Site) -> Start:
    """``start(*scripts)``: what the model says in its next turns."""

    def begin(*scripts: str) -> Site:
        running.ingress.jobs.clear()
        running.ingress.scripts = list(scripts)  # type: ignore[attr-defined]
        return running

    return begin


async def respond(site: Site, **body: Any) -> Any:
    client = site.client.with_options(timeout=100)
    return await client.responses.create(**{"model": "fake", "input": "x", "tools": [mcp()], **body})


@pytest.mark.asyncio(loop_scope="module")
async def test_a_call_is_made_and_the_model_goes_on(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sgla.http.access")
    site = start("I add." + call("add", a=2, b=3), "It is 5.")
    response = await respond(site)
    listed, said, made, last = response.output
    assert [tool.name for tool in listed.tools] == ["add", "fail", "hang", "huge", "crash"]
    assert listed.error.startswith("unusable: strange (")
    assert said.content[0].text == "I add."
    assert (made.type, made.server_label, made.name) == ("mcp_call", "local", "add")
    assert (json.loads(made.arguments), made.output, made.error) == ({"a": 2, "b": 3}, "5", None)
    assert (made.status, last.content[0].text, response.status) == ("completed", "It is 5.", "completed")
    first, second = site.ingress.jobs
    assert "local__add" in [tool["function"]["name"] for tool in first.tools]
    assert second.messages[: len(first.messages)] == first.messages
    assistant, told = second.messages[len(first.messages) :]
    assert (assistant["content"], told["content"]) == ("I add.", "5")
    assert told["tool_call_id"] == assistant["tool_calls"][0]["id"] == made.id
    prompts = [len(site.ingress.prompt(job)) for job in site.ingress.jobs]
    assert response.usage.input_tokens == sum(prompts)
    assert response.usage.output_tokens == len("I add." + call("add", a=2, b=3) + "It is 5.")
    logged = caplog.records[-1].__dict__["fields"]
    assert logged["prompt_tokens"] == response.usage.input_tokens
    assert logged["output_tokens"] == response.usage.output_tokens
    site.ingress.check()
    more = await respond(site, previous_response_id=response.id)
    assert [item.type for item in more.output] == ["message"]  # the tools were listed before
    assert site.ingress.jobs[-1].messages[1:-2] == [assistant, told]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_stream_tells_the_same(start: Start) -> None:
    scripts = (call("add", a=2, b=3) + call("fail"), "It is 5.")
    site = start(*scripts, *scripts)
    whole = await respond(site)
    events = [event async for event in await respond(site, stream=True)]
    final = events[-1].response
    shapes = [
        [{**item.model_dump(), "id": "", "content": None} for item in response.output]
        for response in (whole, final)
    ]
    assert shapes[0] == shapes[1]
    assert final.usage == whole.usage
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events if "delta" not in event.type]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed",
        "response.output_item.done",
        *["response.output_item.added", "response.mcp_call.in_progress", "response.mcp_call_arguments.done"]
        * 2,
        "response.mcp_call.completed",
        "response.output_item.done",
        "response.mcp_call.failed",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event for event in events if event.type == "response.mcp_call_arguments.delta"]
    joined = "".join(event.delta for event in deltas if event.output_index == 1)
    assert joined == final.output[1].arguments
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [final.output[event.output_index] for event in done] == [event.item for event in done]


@pytest.mark.asyncio(loop_scope="module")
async def test_what_goes_wrong_is_the_items_error(start: Start) -> None:
    site = start(
        call("fail"),
        call("huge", size=2 << 20),
        call("huge", size=10 << 20),
        call("add", a="x", b=1),
        call("add", a=1, b=1),
    )
    response = await respond(site)
    assert response.status == "completed"
    calls = [item for item in response.output if item.type == "mcp_call"]
    errors = [item.error for item in calls]
    assert errors[0].type == "mcp_tool_execution_error"
    assert "the disk is on fire" in errors[0].content[0]["text"]
    assert errors[1].code == 413
    assert "more than 1 MiB" in errors[1].message
    assert (errors[2].code, errors[2].message) == (413, "its answer has more than 8 MiB")
    assert errors[3].type == "mcp_tool_execution_error"
    assert calls[4].output == "2"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tool_that_hangs(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "mark"
    site = start(call("hang", mark=str(mark)))
    found = site.app[SERVER].tools.find("local", None)
    monkeypatch.setattr(found, "_seconds", 1.0)
    hung, _ = (await respond(site)).output[1:]
    assert (hung.status, hung.error.code) == ("failed", 504)
    assert "no answer within 1 s" in hung.error.message
    assert site.ingress.jobs[1].messages[-1]["content"] == f"Error: {hung.error.message}"
    if mark.exists():  # it had begun
        await until(lambda: mark.read_text() == "cancelled")


async def until(true: Callable[[], bool]) -> None:
    for _ in range(3000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.asyncio(loop_scope="module")
async def test_who_leaves_or_cancels_ends_the_call(start: Start, tmp_path: Path, background: bool) -> None:
    mark = tmp_path / "mark"
    site = start(call("hang", mark=str(mark)))
    stream = await respond(site, stream=True, background=background)
    first = await anext(aiter(stream))
    await until(mark.exists)
    if background:
        ended = await site.client.responses.cancel(first.response.id)
        assert ended.status == "cancelled"
    await stream.close()
    await until(lambda: mark.read_text() == "cancelled")
    found = await site.client.responses.retrieve(first.response.id)
    assert (found.status, found.output[-1].status) == ("cancelled", "incomplete")
    site.ingress.check()


@pytest.mark.asyncio(loop_scope="module")
async def test_in_the_background(start: Start) -> None:
    site = start(call("add", a=2, b=3), "It is 5.")
    begun = await respond(site, background=True)
    while (response := await site.client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
    assert (response.status, response.output_text) == ("completed", "It is 5.")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_server_that_cannot_be_reached(start: Start) -> None:
    site = start(call("add", a=1, b=2))
    response = await respond(site, tools=[mcp("gone"), mcp()])
    gone, listed, made, _ = response.output
    assert (gone.server_label, gone.tools, listed.server_label) == ("gone", [], "local")
    assert gone.error.startswith("MCP server gone: ConnectError")
    assert made.output == "3"


@pytest.mark.asyncio(loop_scope="module")
async def test_two_servers_with_the_same_tools(start: Start) -> None:
    site = start(call("add", "local", a=1, b=1) + call("add", "two", a=2, b=2))
    response = await respond(
        site, tools=[mcp(allowed_tools=["add"]), mcp("two", allowed_tools={"read_only": True})]
    )
    calls = [item for item in response.output if item.type == "mcp_call"]
    assert [(item.server_label, item.output) for item in calls] == [("local", "2"), ("two", "4")]
    assert [tool["function"]["name"] for tool in site.ingress.jobs[0].tools] == ["local__add", "two__add"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_session_that_was_lost_is_opened_again(start: Start) -> None:
    site = start(call("crash", "two"), call("add", "two", a=2, b=2))
    response = await respond(site, tools=[mcp("two")])
    crashed, made = (item for item in response.output if item.type == "mcp_call")
    assert crashed.error.type == "http_error"
    assert made.output == "4"


@pytest.mark.asyncio(loop_scope="module")
async def test_calls_that_the_client_approves(start: Start) -> None:
    site = start("Shall I?" + call("add", a=2, b=3), "It is 5.", call("add", a=1, b=1), "Then not.")
    tools = [{"type": "mcp", "server_label": "local"}]
    first = await respond(site, tools=tools)
    asked = first.output[-1]
    assert (asked.type, asked.name, json.loads(asked.arguments)) == (
        "mcp_approval_request",
        "add",
        {"a": 2, "b": 3},
    )
    assert first.status == "completed"
    yes = {"type": "mcp_approval_response", "approval_request_id": asked.id, "approve": True}
    second = await respond(site, tools=tools, input=[yes], previous_response_id=first.id)
    made, said = second.output
    assert (made.type, made.approval_request_id, made.output) == ("mcp_call", asked.id, "5")
    assert said.content[0].text == "It is 5."
    said_by, told = site.ingress.jobs[-1].messages[-2:]
    assert (said_by["tool_calls"][0]["id"], told["tool_call_id"], told["content"]) == (
        asked.id,
        asked.id,
        "5",
    )
    third = await respond(site, tools=tools, previous_response_id=second.id)
    no = yes | {"approval_request_id": third.output[-1].id, "approve": False, "reason": "too dear"}
    fourth = await respond(site, tools=tools, input=[no], previous_response_id=third.id)
    assert [item.type for item in fourth.output] == ["message"]
    told = site.ingress.jobs[-1].messages[-1]
    assert told["content"] == "The user did not approve this call. too dear"
    for wrong, param in (([yes | {"approval_request_id": "mcpr_x"}], "input"), ([yes], "tools")):
        body: dict[str, Any] = {"input": wrong, "previous_response_id": first.id}
        with pytest.raises(openai.BadRequestError) as bad:
            await respond(site, **body, tools=tools if param == "input" else [])
        assert bad.value.param == param


def approvals(count: int) -> list[dict[str, Any]]:
    """A conversation that asked for so many calls, all of which the client approves."""
    asked = {"type": "mcp_approval_request", "server_label": "local", "name": "add", "arguments": "{}"}
    said = {"type": "mcp_approval_response", "approve": True}
    return [{**asked, "id": f"mcpr_{i}"} for i in range(count)] + [
        {**said, "approval_request_id": f"mcpr_{i}"} for i in range(count)
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_no_more_calls_are_approved_than_may_be_made(running: Site) -> None:
    body = {"input": approvals(65), "tools": [mcp()]}
    status, reply = await running.post("/v1/responses", body)
    assert (status, reply["error"]["param"]) == (400, "input")
    assert reply["error"]["message"] == "input approves 65 calls; 64 is the limit of one response"


@pytest.mark.asyncio(loop_scope="module")
async def test_calls_that_may_not_be_made_leave_the_loop_to_others(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []
    made, turn = OutputItems.made, 0

    def noted(self: OutputItems, *args: Any) -> Any:
        turns.append(turn)
        return made(self, *args)

    async def others() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    monkeypatch.setattr(OutputItems, "made", noted)
    task = asyncio.ensure_future(others())
    try:
        response = await respond(start(), input=approvals(64), max_tool_calls=0)
    finally:
        task.cancel()
    errors = [item.error.code for item in response.output if item.type == "mcp_call"]
    assert errors == [429] * 64
    assert len(set(turns)) == 64


@pytest.mark.asyncio(loop_scope="module")
async def test_the_tools_of_all_labels_are_bounded(running: Site, remote: str) -> None:
    tools = [mcp(f"l{i}", server_url=remote) for i in range(1024)]
    asked = [{**tool, "allowed_tools": []} for tool in tools]
    fields = msgspec.convert({"input": "x", "tools": asked}, ResponsesRequest)
    assert len(await offers(fields, running.app[SERVER].tools)) == 1024
    fields.tools = tools
    with pytest.raises(InvalidField, match="tools has 102[0-9] items; 1024 is the limit"):
        await offers(fields, running.app[SERVER].tools)


@pytest.mark.parametrize(
    ("required", "asked"),
    [
        ({"never": {"tool_names": ["add"]}}, False),
        ({"never": {"read_only": True}}, False),
        ({"always": {"tool_names": ["fail"]}}, False),
        ({"always": {"read_only": True}}, True),
        ({"never": {"tool_names": ["fail"]}}, True),
        ("always", True),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_which_calls_are_approved(start: Start, required: Any, asked: bool) -> None:
    site = start(call("add", a=1, b=1))
    response = await respond(site, tools=[mcp(require_approval=required)])
    assert response.output[1].type == ("mcp_approval_request" if asked else "mcp_call")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_number_of_calls_is_bounded(start: Start) -> None:
    site = start(*[call("add", a=1, b=1)] * 3, "enough")
    response = await respond(site, max_tool_calls=2)
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert len(site.ingress.jobs) == 3


@pytest.mark.asyncio(loop_scope="module")
async def test_calls_that_are_forced_are_forced_once(start: Start) -> None:
    site = start(call("add", a=1, b=1), "It is 2.")
    response = await respond(site, tool_choice={"type": "mcp", "server_label": "local", "name": "add"})
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "message"]
    assert [job.sampling.grammar is not None for job in site.ingress.jobs] == [True, False]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_call_of_the_client_ends_the_response(start: Start) -> None:
    mine = '<tool_call>\n{"name": "mine", "arguments": {}}\n</tool_call>'
    site = start(call("add", a=1, b=1) + mine)
    response = await respond(
        site, tools=[mcp(), {"type": "function", "name": "mine", "parameters": {"type": "object"}}]
    )
    assert [(item.type, item.status) for item in response.output[1:]] == [
        ("mcp_call", "completed"),
        ("function_call", "completed"),
    ]
    assert response.output[1].output == "2"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_tokens_of_all_turns_are_bounded(start: Start) -> None:
    script = call("add", a=1, b=1)
    site = start(script)
    response = await respond(site, max_output_tokens=len(script) + 4)
    assert [job.sampling.max_tokens for job in site.ingress.jobs] == [len(script) + 4, 4]
    site.ingress.scripts = [script]  # type: ignore[attr-defined]
    response = await respond(site, max_output_tokens=len(script))
    assert (response.status, response.output[-1].output) == ("incomplete", "2")


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (
            mcp("other"),
            "tools[0]: server_label 'other' is none of this server's MCP servers, which are local, two, "
            "gone;",
        ),
        (mcp(server_url="http://10.0.0.1/"), "tools[0]: server_url 'http://10.0.0.1/' is none of"),
        (mcp(headers={"a": "b"}), "tools[0].headers: the operator"),
        (mcp(authorization="x"), "tools[0].authorization: the operator"),
        (mcp(connector_id="connector_gmail"), "tools[0].connector_id"),
        (mcp(allowed_tools=[1]), "tools[0].allowed_tools must be"),
        (mcp(allowed_tools=["a"] * 1025), "tools[0].allowed_tools has 1025 names; 1024 is the limit"),
        (mcp(allowed_tools={"tool_names": ["a"] * 1025}), "tools[0].allowed_tools has 1025 names"),
        (
            mcp(require_approval={"never": {"tool_names": ["a"] * 1025}}),
            "tools[0].require_approval.never has 1025 names; 1024 is the limit",
        ),
        (mcp(require_approval="sometimes"), "tools[0].require_approval must be"),
        ({"type": "mcp"}, "tools[0].server_label must be a string"),
        (mcp("l" * 257), "tools[0].server_label may have at most 256 characters"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_refused(running: Site, tool: Any, message: str) -> None:
    site = running
    status, reply = await site.post("/v1/responses", {"input": "x", "tools": [tool]})
    assert (status, reply["error"]["param"]) == (400, "tools")
    assert reply["error"]["message"].startswith(message)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_server_by_its_url(start: Start, remote: str) -> None:
    site = start(call("add", "mine", a=1, b=1))
    response = await respond(site, tools=[mcp("mine", server_url=remote + "/")])
    assert (response.output[1].server_label, response.output[1].output) == ("mine", "2")
    body = {"input": "x", "tools": [mcp()]}
    assert (await site.post("/v1/responses/input_tokens", body))[0] == 200


async def batch_of(site: Site, *bodies: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The batch when it has ended, and the responses of its lines."""
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/responses", "body": {"input": "x", **body}}
        for i, body in enumerate(bodies)
    ]
    file = await site.client.files.create(file="\n".join(map(json.dumps, lines)).encode(), purpose="batch")
    made = await site.client.batches.create(
        input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
    )
    for _ in range(3000):
        batch = await site.client.batches.retrieve(made.id)
        if batch.status in ("completed", "failed"):
            break
        await asyncio.sleep(0.01)
    answers = []
    for uid in (batch.output_file_id, batch.error_file_id):
        if uid is not None:
            text = (await site.client.files.content(uid)).text
            answers += [json.loads(answer)["response"]["body"] for answer in text.splitlines()]
    return batch, answers


@pytest.mark.asyncio(loop_scope="module")
async def test_lines_of_a_batch_call_tools(start: Start) -> None:
    """Also in a conversation, and after a response that was stored."""
    site = start(call("add", a=2, b=3), "It is 5.", call("add", "two", a=1, b=1), "It is 2.")
    first = await respond(site)
    talk = await site.client.conversations.create()
    body = {"tools": [mcp(), mcp("two")], "conversation": talk.id}
    batch, (answer,) = await batch_of(site, body)
    assert (batch.request_counts.completed, answer["status"]) == (1, "completed")
    assert [item["type"] for item in answer["output"]] == [*["mcp_list_tools"] * 2, "mcp_call", "message"]
    assert (answer["output"][2]["output"], answer["output"][3]["content"][0]["text"]) == ("2", "It is 2.")
    assert batch.usage.input_tokens == answer["usage"]["input_tokens"]
    assert batch.usage.output_tokens == answer["usage"]["output_tokens"]
    items = [item.type async for item in site.client.conversations.items.list(talk.id, order="asc")]
    assert items == ["message", *["mcp_list_tools"] * 2, "mcp_call", "message"]
    site.ingress.scripts = [call("add", a=4, b=4), "It is 8.", "more", "again"]  # type: ignore[attr-defined]
    later = {"tools": [mcp()], "previous_response_id": first.id}
    _, (answer,) = await batch_of(site, later)
    assert [item["type"] for item in answer["output"]] == ["mcp_call", "message"]
    assert answer["output"][0]["output"] == "8"
    assert len(site.ingress.jobs[-1].messages) > len(site.ingress.jobs[0].messages)
    assert all(job.yields for job in site.ingress.jobs[2:])
    batch, answers = await batch_of(site, body, body)
    assert batch.request_counts.completed == 2
    assert [answer["status"] for answer in answers] == ["completed"] * 2
    batch, (answer,) = await batch_of(site, {"tools": [mcp("other")]})
    assert batch.request_counts.failed == 1
    assert answer["error"]["param"] == "tools"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_line_that_asks_for_approval_ends_there(start: Start) -> None:
    site = start(call("add", a=2, b=3))
    _, (answer,) = await batch_of(site, {"tools": [{"type": "mcp", "server_label": "local"}]})
    assert [item["type"] for item in answer["output"]] == ["mcp_list_tools", "mcp_approval_request"]
    asked = answer["output"][1]["id"]
    yes = {"type": "mcp_approval_response", "approval_request_id": asked, "approve": True}
    site.ingress.scripts = ["It is 5."]  # type: ignore[attr-defined]
    tools = [{"type": "mcp", "server_label": "local"}]
    body = {"input": [yes], "previous_response_id": answer["id"], "tools": tools}
    _, (answer,) = await batch_of(site, body)
    assert [item["type"] for item in answer["output"]] == ["mcp_call", "message"]
    assert answer["output"][0]["output"] == "5"


async def tried(server: ToolServer, name: str, **arguments: Any) -> Any:
    """What the tool answers, or what the call failed with."""
    try:
        return await server.call(name, json.dumps(arguments), name, 30.0)
    except ToolError as error:
        return error.failure.code, error.failure.message


@pytest_asyncio.fixture
async def hostile(request: pytest.FixtureRequest) -> AsyncIterator[ToolServer]:
    command = f"bad={sys.executable} {HOSTILE} {request.param}"
    tools = ToolServers([command], 60.0)
    found = tools.find("bad", None)
    assert found is not None
    await found.tools()
    yield found
    tools.close()


@pytest.mark.parametrize("hostile", ["last"], indirect=True)
async def test_an_answer_that_is_too_long_ends_its_call_alone(hostile: ToolServer) -> None:
    slow = asyncio.ensure_future(tried(hostile, "slow", seconds=0.5))
    session = hostile._open()
    assert await tried(hostile, "long", size=9_000_000) == (413, "its answer has more than 8 MiB")
    assert await tried(hostile, "long", size=100) == "x" * 100
    assert not slow.done()
    assert await slow == "slept"
    assert hostile._open() is session


@pytest.mark.parametrize("hostile", ["first"], indirect=True)
async def test_floods_and_ends_cost_others_nothing(hostile: ToolServer) -> None:
    """What nobody asked for is read slowly, an answer to nobody knows what is passed over, and a call that
    only reads is made again."""
    floods = [
        asyncio.ensure_future(tried(hostile, "unasked")),
        asyncio.ensure_future(tried(hostile, "nameless")),
    ]
    await asyncio.sleep(0.2)
    assert await tried(hostile, "add", a=1, b=2) == "3"
    adding = asyncio.ensure_future(tried(hostile, "slow", seconds=1.0))
    session = hostile._open()
    assert (await tried(hostile, "die"))[0] == 502
    assert await adding == "slept"
    assert hostile._open() is not session
    assert [code for code, _ in await asyncio.gather(*floods)] == [502, 502]


@pytest.mark.parametrize("hostile", ["last"], indirect=True)
async def test_a_server_that_answers_nothing_any_more_is_started_again(
    hostile: ToolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SILENT", 0.5)
    session = hostile._open()
    with pytest.raises(ToolError, match="no answer within 0.2 s"):
        await hostile.call("slow", json.dumps({"seconds": 0.5}), "a", 0.2)
    assert hostile._pinging is not None
    await hostile._pinging
    assert not session.over, "it answers pings"
    with pytest.raises(ToolError, match="no answer within 0.2 s"):
        await hostile.call("deaf", "{}", "a", 0.2)
    assert await tried(hostile, "add", a=1, b=2) == "3", "in a new session"
    assert session.over


async def only_that_call_fails(server: ToolServer, mark: Path, most: int) -> asyncio.Future[Any]:
    hung = asyncio.ensure_future(tried(server, "hang", mark=str(mark)))
    await until(mark.exists)
    session = server._open()
    assert await tried(server, "huge", size=10 << 20) == (413, f"its answer has more than {most} MiB")
    assert await tried(server, "add", a=1, b=2) == "3"
    assert server._open() is session
    assert not hung.done()
    return hung


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_over_http_that_is_too_long_ends_its_call_alone(
    running: Site, tmp_path: Path
) -> None:
    server = running.app[SERVER].tools.find("local", None)
    (await only_that_call_fails(server, tmp_path / "mark", 8)).cancel()


async def test_an_event_that_is_too_long_ends_its_call_alone(tmp_path: Path) -> None:
    with listening("sse") as url:
        tools = ToolServers([f"far={url}"], 60.0)
        server = tools.find("far", None)
        assert server is not None
        hung = await only_that_call_fails(server, tmp_path / "mark", 1)
        tools.close()
        assert (await hung)[0] == 502


LONG_TEXT = b'"result": {"content": "' + rb"\"id\": 7, " * 100 + b'"}'


@pytest.mark.parametrize(
    ("message", "number"),
    [
        (b'{"jsonrpc": "2.0", "id": 5, %b}', b"5"),
        (b'{"id":"5","jsonrpc":"2.0",%b}', b'"5"'),
        (b'{%b, "jsonrpc": "2.0", "id": 5}', b"5"),
        (b'{%b,"id":5,"jsonrpc":"2.0"}', b"5"),
        (b'{"jsonrpc":"2.0",%b,"id":5}\r', b"5"),
        (b'{%b,"id":5,"more":{"id":6}}', b""),
        (b'{"jsonrpc": "2.0", "id": 5, "method": "ping", %b}', b""),
        (b'{"jsonrpc": "2.0", "method": "notifications/x", %b, "id": 5}', b""),
        (b'[%b, "id": 5}', b""),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_whose_answer_is_too_long(message: bytes, number: bytes, size: int) -> None:
    cut = process.Cut(b"\n", 1500)
    sent = b"before\n" + message % (LONG_TEXT * 3) + b"\nafter\n"
    found = [line for at in range(0, len(sent), size) for line in cut.feed(sent[at : at + size])]
    told = [json.loads(line)["id"] for line in found[1:-1]]
    assert (found[0], told, found[-1]) == (b"before", [json.loads(number)] if number else [], b"after")


def test_addresses() -> None:
    texts = ["a=http://h/mcp", "127.0.0.1:8001,", "https://h.org:1/x?a=b", "b=npx -y 'x y'", "c=h:1"]
    found = addresses([text.rstrip(",") for text in texts], {"SGLA_TOOL_TOKEN_A": "geheim"})
    assert [(one.label, one.url, one.command) for one in found] == [
        ("a", "http://h/mcp", []),
        ("127_0_0_1_8001", "http://127.0.0.1:8001/sse", []),
        ("h_org_1", "https://h.org:1/x?a=b", []),
        ("b", "", ["npx", "-y", "x y"]),
        ("c", "http://h:1/sse", []),
    ]
    assert [one.token for one in found] == ["geheim", "", "", "", ""]
    for wrong in (["demo"], ["a=x", "a=y"], ["npx x"], ["a='"]):
        with pytest.raises(ConfigError, match="--tool-server"):
            addresses(wrong, {})


def test_a_missing_package_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise servers.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(servers.importlib.metadata, "version", none)
    assert not ToolServers([], 1.0)
    with pytest.raises(ConfigError, match=r"pip install 'sgla\[mcp\]'"):
        ToolServers(["h:1"], 1.0)


def test_calls_in_a_history() -> None:
    """Calls of one turn become one message, and their results follow it."""
    made = {"type": "mcp_call", "server_label": "s", "name": "t", "arguments": "{}"}
    failed = {"type": "mcp_protocol_error", "code": 1, "message": "no"}
    messages = chat_messages(
        None,
        [
            made | {"id": "1", "output": "a"},
            made | {"id": "2", "error": failed},
            {"role": "user", "content": "x"},
        ],
    )
    assert [message["role"] for message in messages] == ["assistant", "tool", "tool", "user"]
    assert [call["id"] for call in messages[0]["tool_calls"]] == ["1", "2"]
    assert [message["content"] for message in messages[1:3]] == ["a", "Error: no"]
