"""Where the time of pictures goes: before the scheduler sees them, and on the GPU between those that the
tower looks at."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sgla.actors.pictures import PictureRoom
from sgla.config import MediaSettings
from sgla.http.bodies import RequestMemory, Share
from sgla.http.media.load import Media
from sgla.http.media.parts import Source
from sgla.media.pool import Pool, processes_of
from sgla.model.vision.served import settings_of
from sgla.model.vision.spec import Vision
from sgla.worker.features import arrays_of

Span = tuple[float, float]
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
TOWER = "tower"  # what ``loading/tower.py`` calls it in a trace
# What the worker's threads do where the GPU does nothing, the first that fits; see ``gaps``.
IDLE = {"read a picture": "reads pictures", TOWER: "launches the tower"}


class Host:
    """The way of a picture to a worker without a server: base64, decoded, prepared, and read."""

    def __init__(self, model: Path, vision: Vision, config: dict[str, Any], pinned: bool) -> None:
        self.pool = Pool(processes_of(None), 1 << 30, modules=["sgla.media.decode"])
        self.room = PictureRoom(
            vision,
            config,
            settings_of(model),
            processes=processes_of(None),
            kept=MediaSettings().media_cache_bytes,
        )
        self._ingress: Any = SimpleNamespace(media=self.pool, pictures=self.room)
        self._media, self._pinned = Media(MediaSettings()), pinned
        self._memory = RequestMemory(1 << 33)
        self.spent: dict[str, list[float]] = defaultdict(list)  # seconds by stage
        self.pool.run = self._timed("decode", self.pool.run)  # type: ignore[method-assign]
        self.room._pool.run = self._timed("prepare", self.room._pool.run)  # type: ignore[method-assign]

    def _timed(self, stage: str, run: Any) -> Any:
        async def timed(*args: Any, **more: Any) -> Any:
            begun = time.perf_counter()
            try:
                return await run(*args, **more)
            finally:
                self.spent[stage].append(time.perf_counter() - begun)

        return timed

    async def bring(self, url: str) -> None:
        """One picture, to where the tower takes it."""
        share = Share(self._memory, "a")
        try:
            [pictures] = await self._media.pictures([[Source(url, "image")]], self._ingress, share)
            [prepared] = await self.room.prepare(pictures, "a")
        finally:
            share.close()
        begun = time.perf_counter()
        arrays_of(prepared, self._pinned)
        self.spent["read"].append(time.perf_counter() - begun)

    async def measure(self, urls: Sequence[str], alone: Sequence[str]) -> dict[str, Any]:
        """Seconds of ``urls`` at once; of one ``alone``, and of each stage then; medians."""
        self.spent.clear()
        took = []
        for url in alone:
            begun = time.perf_counter()
            await self.bring(url)
            took.append(time.perf_counter() - begun)
        stages = {f"{stage}_s": statistics.median(spent) for stage, spent in self.spent.items()}
        begun = time.perf_counter()
        await asyncio.gather(*map(self.bring, urls))
        whole = time.perf_counter() - begun
        return {"seconds": whole, "pictures": len(urls), "alone_s": statistics.median(took), **stages}

    async def close(self) -> None:
        await asyncio.gather(self.pool.close(), self.room.close(), self._media.close())


def united(spans: Iterable[Span]) -> list[Span]:
    """Without what they have in common, in order."""
    found: list[list[float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return [(begin, end) for begin, end in found]


def common(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """What both have; each without overlaps, in order."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        i, j = (i + 1, j) if a[i][1] < b[j][1] else (i, j + 1)
    return found


def without(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """What ``a`` has and ``b`` has not."""
    if not a:
        return []
    edges = [(a[0][0], a[0][0]), *b, (a[-1][1], a[-1][1])]
    between = [(end, begin) for (_, end), (begin, _) in pairwise(edges) if end < begin]
    return common(a, between)


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def gaps(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of a trace in Chrome's format, in seconds: from the tower's first kernel to its last, how long it was
    at work, and what the time between is spent on: other kernels (the model's steps), or nothing, by what the
    worker does meanwhile."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for event in events:
        kind, name = event.get("cat"), event.get("name")
        if "dur" not in event:
            continue
        span = event["ts"], event["ts"] + event["dur"]
        if kind in ON_GPU:
            spans["gpu"].append(span)
        elif kind == "gpu_user_annotation" and name == TOWER:
            spans["seen"].append(span)
        elif kind == "user_annotation" and name in IDLE:
            spans[name].append(span)
        elif kind in ("cpu_op", "cuda_runtime", "cuda_driver"):
            spans["launches"].append(span)
    gpu = united(spans["gpu"])
    tower = common(united(spans["seen"]), gpu)
    if not tower:
        return {}
    whole = [(tower[0][0], tower[-1][1])]
    between = without(whole, united(spans["seen"]))
    steps = common(between, gpu)
    idle = without(whole, gpu)
    found = {"whole_s": length(whole), "tower_s": length(tower), "steps_s": length(steps)}
    for name, told in (*IDLE.items(), ("launches", "launches steps")):
        part = common(idle, united(spans[name]))
        found[f"idle while it {told}_s".replace(" ", "_")] = length(part)
        idle = without(idle, united(spans[name]))
    found["idle_while_it_waits_for_a_step_s"] = length(idle)
    rounded = {name: seconds / 1e6 for name, seconds in found.items()}
    return rounded | {"tower_share": found["tower_s"] / found["whole_s"]}
