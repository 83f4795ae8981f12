"""W7 to W10 over HTTP: agents, long documents, chats that arrive, requests of many kinds (``traffic.py``).

Each function gives the lines of one workload; in each, numbers are medians of the runs, and ``limit_`` is
what an H200 needs at least, where ``--model`` is a folder with config.json.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sessions
import traffic
from limits import Limits

from sgla.bench import load, report, workloads
from sgla.bench.load import Record, Target
from sgla.clock import now

Line = dict[str, Any]
Runs = Sequence[Line]
GOOD = 0.9  # of the requests, for a rate to count as borne
CROWD = 64  # W10: requests at a time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--agents", type=int, default=16, help="of W7")
    parser.add_argument("--agent-turns", type=int, default=30, help="of W7")
    parser.add_argument("--agent-tokens", type=int, default=60_000, help="of W7: the longest prompt")
    parser.add_argument("--gap", type=float, default=2.0, help="of W7: seconds of a tool, on average")
    parser.add_argument("--plain", action="store_true", help="W7: no tools")
    parser.add_argument("--document-tokens", default="", help="of W8: their lengths")
    parser.add_argument("--rates", default="1,2,4,8,16,32,64", help="of W9: requests a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of W9: how long they come, at each rate")
    parser.add_argument("--kinds", type=int, default=256, help="of W10: requests")


def limits_of(args: argparse.Namespace) -> Limits | None:
    """Of ``--model`` with the settings of the server that change what it reads."""
    if not Path(args.model, "config.json").is_file():
        return None
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    settings, _ = parser.parse_known_args(shlex.split(args.server_args))
    return Limits.of(args.model, vars(settings))


def agents(args: argparse.Namespace, target: Target, context: int) -> Iterator[Line]:
    """W7: ``bench/sessions.py agents``."""
    limits, runs = limits_of(args), []
    chat = Target(url=target.url, model=target.model, api="chat", key=target.key, extra=target.extra)
    for seed in range(args.repeat):
        told = argparse.Namespace(
            seed=seed, agents=args.agents, turns=args.agent_turns, gap=args.gap, plain=args.plain,
            most=min(args.agent_tokens, context - 2 * traffic.ANSWER), system=traffic.SYSTEM,
            question=traffic.QUESTION, answer=traffic.ANSWER,
        )  # fmt: skip
        began = now()
        talks = asyncio.run(sessions.agents(told, chat))
        run = sessions.numbers(talks, now() - began, args.plain)
        if limits:
            least = max(_least(limits, talk.records, args.gap) for talk in talks)
            run["limit_turns_s"] = round(run["requests"] / least, 3)
        runs.append(run)
    yield {"w": "W7", "repeat": args.repeat, **checked(runs)}


def _least(limits: Limits, records: Sequence[Record], gap: float) -> float:
    """Seconds of one agent's turns on a server of its own that loses no prefix."""
    spent, before = gap * (len(records) + 1), 0
    for record in records:
        known = min(before, record.prompt_tokens)
        spent += limits.document(record.prompt_tokens, known)
        spent += record.completion_tokens * limits.step([record.prompt_tokens])
        before = record.prompt_tokens
    return spent


