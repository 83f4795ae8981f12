"""Prometheus metrics.
The actors call plain methods on the loop's thread; the text is made when it is scraped.

Counters and histograms are ordinary Python numbers (an observation costs about 0.3 us and takes no lock) that
a collector turns into metric families, in this object's own registry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sgla import clock
from sgla.observe.compat import translated
from sgla.observe.histogram import E2E, GAP_MS, LAG, LATENCY, SHORT, SIZES, Histogram
from sgla.sched.stats import Finished, Stats, TierStats

if TYPE_CHECKING:
    from sgla.grammar.compiler import Compiler
    from sgla.messages import Facts, Opened
    from sgla.observe.requests import RequestDump
    from sgla.observe.tracing import Tracing


class Balancing(Protocol):
    """Of ``actors.placing.Balancer``."""

    balance: float | None
    moves: int


PREFIX = "sgla:"
# Begin of the names of what the models of a server have together.
OF_SERVER = tuple(PREFIX + name for name in ("http_", "loop_lag_", "stored_", "unstored_", "undumped_"))
FINISHES = ("stop", "length", "repetition", "abort", "error")

MISSES = ("unread", "tail", "parts", "evicted", "salt", "adapter", "weights", "new")  # Ledger.missed
# Of places beside the device that keep prefixes: the field of TierStats, and whether it is of pages.
TIERS = (
    ("tier_total_tokens", "Tokens that a tier has room for", "total", "gauge", True),
    ("tier_used_tokens", "Tokens that a tier keeps", "cached", "gauge", True),
    ("tier_loaded_tokens", "Tokens copied from a tier", "loaded", "counter", True),
    ("tier_saved_tokens", "Tokens copied to a tier", "saved", "counter", True),
    ("tier_failed_copies", "Copies that failed", "failed", "counter", False),
    ("num_decode_transfer_queue_reqs", "Requests waiting for KV", "asking", "gauge", False),
    ("num_transfer_reqs", "Prompts that were asked for", "asked", "counter", False),
    ("num_transfer_failed_reqs", "Those of which not all has come", "unanswered", "counter", False),
)
ASKED = ("asking", "asked", "unanswered")  # of these, those that a prefill server has


class Page(Collector):
    """The metrics of several models: each family once, with the samples of all. Those of the server as a
    whole are the first one's."""

    def __init__(self, first: Metrics, *others: Metrics) -> None:
        self._first, self._others = first, others

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in self._first.collect()}
        for metrics in self._others:
            for family in metrics.collect():
                if family.name.startswith(OF_SERVER):
                    continue
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()


