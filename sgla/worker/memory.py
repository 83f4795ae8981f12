"""Who needs how many bytes, decided before anything is allocated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sgla.errors import OutOfMemory
from sgla.messages import CacheGroup
from sgla.model.state import Pool

MIB = 1 << 20
KV_BYTES = 512 * MIB  # size of the KV cache if nobody says otherwise


class KVSize(NamedTuple):
    pages: list[int]  # of each cache group, including the dummy page 0
    context_len: int
    bytes: int
    note: str  # why the context is shorter than the model's, or ""


def size_kv(
    pool: Pool,
    *,
    budget: int | None,
    available: int,
    wanted_context: int | None,
    model_context: int,
) -> KVSize:
    """How many pages, and the context length they allow. All sizes in bytes, ``available`` after the weights.

    ``budget`` is the user's; without one it is KV_BYTES, at most a quarter of what is available, but enough
    for one full context if that fits in half. Raises OutOfMemory if the budget is not there or does not hold
    ``wanted_context``; the model's own context is cut to what the pages hold.
    """
    context = wanted_context or model_context
    needed = pool.needed(context)
    if budget is None:
        budget = max(min(KV_BYTES, available // 4), sum(pool.page_bytes))
        if budget < needed <= available // 2:
            budget = needed
    if budget > available:
        raise OutOfMemory(
            f"a KV cache of {mib(budget)} does not fit: {mib(available)} are available beside the weights, "
            f"{mib(budget - available)} are missing; lower --kv-cache-bytes",
            param="kv_cache_bytes",
        )
    pages = pool.split(budget)
    note = ""
    if (held := pool.one(pages)) < context:
        if wanted_context is not None:
            raise OutOfMemory(
                f"a context of {context} tokens needs {mib(needed)} of KV cache, {mib(needed - budget)} "
                "more than there is; lower --context-length or raise --kv-cache-bytes",
                param="context_length",
            )
        context = held
        note = (
            f"context cut from {model_context} to {context} tokens, what the KV cache holds; "
            "--kv-cache-bytes gives more"
        )
    pages = [n + 1 for n in pages]
    return KVSize(pages, context, pool.taken(pages), note)


def tier_units(room: float, pages: Sequence[int], nbytes: Sequence[int]) -> list[int]:
    """How many units of each cache group a tier of ``room`` bytes has, in the device's proportion: that has
    so many ``pages``. What takes no bytes it need not have more often than the device."""
    share = room / sum(count * size for count, size in zip(pages, nbytes))
    return [int(count * (share if size else min(share, 1))) for count, size in zip(pages, nbytes)]


def cache_groups(pool: Pool, pages: Sequence[int]) -> list[CacheGroup]:
    """As ``Facts`` have them. ``pages`` of each, with the dummy page."""
    slabs = [0] * len(pages) if pool.slab is None else pool.slab.pages
    groups = zip(pages, pool.groups, pool.page_bytes, slabs)
    return [
        CacheGroup(count, group.window, size, pool.every if group.unit_bytes else 0, slab)
        for count, group, size, slab in groups
    ]


def check_weights(needed: int, available: int, advice: str = "--quantization int8 or int4") -> None:
    """Raises OutOfMemory rather than let the kernel kill the process while it loads.
    ``advice``: settings with which a model takes less."""
    if needed > available:
        raise OutOfMemory(
            f"the weights need {mib(needed)}, {mib(needed - available)} more than the {mib(available)} "
            f"available; use {advice}, or a smaller model",
            param=advice.split()[0].removeprefix("--"),
        )


def available_bytes() -> int:
    """Memory this process can still get:
    MemAvailable, or what its control group leaves (version 2, and 0 = unknown)."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.M)
    available = int(found[1]) << 10 if found else 0
    group = re.search(r"^0::/(.*)$", _read("/proc/self/cgroup"), re.M)
    for folder in {"/sys/fs/cgroup", f"/sys/fs/cgroup/{group[1] if group else ''}"}:
        limit, used = _read(f"{folder}/memory.max").strip(), _read(f"{folder}/memory.current").strip()
        if limit.isdigit() and used.isdigit():
            available = min(available, max(0, int(limit) - int(used)))
    return available


def resident_bytes() -> dict[str, int]:
    """``rss`` and its peak, of this process."""
    status = _read("/proc/self/status")
    found = {
        name: re.search(rf"^{key}:\s+(\d+) kB", status, re.M)
        for name, key in (("rss", "VmRSS"), ("peak_rss", "VmHWM"))
    }
    return {name: int(match[1]) << 10 for name, match in found.items() if match}


def mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
