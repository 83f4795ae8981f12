"""Warm from the device = from a disk = after a restart = from a store that another server filled = from a
prefill server = cold: for each kind of cache group, with a plain and an 8-bit KV cache, on one rank and on
two."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedExecutor
from servers import (
    MODELS,
    TEXTS,
    begin,
    check_idle,
    decoding,
    port_of,
    prefilling,
    same_text,
    stats,
    tell,
    write,
)

from sgla.executor import procs
from sgla.worker.tiers import FileTier

LONG = [(TEXTS[0] + TEXTS[1])[:290], (TEXTS[1] + TEXTS[2])[:290]]  # that it is worth asking a store for
PARTS = 576  # of their tokens, the most that can be cached: whole pages


def cached(told: list[Any]) -> int:
    return sum(usage.cached_tokens for _, usage, *_ in told)


CHEAP = {("pages", "int8", 1), ("windows", "int8", 1), ("states", "auto", 2)}


@pytest.mark.parametrize(
    ("name", "kv", "tp"),
    [
        pytest.param(name, kv, tp, marks=[] if (name, kv, tp) in CHEAP else pytest.mark.slow)
        for name in MODELS
        for kv in ("auto", "int8")
        for tp in (1, 2)
    ],
)
def test_answers_are_those_of_a_cold_server(
    name: str, kv: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procs, "ProcsExecutor", ForkedExecutor)
    (tmp_path / "model").mkdir()
    folder = write(tmp_path / "model", MODELS[name], 320)
    both: dict[str, Any] = {"kv_cache_dtype": kv, "tp": tp, "executor": "procs" if tp > 1 else "inline"}
    disk, store = {"kv_disk": f"{tmp_path / 'disk'}:8M"}, {"kv_store": str(tmp_path / "store")}
    with begin(folder, **both, prefix_cache=False) as engine:
        cold = tell(engine, LONG)
        assert cached(cold) == 0

    def warm(changes: dict[str, Any], place: str, first: bool = False) -> None:
        with begin(folder, **both, **changes) as engine:
            told = tell(engine, LONG)
            assert same_text(told, cold)
            assert cached(told) == (0 if first else PARTS)
            again = tell(engine, LONG)
            assert same_text(again, cold)
            assert (cached(again), first or stats(engine).hits[place]) == (PARTS, first or PARTS)
            assert not any(tier.failed for tier in stats(engine).tiers)
            check_idle(engine)

    warm(disk | store, "device", first=True)
    warm(disk, "disk")
    warm(store, "store")
    with prefilling(folder, **both) as prefill, decoding(folder, port_of(prefill), **both) as decode:
        assert same_text(tell(decode, LONG), cold)
        [tier] = stats(decode).tiers
        assert (tier.asked, tier.unanswered, tier.failed) == (2, 0, 0)
        assert tier.loaded
        check_idle(decode)
        check_idle(prefill)


@pytest.mark.parametrize("place", ["disk", "store"])
def test_what_requests_have_left_is_kept_although_the_server_ends(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies take longer than it has to end otherwise."""
    written = FileTier._keep

    def slowly(*args: Any) -> None:
        time.sleep(0.01)
        written(*args)

    monkeypatch.setattr(FileTier, "_keep", slowly)
    (tmp_path / "model").mkdir()
    folder = write(tmp_path / "model", MODELS["pages"], 320)
    where = f"{tmp_path / 'disk'}:8M" if place == "disk" else str(tmp_path / "store")
    for found in (0, PARTS):
        with begin(folder, **{f"kv_{place}": where}) as engine:
            assert cached(tell(engine, LONG)) == found
