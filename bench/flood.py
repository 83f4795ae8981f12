"""Short prompts that come while long ones are read: one JSON line a run.

    python bench/flood.py --model bench/models/qwen3-8b [--long 16000] [--abreast 8] [--longer 2,3]

Milliseconds to the first token of prompts of ``--short`` tokens that come at random, ``--rate`` a second,
alone and while ``--abreast`` requests with prompts of ``--long`` tokens and 16 tokens out follow each other
without end; and tokens a second of the long ones. Steps are limited by the same inter-token target as those
of a server. Weights are random.

``parts``: milliseconds until the scheduler heard of a short one, until its step was planned, until that was
over, and until its token was there, at the median and p95. ``steps``: of those beside, what they took, were
predicted to take, and for how long before them the device had nothing to do, at the median, p95 and most;
their tokens and rows. ``worst``: of the latest ``--worst``, when it came, its ``parts``, what was left of
each step that it waited for, with its tokens, and its own: milliseconds, predicted, tokens, rows.
``--longer``: so much longer than a short prompt's may steps be (``sched/hurry.py``), one run each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lines

from sgla import Engine, SamplingParams
from sgla.bench.report import percentile
from sgla.clock import now
from sgla.messages import Delta, StepPlan, StepResult, Submit
from sgla.sched import hurry
from sgla.sched.core import Core

BEFORE = 1.0  # seconds that the long ones go on before the first short one comes
HEAD = 8  # tokens that tell prompts apart


@dataclass
class Step:
    planned: float
    tokens: int
    rows: int
    predicted: float
    seconds: float = 0.0
    gap: float = 0.0
    heard: float = 0.0

    @property
    def told(self) -> list[float]:
        return [round(1e3 * self.seconds, 1), round(1e3 * self.predicted, 1), self.tokens, self.rows]


@dataclass
class Short:
    """``sent``, ``came``: by who asked; ``offered``: when the scheduler heard of it; ``step``: which brought
    its first token."""

    sent: float
    came: float = 0.0
    offered: float = 0.0
    step: int = 0

    @property
    def ms(self) -> float:
        return 1e3 * (self.came - self.sent)

    def parts(self, steps: dict[int, Step]) -> list[float]:
        own = steps[self.step]
        times = [self.sent, self.offered, own.planned, own.heard, self.came]
        return [1e3 * (b - a) for a, b in pairwise(times)]

    def told(self, steps: dict[int, Step], begun: float) -> dict[str, Any]:
        before = [(number, step) for number, step in steps.items() if number < self.step]
        waited = [step for _, step in before if step.heard > self.offered]
        return {
            "at": round(self.sent - begun, 3),
            "ms": round(self.ms, 1),
            "parts": [round(part, 1) for part in self.parts(steps)],
            "waited": [[round(1e3 * (step.heard - self.offered), 1), step.tokens] for step in waited],
            "own": steps[self.step].told,
        }


class Watch:
    """What the scheduler hears from now on."""

    def __init__(self) -> None:
        self.steps: dict[int, Step] = {}
        self.shorts: dict[tuple[int, ...], Short] = {}  # by their first tokens
        rids: dict[str, Short] = {}
        offer, plan, retire = Core.offer, Core.plan, Core.retire

        def offered(core: Core, submit: Submit, at: float) -> None:
            if (short := self.shorts.get(key(submit.tokens))) is not None:
                short.offered, rids[submit.rid] = at, short
            offer(core, submit, at)

        def planned(core: Core, at: float, paused: bool = False) -> StepPlan | None:
            made = plan(core, at, paused)
            if made is not None:
                step = core._queues.flights[-1]
                seconds = core._costs.predict(step.tokens, step.work)
                self.steps[step.number] = Step(now(), step.tokens, len(step.rows), seconds)
            return made

        def retired(core: Core, result: StepResult, at: float) -> list[Delta]:
            deltas = retire(core, result, at)
            step = self.steps[result.step]
            step.seconds, step.gap, step.heard = result.seconds, result.gap, at
            for delta in deltas:
                if delta.tokens and (short := rids.pop(delta.rid, None)) is not None:
                    short.step = result.step
            return deltas

        Core.offer, Core.plan, Core.retire = offered, planned, retired  # type: ignore[assignment, method-assign]


def key(prompt: Sequence[int]) -> tuple[int, ...]:
    return tuple(prompt[:HEAD])


def shares(values: Sequence[float], digits: int = 1) -> list[float]:
    return [round(percentile(values, q), digits) for q in (0.5, 0.95, 1.0)]


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.draw, self.read, self.watch = args, random.Random(1), 0, Watch()
        settings = {"load_format": "dummy", "device": "cuda", "itl_target_ms": None} | json.loads(args.extra)
        self.engine = Engine(args.model, context_length=args.long + 64, **settings)
        # Made once, which takes 10 ms: short ones would wait for it. Behind another head nothing is cached.
        self.body = self.prompt(args.long - HEAD)

    def prompt(self, tokens: int) -> list[int]:
        return [self.draw.randrange(self.args.vocab) for _ in range(tokens)]

    async def first_token(self, prompt: list[int], outputs: int = 1) -> float:
        """When it came; the request is followed to its end."""
        came = 0.0
        params = SamplingParams(max_tokens=outputs, temperature=0, ignore_eos=True)
        async for event in self.engine.astream(prompt, params):
            came = came or (now() if event.tokens else 0.0)
        self.read += len(prompt)
        return came

    async def short(self) -> Short:
        prompt = self.prompt(self.args.short)
        short = self.watch.shorts[key(prompt)] = Short(now())
        short.came = await self.first_token(prompt)
        return short

    async def shorts(self) -> list[Short]:
        tasks, end = [], now() + self.args.seconds
        while now() < end:
            tasks.append(asyncio.create_task(self.short()))
            await asyncio.sleep(self.draw.expovariate(self.args.rate))
        return await asyncio.gather(*tasks)

    async def flood(self) -> None:
        while True:
            await self.first_token(self.prompt(HEAD) + self.body, 16)

    async def run(self) -> dict[str, Any]:
        await self.shorts()  # what is compiled or learned on the way
        alone = await self.shorts()
        tasks = [asyncio.create_task(self.flood()) for _ in range(self.args.abreast)]
        await asyncio.sleep(BEFORE)
        begun, self.read = now(), 0
        beside = await self.shorts()
        rate = self.read / (now() - begun)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        found = {"alone": [one.ms for one in alone], "beside": [one.ms for one in beside]}
        ttft = {
            f"{name}_p{q:.0%}".replace("%", ""): percentile(found[name], q)
            for name in found
            for q in (0.5, 0.95)
        }
        return {
            "prompts": len(beside),
            **{name: round(value, 2) for name, value in ttft.items()},
            "p95_ratio": round(ttft["beside_p95"] / ttft["alone_p95"], 2),
            "long_tok_s": round(rate),
            **self.told(alone, beside, begun),
        }

    def told(self, alone: list[Short], beside: list[Short], begun: float) -> dict[str, Any]:
        steps = dict(self.watch.steps)  # the engine's thread goes on with it
        of = [step for step in steps.values() if step.planned >= begun and step.heard]
        worst = sorted(beside, key=lambda one: -one.ms)[: self.args.worst]
        names = ("heard", "planned", "over", "back")
        return {
            "parts": {
                name: dict(
                    zip(names, [shares(part)[:2] for part in zip(*(one.parts(steps) for one in ones))])
                )
                for name, ones in (("alone", alone), ("beside", beside))
            },
            "steps": {
                "count": len(of),
                "ms": shares([1e3 * step.seconds for step in of]),
                "predicted_ms": shares([1e3 * step.predicted for step in of]),
                "gap_ms": shares([1e3 * step.gap for step in of], 2),
                "tokens": shares([step.tokens for step in of]),
                "rows": shares([step.rows for step in of]),
            },
            "worst": [one.told(steps, begun) for one in sorted(worst, key=lambda one: one.sent)],
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
    parser.add_argument("--worst", type=int, default=10)
    parser.add_argument("--longer", default=str(hurry.LONGER))
    parser.add_argument("--extra", default="{}", help="more settings of the engine, as JSON")
    args = parser.parse_args()
    tries = [float(each) for each in args.longer.split(",")]
    bench = Bench(args)
    with bench.engine:
        for hurry.LONGER in tries:
            head = {"bench": "flood", "model": args.model, "short": args.short, "long": args.long}
            head |= {"abreast": args.abreast, "rate": args.rate, "longer": hurry.LONGER, "extra": args.extra}
            lines.emit(head | asyncio.run(bench.run()))


if __name__ == "__main__":
    main()
