"""Decode steps beside copies of prefixes between a GPU and the host's memory: one JSON line for each kind.

    python bench/beside.py [--model bench/models/qwen3-8b] [--streams 16] [--tokens 24000] [--repeat 12]

Streams decode while long prompts come by turns, each of which pushes the one before from the KV cache, so
that its prefix comes from the host's memory; then ``--fresh`` others, of which what they leave goes there.
``ratio``: how much longer decode steps beside copies take than others like them, at the median and at p90.
Weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import lines
from process import Server, free_port
from step_times import FLAGS, against_alone, step_times, steps_of
from words import write_tokenizer

from sgla.bench import load, workloads

PAUSE = 0.1  # seconds behind a prompt, in which streams decode beside nothing
FIELDS = {"temperature": 0.0, "ignore_eos": True, "stream_options": {"include_usage": True}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("bench/models/qwen3-8b"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--outputs", type=int, default=2500, help="of a stream")
    parser.add_argument("--tokens", type=int, default=24000, help="of a long prompt")
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--fresh", type=int, default=6, help="prompts that nobody has had before")
    parser.add_argument("--tier", default="--kv-host-bytes 40G")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "beside.log")
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    room = args.streams * (args.outputs + 600) + args.tokens * 3 // 2
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(args.model, Path(folder) / "words")
        port = free_port()
        command = [sys.executable, "-m", "sgla", "serve", "--model", str(args.model), "--port", str(port)]
        command += ["--served-model-name", "m", "--load-format", "dummy", "--device", args.device, *FLAGS]
        command += ["--tokenizer", str(Path(folder) / "words"), "--kv-cache-bytes", str(room * token)]
        command += ["--context-length", str(args.tokens + 4000), *args.tier.split()]
        with Server(command, f"http://127.0.0.1:{port}", "/health/ready", args.log) as server:
            play(args, server.url)
            found, ratios = step_times(server.url), against_alone(steps_of(server.url))
    for kind, fields in found.items():
        lines.emit({"bench": "beside", "model": str(args.model), "kind": kind} | fields)
    lines.emit({"bench": "beside", "model": str(args.model), "kind": "ratio"} | ratios)


def play(args: argparse.Namespace, url: str) -> None:
    target = load.Target(url=url, model="m", extra=FIELDS)
    draw = random.Random(0)
    streams = [[workloads.Turn(workloads.tokens(draw, 300), args.outputs)] for _ in range(args.streams)]
    prompts = [workloads.tokens(draw, args.tokens) for _ in range(4)]

    def ask(sessions: Any, at_once: int) -> None:
        records, _ = asyncio.run(load.run(target, sessions, at_once))
        if errors := [record.error for record in records if record.error]:
            raise SystemExit(errors[0])

    for prompt in prompts:
        ask([[workloads.Turn(prompt, 1)]], 1)
    running = threading.Thread(target=ask, args=(streams, args.streams))
    running.start()
    for i in range(args.repeat):
        ask([[workloads.Turn([*prompts[i % 4], *workloads.tokens(draw, 8)], 1)]], 1)
        time.sleep(PAUSE)
    for _ in range(args.fresh):
        ask([[workloads.Turn(workloads.tokens(draw, args.tokens), 1)]], 1)
        time.sleep(PAUSE)
    running.join()


if __name__ == "__main__":
    main()
