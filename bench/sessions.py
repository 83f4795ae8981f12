"""Conversations that outgrow a KV cache, against any server of OpenAI's API: one JSON line a run.

    python bench/sessions.py turns http://127.0.0.1:30000 --model m --pool 100000 --times 5
    python bench/sessions.py agents http://127.0.0.1:30000 --model m --agents 16 --turns 30 --most 60000

``turns``: so many chats that they have ``--times`` as many tokens at their ends as a KV cache of ``--pool``
holds. In each round all of them take one turn, in a random order, so that each has been pushed out when its
next turn comes. ``agents``: each begins with the same system prompt and tools; its turn is a tool's call, and
the tool's output comes after a gap of seconds. Outputs are of very different lengths, until ``--most`` tokens
are there. With ``--plain`` outputs are messages of a user, for models whose template knows no tools, and what
the model said stays in the conversation; with tools the calls are written beforehand.

``hit_rate`` is the share of prompt tokens that the server tells as cached (vLLM: with
``--enable-prompt-tokens-details``), ``attainable`` what a cache that loses nothing would have: all of the
turn before, and of first turns, which begin alike, as much as any of them found. Words are about a token
each; what a server counted is in the line.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import lines
from traffic import sizes

from sgla.bench.load import TIMEOUT, Record, Target, ask
from sgla.bench.report import percentile, summarize
from sgla.bench.workloads import words
from sgla.clock import now

TEMPLATE = 16  # tokens, about, of a template around a message
WIDE = 12  # words of a line that a tool says; its end is a token, too
PATHS = ["src", "tests", "docs", "lib", "app", "core", "api", "web", "db", "tools"]
TOOLS = {
    "read_file": {"path": "a file below the working folder", "offset": "the first line", "limit": "lines"},
    "search": {"pattern": "a regular expression", "path": "where to look"},
    "run_command": {"command": "a line of bash", "timeout": "seconds"},
    "edit_file": {"path": "a file", "old": "text that is there once", "new": "what takes its place"},
}

Message = dict[str, Any]


class Talk:
    """A conversation, and what became of its turns."""

    def __init__(self, system: str, tools: list[Message] | None = None) -> None:
        self.messages: list[Message] = [{"role": "system", "content": system}]
        self.records: list[Record] = []
        self._tools = tools

    async def turn(self, client: aiohttp.ClientSession, target: Target, max_tokens: int) -> Record:
        prompt: Message = {"messages": self.messages}
        if self._tools:
            prompt["tools"] = self._tools
        record = await ask(client, target, prompt, max_tokens)
        self.records.append(record)
        return record

    def attainable(self, answers: bool) -> int:
        """Prompt tokens that the turn before had, with its answer if that stays."""
        good = [record for record in self.records if record.error is None]
        return sum(
            min(after.prompt_tokens, before.prompt_tokens + answers * before.completion_tokens)
            for before, after in itertools.pairwise(good)
        )


async def turns(args: argparse.Namespace, target: Target) -> list[Talk]:
    draw = random.Random(args.seed)
    whole = args.system + args.turns * (args.question + args.answer + 2 * TEMPLATE)
    system = words(draw, args.system).strip()
    talks = [Talk(system) for _ in range(max(1, round(args.times * args.pool / whole)))]
    gate = asyncio.Semaphore(args.concurrency)

    async def go_on(client: aiohttp.ClientSession, talk: Talk, question: str) -> None:
        async with gate:
            talk.messages.append({"role": "user", "content": question})
            record = await talk.turn(client, target, args.answer)
            talk.messages.append({"role": "assistant", "content": record.text})

    async with aiohttp.ClientSession(timeout=TIMEOUT, auto_decompress=False) as client:
        for _ in range(args.turns):
            draw.shuffle(talks)
            questions = [words(draw, args.question).strip() for _ in talks]
            await asyncio.gather(*(go_on(client, *pair) for pair in zip(talks, questions)))
    return talks


def described() -> list[Message]:
    """The tools, as OpenAI has them."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"{name} of a coding agent",
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": "string", "description": d} for key, d in given.items()},
                },
            },
        }
        for name, given in TOOLS.items()
    ]


