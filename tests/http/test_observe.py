"""Metrics and logs without a server: exact numbers from a script with its own clock."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from sgla import clock
from sgla.messages import CacheGroup, Facts
from sgla.observe.log import LineFormatter
from sgla.observe.loop import LoopWatch
from sgla.observe.metrics import E2E, Histogram, Metrics
from sgla.observe.throughput import Throughput
from sgla.sched.stats import Finished, Stats


def samples(metrics: Metrics) -> dict[str, float]:
    """``name{other labels}`` -> value."""
    result = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        if family.name.startswith("process_"):
            continue
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "m"
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            result[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return result


def finished(**fields: object) -> Finished:
    values = {
        "rid": "r",
        "reason": "stop",
        "arrival": 10.0,
        "scheduled": 10.25,
        "first_token": 10.5,
        "finished": 12.0,
        "prompt_tokens": 8,
        "output_tokens": 4,
        "cached_tokens": 2,
        "preemptions": 0,
    }
    return Finished(**(values | fields))


def test_requests_are_counted_exactly() -> None:
    metrics = Metrics("m")
    metrics.finished(finished())
    metrics.finished(finished(reason="length", finished=20.0, preemptions=3, prompt_tokens=100))
    metrics.finished(
        finished(reason="abort", scheduled=None, first_token=None, output_tokens=0, finished=10.125)
    )
    values = samples(metrics)
    assert values["sgla:num_requests_total{finish_reason=stop}"] == 1
    assert values["sgla:num_requests_total{finish_reason=length}"] == 1
    assert values["sgla:num_requests_total{finish_reason=error}"] == 0
    assert values["sgla:num_aborted_requests_total"] == 1
    assert values["sgla:prompt_tokens_histogram_sum"] == 116
    assert values["sgla:generation_tokens_histogram_sum"] == 8
    assert values["sgla:time_to_first_token_seconds_count"] == 2
    assert values["sgla:time_to_first_token_seconds_sum"] == 1.0
    assert values["sgla:queue_time_seconds_sum"] == 0.5
    assert values["sgla:e2e_request_latency_seconds_sum"] == 12.125
    buckets = [values[f"sgla:e2e_request_latency_seconds_bucket{{le={float(bound)}}}"] for bound in E2E[:8]]
    assert buckets == [0, 1, 1, 1, 1, 2, 2, 3]
    assert values["sgla:e2e_request_latency_seconds_bucket{le=+Inf}"] == 3


def test_histogram_edges() -> None:
    """A value that equals a bound belongs to it; one above all bounds is in +Inf only."""
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 2.1):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 1), ("2.0", 3), ("+Inf", 4)]
    assert (histogram.sum, histogram.count) == (6.6, 4)


def test_tokens_and_steps() -> None:
    metrics = Metrics("m")
    metrics.inter_token(0.03, tokens=3)
    metrics.inter_token(0.5)
    metrics.step(0.006, 0.0005)
    values = samples(metrics)
    assert values["sgla:inter_token_latency_seconds_count"] == 4
    assert values["sgla:inter_token_latency_seconds_bucket{le=0.01}"] == 3
    assert values["sgla:inter_token_latency_seconds_sum"] == pytest.approx(0.53)
    assert values["sgla:step_seconds_bucket{le=0.006}"] == 1
    assert values["sgla:step_gap_ms_sum"] == 0.5


def test_gauges() -> None:
    metrics = Metrics("m")
    facts = Facts(
        groups=[CacheGroup(101)],
        page_size=16,
        slots=4,
        context_len=64,
        vocab_size=9,
        step_tokens=8,
        dtype="f",
        device="cpu",
        ledger={"kv": 7},
    )
    metrics.started(facts, {"load": 1.5, "warmup": 0.5})
    stats = Stats(
        running=3,
        waiting=2,
        pages_total=100,
        pages_free=50,
        pages_evictable=20,
        query_tokens=200,
        hit_tokens=50,
    )
    metrics.gauges(stats, now=100.0)
    stats.output_tokens, stats.prompt_tokens, stats.preemptions = 500, 116, 3
    metrics.gauges(stats, now=100.5)
    assert samples(metrics)["sgla:gen_throughput"] == 0
    metrics.gauges(stats, now=102.0)
    values = samples(metrics)
    assert values["sgla:gen_throughput"] == 250
    assert (values["sgla:num_running_reqs"], values["sgla:num_queue_reqs"]) == (3, 2)
    assert (values["sgla:num_used_tokens"], values["sgla:max_total_num_tokens"]) == (30 * 16, 1600)
    assert (values["sgla:token_usage"], values["sgla:cache_hit_rate"]) == (0.3, 0.25)
    assert (values["sgla:generation_tokens_total"], values["sgla:prompt_tokens_total"]) == (500, 116)
    assert (values["sgla:cached_tokens_total"], values["sgla:num_retracted_requests_total"]) == (50, 3)
    assert values["sgla:startup_time_seconds"] == 2.0
    assert values["sgla:memory_bytes{purpose=kv}"] == 7


# names that the dashboards of the two servers read
SGLANG = """num_running_reqs num_queue_reqs token_usage num_used_tokens kv_available_tokens max_total_num_tokens page_size
cache_hit_rate cached_tokens_total gen_throughput prompt_tokens_total generation_tokens_total
prompt_tokens_histogram_bucket generation_tokens_histogram_bucket time_to_first_token_seconds_bucket
inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket queue_time_seconds_bucket num_requests_total
num_aborted_requests_total num_retracted_requests_total num_retracted_reqs kv_used_tokens kv_evictable_tokens
weight_load_duration_seconds weight_memory_usage_gb kv_cache_memory_usage_gb http_responses_total http_requests_total
http_requests_active startup_time_seconds spec_accept_length spec_accept_rate spec_verify_calls_total"""  # noqa: E501
VLLM = """num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info prefix_cache_hits_total
prefix_cache_queries_total prompt_tokens_total generation_tokens_total request_prompt_tokens_bucket
request_generation_tokens_bucket time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
request_prefill_time_seconds_bucket request_decode_time_seconds_bucket request_success_total
num_preemptions_total admission_rejections_total request_inference_time_seconds_bucket request_params_n_bucket
request_params_max_tokens_bucket time_per_output_token_seconds_bucket gpu_cache_usage_perc tool_call_parser_invocations_total
prompt_tokens_cached_total spec_decode_num_drafts_total spec_decode_num_draft_tokens_total
spec_decode_num_accepted_tokens_total spec_decode_num_accepted_tokens_per_pos_total"""  # noqa: E501


@pytest.mark.parametrize(
    ("server", "names", "labels"),
    [("sglang", SGLANG, {"tp_rank": "0"}), ("vllm", VLLM, {"engine": "0"})],
)
def test_other_servers_metrics(server: str, names: str, labels: dict[str, str]) -> None:
    metrics = Metrics("m", server)
    facts = {"context_len": 10, "vocab_size": 10, "step_tokens": 10, "dtype": "f", "device": "cpu"}
    metrics.started(Facts(groups=[CacheGroup(5)], page_size=16, slots=2, drafts=7, **facts), {"load": 1.0})
    guesses = {"verifies": 10, "verified_tokens": 25, "drafts": 8, "draft_tokens": 30, "right_at": [9, 5, 1]}
    metrics.gauges(Stats(running=2, waiting=3, query_tokens=8, hit_tokens=4, **guesses), now=0.0)
    metrics.http_started("GET", "/x")
    metrics.http_finished("GET", "/x", 200)
    metrics.finished(finished())
    found = [
        sample
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name.startswith(f"{server}:")
    ]
    assert {sample.name.removeprefix(f"{server}:") for sample in found} >= set(names.split())
    assert all(
        sample.labels["model_name"] == "m" and labels.items() <= sample.labels.items() for sample in found
    )
    values = {sample.name: sample.value for sample in found}
    if server == "sglang":
        assert (values["sglang:spec_accept_length"], values["sglang:spec_accept_rate"]) == (2.5, 0.5)
        (response,) = [sample for sample in found if sample.name == "sglang:http_responses_total"]
        assert {"endpoint": "/x", "method": "GET", "status_code": "200"}.items() <= response.labels.items()
    if server == "vllm":
        assert 'http_requests_total{handler="/x",method="GET",status="2xx"} 1.0' in metrics.text().decode()
        assert (values["vllm:num_requests_running"], values["vllm:prefix_cache_hits_total"]) == (2, 4)
        assert values["vllm:request_time_per_output_token_seconds_sum"] == 0.5
        assert values["vllm:spec_decode_num_accepted_tokens_total"] == 15
        places = [s for s in found if s.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
        assert {s.labels["position"]: s.value for s in places} == {"0": 9, "1": 5, "2": 1}
        (waiting,) = [s for s in found if s.name == "vllm:num_requests_waiting_by_reason"]
        assert (waiting.value, waiting.labels["reason"]) == (3, "capacity")
        success = [sample for sample in found if sample.name == "vllm:request_success_total"]
        assert {sample.labels["finished_reason"]: sample.value for sample in success}["stop"] == 1


DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "sgla.json"


def everything() -> Metrics:
    """Metrics of a server that has done all there is."""
    metrics = Metrics("m")
    compiler: Any = SimpleNamespace(counts=Counter(), numbers={"waiting": 0}, drain_seconds=list)
    metrics.compiler = compiler
    sizes = {"context_len": 64, "vocab_size": 9, "step_tokens": 8, "dtype": "f", "device": "cpu"}
    metrics.started(
        Facts(groups=[CacheGroup(101)], page_size=16, slots=4, ledger={"kv": 7}, **sizes), {"load": 1.5}
    )
    metrics.http_started("GET", "/x")
    metrics.http_finished("GET", "/x", 200)
    metrics.finished(finished())
    return metrics


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    """Every ``sgla:name{label...}`` of every query, and the labels it is summed by."""
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(everything().text().decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, {"instance"}).update(sample.labels)
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    queries += [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    assert len(queries) > 60
    for query in queries:
        names = re.findall(r"(?:sgla:|process_)\w+", query)
        assert names, query
        grouped = re.findall(r" by \((\w+)\)", query) + re.findall(r"{{(\w+)}}", query)
        selected = re.findall(r"[{,] ?(\w+)=~", query)
        for name in names:
            assert name in labels, f"{name} in {query}"
            assert {*grouped, *selected} <= labels[name], query


def test_the_dashboard_can_be_imported() -> None:
    """One data source, chosen in the dashboard; panels with ids of their own that do not overlap."""
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert dashboard["templating"]["list"][0]["name"] == "datasource"
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        if panel["type"] != "row":
            assert all(part["datasource"] == source for part in [*panel["targets"], panel])
        place = panel["gridPos"]
        own = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert cells.isdisjoint(own), panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= own


@pytest.mark.parametrize("colours", [False, True])
def test_log_lines(colours: bool) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(colours))
    log = logging.Logger("sgla.http.app")
    log.addHandler(handler)
    log.info("two\nlines %d", 1)
    log.warning("careful")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("http.app: two\\nlines 1")
    assert re.search(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} info ", lines[0])
    assert ("\x1b[" in lines[1]) == colours


async def test_the_throughput_is_told_while_there_is_some(caplog: pytest.LogCaptureFixture) -> None:
    stats = Stats(pages_total=100, pages_free=100)
    caplog.set_level(logging.INFO, "sgla.observe.throughput")
    telling = Throughput(lambda: stats, 3600)
    telling._tick()
    assert caplog.records == []
    stats = replace(
        stats, running=2, waiting=1, steps=9, output_tokens=50, prefilled_tokens=80, pages_free=60
    )
    stats = replace(stats, query_tokens=80, hit_tokens=60, pages_evictable=15)
    telling._tick()
    telling._last = (clock.now() - 10, stats)
    stats = replace(stats, steps=10, output_tokens=150, prefilled_tokens=380, running=0, waiting=0)
    telling._tick()
    telling._tick()
    telling.close()
    first, second = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(
        r"running 2, waiting 1, prompts [\d.]+ tok/s, output [\d.]+ tok/s, prefix cache hits 75 %, KV cache "
        r"used 25 %",
        first,
    )
    assert second.startswith(
        "running 0, waiting 0, prompts 30.0 tok/s, output 10.0 tok/s, prefix cache hits 0 %"
    )


def test_no_interval_means_no_lines() -> None:
    asyncio.run(never())


async def never() -> None:
    telling = Throughput(Stats, 0)
    assert telling._timer is None
    telling.close()


async def test_a_blocked_loop_is_seen() -> None:
    lags: list[float] = []
    watch = LoopWatch(lags.append)
    await asyncio.sleep(0.05)
    time.sleep(0.3)
    await asyncio.sleep(0.02)
    watch.close()
    assert max(lags) > 0.15
    count = len(lags)
    await asyncio.sleep(0.15)
    assert len(lags) == count
