"""What programs of ``sgla.lang`` save by the prefix cache: a batch of programs of five calls each, which
share the beginning of their prompts, beside the same calls on an engine without a cache.

    python bench/programs.py [--model demo] [--programs 100] [--examples 12]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import lines

import sgla.lang as sgl
from sgla import Engine

EXAMPLE = "Question: What is {a} plus {b}?\nThought: I add {b} to {a}.\nTool: calculator\nAnswer: {sum}\n\n"


@sgl.function
def solve(s: Any, examples: str, question: str) -> None:
    """Five calls: a thought, a tool, and three answers side by side."""
    s += examples + question
    s += "Thought:" + sgl.gen("thought", stop="\n", max_tokens=8) + "\n"
    s += "Tool: " + sgl.select("tool", ["calculator", "search engine"]) + "\n"
    forks = s.fork(3)
    forks += lambda i: f"Answer {i + 1}:"
    forks += sgl.gen("answer", stop="\n", max_tokens=4)
    forks.join()


def measure(model: str, cache: bool, batch: list[dict[str, str]]) -> tuple[float, list[Any]]:
    """Seconds of the batch, and what it answers."""
    with Engine(model, prefix_cache=cache, context_length=2048) as engine:
        solve.run("Warm. ", "up", backend=engine, temperature=0)
        begun = time.perf_counter()
        states = solve.run_batch(batch, backend=engine, temperature=0)
        seconds = time.perf_counter() - begun
        return seconds, [(state["tool"], state["answer"]) for state in states]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--examples", type=int, default=12)
    args = parser.parse_args()
    examples = "".join(EXAMPLE.format(a=i, b=3 * i, sum=4 * i) for i in range(2, 2 + args.examples))
    batch = [
        {"examples": examples, "question": f"Question: What is {i} plus {2 * i}?\n"}
        for i in range(args.programs)
    ]
    with_cache, answers = measure(args.model, True, batch)
    without, others = measure(args.model, False, batch)
    lines.emit(
        {
            "bench": "programs",
            "model": args.model,
            "programs": args.programs,
            "calls": 5 * args.programs,
            "shared_characters": len(examples),
            "s": {"cache": round(with_cache, 2), "no cache": round(without, 2)},
            "ratio": round(without / with_cache, 2),
            "same_answers": sum(a == b for a, b in zip(answers, others)),
        }
    )


if __name__ == "__main__":
    main()
