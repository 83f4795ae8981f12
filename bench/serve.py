"""Workloads over HTTP, for sgla and its peers. One JSON object a line, medians of ``--repeat`` runs.

    python bench/serve.py --engine sgla --model demo --server-args "--quantization int8"
    python bench/serve.py --engine llamacpp --model model.gguf --python peer-venv/bin/python
    python bench/serve.py --engine url --url http://127.0.0.1:8000 --only single c8
    python bench/serve.py --only W6 --model bench/models/qwen3-8b --dummy TOKENIZER --server-args "--device cuda --context-length 8192"
    python bench/serve.py --only W6 --model bench/models/qwen3-8b --dummy TOKENIZER --engine vllm --python peer-venv/bin/python
    python bench/serve.py --only W9 --model bench/models/qwen3-8b --dummy TOKENIZER --beside "--engine vllm --python peer-venv/bin/python"

All workloads but W7 stream ``/v1/completions``; all ignore EOS. Prompts are new in every run, so no prefix is
cached before it. W6 to W10 are for a GPU; the others are for a CPU and run if ``--only`` names none. W7 to W10
are those of ``users.py``: agents, long documents, chats that arrive, many kinds of requests. vllm and sglang
have not been run with this script on a GPU. ``--beside``: two servers by turns (``turns.py``). ``--dummy`` serves a folder that has only config.json, with random weights.
Its tokens have to make text, since one without makes no chunk and two steps would look like one: so the
tokenizer in the folder TOKENIZER, of any model or of ``words.py``, is given a made-up word for each further id.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import lines
import turns
import users
from process import Server, free_port

from sgla.bench import load, report, workloads
from sgla.cli.bench import describe
from sgla.observe.machine import detect


@dataclass(frozen=True)
class Workload:
    """``requests``, each ``input_len`` own tokens after ``prefix_len`` common ones, ``output_len`` out.
    ``concurrency`` at a time, or all at once. ``warm_up``: tokens out of as many requests as run at a time,
    before the first run."""

    requests: int
    input_len: int
    output_len: int
    prefix_len: int = 0
    concurrency: int | None = None
    warm_up: int = 0

    @property
    def at_once(self) -> int:
        return self.concurrency or self.requests

    def sessions(self, seed: int, text: bool) -> list[workloads.Session]:
        rng = random.Random(f"{self} {seed}")
        return workloads.shared_prefix_sessions(
            rng, self.requests, self.prefix_len, self.input_len, self.output_len, text
        )


CPU = {
    "single": Workload(1, 64, 128),
    "c8": Workload(8, 64, 64),
    "c32": Workload(32, 64, 64),
    "prefill-1x1024": Workload(1, 1024, 1),
    "prefill-8x512": Workload(8, 512, 1),
    "shared-32x768+32": Workload(32, 32, 16, prefix_len=768),
}
CONTEXT = 8192  # of a server that does not tell
WORKLOADS = CPU | {"W6": Workload(256, 1024, 256, concurrency=64, warm_up=32)}


@dataclass(frozen=True)
class Engine:
    """How to start a server: ``{python} {model} {port} {threads}`` are filled in. ``dummy``: what to add for
    random weights and the ``{tokenizer}`` of another model."""

    command: str
    ready: str
    package: str
    dummy: str = ""
    text: bool = False  # takes prompts as text only


ENGINES = {
    "sgla": Engine(
        "{python} -m sgla serve --model {model} --port {port}",
        "/health/ready",
        "sgla",
        dummy="--load-format dummy --tokenizer {tokenizer}",
    ),
    "vllm": Engine(
        "{python} -m vllm.entrypoints.openai.api_server --model {model} --port {port} --dtype bfloat16 "
        "--max-model-len 8192",
        "/health",
        "vllm",
        dummy="--load-format dummy --tokenizer {tokenizer}",
    ),
    "sglang": Engine(
        "{python} -m sglang.launch_server --model-path {model} --port {port} --dtype bfloat16 "
        "--context-length 8192",
        "/health",
        "sglang",
        dummy="--load-format dummy --tokenizer-path {tokenizer}",
    ),
    "llamacpp": Engine(
        "{python} -m llama_cpp.server --model {model} --port {port} --n_threads {threads} --n_ctx 8192",
        "/v1/models",
        "llama_cpp_python",
        text=True,
    ),
}


def main() -> None:
    args = parse(sys.argv[1:])
    if args.beside:
        turns.measure(args, lambda side: [sys.executable, __file__, *side])
        return
    if args.dummy and (args.engine == "url" or not ENGINES[args.engine].dummy):
        raise SystemExit(f"--dummy is not for --engine {args.engine}: it cannot serve random weights")
    if args.engine == "url":
        facts = asyncio.run(describe(args.url))
        target = target_of(args.url, facts["model"])
        for line in measure(args, target, facts["context"]):
            emit(args, facts["engine"], facts["version"], line)
        return
    engine, url, log = ENGINES[args.engine], f"http://127.0.0.1:{free_port()}", Path(args.log)
    with tempfile.TemporaryDirectory() as folder:
        command = (engine.command + (f" {engine.dummy}" if args.dummy else "")).format(
            python=args.python,
            model=args.model,
            port=url.rpartition(":")[2],
            threads=args.threads,
            tokenizer=folder,
        )
        if args.dummy:
            extend_tokenizer(args.dummy, Path(args.model), Path(folder))
        with Server(
            [*shlex.split(command), *shlex.split(args.server_args)], url, engine.ready, log
        ) as server:
            facts = asyncio.run(describe(url))
            version = version_of(args.python, engine.package) or facts["version"]
            emit(args, args.engine, version, {"w": "start", "s": round(server.ready_s, 2)})
            target, args.text = target_of(url, facts["model"]), args.text or engine.text
            for line in measure(args, target, facts["context"]):
                emit(args, args.engine, version, line)
    emit(args, args.engine, version, {"w": "memory", "peak_rss_mb": round(server.peak_rss / 1e6)})


def extend_tokenizer(source: Path, model: Path, folder: Path) -> None:
    """Put a copy of the tokenizer in ``source`` into ``folder``, with a word for every id of ``model``."""
    for path in source.glob("*token*.json"):
        shutil.copy(path, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    if not isinstance(words, dict):
        raise SystemExit("--dummy needs a tokenizer whose vocabulary has names and ids (BPE or WordPiece)")
    # an added token keeps its id behind a longer vocabulary only if it stands in there, too
    words |= {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    known = max(words.values()) + 1
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words |= {f"xq{i}": i for i in range(known, size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=[*ENGINES, "url"], default="sgla")
    parser.add_argument("--model", default="demo", help="as the engine takes it")
    parser.add_argument("--dummy", type=Path, metavar="TOKENIZER", help="random weights; see above")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="with --engine url")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the engine")
    parser.add_argument(
        "--threads",
        type=int,
        default=detect().cores,
        help="of llamacpp; the others choose, or --server-args says",
    )
    parser.add_argument("--server-args", default="", help="more arguments for the server")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[*WORKLOADS, *users.WORKLOADS], default=list(CPU))
    parser.add_argument("--text", action="store_true", help="send text even if token ids are understood")
    parser.add_argument(
        "--log", default=os.path.join(tempfile.gettempdir(), "bench-server.log"), help="the server's output"
    )
    users.add_arguments(parser)
    turns.add_arguments(parser)
    return parser.parse_args(arguments)


def target_of(url: str, model: str) -> load.Target:
    extra = {"temperature": 0.0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    return load.Target(url=url, model=model, extra=extra)


def measure(
    args: argparse.Namespace, target: load.Target, context: int | None
) -> Iterator[dict[str, object]]:
    """The lines of all workloads, after one request that warms the server up. ``context``: the server's, as
    far as it tells."""
    text = args.text
    once(target, Workload(1, 32, 8), seed=999, text=text)
    for name in args.only:
        if name in users.WORKLOADS:
            yield from users.WORKLOADS[name](args, target, context or CONTEXT)
            continue
        workload = WORKLOADS[name]
        if workload.warm_up:
            first = replace(workload, requests=workload.at_once, output_len=workload.warm_up)
            once(target, first, seed=999, text=text)
        runs = [once(target, workload, seed, text) for seed in range(args.repeat)]
        yield {"w": name, "concurrency": workload.at_once, "repeat": args.repeat} | report.median_of(runs)


def once(target: load.Target, workload: Workload, seed: int, text: bool) -> dict[str, object]:
    sessions = workload.sessions(seed, text)
    numbers = report.summarize(*asyncio.run(load.run(target, sessions, workload.at_once)))
    if numbers["errors"]:
        raise SystemExit(f"requests failed: {numbers['first_error']}")
    return numbers


def version_of(python: str, package: str) -> str | None:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    with contextlib.suppress(subprocess.CalledProcessError):
        return subprocess.check_output([python, "-c", code], text=True, stderr=subprocess.DEVNULL).strip()
    return None  # it is run from a working tree


def emit(args: argparse.Namespace, engine: str, version: str, line: dict[str, object]) -> None:
    head = {
        "engine": engine,
        "version": version,
        "machine": detect().label(),
        "model": args.model,
        "args": args.server_args,
    }
    print(lines.line(head | line), flush=True)


if __name__ == "__main__":
    main()
