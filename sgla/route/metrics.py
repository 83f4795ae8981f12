"""The router's metrics, as Prometheus' text."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sgla import clock
from sgla.route.balancer import Balancer
from sgla.route.merged import merged

PREFIX = "sgla_router:"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer

    def collect(self) -> Iterator[Metric]:
        balancer, now = self._balancer, clock.now()
        yield GaugeMetricFamily(f"{PREFIX}waiting", "Requests that wait for a worker", balancer.waiting)
        yield CounterMetricFamily(f"{PREFIX}retries", "Requests sent to another worker", balancer.retries)
        refused = CounterMetricFamily(f"{PREFIX}refused", "Requests without a worker", labels=["code"])
        for code, count in balancer.refused.items():
            refused.add_metric([code], count)
        yield refused
        first = HistogramMetricFamily(f"{PREFIX}first_byte_seconds", "Placing to the answer's first byte")
        first.add_metric([], balancer.first_byte.cumulative(), balancer.first_byte.sum)
        yield first
        yield from self._of_workers(now)

    def _of_workers(self, now: float) -> Iterator[Metric]:
        workers = self._balancer.workers.values()
        for name, text, value in (
            ("worker_up", "Whether it takes requests", lambda w: float(w.usable(now))),
            ("worker_running", "Requests that it has", lambda w: w.running),
            ("worker_unread_bytes", "Bytes of prompts that it has to read", lambda w: w.unread),
            ("worker_tree_bytes", "Bytes of prompts that it is taken to keep", lambda w: w.tree.size),
            ("worker_breaker_open", "Whether its circuit breaker is open", lambda w: float(w.breaker.open)),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["worker"])
            for worker in workers:
                gauge.add_metric([worker.name], value(worker))
            yield gauge
        for name, text, field in (
            ("prompt_bytes", "Bytes of prompts sent", "prompt_bytes"),
            ("matched_bytes", "Bytes of prompts sent where they were taken to be cached", "matched_bytes"),
        ):
            counter = CounterMetricFamily(PREFIX + name, text, labels=["worker"])
            for worker in workers:
                counter.add_metric([worker.name], getattr(worker, field))
            yield counter
        ended = CounterMetricFamily(
            f"{PREFIX}requests", "Requests that ended, by status or fault", labels=["worker", "outcome"]
        )
        for worker in workers:
            for outcome, count in worker.outcomes.items():
                ended.add_metric([worker.name, outcome], count)
        yield ended


def text(balancer: Balancer) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Metrics(balancer))
    pages = {worker.name: worker.page for worker in balancer.workers.values() if worker.page}
    return generate_latest(registry) + merged(pages, "replica").encode()
