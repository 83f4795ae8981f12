# mypy: allow-untyped-defs
"""Ways in which pages cross between a GPU and the host's memory, beside something that reads the GPU's memory
as decode steps do: one JSON line a way.

    python bench/crossings.py [--seconds 0.4] [--ways plain,staged,rows,batch,blocks,kernel] [--width 32]

The load is a graph of products of ``--rows`` rows that reads ``--gib`` of weights; in front of each replay
a few bytes go to the GPU by its copy engine (``copied``) or are fetched by a kernel (``fetched``), as columns
of a step do. ``alone_gb_s``: the copy without the load; ``gb_s``: beside it; ``host_us_mb``: the host's time
to queue a MB; ``copied`` and ``fetched``: how much longer a step takes beside the copy, median and p90.

Pages have ``--width`` KiB in each of ``PARTS`` tensors. Places of the host's memory follow each other, pages
of the GPU in runs of ``run``. ``plain``: one piece of memory each way; ``staged``: through a buffer of so
many MiB on the GPU and a kernel; ``rows``: by the copy engine, a run of rows a call; ``batch``: by the copy
engine, all rows in one call; ``blocks``: the same, a run of rows being one; ``kernel``: so many blocks of a
kernel read or write the host's memory.
"""

from __future__ import annotations

import argparse
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from itertools import pairwise
from typing import Any

import lines
import numpy as np
import torch
import triton
import triton.language as tl

WIDTH, PARTS, PAGES, PLACES = 32 << 10, 12, 4096, 2048
PIECE = 84  # pages that are queued at once: 33 MB
AHEAD = 4  # pieces
STEPS = 24  # that are timed at a time
HOST, DEVICE = 1, 2  # CUmemorytype
STREAM, OVERLAP = 1, 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
driver = ctypes.CDLL("libcuda.so.1")


class Copy2D(ctypes.Structure):
    _fields_ = (
        ("source_x", c_size_t),
        ("source_y", c_size_t),
        ("source_kind", c_uint),
        ("source_host", c_void_p),
        ("source_device", c_uint64),
        ("source_array", c_void_p),
        ("source_pitch", c_size_t),
        ("target_x", c_size_t),
        ("target_y", c_size_t),
        ("target_kind", c_uint),
        ("target_host", c_void_p),
        ("target_device", c_uint64),
        ("target_array", c_void_p),
        ("target_pitch", c_size_t),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class Attributes(ctypes.Structure):
    _fields_ = (
        ("order", c_int),
        ("source_kind", c_int),
        ("source_id", c_int),
        ("target_kind", c_int),
        ("target_id", c_int),
        ("flags", c_uint),
    )


def check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what}: CUDA error {code}")


@triton.jit(do_not_specialize=["rows"])
def _fetch(source, target, rows, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < rows, other=0), mask=i < rows)


