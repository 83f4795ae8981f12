"""OpenTelemetry traces:
a request with its phases tokenize, queue, prefill and decode, which are known when it has ended.

Imported only where ``--otlp-traces-endpoint`` is given. Names of attributes are OpenTelemetry's for
generative AI (``gen_ai.*``); the ``gen_ai.latency.*`` ones are vLLM's and SGLang's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sgla import clock
from sgla.messages import Job, SamplingParams, Submit
from sgla.sched.stats import Finished
from sgla.version import __version__

OPEN = 8192  # requests whose phases are awaited; the oldest are forgotten first
ATTRIBUTES = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
    "stop": "stop_sequences",
    "n": "choice.count",
}


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Sends spans in the background to a collector, OTLP over HTTP;
    ``endpoint`` without a path means ``/v1/traces``."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    url = urlsplit(endpoint if "//" in endpoint else f"http://{endpoint}")
    if url.path in ("", "/"):
        url = url._replace(path="/v1/traces")
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=url.geturl()))


class Trace:
    """One HTTP request's span. ``children`` of its jobs have not ended yet."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.children = 0
        self.jobs: list[str] = []
        self.tokenized: dict[str, float] = {}
        self.usage = {"input_tokens": 0, "output_tokens": 0, "cache_read.input_tokens": 0}
        self.reasons: list[str] = []
        self.first_token: float | None = None
        self.queued = 0.0


class Tracing:
    """Called on the loop's thread; spans are exported by the processor's own."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME", "sgla")
        resource = Resource.create({"service.name": name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("sgla", __version__)
        self._model = model
        self._offset = time.time_ns() - int(clock.now() * 1e9)
        self._traces: dict[str, Trace] = {}  # by id of the engine's request

    def begin(self, headers: Mapping[str, str], method: str, route: str, rid: str, job: Job) -> Trace:
        """A request that goes to the engine;
        ``traceparent`` in its headers makes it part of its sender's trace."""
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        operation = operation_of(job)
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            TraceContextTextMapPropagator().extract(carrier),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "sgla",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "gen_ai.response.id": rid,
                "http.request.method": method,
                "http.route": route,
                **sampling_attributes(job.sampling),
            },
            start_time=self._ns(clock.now()),
        )
        return Trace(span)

    def add(self, trace: Trace, jobs: Iterable[Job]) -> None:
        """The request's share of the engine."""
        for job in jobs:
            trace.children += job.sampling.n
            trace.jobs.append(job.rid)
            self._traces[job.rid] = trace
        while len(self._traces) > OPEN:
            del self._traces[next(iter(self._traces))]

    def tokenized(self, submit: Submit, now: float) -> None:
        """A child is on its way to the scheduler."""
        trace = self._traces.get(submit.parent)
        if trace is None:
            return
        if submit.parent not in trace.tokenized:
            self._phase(trace, "tokenize", submit.arrival, now, {"sgla.tokens": len(submit.tokens)})
            trace.tokenized[submit.parent] = now

    def finished(self, request: Finished) -> None:
        """A child has ended: its phases."""
        job = request.rid.rpartition("-")[0]
        trace = self._traces.get(job)
        if trace is None:
            return
        self._phases(trace, request, trace.tokenized.get(job, request.arrival))
        trace.usage["input_tokens"] += request.prompt_tokens
        trace.usage["output_tokens"] += request.output_tokens
        trace.usage["cache_read.input_tokens"] += request.cached_tokens
        trace.reasons.append(request.reason)
        if request.first_token is not None and trace.first_token is None:
            trace.first_token = request.first_token - request.arrival
            trace.queued = (request.scheduled or request.arrival) - request.arrival
        trace.children -= 1
        if trace.children == 0:
            for rid in trace.jobs:
                self._traces.pop(rid, None)

    def _phases(self, trace: Trace, request: Finished, submitted: float) -> None:
        end = request.finished
        common = {"sgla.request": request.rid}
        queued = common | {"sgla.preemptions": request.preemptions}
        self._phase(trace, "queue", submitted, request.scheduled or end, queued)
        if request.scheduled is not None:
            cached = common | {"gen_ai.usage.cache_read.input_tokens": request.cached_tokens}
            self._phase(trace, "prefill", request.scheduled, request.first_token or end, cached)
        if request.first_token is not None:
            made = common | {"gen_ai.usage.output_tokens": request.output_tokens}
            self._phase(trace, "decode", request.first_token, end, made)

    def end(self, trace: Trace, status: int) -> None:
        """The HTTP request has been answered."""
        span, now = trace.span, clock.now()
        span.set_attribute("http.response.status_code", status)
        for name, value in trace.usage.items():
            span.set_attribute(f"gen_ai.usage.{name}", value)
        span.set_attribute("gen_ai.response.finish_reasons", trace.reasons)
        if trace.first_token is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", trace.first_token)
            span.set_attribute("gen_ai.latency.time_in_queue", trace.queued)
        if status >= 400:
            span.set_attribute("error.type", str(status))
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._ns(now))

    def close(self) -> None:
        """Send what is left. Blocks for as long as the exporter lets it."""
        self._provider.shutdown()

    def _phase(
        self, trace: Trace, name: str, start: float, end: float, attributes: Mapping[str, Any]
    ) -> None:
        span = self._tracer.start_span(
            name,
            set_span_in_context(trace.span),
            attributes=dict(attributes),
            start_time=self._ns(start),
        )
        span.end(self._ns(end))

    def _ns(self, seconds: float) -> int:
        """Of our clock, as nanoseconds since 1970."""
        return self._offset + int(seconds * 1e9)


def operation_of(job: Job) -> str:
    if job.pool is not None:
        return "embeddings"
    return "chat" if job.messages is not None else "text_completion"


def sampling_attributes(sampling: SamplingParams) -> dict[str, Any]:
    """What was asked for, without values that mean nothing was."""
    values = {f"gen_ai.request.{theirs}": getattr(sampling, ours) for ours, theirs in ATTRIBUTES.items()}
    values["gen_ai.output.type"] = (
        "json" if sampling.grammar is not None and sampling.grammar.kind.startswith("json") else "text"
    )
    return {name: value for name, value in values.items() if value not in (None, [])}
