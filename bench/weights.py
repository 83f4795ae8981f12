"""How fast weights get from files to the GPU: one JSON line a measurement.

    python bench/weights.py --model bench/models/qwen3-8b [--layers 8] [--folder /tmp/weights] [--shards 3]

Writes a checkpoint of random values in the model's shapes (cut to ``--layers``), then reads its files
plainly, with as many threads as the loader has, and loads it in new processes, whole and as two halves at
once, on two GPUs where there are two: from the page cache, and with ``--disk`` after dropping that (root; it
slows whatever else runs on the host). ``load_gb_s`` is the sum over the ranks; ``again_gb_s`` is a second
load from the page cache, where buffers are pinned and libraries loaded. ``host_mib`` is the most that loading
adds to a rank's resident memory, mapped files not counted; ``pinned_mib`` are the buffers that copies start
from, which a process's resident memory need not show.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import lines
import torch
import torch.multiprocessing

from sgla.dist import Shard
from sgla.hub.source import ModelSource
from sgla.layers.build import Build
from sgla.loading.load import load_model, model_of
from sgla.loading.source import open_source
from sgla.loading.upload import threads_for
from sgla.model.read import read_decoder

PIECE = 8 << 20
MOST = 1 << 30  # bytes of a write
TIMEOUT = 300  # seconds


def write(source: ModelSource, folder: Path, shards: int) -> None:
    spec = read_decoder(source.config)
    build = Build(kind="bf16", vocab_kind="bf16", plain="bf16")
    with torch.device("meta"):
        model_of(spec, build, 1024)
    names = sorted(build.table)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(source.config))
    shapes = [{name: tuple(build.table[name].shape) for name in names[i::shards]} for i in range(shards)]
    with ThreadPoolExecutor(shards) as pool:
        list(pool.map(write_shard, [folder / f"model-{i}.safetensors" for i in range(shards)], shapes))


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], device: str = "cuda") -> None:
    """Random bfloat16, as safetensors has it. Its own library writes one file at a time."""
    ends = [0, *accumulate(2 * math.prod(shape) for shape in shapes.values())]
    header = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": ends[i : i + 2]}
        for i, (name, shape) in enumerate(shapes.items())
    }
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for shape in shapes.values():
            values: Any = torch.randn(shape, device=device).bfloat16().cpu().view(torch.uint8).numpy()
            left = memoryview(values).cast("B")
            while left:
                left = left[file.write(left[:MOST]) :]


def read_plainly(files: tuple[Path, ...], threads: int) -> float:
    """Bytes a second into one buffer a thread."""
    pieces = [(path, at) for path in files for at in range(0, path.stat().st_size, PIECE)]

    def take(share: int) -> int:
        buffer, count, handles = bytearray(PIECE), 0, {path: os.open(path, os.O_RDONLY) for path in files}
        for path, at in pieces[share::threads]:
            count += os.preadv(handles[path], [buffer], at)
        return count

    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(take, range(threads)))
    return total / (time.perf_counter() - begun)


def drop_cache() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


class Peak(threading.Thread):
    """Samples this process's resident memory, mapped files not counted, a thousand times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._done = threading.Event()
        self.before = self.most = own_kib()

    def run(self) -> None:
        while not self._done.wait(0.001):
            self.most = max(self.most, own_kib())

    def stop(self) -> int:
        """MiB more than before, at most."""
        self._done.set()
        self.join()
        return (max(self.most, own_kib()) - self.before) >> 10


def own_kib() -> int:
    found = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return sum(map(int, found))


class Part(NamedTuple):
    """A rank's load: seconds, and of a second one, bytes of its weights, MiB of host memory and of pinned
    buffers."""

    seconds: float
    again: float
    size: int
    host: int
    pinned: int


def timed_load(source: ModelSource, shard: Shard) -> tuple[float, int]:
    """Seconds, and bytes of the weights."""
    allocated, begun = torch.cuda.memory_allocated(), time.perf_counter()
    with torch.device("cuda"):
        model = load_model(source, "bfloat16", shard=shard, context_len=1024)
    torch.cuda.synchronize()
    found = time.perf_counter() - begun, torch.cuda.memory_allocated() - allocated
    del model
    torch.cuda.empty_cache()
    return found


def load(rank: int, ranks: int, folder: str, together: Barrier, parts: Queue[Part]) -> None:
    """In a process of its own."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_num_threads(1)  # as the worker does
    source, shard = open_source(folder), Shard(rank, ranks)
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    peak = Peak()
    together.wait()  # all are ready
    together.wait()  # the cache has been dropped
    peak.start()
    seconds, size = timed_load(source, shard)
    host, pinned = peak.stop(), torch.cuda.host_memory_stats()["allocated_bytes.peak"] >> 20
    together.wait()
    again, _ = timed_load(source, shard)
    parts.put(Part(seconds, again, size, host, pinned))


def load_all(ranks: int, folder: str, cold: bool) -> list[Part]:
    """Processes start first, then the cache is dropped, then all load."""
    processes = torch.multiprocessing.get_context("spawn")
    together, parts = processes.Barrier(ranks + 1, timeout=TIMEOUT), processes.Queue()
    for rank in range(ranks):
        processes.Process(target=load, args=(rank, ranks, folder, together, parts), daemon=True).start()
    together.wait()
    if cold:
        drop_cache()
    together.wait()
    together.wait()
    return [parts.get(timeout=TIMEOUT) for _ in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", default="/tmp/sgla-weights")
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--disk", action="store_true", help="from the disk, too")
    args = parser.parse_args()
    source = open_source(args.model, "dummy")
    source.config["num_hidden_layers"] = args.layers
    write(source, Path(args.folder), args.shards)
    source = open_source(args.folder)
    size = sum(path.stat().st_size for path in source.files)
    threads = threads_for(torch.device("cuda"))
    base: dict[str, Any] = {"bench": "weights", "machine": lines.gpus(), "torch": torch.__version__}
    base |= {"model": Path(args.model).name, "layers": args.layers, "bytes": size, "threads": threads}
    for cold in (False, True) if args.disk else (False,):
        if cold and not drop_cache():
            raise SystemExit("--disk: the page cache can only be dropped by root")
        plain = read_plainly(source.files, threads)
        for ranks in (1, 2):
            parts = load_all(ranks, args.folder, cold)
            line = {
                "from": "disk" if cold else "page cache",
                "ranks": ranks,
                "gpus": min(ranks, torch.cuda.device_count()),
                "plain_gb_s": plain / 1e9,
                "load_s": max(part.seconds for part in parts),
                "load_gb_s": sum(part.size / part.seconds for part in parts) / 1e9,
                "again_gb_s": sum(part.size / part.again for part in parts) / 1e9,
                "host_mib": max(part.host for part in parts),
                "pinned_mib": max(part.pinned for part in parts),
                "part_mib": max(part.size for part in parts) >> 20,
                "file_mib": max(path.stat().st_size for path in source.files) >> 20,
            }
            lines.emit(base | {k: round(v, 2) if isinstance(v, float) else v for k, v in line.items()})


if __name__ == "__main__":
    main()
