"""Traces of requests through the whole engine, as an exporter sees them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from local_server import Local, local_server
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.http.serve import start_tracing
from sgla.observe.tracing import Tracing, otlp_processor

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["tokenize", "queue", "prefill", "decode"]


class Traced:
    """A server that exports into memory."""

    def __init__(self, local: Local, exporter: InMemorySpanExporter) -> None:
        self._local = local
        self._exporter = exporter

    async def post(self, path: str, body: Any, **headers: str) -> int:
        return (await self._local.post(path, body, **headers))[0]

    async def spans(self, count: int) -> list[ReadableSpan]:
        """The first ``count`` spans, phases in their order, the request last."""
        async with asyncio.timeout(5):
            while len(self._exporter.get_finished_spans()) < count:
                await asyncio.sleep(0.01)
        spans = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return spans


@pytest.fixture
async def server(tiny_model: Path) -> AsyncIterator[Traced]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter), "tiny")
    async with local_server(tracing, model=str(tiny_model)) as local:
        yield Traced(local, exporter)


def of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_request_and_its_phases(server: Traced) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 5,
        "ignore_eos": True,
        "temperature": 0.5,
        "stop": ["zzz"],
        "stream": True,
    }
    parent = f"00-{TRACE_ID}-{PARENT_ID}-01"
    assert (
        await server.post("/v1/chat/completions", body, traceparent=parent, **{"X-Request-Id": "mine"}) == 200
    )
    *phases, request = await server.spans(5)
    assert [span.name for span in phases] == PHASES
    assert request.name == "chat tiny"
    assert all(f"{span.context.trace_id:032x}" == TRACE_ID for span in [*phases, request])
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == PARENT_ID
    assert {span.parent.span_id for span in phases if span.parent} == {request.context.span_id}
    times = [(span.start_time or 0, span.end_time or 0) for span in phases]
    assert all(start <= end for start, end in times)
    assert [end for _, end in times[:-1]] == [start for start, _ in times[1:]]
    assert (request.start_time or 0) <= times[0][0]
    assert times[-1][1] <= (request.end_time or 0)
    told = of(request)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stop_sequences": ("zzz",),
        "gen_ai.response.id": "mine",
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert {name: told[name] for name in expected} == expected
    assert told["gen_ai.usage.input_tokens"] == of(phases[0])["sgla.tokens"] > 5
    assert told["gen_ai.latency.time_to_first_token"] > 0


async def test_every_choice_of_every_prompt(server: Traced) -> None:
    body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 2, "ignore_eos": True}
    assert await server.post("/v1/completions", body) == 200
    spans = await server.spans(2 + 2 * 3 * 3 + 1)
    names = [span.name for span in spans]
    assert {name: names.count(name) for name in PHASES} == {
        "tokenize": 2,
        "queue": 6,
        "prefill": 6,
        "decode": 6,
    }
    (request,) = [span for span in spans if span.parent is None]
    assert of(request)["gen_ai.usage.output_tokens"] == 12


async def test_refused_requests(server: Traced) -> None:
    assert await server.post("/v1/completions", {"prompt": "x" * 5000}) == 400  # longer than the context
    (request,) = await server.spans(1)
    assert (of(request)["error.type"], request.status.is_ok) == ("400", False)
    assert await server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}) == 200
    assert len(await server.spans(5)) == 5


async def test_spans_reach_a_collector() -> None:
    bodies: list[bytes] = []

    async def collect(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.Response(status=200)

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    processor = otlp_processor(f"127.0.0.1:{runner.addresses[0][1]}")
    tracing = Tracing(processor, "tiny")
    tracing._tracer.start_span("hello").end()
    await asyncio.to_thread(tracing.close)
    assert len(bodies) == 1
    assert b"hello" in bodies[0]
    await runner.cleanup()


def test_without_the_setting_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, sgla.http.serve; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert start_tracing(Config(), "m") is None
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "sgla.observe.tracing")
    with pytest.raises(ConfigError, match=r"sgla\[otel\]"):
        start_tracing(Config(otlp_traces_endpoint="http://x"), "m")
