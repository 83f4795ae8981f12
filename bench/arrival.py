"""A long prompt that arrives while others are answered: one JSON line a run.

    python bench/arrival.py --model bench/models/llama-3.1-8b --tokens 100000 --streams 32 [--repeat 3]

Seconds to the first token of a prompt of ``--tokens``, alone, and beside ``--streams`` that go on behind 512
tokens each; gaps between the tokens of these while the prompt is read, and while nothing is. Steps are
limited by the same inter-token target as those of a server. Weights are random. ``--steps FILE`` gets a
line for each step that reads a prompt beside streams: when its result came, its tokens and the pairs of its
attention, milliseconds predicted and taken, and for how many before it the device had nothing to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import lines

from sgla import Engine, SamplingParams
from sgla.bench.report import percentile
from sgla.clock import now
from sgla.messages import Delta, StepResult
from sgla.sched.core import Core

BEFORE = 2.0  # seconds that the streams go on before the prompt comes
LEAD = 512  # tokens of their prompts


@dataclass
class Streams:
    """``came``: when each stream's tokens did."""

    came: list[list[float]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def longest(self, begin: float, end: float, count: int = 12) -> list[tuple[float, float]]:
        """Of the first stream: seconds behind ``begin`` at which its longest gaps ended, and milliseconds."""
        found = [(b - begin, 1e3 * (b - a)) for a, b in pairwise(self.came[0]) if begin <= b <= end]
        longest = sorted(found, key=lambda gap: -gap[1])[:count]
        return [(round(at, 3), round(ms, 1)) for at, ms in sorted(longest)]

    def gaps(self, begin: float, end: float) -> list[float]:
        """Milliseconds between tokens, of those that came in this time."""
        return [1e3 * (b - a) for times in self.came for a, b in pairwise(times) if begin <= b <= end]


class Steps(list[tuple[float | int, ...]]):
    """What the scheduler hears of its steps from now on."""

    def __init__(self) -> None:
        retire = Core.retire

        def retired(core: Core, result: StepResult, now: float) -> list[Delta]:
            step = core._queues.flights[0]
            if step.mixed:
                taken = (core._costs.predict(step.tokens, step.work), result.seconds, result.gap)
                self.append((round(now, 4), step.tokens, step.work, *(round(1e3 * x, 2) for x in taken)))
            return retire(core, result, now)

        Core.retire = retired  # type: ignore[assignment, method-assign]


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.draw = args, random.Random(1)
        settings = {"load_format": "dummy", "device": "cuda", "itl_target_ms": None} | json.loads(args.extra)
        self.engine = Engine(args.model, context_length=args.tokens + 64, **settings)

    def prompt(self, tokens: int) -> list[int]:
        return [self.draw.randrange(self.args.vocab) for _ in range(tokens)]

    async def first_token(self, prompt: list[int]) -> tuple[float, float]:
        """When the prompt was sent, and when its token was there."""
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        begun = now()
        async for _ in self.engine.astream(prompt, params):
            pass
        return begun, now()

    async def start(self, streams: Streams, count: int) -> None:
        params = SamplingParams(max_tokens=self.args.tokens - LEAD, temperature=0, ignore_eos=True)

        async def follow(prompt: list[int], times: list[float]) -> None:
            async for event in self.engine.astream(prompt, params):
                times += [now()] if event.tokens else []

        for _ in range(count):
            streams.came.append([])
            work = follow(self.prompt(LEAD), streams.came[-1])
            streams.tasks.append(asyncio.create_task(work))
        while not all(streams.came):
            await asyncio.sleep(0.01)

    async def run(self, count: int) -> dict[str, Any]:
        # Made here: streams would wait for it.
        *before_it, last = (self.prompt(self.args.tokens) for _ in range(self.args.alone + 1))
        alone = [end - begun for begun, end in [await self.first_token(one) for one in before_it]]
        streams = Streams()
        await self.start(streams, count)
        quiet = now()
        await asyncio.sleep(BEFORE)
        begun, end = await self.first_token(last)
        for task in streams.tasks:
            task.cancel()
        await asyncio.gather(*streams.tasks, return_exceptions=True)
        beside, before = streams.gaps(begun, end), streams.gaps(quiet, begun)
        return {
            "alone_s": round(median(alone), 4),
            "beside_s": round(end - begun, 4),
            "ttft_ratio": round((end - begun) / median(alone), 3),
            "itl_ms": round(percentile(beside, 0.5), 3),
            "itl_p99_ms": round(percentile(beside, 0.99), 3),
            "itl_max_ms": round(max(beside, default=0.0), 3),
            "quiet_itl_ms": round(percentile(before, 0.5), 3),
            "quiet_itl_p99_ms": round(percentile(before, 0.99), 3),
            "tokens_beside": len(beside),
            "longest": streams.longest(begun, end),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bench/models/llama-3.1-8b", help="folder with config.json")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--streams", default="32", help="numbers of them, one after the other: 32,96")
    parser.add_argument("--alone", type=int, default=2, help="prompts alone, for each run")
    parser.add_argument("--vocab", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--extra", default="{}", help="more settings of the engine, as JSON")
    parser.add_argument("--steps", help="file for what each step took")
    args = parser.parse_args()
    steps = Steps() if args.steps else []
    bench = Bench(args)
    with bench.engine:
        for repeat, count in product(range(args.repeat), map(int, args.streams.split(","))):
            found = asyncio.run(bench.run(count))
            head = {"bench": "arrival", "model": args.model, "tokens": args.tokens, "streams": count}
            lines.emit(head | {"rep": repeat, "extra": args.extra} | found)
    if args.steps:
        Path(args.steps).write_text("".join(json.dumps(step) + "\n" for step in steps))


if __name__ == "__main__":
    main()