def documents(args: argparse.Namespace, target: Target, context: int) -> Iterator[Line]:
    """W8: one at a time, and eight."""
    limits = limits_of(args)
    lengths = [int(n) for n in args.document_tokens.split(",") if n] or traffic.DOCUMENTS
    for tokens in traffic.documents(context, lengths):
        for size in (1, 8):
            runs = []
            for seed in range(args.repeat):
                draw = random.Random(f"{tokens} {size} {seed}")
                asked = workloads.random_sessions(draw, size, tokens, traffic.DOCUMENT_OUT, text=args.text)
                runs.append(report.summarize(*asyncio.run(load.run(target, asked, size))))
            line = {"w": "W8", "tokens": tokens, "bs": size, "repeat": args.repeat, **checked(runs)}
            if limits:
                step = limits.step([tokens + traffic.DOCUMENT_OUT // 2] * size)
                line["limit_in_tok_s"] = round(tokens / limits.document(tokens), 1)
                line["limit_ms_per_tok"] = round(1e3 * step, 3)
            yield line


def arrivals(args: argparse.Namespace, target: Target, context: int) -> Iterator[Line]:
    """W9: ``goodput`` is the rate times the share of requests that keep both bounds. The last line has the
    most of all rates, and the highest rate at which nine in ten do."""
    limits, best, borne = limits_of(args), 0.0, 0.0
    for rate in map(float, args.rates.split(",")):
        runs, lengths = [], []
        for seed in range(args.repeat):
            drawn = traffic.chats(seed, max(20, round(rate * args.seconds)))
            lengths += drawn
            runs.append(_arrive(target, drawn, rate, seed, args.text))
        line = {"w": "W9", "rate": rate, "repeat": args.repeat, **checked(runs)}
        best, borne = max(best, line["goodput"]), rate if line["share"] >= GOOD else borne
        if limits:
            tokens, outputs = (sum(column) / len(lengths) for column in zip(*lengths))
            line["limit_rate"] = round(limits.rate(tokens, outputs, traffic.ITL_MS / 1e3), 1)
        yield line
    yield {"w": "W9 best", "goodput": best, "borne": borne}


def _arrive(target: Target, drawn: Sequence[tuple[int, int]], rate: float, seed: int, text: bool) -> Line:
    draw = random.Random(f"W9 {rate} {seed}")
    make = workloads.words if text else workloads.tokens
    asked = [[workloads.Turn(make(draw, n), out)] for n, out in drawn]
    records, seconds = asyncio.run(load.run(target, asked, len(asked), rate, seed))
    whole = [record for record in records if record.error is None]
    first = [1e3 * (record.chunks[0] - record.start) for record in whole]
    gaps = [1e3 * (r.chunks[-1] - r.chunks[0]) / max(1, r.completion_tokens - 1) for r in whole]
    share = traffic.good(first, gaps) / len(records)
    numbers = report.summarize(records, seconds)
    return {**numbers, "share": round(share, 4), "goodput": round(share * rate, 3)}


def kinds(args: argparse.Namespace, target: Target, context: int) -> Iterator[Line]:
    """W10: 512 tokens in, 128 out. ``others_``: of the requests without a schema."""
    limits, runs, count = limits_of(args), [], args.kinds
    for seed in range(args.repeat):
        draw = random.Random(f"W10 {seed}")
        asked = workloads.random_sessions(draw, count, 512, 128, text=args.text)
        for i, (session, fields) in enumerate(zip(asked, traffic.settings(count))):
            session[0].extra = fields if i % 4 else fields | constrained(seed * count + i)
        records, seconds = asyncio.run(load.run(target, asked, CROWD))
        others = report.summarize([r for i, r in enumerate(records) if i % 4], seconds)
        more = {f"others_{name}": others[name] for name in ("ttft_ms", "itl_ms", "itl_p99_ms")}
        runs.append(report.summarize(records, seconds) | more)
    line = {"w": "W10", "concurrency": CROWD, "repeat": args.repeat, **checked(runs)}
    if limits:
        inputs, outputs = [512] * CROWD, [128] * CROWD
        line["limit_out_tok_s"] = round(sum(outputs) / limits.crowd(inputs, outputs), 1)
    yield line


def constrained(number: int) -> Line:
    form = {"name": f"records_{number}", "schema": traffic.schema(number)}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def checked(runs: Runs) -> Line:
    """Medians of what each run has. Raises SystemExit."""
    for run in runs:
        if run["errors"]:
            raise SystemExit(f"requests failed: {run['first_error']}")
    return report.median_of(runs)


WORKLOADS: dict[str, Callable[[argparse.Namespace, Target, int], Iterator[Line]]] = {
    "W7": agents,
    "W8": documents,
    "W9": arrivals,
    "W10": kinds,
}
