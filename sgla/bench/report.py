"""From records to the numbers of one JSON line."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sgla.bench.load import Record


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the closest ranks; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(records: Sequence[Record], seconds: float) -> dict[str, Any]:
    """Numbers of one run that took ``seconds``.

    ``out_tok_s``: output tokens over the whole time. ``in_tok_s``: prompt tokens over the time until the last
    first token. ``ms_per_tok``: median over requests of the time per token after the first. Gaps of ``itl_*``
    are between chunks. All ``*_ms`` in milliseconds.
    """
    good = [record for record in records if record.error is None]
    ttft = [1e3 * (record.chunks[0] - record.start) for record in good]
    gaps = [1e3 * (b - a) for record in good for a, b in zip(record.chunks, record.chunks[1:])]
    decode = [
        1e3 * (record.chunks[-1] - record.chunks[0]) / (record.completion_tokens - 1)
        for record in good
        if record.completion_tokens > 1
    ]
    prompt, output = (sum(getattr(r, name) for r in good) for name in ("prompt_tokens", "completion_tokens"))
    prefill = max((r.chunks[0] for r in good), default=0.0) - min((r.start for r in good), default=0.0)
    numbers: dict[str, Any] = {
        "requests": len(records),
        "errors": len(records) - len(good),
        "s": round(seconds, 4),
        "in_tokens": prompt,
        "out_tokens": output,
        "cached_tokens": sum(record.cached_tokens for record in good),
        "out_tok_s": _rate(output, seconds),
        "in_tok_s": _rate(prompt, prefill),
        "ms_per_tok": _round(percentile(decode, 0.5)),
        "ttft_ms": _round(percentile(ttft, 0.5)),
        "ttft_p99_ms": _round(percentile(ttft, 0.99)),
        "itl_ms": _round(percentile(gaps, 0.5)),
        "itl_p99_ms": _round(percentile(gaps, 0.99)),
        "itl_max_ms": _round(max(gaps, default=0.0)),
        "e2e_ms": _round(percentile([1e3 * (record.end - record.start) for record in good], 0.5)),
    }
    if len(good) < len(records):
        numbers["first_error"] = next(record.error for record in records if record.error)
    return numbers


def median_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Field by field: the median of numbers, the first of anything else."""
    return {
        name: _round(statistics.median(run[name] for run in runs))
        if isinstance(value, (int, float))
        else value
        for name, value in runs[0].items()
    }


def _rate(count: float, seconds: float) -> float:
    return round(count / seconds, 2) if seconds > 0 else 0.0


def _round(value: float) -> float:
    return round(value, 3)
