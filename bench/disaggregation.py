"""A prefill server and a decode server on two GPUs of one host: one JSON line a measurement.

    python bench/disaggregation.py [--parts link,servers,equal,transports] [--model bench/models/qwen3-8b]

``link``: GB/s at which units get from the memory of one GPU into the KV cache of another process's, and of a
plain copy between the two. ``servers``: by ``--kv-transfer-backend cuda_ipc``, W6 (256 requests of 1,024
tokens in and 256 out, 64 at a time), and the seconds to the first token of a long prompt: of one server (the
prefill server, which is asked itself), of both, and of both where the prefill server has it cached; and
``steps``: medians, 90th and 99th percentiles of what the decode server's steps took, by what was in them.
``W6``: that and these alone.
``equal``: tokens of two servers with ``--deterministic`` are those of one. ``transports``: the long prompt by
each of ``--backends``. Weights are random. A part that would end later than ``--limit`` seconds from the
start is left out, and says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import clients
import lines
from process import Server, free_port
from step_times import FLAGS, step_times
from words import write_tokenizer

from sgla.bench import load, report, workloads

SECONDS = {"link": 25, "servers": 75, "W6": 45, "equal": 50, "transports": 45}  # about, of a part
FIELDS = {"temperature": 0.0, "ignore_eos": True, "stream_options": {"include_usage": True}}
UNIT, LAYERS, TOKENS = 2304 << 10, 72, 16  # bytes of 16 tokens of Qwen3-8B, and its keys and values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="link,servers,equal,transports")
    parser.add_argument("--model", type=Path, default=Path("bench/models/qwen3-8b"))
    parser.add_argument("--small", type=Path, default=Path("bench/models/qwen3-0.6b"), help="of equal")
    parser.add_argument("--gpus", default="0,1", help="of the prefill and the decode server")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--long", type=int, default=8000, help="tokens of the long prompt")
    parser.add_argument("--backends", default="auto,tcp")
    parser.add_argument("--requests", type=int, default=256, help="of W6")
    parser.add_argument("--server-args", default="--context-length 16384")
    parser.add_argument("--limit", type=float, default=200.0)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    os.environ["SGLA_KV_TRANSFER_SECRET"] = "of a bench"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        args.tokenizers = Path(folder)
        for part in args.parts.split(","):
            if time.monotonic() - began + SECONDS[part] > args.limit:
                lines.emit({"bench": "disaggregation", "part": part, "left_out": "no time"})
                continue
            PARTS[part](args)


def emit(args: argparse.Namespace, part: str, fields: dict[str, Any]) -> None:
    lines.emit({"bench": "disaggregation", "part": part, "model": str(args.model)} | fields)


# --- the copy alone


def link(args: argparse.Namespace) -> None:
    ours, theirs = get_context("spawn").Pipe()
    lender, borrower = args.gpus.split(",")
    for backend in ("cuda_ipc", "auto"):
        os.environ["CUDA_VISIBLE_DEVICES"] = lender
        process = get_context("spawn").Process(target=lends, args=(theirs, backend), daemon=True)
        process.start()
        os.environ["CUDA_VISIBLE_DEVICES"] = borrower
        told = ours.recv()
        reader = get_context("spawn").Process(target=borrows, args=(theirs, backend, told), daemon=True)
        reader.start()
        emit(args, "link", {"backend": backend} | ours.recv())
        reader.join()
        process.kill()
        process.join()
        del os.environ["CUDA_VISIBLE_DEVICES"]


COUNT = 2000  # units: 4.7 GB


def lending_of(backend: str) -> Any:
    from sgla.worker.gpu_lent import GpuLending
    from sgla.worker.lent import HostLending

    return GpuLending(lambda: None) if backend == "cuda_ipc" else HostLending()


def lends(pipe: Connection, backend: str) -> None:
    import numpy as np
    import torch

    torch.zeros(1, device="cuda")
    segment = lending_of(backend).lend(COUNT, UNIT, bytes(32))
    if backend == "cuda_ipc":
        segment.bytes.random_()
        torch.cuda.synchronize()
    else:
        segment.units[:] = np.random.default_rng(0).integers(0, 256, UNIT, np.uint8)
    pipe.send((os.getpid(), segment.fd, segment.handle, segment.content(COUNT).sum(dtype=np.int64)))
    time.sleep(600)


def borrows(pipe: Connection, backend: str, told: tuple[int, int, bytes, int]) -> None:
    import numpy as np
    import torch

    from sgla.messages import Copy, int32
    from sgla.peers import Lent
    from sgla.worker.gpu_tiers import by_lanes, staging

    torch.zeros(1, device="cuda")
    pid, fd, handle, last = told
    segment = lending_of(backend).borrow(
        Lent(pid, bytes(32), [fd], [COUNT], [handle] * bool(handle)), 0, UNIT
    )
    if segment is None:
        pipe.send({"error": "the memory cannot be borrowed"})
        return
    pages = torch.zeros(LAYERS, COUNT + 1, UNIT // LAYERS, dtype=torch.uint8, device="cuda")
    tier = by_lanes([list(pages)], staging(), lambda: None, [segment])
    units = int32(range(1, COUNT + 1))

    def bring(number: int) -> float:
        begun = time.perf_counter()
        with torch.inference_mode():
            tier.begin(Copy(number, "prefill", "device", [units], [units], [b""]))
            while not tier.ended():
                pass
        return time.perf_counter() - begun

    seconds = [round(bring(number), 5) for number in range(1, 6)]
    same = int(pages[:, COUNT].sum(dtype=torch.int64)) == int(last)
    fields = {"bytes": COUNT * UNIT, "s": seconds, "gb_s": round(COUNT * UNIT / min(seconds) / 1e9, 1)}
    plain = plain_copy(torch, np, segment, backend)
    pipe.send(fields | {"same": same, "plain_gb_s": plain, "access": "cuda_ipc" if handle else "pinned"})


def plain_copy(torch: Any, np: Any, segment: Any, backend: str) -> float:
    """GB a second of one copy of a GiB that is read at once."""
    if backend == "cuda_ipc":
        source = segment.bytes.flatten()[: 1 << 30]
    else:
        source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(4):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        there.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, (1 << 30) / (time.perf_counter() - begun) / 1e9)
    return round(best, 1)


# --- servers


@contextlib.contextmanager
def pair(args: argparse.Namespace, model: Path, backend: str, more: str = "") -> Iterator[tuple[str, str]]:
    """URLs of a prefill and a decode server that start together."""
    tokenizer = args.tokenizers / model.name
    if not tokenizer.exists():
        write_tokenizer(model, tokenizer)
    kv, made = free_port(), []
    roles = ("prefill", f"--kv-transfer-port {kv}"), ("decode", f"--prefill-url tcp://127.0.0.1:{kv}")
    for (role, own), gpu in zip(roles, args.gpus.split(",")):
        port = free_port()
        command = [sys.executable, "-m", "sgla", "serve", "--model", str(model), "--port", str(port)]
        command += ["--load-format", "dummy", "--tokenizer", str(tokenizer), "--device", args.device]
        command += ["--role", role, "--kv-transfer-backend", backend, *own.split(), *more.split()]
        command += FLAGS
        log = args.logs / f"{role}-{backend}-{model.name}.log"
        server = Server(
            [*command, *args.server_args.split()],
            f"http://127.0.0.1:{port}",
            "/health/ready",
            log,
            env={"CUDA_VISIBLE_DEVICES": gpu},
        )
        made.append(server.start())
    with made[0] as first, made[1] as second:
        meet(second.url)
        yield first.url, second.url


def meet(url: str) -> None:
    """Wait until a prompt comes from the prefill server."""
    for i in range(60):
        ask(url, tokens(10_000 + i, 100), 1)
        if any(value for name, value in metrics(url).items() if "tier_loaded_tokens" in name):
            return
        time.sleep(0.5)
    raise SystemExit("the two servers do not meet")


def target_of(url: str, **extra: Any) -> load.Target:
    with urllib.request.urlopen(url + "/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    return load.Target(url=url, model=model, extra=FIELDS | extra)


def ask(url: str, prompt: list[int], count: int) -> load.Record:
    turn = workloads.Turn(prompt, count)
    records, _ = asyncio.run(load.run(target_of(url), [[turn]], 1))
    if records[0].error:
        raise SystemExit(records[0].error)
    return records[0]


def first_token(url: str, prompt: list[int]) -> float:
    record = ask(url, prompt, 8)
    return round(record.chunks[0] - record.start, 4)


def tokens(seed: int, count: int) -> list[int]:
    return workloads.tokens(random.Random(seed), count)


def metrics(url: str) -> dict[str, float]:
    """Of tiers and transfers."""
    with urllib.request.urlopen(url + "/metrics") as answer:
        told = [line.rpartition(" ") for line in answer.read().decode().splitlines() if line[:1] != "#"]
    return {name: float(value) for name, _, value in told if "tier_" in name or "transfer" in name}


def long_prompts(args: argparse.Namespace, first: str, second: str) -> dict[str, Any]:
    """Seconds to the first token. ``own``: the decode server has all; ``brought``: the prefill server has;
    ``apart``: it computes; ``alone``: it answers."""
    found: dict[str, list[float]] = {name: [] for name in ("alone", "apart", "own", "brought")}
    for i in range(4):
        prompts = [tokens(100 + 9 * i + j, args.long) for j in range(2)]
        found["alone"].append(first_token(first, prompts[0]))
        found["brought"].append(first_token(second, prompts[0] + [7] * 16))
        found["own"].append(first_token(second, prompts[0] + [8] * 16))
        found["apart"].append(first_token(second, prompts[1]))
    shown = {f"{name}_s": values[1:] for name, values in found.items()}
    link_s = min(found["brought"]) - min(found["own"])
    layout = json.loads((args.model / "config.json").read_text())
    token = 4 * layout["num_hidden_layers"] * layout["num_key_value_heads"] * layout["head_dim"]
    rate = round(args.long * token / max(link_s, 1e-6) / 1e9, 1)
    return shown | {"tokens": args.long, "bytes": args.long * token, "brought_gb_s": rate}


def servers(args: argparse.Namespace, only_w6: bool = False) -> None:
    backend = "cuda_ipc" if args.device == "cuda" else "auto"
    with pair(args, args.model, backend) as (first, second):
        for url in (first, second):
            ask(url, tokens(1, 300), 8)
        if not only_w6:
            emit(args, "long", {"backend": backend} | long_prompts(args, first, second))
        emit(args, "W6", {"servers": "both"} | w6(args, second))
        for kind, fields in step_times(second).items():
            emit(args, "steps", {"servers": "both", "kind": kind} | fields)
        if not only_w6:
            emit(args, "W6", {"servers": "alone"} | w6(args, first))
            emit(args, "metrics", metrics(second))


def w6_of_both(args: argparse.Namespace) -> None:
    servers(args, only_w6=True)


def w6(args: argparse.Namespace, url: str) -> dict[str, Any]:
    sessions = workloads.random_sessions(random.Random(url), args.requests, 1024, 256)
    warm = workloads.random_sessions(random.Random(0), 64, 1024, 32)
    clients.run(target_of(url), warm, 64)
    numbers = report.summarize(*clients.run(target_of(url), sessions, 64))
    return numbers | {"p99_of_median": round(numbers["itl_p99_ms"] / max(numbers["itl_ms"], 1e-6), 3)}


def equal(args: argparse.Namespace) -> None:
    """Prompts of many lengths at once, of each server in its own order."""
    backend = "cuda_ipc" if args.device == "cuda" else "auto"
    prompts = [tokens(i, 40 + 317 * i) for i in range(16)]
    with pair(args, args.small, backend, "--deterministic") as urls:
        texts = []
        for url in urls:
            sessions = [[workloads.Turn(prompt, 64)] for prompt in prompts]
            records, _ = asyncio.run(load.run(target_of(url), sessions, 16))
            texts.append([record.error or record.text for record in records])
        told = metrics(urls[1])
    alike = sum(a == b for a, b in zip(*texts))
    emit(args, "equal", {"small": str(args.small), "texts": len(prompts), "alike": alike, "metrics": told})


def transports(args: argparse.Namespace) -> None:
    for backend in args.backends.split(","):
        with pair(args, args.model, backend) as (first, second):
            emit(args, "long", {"backend": backend} | long_prompts(args, first, second))


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "link": link,
    "servers": servers,
    "W6": w6_of_both,
    "equal": equal,
    "transports": transports,
}

if __name__ == "__main__":
    main()
