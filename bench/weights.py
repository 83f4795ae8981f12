"""How fast weights get from files to the GPU: one JSON line a measurement.

    python bench/weights.py --model bench/models/qwen3-8b [--layers 8] [--folder /tmp/weights] [--shards 3]

Writes a checkpoint of random values in the model's shapes (cut to ``--layers``), then reads its files plainly, with as many
threads as the loader has, and loads it: both from the page cache, and from the disk where the cache can be dropped (root).
``host_mib`` is what loading adds to the resident memory, mapped files not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from sgla.dist import Shard
from sgla.hub.source import ModelSource, open_source
from sgla.layers.build import Build
from sgla.model.load import load_model
from sgla.model.registry import model_class
from sgla.model.spec import ModelSpec
from sgla.model.upload import threads_for

PIECE = 8 << 20


def write(source: ModelSource, folder: Path, shards: int) -> None:
    spec = ModelSpec.from_config(source.config)
    build = Build(kind="bf16", vocab_kind="bf16", plain="bf16")
    with torch.device("meta"):
        model_class(spec.architecture)(spec, build, 1024)
    names = sorted(build.table)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(source.config))
    for i in range(shards):
        tensors = {
            name: torch.randn(build.table[name].shape, device="cuda").bfloat16().cpu()
            for name in names[i::shards]
        }
        save_file(tensors, folder / f"model-{i}.safetensors")


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


def anonymous_mib() -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) >> 10 if found else 0


def load(source: ModelSource, shard: Shard) -> tuple[float, int, int]:
    """Seconds, bytes of this rank's weights, and MiB of host memory more than before."""
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    before, begun = anonymous_mib(), time.perf_counter()
    with torch.device("cuda"):
        model = load_model(source, "bfloat16", shard=shard, context_len=1024)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    size = torch.cuda.memory_allocated() - allocated
    del model
    torch.cuda.empty_cache()
    return seconds, size, anonymous_mib() - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", default="/tmp/sgla-weights")
    parser.add_argument("--shards", type=int, default=3)
    args = parser.parse_args()
    source = open_source(args.model, "dummy")
    source.config["num_hidden_layers"] = args.layers
    write(source, Path(args.folder), args.shards)
    source = open_source(args.folder)
    size = sum(path.stat().st_size for path in source.files)
    threads = threads_for(torch.device("cuda"))
    base = {"bench": "weights", "machine": torch.cuda.get_device_name(), "torch": torch.__version__}
    base |= {"model": Path(args.model).name, "layers": args.layers, "bytes": size, "threads": threads}
    torch.set_num_threads(1)  # as the worker does
    load(source, Shard())  # loads libraries, makes pinned memory
    for cold in (False, True):
        for shard in (Shard(), Shard(1, 2)):
            if cold and not drop_cache():
                continue
            plain = read_plainly(source.files, threads)
            if cold:
                drop_cache()
            seconds, own, host = load(source, shard)
            line = {
                "from": "disk" if cold else "page cache",
                "part": f"1/{shard.size}",
                "plain_gb_s": plain / 1e9,
            }
            line |= {"load_s": seconds, "load_gb_s": own / seconds / 1e9, "host_mib": host}
            rounded = {k: round(v, 2) if isinstance(v, float) else v for k, v in line.items()}
            print("JSON " + json.dumps(base | rounded), flush=True)


if __name__ == "__main__":
    main()