@triton.jit(do_not_specialize=["rows", "blocks", "place"])
def _cross(
    memory, host, units, place, rows, blocks,
    PARTS: tl.constexpr, GAP: tl.constexpr, WORDS: tl.constexpr, INWARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of ``WORDS`` times 8 bytes of pages ``units``, to or from the places from ``place`` on."""
    for row in range(tl.program_id(0), rows, blocks):
        unit, part = row // PARTS, row % PARTS
        here = memory + part * GAP + tl.load(units + unit) * WORDS
        there = host + (place + unit) * (PARTS * WORDS) + part * WORDS
        for at in tl.static_range(0, WORDS, BLOCK):
            i = at + tl.arange(0, BLOCK)
            if INWARD:
                tl.store(here + i, tl.load(there + i))
            else:
                tl.store(there + i, tl.load(here + i))


class World:
    """``memory`` int64[parts, pages, words] on the GPU; ``host`` int64[places, parts, words], pinned."""

    def __init__(self) -> None:
        words = WIDTH // 8
        self.memory = torch.zeros(PARTS, PAGES, words, dtype=torch.int64, device="cuda")
        self.host = torch.zeros(PLACES, PARTS, words, dtype=torch.int64).pin_memory()
        self.streams = torch.cuda.Stream(), torch.cuda.Stream()

    def pages(self, run: int) -> list[list[int]]:
        """Pages of each piece, in runs."""
        firsts = torch.randperm(PAGES // run, generator=torch.Generator().manual_seed(run)).tolist()
        every = [first * run + i for first in firsts for i in range(run)]
        return [every[at : at + PIECE] for at in range(0, len(every) - PIECE, PIECE)]


Way = Callable[[list[int], int], "torch.cuda.Event"]  # queues pages, to or from the places behind one


def ended(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def plain(world: World, inward: bool) -> Way:
    flat, (first, _) = world.memory.view(-1), world.streams

    def go(pages: list[int], place: int) -> torch.cuda.Event:
        there = world.host[place : place + len(pages)].view(-1)
        here = flat[: there.numel()]
        with torch.cuda.stream(first):
            (here if inward else there).copy_(there if inward else here, non_blocking=True)
        return ended(first)

    return go


def staged(world: World, inward: bool, mib: int) -> Way:
    count = max(1, (mib << 20) // (WIDTH * PARTS))
    halves = [torch.empty(count, PARTS, WIDTH // 8, dtype=torch.int64, device="cuda") for _ in range(2)]
    empty: list[torch.cuda.Event | None] = [None, None]
    first, second = world.streams
    memory = world.memory.transpose(0, 1)
    turn = [0]

    def go(pages: list[int], place: int) -> torch.cuda.Event:
        with torch.cuda.stream(first):
            index = torch.tensor(pages).pin_memory().to("cuda", non_blocking=True)
        event = ended(first)
        for at in range(0, len(pages), count):
            n, half = min(count, len(pages) - at), turn[0]
            turn[0] = 1 - half
            there, here = world.host[place + at : place + at + n], halves[half][:n]
            with torch.cuda.stream(first):
                if (before := empty[half]) is not None:
                    first.wait_event(before)
                if inward:
                    here.copy_(there, non_blocking=True)
                else:
                    torch.index_select(memory, 0, index[at : at + n], out=here)
            with torch.cuda.stream(second):
                second.wait_event(ended(first))
                if inward:
                    memory.index_copy_(0, index[at : at + n], here)
                else:
                    there.copy_(here, non_blocking=True)
            empty[half] = event = ended(second)
        index.record_stream(second)
        return event

    return go


def rows(world: World, inward: bool) -> Way:
    stream, host = world.streams[0], world.host.data_ptr()
    pitch, gap = WIDTH * PARTS, WIDTH * PAGES
    made, call, handle = Copy2D(width=WIDTH), driver.cuMemcpy2DAsync_v2, c_void_p(stream.cuda_stream)
    memory = world.memory.data_ptr()

    def go(pages: list[int], place: int) -> torch.cuda.Event:
        for first, count in runs(pages):
            for part in range(PARTS):
                there = host + (place + first) * pitch + part * WIDTH
                here = memory + part * gap + pages[first] * WIDTH
                made.height = count
                if inward:
                    made.source_kind, made.source_host, made.source_pitch = HOST, there, pitch
                    made.target_kind, made.target_device, made.target_pitch = DEVICE, here, WIDTH
                else:
                    made.source_kind, made.source_device, made.source_pitch = DEVICE, here, WIDTH
                    made.target_kind, made.target_host, made.target_pitch = HOST, there, pitch
                check(call(byref(made), handle), "cuMemcpy2DAsync")
        return ended(stream)

    return go


def runs(pages: list[int]) -> Iterator[tuple[int, int]]:
    begin = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield begin, i - begin
            begin = i


def call_of(name: str) -> Callable[..., int]:
    """The driver's function as CUDA 13 has it."""
    call = getattr(driver, name + "_v2", None)
    if call is not None:
        return call  # type: ignore[no-any-return]
    older, failed = getattr(driver, name), c_size_t(0)
    last = -1 if name == "cuMemcpyBatchAsync" else -2  # arguments behind which one names what failed
    return lambda *args: int(older(*args[:last], byref(failed), *args[last:]))


def batch(world: World, inward: bool, flags: int = OVERLAP, joined: bool = False) -> Way:
    """``joined``: as if the places of each tensor followed each other in the host's memory, too, so that a
    run of pages is one copy."""
    stream, host, memory = world.streams[0], world.host.data_ptr(), world.memory.data_ptr()
    handle, call = c_void_p(stream.cuda_stream), call_of("cuMemcpyBatchAsync")
    attributes, number = Attributes(order=STREAM, flags=flags), c_size_t(0)
    parts = np.arange(PARTS)

    def go(pages: list[int], place: int) -> torch.cuda.Event:
        spans = list(runs(pages)) if joined else [(i, 1) for i in range(len(pages))]
        first, count = np.array(spans).T
        here = memory + (np.array(pages)[first, None] + parts * PAGES) * WIDTH
        steps = (1, PLACES) if joined else (PARTS, 1)
        there = host + ((place + first)[:, None] * steps[0] + parts * steps[1]) * WIDTH
        sizes = np.repeat(count * WIDTH, PARTS)
        ends = (here, there) if inward else (there, here)
        columns = [np.ascontiguousarray(column).ctypes for column in (*ends, sizes)]
        given = [c_void_p(column.data) for column in columns]
        code = call(*given, c_size_t(here.size), byref(attributes), byref(number), c_size_t(1), handle)
        check(code, "cuMemcpyBatchAsync")
        return ended(stream)

    return go


END = [("kind", "i8"), ("address", "i8"), ("row", "i8"), ("layer", "i8"), ("where", "i8")]
OPERATION = np.dtype(
    [("source", END), ("target", END), ("width", "i8"), ("height", "i8"), ("depth", "i8"), ("order", "i4"),
     ("flags", "i4")]
)  # fmt: skip


def blocks(world: World, inward: bool) -> Way:
    stream, host, memory = world.streams[0], world.host.data_ptr(), world.memory.data_ptr()
    handle, call, parts = c_void_p(stream.cuda_stream), call_of("cuMemcpy3DBatchAsync"), np.arange(PARTS)

    def go(pages: list[int], place: int) -> torch.cuda.Event:
        first, count = np.array(list(runs(pages))).T
        made = np.zeros((len(first), PARTS), OPERATION)
        here, there = made["target" if inward else "source"], made["source" if inward else "target"]
        here["address"] = memory + (np.array(pages)[first, None] + parts * PAGES) * WIDTH
        there["address"] = host + ((place + first)[:, None] * PARTS + parts) * WIDTH
        here["row"], there["row"] = WIDTH, WIDTH * PARTS
        for end in (here, there):
            end["kind"], end["layer"] = 1, count[:, None]
        made["width"], made["height"], made["depth"] = WIDTH, count[:, None], 1
        made["order"], made["flags"] = STREAM, OVERLAP
        check(call(c_size_t(made.size), c_void_p(made.ctypes.data), c_uint64(0), handle), "a batch of blocks")
        return ended(stream)

    return go


def kernel(world: World, inward: bool, blocks: int) -> Way:
    stream, words = world.streams[0], WIDTH // 8

    def go(pages: list[int], place: int) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            index = torch.tensor(pages).pin_memory().to("cuda", non_blocking=True)
            _cross[(blocks,)](
                world.memory, world.host, index, place, len(pages) * PARTS, blocks,
                PARTS=PARTS, GAP=PAGES * words, WORDS=words, INWARD=inward, BLOCK=min(words, 4096),
                num_warps=8,
            )  # fmt: skip
        return ended(stream)

    return go


class Load:
    """``seconds`` of steps that run back to back."""

    def __init__(self, gib: float, count: int) -> None:
        inner, outer = 4096, 12288
        self._weights = [
            torch.randn(inner, outer, dtype=torch.bfloat16, device="cuda")
            for _ in range(round(gib * (1 << 30) / (2 * inner * outer)))
        ]
        x = torch.randn(count, inner, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(count, outer, dtype=torch.bfloat16, device="cuda")
        self._pinned = torch.zeros(64, dtype=torch.int32).pin_memory()
        self._columns = torch.zeros(64, dtype=torch.int32, device="cuda")
        torch.mm(x, self._weights[0], out=out)
        torch.cuda.synchronize()
        self._graph, self._stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(self._graph, stream=self._stream):
            for weight in self._weights:
                torch.mm(x, weight, out=out)

    def seconds(self, fetched: bool) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        with torch.cuda.stream(self._stream):
            for mark in marks[:-1]:
                mark.record()
                if fetched:
                    _fetch[(1,)](self._pinned, self._columns, 64, BLOCK=64)
                else:
                    self._columns.copy_(self._pinned, non_blocking=True)
                self._graph.replay()
            marks[-1].record()
        marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks[2:])]


