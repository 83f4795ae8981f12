"""One stream with and without ``--speculative-algorithm ngram``: the same prompts, greedy, the same number of output tokens.

    python bench/drafts.py [--model demo] [--tokens 200] [--repeat 5]

``code``: repeat 2,000 characters of code, where there is much to guess. ``story``: tell one. Both servers are there at once, and are
measured in turn after a warm-up. Prints a JSON line for each text with medians; the exit code is 1 if texts differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import lines

from sgla import LLM, SamplingParams

CODE = (Path(__file__).parents[1] / "sgla" / "sched" / "commit.py").read_text()[1200:3200]
PROMPTS = {"code": f"Repeat this code exactly:\n{CODE}", "story": "Tell me a story about a fox."}


def answer(llm: LLM, prompt: str, tokens: int) -> tuple[str, float]:
    """The text and its seconds."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    [result] = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)
    return result.outputs[0].text, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    llms: dict[str, Any] = {
        "none": LLM(args.model),
        "ngram": LLM(args.model, speculative_algorithm="ngram"),
    }
    different = 0
    for name, prompt in PROMPTS.items():
        texts = {kind: answer(llm, prompt, args.tokens)[0] for kind, llm in llms.items()}
        seconds: dict[str, list[float]] = {kind: [] for kind in llms}
        for _ in range(args.repeat):
            for kind, llm in llms.items():
                text, took = answer(llm, prompt, args.tokens)
                seconds[kind].append(took)
                different += text != texts["none"]
        speeds = {kind: round(args.tokens / median(found), 1) for kind, found in seconds.items()}
        lines.emit(
            {
                "bench": "drafts",
                "model": args.model,
                "text": name,
                "tokens": args.tokens,
                "repeat": args.repeat,
                "tok_s": speeds,
                "ratio": round(speeds["ngram"] / speeds["none"], 2),
                "same_text": not different,
            }
        )
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
