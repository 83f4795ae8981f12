"""Embeddings over HTTP, and by transformers and sentence-transformers in a process without a server. One JSON
object a line, medians of ``--repeat`` runs.

    python bench/embeddings.py --model minilm --server-args "--quantization int8"
    python bench/embeddings.py --model FOLDER --engine transformers
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lines
from process import Server, free_port

from sgla.observe.machine import detect

WORDS = [
    "river",
    "lake",
    "water",
    "stone",
    "bridge",
    "forest",
    "mountain",
    "valley",
    "city",
    "harbour",
    "market",
    "road",
]
# name -> texts in one request, words of the shortest and of the longest one
WORKLOADS = {
    "one short": (1, 8, 8),
    "32 short": (32, 4, 16),
    "32 mixed": (32, 4, 180),
    "256 short": (256, 4, 16),
}
Embed = Callable[[list[str]], int]  # -> tokens, or 0 where they are not counted


def texts(count: int, low: int, high: int, seed: int) -> list[str]:
    rng = random.Random(f"{count} {low} {high} {seed}")
    return [" ".join(rng.choices(WORDS, k=rng.randint(low, high))) for _ in range(count)]


def over_http(port: int) -> Embed:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def embed(batch: list[str]) -> int:
        body = json.dumps({"input": batch, "encoding_format": "base64"})
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        tokens: int = answer["usage"]["prompt_tokens"]
        return tokens

    return embed


def by_transformers(model: str) -> Embed:
    """Mean pooling of a padded batch."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, body = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()

    @torch.inference_mode()
    def embed(batch: list[str]) -> int:
        inputs = tokenizer(batch, padding=True, truncation=True, max_length=256, return_tensors="pt")
        mask = inputs["attention_mask"][..., None]
        hidden = body(**inputs).last_hidden_state
        torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
        return int(mask.sum())

    return embed


def by_sentence_transformers(model: str) -> Embed:
    """In batches of 32 by length, its default."""
    from sentence_transformers import SentenceTransformer

    body: Any = SentenceTransformer(model, device="cpu")

    def embed(batch: list[str]) -> int:
        body.encode(batch, show_progress_bar=False)
        return 0

    return embed


def measure(embed: Embed, repeat: int) -> list[dict[str, Any]]:
    lines = []
    for name, (count, low, high) in WORKLOADS.items():
        embed(texts(count, low, high, 0))
        times, tokens = [], []
        for seed in range(1, repeat + 1):
            batch = texts(count, low, high, seed)
            began = time.perf_counter()
            tokens.append(embed(batch))
            times.append(time.perf_counter() - began)
        median = statistics.median(times)
        line = {"w": f"embed {name}", "repeat": repeat, "ms": round(1000 * median, 2)}
        line |= {"best_ms": round(1000 * min(times), 2), "texts_s": round(count / median, 1)}
        lines.append(line | {"tokens": round(statistics.mean(tokens))})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["sgla", "transformers", "sentence-transformers"], default="sgla")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--server-args", default="")
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    head = {"engine": args.engine, "version": version(args.engine), "machine": detect().label()}
    head |= {"model": Path(args.model).name, "args": args.server_args}
    if args.engine == "sgla":
        port = free_port()
        command = [sys.executable, "-m", "sgla", "serve", args.model, "--port", str(port)]
        with tempfile.TemporaryDirectory() as folder:
            server = Server(
                [*command, *shlex.split(args.server_args)],
                f"http://127.0.0.1:{port}",
                "/health/ready",
                Path(folder) / "log",
            )
            with server:
                measured = measure(over_http(port), args.repeat)
    elif args.engine == "transformers":
        measured = measure(by_transformers(args.model), args.repeat)
    else:
        measured = measure(by_sentence_transformers(args.model), args.repeat)
    for line in measured:
        print(lines.line(head | line), flush=True)


if __name__ == "__main__":
    main()
