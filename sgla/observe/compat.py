"""Our metrics under the names and labels that dashboards of SGLang and vLLM read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

OURS = "sgla:"
# SGLang has ours under its own prefix. Where there are two names, readers of other versions want the second.
VLLM: dict[str, tuple[str, ...] | str] = {
    "num_running_reqs": "num_requests_running",
    "num_queue_reqs": "num_requests_waiting",
    "token_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "cache_config_info": "cache_config_info",
    "query_tokens": "prefix_cache_queries",
    "media_cache_queries": "mm_cache_queries",
    "media_cache_hits": "mm_cache_hits",
    "cached_tokens": ("prefix_cache_hits", "prompt_tokens_cached"),
    "num_retracted_requests": "num_preemptions",
    "rejected_requests": "admission_rejections",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "prompt_tokens_histogram": "request_prompt_tokens",
    "generation_tokens_histogram": "request_generation_tokens",
    "num_requests": "request_success",
    "spec_drafts": "spec_decode_num_drafts",
    "spec_draft_tokens": "spec_decode_num_draft_tokens",
    "spec_accepted_tokens": "spec_decode_num_accepted_tokens",
    "spec_accepted_tokens_per_pos": "spec_decode_num_accepted_tokens_per_pos",
    "tool_call_parser_invocations": "tool_call_parser_invocations",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "inference_time_seconds": "request_inference_time_seconds",
    "params_n": "request_params_n",
    "params_max_tokens": "request_params_max_tokens",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "queue_time_seconds": "request_queue_time_seconds",
    "prefill_time_seconds": "request_prefill_time_seconds",
    "decode_time_seconds": "request_decode_time_seconds",
}
LABELS = {
    "sglang": {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"},
    "vllm": {"engine": "0"},
}
RELABELLED = {"vllm": {"finish_reason": "finished_reason"}, "sglang": {"status": "status_code"}}


def translated(families: Iterable[Metric], server: str) -> Iterator[Metric]:
    """Copies of the families that ``server`` (sglang or vllm) has,
    under its names and with its labels, too."""
    for family in families:
        ours = family.name.removeprefix(OURS)
        names = VLLM.get(ours, ()) if server == "vllm" else ours
        if server == "vllm" and ours == "http_responses":
            yield instrumented(family)
        if server == "vllm" and ours == "num_queue_reqs":  # nothing else is waited for here
            reason = LABELS[server] | {"reason": "capacity"}
            yield renamed(family, "vllm:num_requests_waiting_by_reason", reason, {})
        for name in (names,) if isinstance(names, str) else names:
            yield renamed(family, f"{server}:{name}", LABELS[server], RELABELLED[server])


def instrumented(family: Metric) -> Metric:
    """Responses by class of status, as the instrumentation of vLLM's HTTP server counts them."""
    copy = Metric("http_requests", family.documentation, "counter")
    counts: Counter[tuple[str, str, str]] = Counter()
    for sample in family.samples:
        labels = sample.labels
        counts[labels["endpoint"], labels["method"], f"{labels['status'][0]}xx"] += int(sample.value)
    for key, count in counts.items():
        labels = dict(zip(("handler", "method", "status"), key))
        copy.samples.append(Sample("http_requests_total", labels, count))
    return copy


def renamed(family: Metric, name: str, labels: dict[str, str], relabelled: dict[str, str]) -> Metric:
    copy = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        own = {relabelled.get(label, label): value for label, value in sample.labels.items()}
        suffix = sample.name.removeprefix(family.name)
        copy.samples.append(Sample(name + suffix, own | labels, sample.value))
    return copy