def step(draw: random.Random, number: int, size: int, plain: bool) -> list[Message]:
    """A tool's call and its output of about ``size`` tokens."""
    name = draw.choice(list(TOOLS))
    path = f"{draw.choice(PATHS)}/{draw.choice(PATHS)}/{draw.randrange(1000)}.py"
    output = "".join(f"{words(draw, WIDE)}\n" for _ in range(max(1, size // (WIDE + 1))))
    if plain:
        return [{"role": "user", "content": f"{name} {path}\n{output}"}]
    call = {"name": name, "arguments": json.dumps(dict.fromkeys(TOOLS[name], path))}
    uid = f"call_{number}"
    calls = [{"id": uid, "type": "function", "function": call}]
    return [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": uid, "content": output},
    ]


async def agents(args: argparse.Namespace, target: Target) -> list[Talk]:
    shared = random.Random(args.seed)
    system, tools = words(shared, args.system).strip(), None if args.plain else described()

    async def work(client: aiohttp.ClientSession, number: int) -> Talk:
        draw = random.Random(f"{args.seed} {number}")
        talk = Talk(system, tools)
        talk.messages.append({"role": "user", "content": words(draw, args.question).strip()})
        beside = args.system + args.turns * (args.answer + 3 * TEMPLATE)
        whole = max(args.turns, round(args.most * draw.uniform(0.4, 1)) - beside)
        await asyncio.sleep(draw.expovariate(1 / args.gap))
        for i, size in enumerate(sizes(draw, args.turns, whole)):
            record = await talk.turn(client, target, args.answer)
            if record.error:
                break
            if args.plain:
                talk.messages.append({"role": "assistant", "content": record.text})
            talk.messages += step(draw, i, size, args.plain)
            await asyncio.sleep(draw.expovariate(1 / args.gap))
        return talk

    async with aiohttp.ClientSession(timeout=TIMEOUT, auto_decompress=False) as client:
        return await asyncio.gather(*(work(client, number) for number in range(args.agents)))


def numbers(talks: Sequence[Talk], seconds: float, answers: bool) -> dict[str, Any]:
    """``answers``: whether they stay in their conversations. Of turns behind the first ones alone:
    ``later_ttft_*``."""
    records = [record for talk in talks for record in talk.records]
    told = summarize(records, seconds)
    every = [1e3 * (r.chunks[0] - r.start) for r in records if r.chunks]
    later = [1e3 * (r.chunks[0] - r.start) for talk in talks for r in talk.records[1:] if r.chunks]
    ends = [talk.records[-1].prompt_tokens for talk in talks if talk.records]
    whole = max(told["in_tokens"], 1)
    alike = max((talk.records[0].cached_tokens or 0 for talk in talks if talk.records), default=0)
    found = sum(talk.attainable(answers) for talk in talks) + alike * (len(ends) - 1)
    return {
        "talks": len(talks),
        "longest": max(ends, default=0),
        "working_set": sum(ends),
        "hit_rate": round(told["cached_tokens"] / whole, 4),
        "attainable": round(found / whole, 4),
        "ttft_mean_ms": round(sum(every) / max(len(every), 1), 1),
        "turns_s": round(len(records) / seconds, 3),
        "later_ttft_mean_ms": round(sum(later) / max(len(later), 1), 1),
        "later_ttft_p90_ms": round(percentile(later, 0.9), 1),
        **told,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kind", choices=("turns", "agents"))
    parser.add_argument("url")
    parser.add_argument("--model", default="")
    parser.add_argument("--key")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", type=int, default=6, help="of each")
    parser.add_argument("--system", type=int, default=500, help="tokens of the system prompt")
    parser.add_argument("--question", type=int, default=300)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--pool", type=int, default=100_000, help="turns: tokens that the KV cache holds")
    parser.add_argument("--times", type=float, default=5, help="turns: so much larger is the working set")
    parser.add_argument("--concurrency", type=int, default=8, help="turns: chats at a time")
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--most", type=int, default=60_000, help="agents: tokens of the longest")
    parser.add_argument("--gap", type=float, default=2.0, help="agents: seconds of a tool, on average")
    parser.add_argument("--plain", action="store_true", help="agents: no tools")
    parser.add_argument("--extra", default='{"temperature": 0, "ignore_eos": true}', help="fields, as JSON")
    parser.add_argument("--note", default="", help="of the server, for the line")
    args = parser.parse_args()
    usage = {"stream_options": {"include_usage": True}}
    target = Target(
        url=args.url, model=args.model, api="chat", key=args.key, extra=json.loads(args.extra) | usage
    )
    run: Callable[..., Awaitable[list[Talk]]] = {"turns": turns, "agents": agents}[args.kind]
    began = now()
    talks: Any = asyncio.run(run(args, target))  # type: ignore[arg-type]
    told = numbers(talks, now() - began, args.kind == "turns" or args.plain)
    lines.emit({"bench": "sessions", "kind": args.kind, "note": args.note} | told)


if __name__ == "__main__":
    main()
