"""Throughput of one batch with and without a grammar: the same prompts, the same number of output tokens.

    python bench/grammar.py --model demo [--batch 32] [--tokens 128] [--repeat 3] [--schema names]
    python bench/grammar.py --model bench/models/qwen3-8b --extra '{"device": "cuda", "load_format": "dummy", "tokenizer": "FOLDER"}'

The schema is a list of records that is longer than any output here, so that every request runs to
``--tokens``. The records of ``--schema names`` have long names and short values: most tokens are forced. Both
kinds are measured in turn. Prints one JSON line with medians.

``--others``: a batch of which one request has a schema, known or new, and is the first to end: what the other
requests lose to a schema that is compiled meanwhile.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import platform
import time
from statistics import median
from typing import Any

import lines
from msgspec.structs import replace

import sgla
from sgla import Engine, SamplingParams
from sgla.messages import Grammar

RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["river", "lake", "sea"]},
        "length": {"type": "integer", "minimum": 0, "maximum": 100000},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "deep": {"type": "boolean"},
    },
    "required": ["name", "kind", "length", "tags", "deep"],
    "additionalProperties": False,
}
NAMES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name_of_the_country": {"type": "string", "maxLength": 20},
        "length_in_kilometres": {"type": "integer", "minimum": 0, "maximum": 10000},
        "is_navigable_by_ships": {"type": "boolean"},
        "average_discharge_at_mouth": {"type": "integer", "minimum": 0, "maximum": 10000},
    },
    "additionalProperties": False,
}
NAMES["required"] = list(NAMES["properties"])
RECORDS = {"records": RECORD, "names": NAMES}
PROMPT = "Here is a long list of waters number {} as JSON:\n"


def run(engine: Engine, batch: int, tokens: int, temperature: float, grammar: Grammar | None) -> float:
    """Output tokens a second."""
    params = SamplingParams(
        max_tokens=tokens, temperature=temperature, ignore_eos=True, seed=1, grammar=grammar
    )
    began = time.perf_counter()
    outputs = engine.generate([PROMPT.format(i) for i in range(batch)], params)
    seconds = time.perf_counter() - began
    made = sum(len(output.tokens) for output in outputs)
    assert made == batch * tokens, f"{made} tokens instead of {batch * tokens}"
    return made / seconds


def others(engine: Engine, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of such batches by turns, medians: without a schema, with a known and with a new one."""

    def batch(number: int | None) -> float:
        params = [
            SamplingParams(max_tokens=args.tokens, temperature=args.temperature, ignore_eos=True)
        ] * args.batch
        if number is not None:
            record = RECORD | {"properties": RECORD["properties"] | {f"field_{number}": {"type": "string"}}}
            schema = {"type": "array", "items": record, "minItems": 100}
            grammar = Grammar(kind="json_schema", text=json.dumps(schema))
            params[-1] = replace(params[-1], max_tokens=args.tokens // 3, grammar=grammar)
        began = time.perf_counter()
        engine.generate([PROMPT.format(i) for i in range(args.batch)], params, progress=False)
        return time.perf_counter() - began

    batch(0)
    found: dict[str, list[float]] = {"none": [], "known": [], "new": []}
    for turn in range(args.repeat):
        for kind, number in (("none", None), ("known", 0), ("new", turn + 1)):
            found[kind].append(batch(number))
    return {kind: round(median(seconds), 3) for kind, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--schema", choices=RECORDS, default="records")
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--extra", type=json.loads, default={}, help="settings of the engine")
    args = parser.parse_args()
    schema = {"type": "array", "items": RECORDS[args.schema], "minItems": 100}
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    found: dict[str, list[float]] = {"free": [], "grammar": []}
    steps = forced = 0
    with Engine(args.model, **args.extra) as engine:
        facts = engine._ready().ingress.facts
        for kind in (None, grammar):
            run(engine, args.batch, 8, args.temperature, kind)
        if args.others:
            seconds = others(engine, args)
            ratio = round(seconds["new"] / seconds["known"], 3)
            what = {"bench": "grammar", "model": args.model, "batch": args.batch, "tokens": args.tokens}
            return lines.emit(what | {"repeat": args.repeat, "others": seconds, "ratio": ratio})
        for _ in range(args.repeat):
            found["free"].append(run(engine, args.batch, args.tokens, args.temperature, None))
            before = engine.stats()
            found["grammar"].append(run(engine, args.batch, args.tokens, args.temperature, grammar))
            after = engine.stats()
            steps, forced = after.steps - before.steps, after.forced_tokens - before.forced_tokens
    print(
        lines.line(
            {
                "bench": "grammar",
                "version": sgla.__version__,
                "machine": platform.processor() or platform.machine(),
                "device": facts.device if facts else None,
                "model": args.model,
                "batch": args.batch,
                "tokens": args.tokens,
                "temperature": args.temperature,
                "schema": args.schema,
                "repeat": args.repeat,
                "free_tok_s": round(median(found["free"]), 1),
                "grammar_tok_s": round(median(found["grammar"]), 1),
                "ratio": round(median(g / f for f, g in zip(found["free"], found["grammar"])), 3),
                "grammar_steps": steps,
                "forced_tokens": forced,
                "step_ms": round(1e3 * (after.step_seconds - before.step_seconds) / steps, 2),
                "gap_ms": round(1e3 * (after.gap_seconds - before.gap_seconds) / steps, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