def text_of(metrics: Sequence[Metrics]) -> bytes:
    """Prometheus' text of one model, or of several."""
    if len(metrics) == 1:
        return metrics[0].text()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Page(*metrics))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def labelled(names: Sequence[str], counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """By one label, of which these names are shown in any case."""
    return {(name,): count for name, count in (dict.fromkeys(names, 0.0) | dict(counts)).items()}


class Metrics(Collector):
    """Everything ``/metrics`` shows. All names start with ``sgla:`` and carry the label ``model_name``, but
    for the main process's own (``process_cpu_seconds_total`` and its kin)."""

    def __init__(self, model_name: str, compat: str | None = None) -> None:
        """``compat``: sglang or vllm; that server's names are shown beside ours."""
        self.model_name = model_name
        self._compat = compat
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self.ttft = Histogram(LATENCY)
        self.itl = Histogram(SHORT)
        self.e2e = Histogram(E2E)
        self.queue_time = Histogram(LATENCY)
        self.prefill_time = Histogram(LATENCY)
        self.decode_time = Histogram(LATENCY)
        self.token_time = Histogram(SHORT)
        self.compilation = Histogram(LATENCY)
        self.compiler: Compiler | None = None  # once it runs
        self.balancer: Balancing | None = None  # of experts, if asked for
        self.tracing: Tracing | None = None  # if asked for
        self.dump: RequestDump | None = None  # if asked for
        self.unstored: Callable[[], int] | None = None  # how many writes of what clients store have failed
        self.media: Callable[[], tuple[int, int, int]] | None = None  # see ``PictureRoom.kept``
        self.stored: Callable[[], Mapping[str, tuple[int, int]]] | None = None  # objects and bytes by kind
        self.inference_time = Histogram(LATENCY)
        self.loop_lag = Histogram(LAG)
        self.asked_choices = Histogram(SIZES)
        self.asked_tokens = Histogram(SIZES)
        self.prompt_sizes = Histogram(SIZES)
        self.output_sizes = Histogram(SIZES)
        self.step_seconds = Histogram(SHORT)
        self.step_gap = Histogram(GAP_MS)
        self.requests: Counter[str] = Counter()  # by finish reason
        self.http_requests: Counter[tuple[str, str]] = Counter()  # by method and route
        self.http_responses: Counter[tuple[str, str, int]] = Counter()  # by method, route and status
        self.http_active = self.slow_readers = self.tool_calls = 0
        self.batch_lines: Counter[str] = Counter()  # by what came of them
        self.tool_outputs: Counter[str] = Counter()  # by what they are
        self._stats = Stats()
        self._facts: Facts | None = None
        self._startup: dict[str, float] = {}
        self._rate_from: tuple[float, int] | None = None
        self._throughput = 0.0

    # called by the actors

    def opened(self, opened: Opened) -> None:
        """A child is on its way to the scheduler."""
        submit = opened.submit
        if submit.index % opened.sampling.n == 0:
            self.asked_choices.observe(opened.sampling.n)
            self.asked_tokens.observe(submit.max_new)
        if self.tracing is not None:
            self.tracing.tokenized(submit, clock.now())

    def finished(self, request: Finished) -> None:
        """One child has ended, whatever the reason.
        Nobody waits for one that yields, so its times are not those of the server."""
        if self.tracing is not None:
            self.tracing.finished(request)
        self.requests[request.reason] += 1
        self.prompt_sizes.observe(request.prompt_tokens)
        self.output_sizes.observe(request.output_tokens)
        if request.yields:
            return
        self.e2e.observe(request.finished - request.arrival)
        if request.scheduled is not None:
            self.queue_time.observe(request.scheduled - request.arrival)
            self.inference_time.observe(request.finished - request.scheduled)
        if request.first_token is not None:
            self.ttft.observe(request.first_token - request.arrival)
            self.prefill_time.observe(request.first_token - (request.scheduled or request.arrival))
            self.decode_time.observe(request.finished - request.first_token)
            if request.output_tokens > 1:
                self.token_time.observe(
                    (request.finished - request.first_token) / (request.output_tokens - 1)
                )

    def inter_token(self, seconds: float, tokens: int = 1) -> None:
        """``tokens`` tokens of one child came ``seconds`` after the one before them;
        each gets an equal share."""
        self.itl.observe(seconds / tokens, tokens)

    def step(self, seconds: float, gap: float) -> None:
        """One step: its duration on the device, and how long the worker had waited for the plan."""
        self.step_seconds.observe(seconds)
        self.step_gap.observe(gap * 1000)

    def gauges(self, stats: Stats, now: float | None = None) -> None:
        """A snapshot of the scheduler.
        Throughput is measured between two snapshots at least a second apart."""
        now = clock.now() if now is None else now
        self._stats = stats
        if self._rate_from is None:
            self._rate_from = (now, stats.output_tokens)
        elif now - self._rate_from[0] >= 1.0:
            since, tokens = self._rate_from
            self._throughput = (stats.output_tokens - tokens) / (now - since)
            self._rate_from = (now, stats.output_tokens)

    def started(self, facts: Facts, timings: Mapping[str, float]) -> None:
        """The model is loaded. ``timings``: seconds by phase of the start-up."""
        self._facts = facts
        self._startup = dict(timings)

    def http_started(self, method: str, route: str) -> None:
        self.http_requests[method, route] += 1
        self.http_active += 1

    def http_finished(self, method: str, route: str, status: int) -> None:
        self.http_responses[method, route, status] += 1
        self.http_active -= 1

    def tools_read(self, calls: int) -> None:
        """An output of a request with tools is complete and has so many calls."""
        self.tool_outputs["tool_call" if calls else "no_tool_call"] += 1
        self.tool_calls += calls

    def slow_reader(self) -> None:
        """A stream was dropped because its client did not read."""
        self.slow_readers += 1

    def batch_line(self, failed: bool) -> None:
        """A line of a batch has its answer."""
        self.batch_lines["failed" if failed else "completed"] += 1

    # scraping

    def text(self) -> bytes:
        """Prometheus' text format, version 0.0.4."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        ours = list(self._families())
        yield from ours
        if self._compat is not None:
            yield from translated(ours, self._compat)

    def _families(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._histograms()
        yield from self._http()
        if self._facts is not None:
            yield from self._model(self._facts)
        yield from self._scheduler(self._stats)
        if self.compiler is not None:
            yield from self._grammars(self.compiler)
        yield from _experts(self, self.balancer)

    def _requests(self) -> Iterator[Metric]:
        reasons = {(reason,): self.requests[reason] for reason in FINISHES}
        yield self._counter("num_requests", "Finished requests", reasons, ["finish_reason"])
        yield self._counter(
            "num_aborted_requests",
            "Requests ended by the client or by /abort_request",
            self.requests["abort"],
        )
        outputs = {(outcome,): self.tool_outputs[outcome] for outcome in ("tool_call", "no_tool_call")}
        yield self._counter(
            "tool_call_parser_invocations", "Outputs searched for tool calls", outputs, ["outcome"]
        )
        yield self._counter("tool_calls", "Tool calls found", self.tool_calls)
        lines = {(outcome,): self.batch_lines[outcome] for outcome in ("completed", "failed")}
        yield self._counter("batch_lines", "Lines of batches that were run", lines, ["outcome"])
        yield self._counter(
            "slow_readers", "Streams dropped because the client did not read", self.slow_readers
        )

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first output token", self.ttft),
            ("inter_token_latency_seconds", "Time between output tokens of a request", self.itl),
            ("e2e_request_latency_seconds", "Arrival to finish", self.e2e),
            ("queue_time_seconds", "Arrival to first scheduling", self.queue_time),
            ("prefill_time_seconds", "First scheduling to first output token", self.prefill_time),
            ("decode_time_seconds", "First output token to finish", self.decode_time),
            ("inference_time_seconds", "First scheduling to finish", self.inference_time),
            ("time_per_output_token_seconds", "Mean time between a request's output tokens", self.token_time),
            ("prompt_tokens_histogram", "Prompt tokens of a request", self.prompt_sizes),
            ("generation_tokens_histogram", "Output tokens of a request", self.output_sizes),
            ("params_n", "Choices that a request asked for", self.asked_choices),
            ("params_max_tokens", "Most output tokens that a request may have", self.asked_tokens),
            ("loop_lag_seconds", "How late the main loop ran what was due", self.loop_lag),
            ("step_seconds", "Duration of a step on the device", self.step_seconds),
            ("step_gap_ms", "Worker idle before a step, waiting for its plan", self.step_gap),
        ):
            yield self._histogram(name, text, histogram)

    def _http(self) -> Iterator[Metric]:
        yield self._counter("http_requests", "HTTP requests", self.http_requests, ["method", "endpoint"])
        responses = {
            (method, route, str(status)): count
            for (method, route, status), count in self.http_responses.items()
        }
        yield self._counter("http_responses", "HTTP responses", responses, ["method", "endpoint", "status"])
        yield self._gauge("http_requests_active", "HTTP requests being answered", self.http_active)
        if self.stored is not None:
            held = {(kind,): sums for kind, sums in self.stored().items()}
            counts, sizes = ({kind: sums[i] for kind, sums in held.items()} for i in (0, 1))
            yield self._gauge("stored_objects", "What clients have stored", counts, ["kind"])
            yield self._gauge("stored_bytes", "Bytes that it counts for", sizes, ["kind"])
        yield from _of_media(self)
        if self.unstored is not None:
            yield self._counter("unstored_writes", "Writes of clients' objects that failed", self.unstored())
        if self.dump is not None:
            yield self._counter(
                "undumped_requests", "Requests that --dump-requests could not write", self.dump.dropped
            )

    def _model(self, facts: Facts) -> Iterator[Metric]:
        yield self._gauge(
            "max_total_num_tokens",
            "Tokens the KV cache can hold",
            (facts.groups[0].pages - 1) * facts.page_size,
        )
        yield self._gauge("page_size", "Tokens in one KV page", facts.page_size)
        info = {(str(facts.page_size), str(facts.groups[0].pages - 1)): 1}
        yield self._gauge("cache_config_info", "The KV cache's shape", info, ["block_size", "num_gpu_blocks"])
        yield self._gauge("memory_bytes", "Memory by purpose", labelled((), facts.ledger), ["purpose"])
        yield self._gauge("startup_seconds", "Start-up time by phase", labelled((), self._startup), ["phase"])
        yield self._gauge(
            "weight_load_duration_seconds", "Time to load the weights", self._startup.get("weights", 0.0)
        )
        for name, purpose in (("weight_memory_usage_gb", "weights"), ("kv_cache_memory_usage_gb", "kv")):
            yield self._gauge(name, f"Memory of the {purpose}, GiB", facts.ledger.get(purpose, 0) / 2**30)
        yield self._gauge("startup_time_seconds", "Start-up time, all phases", sum(self._startup.values()))

    def _grammars(self, compiler: Compiler) -> Iterator[Metric]:
        counts = compiler.counts
        total = sum(counts[outcome] for outcome in ("cached", "compiled", "late", "refused"))
        yield self._counter("num_grammar", "Requests with a grammar", total)
        yield self._counter("num_grammar_cache_hit", "Grammars found compiled", counts["cached"])
        yield self._counter("num_grammar_timeout", "Grammars that took too long to compile", counts["late"])
        yield self._counter("num_grammar_refused", "Grammars refused", counts["refused"])
        yield self._gauge(
            "num_grammar_queue_reqs", "Requests waiting for the compiler", compiler.numbers["waiting"]
        )
        results = {(result,): counts[result] for result in ("valid", "invalid", "unchecked")}
        yield self._counter("grammar_outputs", "Finished JSON, checked once more", results, ["result"])
        for seconds in compiler.drain_seconds():
            self.compilation.observe(seconds)
        yield self._histogram("grammar_compilation_time_seconds", "CPU time of compiling", self.compilation)

    def _speculation(self, stats: Stats) -> Iterator[Metric]:
        right = sum(stats.right_at)
        yield self._gauge(
            "spec_accept_length",
            "Tokens of a row that may guess",
            stats.verified_tokens / max(1, stats.verifies),
        )
        yield self._gauge(
            "spec_accept_rate", "Share of guesses that are right", right / max(1, stats.draft_tokens)
        )
        yield self._counter("spec_verify_calls", "Rows that might guess", stats.verifies)
        yield self._counter("spec_drafts", "Rows that guessed", stats.drafts)
        yield self._counter("spec_draft_tokens", "Guessed tokens", stats.draft_tokens)
        yield self._counter("spec_accepted_tokens", "Guessed tokens that were right", right)
        places = {(str(place),): count for place, count in enumerate(stats.right_at)}
        yield self._counter(
            "spec_accepted_tokens_per_pos", "Right guesses by their place in a row", places, ["position"]
        )

    def _tiers(self, tiers: Sequence[TierStats], page_size: int) -> Iterator[Metric]:
        for name, text, field, make, tokens in TIERS:
            of = [tier for tier in tiers if field not in ASKED or tier.name == "prefill"]
            values = {(tier.name,): getattr(tier, field) * (page_size if tokens else 1) for tier in of}
            yield (self._gauge if make == "gauge" else self._counter)(name, text, values, ["tier"])

    def _scheduler(self, stats: Stats) -> Iterator[Metric]:
        page_size = self._facts.page_size if self._facts is not None else 1
        used = stats.pages_total - stats.pages_free - stats.pages_evictable
        yield self._gauge("num_running_reqs", "Requests in the running batch", stats.running)
        yield self._gauge("num_queue_reqs", "Requests waiting", stats.waiting)
        yield self._gauge("num_held_reqs", "Requests held for a grammar, or a prefix", stats.held)
        for name in ("num_used_tokens", "kv_used_tokens"):
            yield self._gauge(name, "KV tokens held by requests", used * page_size)
        yield self._gauge(
            "kv_available_tokens", "KV tokens free or evictable", (stats.pages_total - used) * page_size
        )
        yield self._gauge(
            "kv_evictable_tokens", "Cached KV tokens that no request holds", stats.pages_evictable * page_size
        )
        yield self._gauge(
            "token_usage", "Share of the KV cache held by requests", used / max(1, stats.pages_total)
        )
        if stats.adapter_places:
            yield self._gauge("lora_pool_slots_total", "Places for adapters", stats.adapter_places)
            yield self._gauge("lora_pool_slots_used", "Adapters that have a place", stats.adapters_placed)
            yield self._counter("lora_loads", "Adapters copied to a place", stats.adapter_loads)
        if stats.tiers:
            yield from self._tiers(stats.tiers, page_size)
        if stats.windows:
            held = {
                (str(pool.window),): (pool.total - pool.free - pool.evictable) / pool.total
                for pool in stats.windows
            }
            yield self._gauge(
                "swa_token_usage", "Share of the KV cache of a window held by requests", held, ["window"]
            )
        yield self._gauge("cached_prefix_tokens", "Tokens in the prefix cache", stats.cached_tokens)
        yield self._gauge(
            "cache_hit_rate",
            "Share of prompt tokens found cached",
            stats.hit_tokens / max(1, stats.query_tokens),
        )
        yield self._gauge(
            "gen_throughput", "Output tokens per second since the last scrape", self._throughput
        )
        yield self._counter("prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Output tokens", stats.output_tokens)
        yield self._counter(
            "forced_tokens", "Output tokens forced by a grammar, not sampled", stats.forced_tokens
        )
        if self._facts is not None and self._facts.drafts:
            yield from self._speculation(stats)
        yield self._counter("query_tokens", "Prompt tokens looked up in the prefix cache", stats.query_tokens)
        yield self._counter("cached_tokens", "Prompt tokens found in the prefix cache", stats.hit_tokens)
        hits, misses = labelled(("device",), stats.hits), labelled(MISSES, stats.misses)
        yield self._counter("prefix_hit_tokens", "The same by the place that had them", hits, ["place"])
        yield self._counter("prefix_miss_tokens", "Prompt tokens not found there", misses, ["reason"])
        yield self._counter("num_retracted_requests", "Preemptions of running requests", stats.preemptions)
        yield self._gauge("num_retracted_reqs", "Preempted requests that wait to run again", stats.retracted)
        yield self._counter(
            "invalid_logits",
            "Requests ended because the model's logits or vectors were no numbers",
            stats.invalid_logits,
        )
        yield self._counter("steps", "Model steps", stats.steps)
        yield self._counter(
            "rejected_requests", "Requests refused: no room, or they could never run", stats.rejected
        )

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model_name], histogram.cumulative(), histogram.sum)
        return family

    def _gauge(self, name: str, text: str, value: Any, labels: Sequence[str] = ()) -> Metric:
        return self._fill(GaugeMetricFamily(PREFIX + name, text, labels=["model_name", *labels]), value)

    def _counter(self, name: str, text: str, value: Any, labels: Sequence[str] = ()) -> Metric:
        return self._fill(CounterMetricFamily(PREFIX + name, text, labels=["model_name", *labels]), value)

    def _fill(self, family: Any, value: float | Mapping[tuple[str, ...], float]) -> Metric:
        rows = value if isinstance(value, Mapping) else {(): value}
        for labels, number in rows.items():
            family.add_metric([self.model_name, *labels], number)
        return family


def _experts(metrics: Metrics, balancer: Balancing | None) -> Iterator[Metric]:
    if balancer is None:
        return
    if balancer.balance is not None:
        what = "What ranks had to do with experts on average, against the one that had most"
        yield metrics._gauge("expert_balance", what, balancer.balance)
    yield metrics._counter("expert_moves", "Times that experts have gone to other ranks", balancer.moves)


def _of_media(metrics: Metrics) -> Iterator[Metric]:
    if metrics.media is None:
        return
    asked, found, size = metrics.media()
    counter, gauge = metrics._counter, metrics._gauge
    yield counter("media_cache_queries", "Media of requests that may have come before", asked)
    yield counter("media_cache_hits", "Those that were neither decoded nor prepared", found)
    yield gauge("media_cache_bytes", "What is kept of media for later requests", size)
