"""Short prompts that come while long ones are read: one JSON line a run.

    python bench/flood.py --model bench/models/qwen3-8b [--short 100] [--long 16000] [--abreast 8]

Milliseconds to the first token of prompts of ``--short`` tokens that come at random, ``--rate`` a second,
alone and while ``--abreast`` requests with prompts of ``--long`` tokens and 16 tokens out follow each other
without end; and tokens a second of the long ones. Steps are limited by the same inter-token target as those
of a server. Weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from typing import Any

import lines

from sgla import Engine, SamplingParams
from sgla.bench.report import percentile
from sgla.clock import now

BEFORE = 1.0  # seconds that the long ones go on before the first short one comes
FASTEST = 60_000  # tokens of long ones a second, at most


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.draw, self.read = args, random.Random(1), 0
        settings = {"load_format": "dummy", "device": "cuda", "itl_target_ms": None} | json.loads(args.extra)
        self.engine = Engine(args.model, context_length=args.long + 64, **settings)
        # Made here, which takes 10 ms each: short ones would wait for it.
        count = args.abreast + int((args.seconds + 2 * BEFORE) * FASTEST / args.long)
        self.long = [self.prompt(args.long) for _ in range(count)]

    def prompt(self, tokens: int) -> list[int]:
        return [self.draw.randrange(self.args.vocab) for _ in range(tokens)]

    async def first_token(self, prompt: list[int], outputs: int = 1) -> float:
        """Seconds until it came; the request is followed to its end."""
        begun, came = now(), 0.0
        params = SamplingParams(max_tokens=outputs, temperature=0, ignore_eos=True)
        async for event in self.engine.astream(prompt, params):
            came = came or (now() if event.tokens else 0.0)
        self.read += len(prompt)
        return came - begun

    async def short(self) -> list[float]:
        """Milliseconds to the first token of each."""
        tasks, end = [], now() + self.args.seconds
        while now() < end:
            tasks.append(asyncio.create_task(self.first_token(self.prompt(self.args.short))))
            await asyncio.sleep(self.draw.expovariate(self.args.rate))
        return [1e3 * seconds for seconds in await asyncio.gather(*tasks)]

    async def flood(self) -> None:
        while self.long:
            await self.first_token(self.long.pop(), 16)

    async def run(self) -> dict[str, Any]:
        await self.short()  # what is compiled or learned on the way
        alone = await self.short()
        tasks = [asyncio.create_task(self.flood()) for _ in range(self.args.abreast)]
        await asyncio.sleep(BEFORE)
        begun, self.read = now(), 0
        beside = await self.short()
        rate = self.read / (now() - begun)
        assert self.long, "long prompts ended first"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        found = {"alone": alone, "beside": beside}
        shares = {
            f"{name}_p{q:.0%}".replace("%", ""): percentile(found[name], q)
            for name in found
            for q in (0.5, 0.95)
        }
        return {
            "prompts": len(beside),
            **{name: round(value, 2) for name, value in shares.items()},
            "p95_ratio": round(percentile(beside, 0.95) / percentile(alone, 0.95), 2),
            "long_tok_s": round(rate),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bench/models/qwen3-8b", help="folder with config.json")
    parser.add_argument("--short", type=int, default=100)
    parser.add_argument("--long", type=int, default=16_000)
    parser.add_argument("--abreast", type=int, default=8)
    parser.add_argument("--rate", type=float, default=20.0, help="short prompts a second")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--vocab", type=int, default=100_000)
    parser.add_argument("--extra", default="{}", help="more settings of the engine, as JSON")
    args = parser.parse_args()
    bench = Bench(args)
    with bench.engine:
        head = {"bench": "flood", "model": args.model, "short": args.short, "long": args.long}
        head |= {"abreast": args.abreast, "rate": args.rate, "extra": args.extra}
        lines.emit(head | asyncio.run(bench.run()))


if __name__ == "__main__":
    main()