class Traffic:
    """Copies without end, a few pieces ahead, until it is left; ``pieces`` that have crossed."""

    def __init__(self, world: World, way: Way, run: int) -> None:
        self._way, self._pages, self._device = way, world.pages(run), torch.cuda.current_device()
        self.pieces, self.queueing, self.failed = 0, 0.0, ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go)

    def _go(self) -> None:
        try:
            with torch.inference_mode():
                self._cross()
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"

    def _cross(self) -> None:
        torch.cuda.set_device(self._device)
        queued: list[torch.cuda.Event] = []
        at = 0
        while not self._over.is_set():
            pages = self._pages[at % len(self._pages)]
            begun = time.perf_counter()
            queued.append(self._way(pages, at * PIECE % (PLACES - PIECE)))
            self.queueing += time.perf_counter() - begun
            at += 1
            while len(queued) > AHEAD:
                while not queued[0].query():
                    time.sleep(2e-5)
                queued.pop(0)
                self.pieces += 1
        torch.cuda.synchronize()

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def rate(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Bytes a second meanwhile."""
        pieces, begun = self.pieces, time.perf_counter()
        made = work()
        return (self.pieces - pieces) * PIECE * WIDTH * PARTS / (time.perf_counter() - begun), made


def at(values: list[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))]


def measure(world: World, load: Load, way: Way, run: int, seconds: float) -> dict[str, Any]:
    for pages in world.pages(run)[:3]:  # what is compiled is not timed
        way(pages, 0)
    torch.cuda.synchronize()
    fields: dict[str, Any] = {}
    alone = {fetched: at(load.seconds(fetched), 0.5) for fetched in (False, True)}
    with Traffic(world, way, run) as traffic:
        time.sleep(0.05)
        rate, _ = traffic.rate(lambda: time.sleep(seconds / 2))
        fields["alone_gb_s"] = round(rate / 1e9, 1)
        for name, fetched in (("copied", False), ("fetched", True)):
            beside = list[float]()

            def steps(beside: list[float] = beside, fetched: bool = fetched) -> None:
                end = time.perf_counter() + seconds / 2
                while time.perf_counter() < end:
                    beside.extend(load.seconds(fetched))

            rate, _ = traffic.rate(steps)
            fields["gb_s"] = round(rate / 1e9, 1)
            fields[name] = [round(at(beside, part) / alone[fetched], 4) for part in (0.5, 0.9)]
    if traffic.failed:
        return {"failed": traffic.failed}
    sent = traffic.pieces * PIECE * WIDTH * PARTS / 1e6
    fields["host_us_mb"] = round(traffic.queueing * 1e6 / max(1.0, sent), 2)
    return fields | {"step_ms": [round(1e3 * alone[fetched], 3) for fetched in (False, True)]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--gib", type=float, default=15.0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--ways", default="plain,staged,rows,batch,blocks,kernel")
    parser.add_argument("--width", type=int, default=32, help="KiB of a page in a tensor")
    args = parser.parse_args()
    global WIDTH
    WIDTH = args.width << 10
    world, load = World(), Load(args.gib, args.rows)
    for inward in (True, False):
        ways: dict[str, tuple[Way, int]] = {
            "plain": (plain(world, inward), 84),
            **{f"staged {mib}": (staged(world, inward, mib), 16) for mib in (32, 8)},
            **{f"rows, run {run}": (rows(world, inward), run) for run in (84, 16, 6, 1)},
            **{f"batch, run {run}": (batch(world, inward), run) for run in (84, 6, 1)},
            "batch by default, run 6": (batch(world, inward, 0), 6),
            "batch of spans, run 6": (batch(world, inward, joined=True), 6),
            "blocks, run 6": (blocks(world, inward), 6),
            **{f"kernel {blocks}": (kernel(world, inward, blocks), 16) for blocks in (2, 4, 8, 16, 32)},
        }
        for name, (way, run) in ways.items():
            if name.replace(",", " ").split()[0] not in args.ways.split(","):
                continue
            fields: dict[str, Any] = {"bench": "crossings", "way": name, "to": "device" if inward else "host"}
            fields["width"] = WIDTH
            try:
                fields |= measure(world, load, way, run, args.seconds)
            except Exception as error:
                fields["failed"] = f"{type(error).__name__}: {error}"
            lines.emit(fields)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
