"""Streams with and without guesses: the same prompts, the same number of output tokens.

    python bench/drafts.py [--model demo] [--tokens 200] [--repeat 5] [--rows 1] [--device cuda] [--dummy]
                           [--algorithm ngram] [--draft MODEL] [--guesses N] [--accept SHARE]
                           [--texts loop,free] [--alone] [--all] [--always] [--second SHARE]
                           [--values STATEMENTS]

``code``: repeat 2,000 characters of code, greedy, where there is much to guess. ``story``: tell one. From the
second time on, the text of another request helps to guess. ``chats``: those of ``chats.py``, each once.
``--dummy``: random weights and no tokenizer. The prompts are then 512 tokens that repeat themselves: ``loop``
goes on greedily, ``right`` may say one token alone, so that all guesses are right, and ``free`` draws from
the whole vocabulary, so that there is nothing to guess. ``--rows``: streams at a time, several numbers by
commas. ``--accept``: on a GPU, this share of the guesses of a model with random weights is taken as right
(``forced.py``); an engine for each of several. ``--guesses``: at most, several by commas, the most first,
with one engine. ``--all``: as many as that, whatever the clock says; ``--always``: of n-grams, with
``--accept``; ``--second``: each has another one beside it, which is right in this share of all cases, with
``--accept``; ``--values``: Python that the worker runs first, with the same. ``--alone``: no engine without
guesses beside, for models that do not fit twice.

Engines are there at once, and are measured in turn after a warm-up. Prints a JSON line for each text with
medians; ``step_ms`` is what a step of the guessing engine takes on its device, ``gap_ms`` how long that waits
for the next one, and ``runs`` the steps of a run, and milliseconds in them and beside them; the exit code
is 1 if texts differ, but for GPUs, whose sums in bfloat16 depend on the number of rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import lines
from chats import CHATS
from msgspec.structs import replace

from sgla import LLM, SamplingParams
from sgla.executor import procs
from sgla.sched.core import Core

CODE = (Path(__file__).parents[1] / "sgla" / "sched" / "commit.py").read_text()[1200:3200]
TEXTS = {"code": f"Repeat this code exactly:\n{CODE}", "story": "Tell me a story about a fox."}
IDS = [*range(1000, 1064)] * 8
DUMMY: dict[str, dict[str, Any]] = {
    "loop": {"temperature": 0},
    "right": {"temperature": 0, "allowed_token_ids": [1000]},
    "free": {"temperature": 1.0, "seed": 1},
}


class Case:
    """``answer``: the tokens of each stream and their seconds."""

    def __init__(self, name: str, tokens: int, rows: int) -> None:
        self._text, self._rows = TEXTS.get(name), rows
        own = DUMMY.get(name, {"temperature": 0})
        self._params = SamplingParams(max_tokens=tokens, ignore_eos=True, **own)

    def answer(self, llm: LLM) -> tuple[list[Any], float]:
        began = time.perf_counter()
        if self._text is None:
            prompts = [{"prompt_token_ids": [row, *IDS]} for row in range(self._rows)]
            results = llm.generate(prompts, self._params, use_tqdm=False)
        else:
            chats = [[{"role": "user", "content": self._text}]] * self._rows
            results = llm.chat(chats, self._params, use_tqdm=False)
        return [result.outputs[0].token_ids for result in results], time.perf_counter() - began


def measure_chats(llms: dict[str, LLM], args: argparse.Namespace) -> bool:
    """Whether all texts are the same. ``quartiles``: of the ratios of single chats."""
    params, same, ratios = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True), True, []
    total = dict.fromkeys(llms, 0.0)
    for turn, chat in enumerate(CHATS):
        texts, took = {}, {}
        for kind in sorted(llms, reverse=turn % 2 == 0):
            began = time.perf_counter()
            result = llms[kind].chat([{"role": "user", "content": chat}], params, use_tqdm=False)
            took[kind] = time.perf_counter() - began
            total[kind] += took[kind]
            texts[kind] = result[0].outputs[0].token_ids
        ratios.append(took["none"] / took["guessing"])
        same &= texts["none"] == texts["guessing"]
    stats = llms["guessing"].engine.stats()
    lines.emit(
        {
            "bench": "drafts",
            "model": args.model,
            "algorithm": args.algorithm,
            "draft": args.draft,
            "device": args.device,
            "text": "chats",
            "tokens": args.tokens,
            "tok_s": {kind: round(len(CHATS) * args.tokens / spent, 1) for kind, spent in total.items()},
            "ratio": round(total["none"] / total["guessing"], 3),
            "quartiles": [round(ratio, 2) for ratio in quantiles(ratios)],
            "tokens_a_step": round(stats.verified_tokens / max(1, stats.verifies), 2),
            "same_text": same,
        }
    )
    return same


def guess_at_most(llm: LLM, most: int) -> None:
    core = llm.engine._ready()._core
    assert isinstance(core, Core)
    core.limits = replace(core.limits, drafts=most)


def measure(
    name: str, rows: int, share: float | None, most: int, llms: dict[str, LLM], args: argparse.Namespace
) -> bool:
    """Whether all texts are the same."""
    case = Case(name, args.tokens, rows)
    texts = {kind: case.answer(llm)[0] for kind, llm in llms.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in llms}
    runs = {kind: {"steps": 0.0, "in_steps_ms": 0.0, "beside_ms": 0.0} for kind in llms}
    before, same = llms["guessing"].engine.stats(), True
    for _ in range(args.repeat):
        for kind, llm in llms.items():
            begun = llm.engine.stats()
            found, took = case.answer(llm)
            ended = llm.engine.stats()
            seconds[kind].append(took)
            own = ended.step_seconds - begun.step_seconds
            parts = ended.steps - begun.steps, 1e3 * own, 1e3 * (took - own)
            for field, part in zip(runs[kind], parts):
                runs[kind][field] = round(runs[kind][field] + part / args.repeat, 2)
            same &= found == next(iter(texts.values()))
    after = llms["guessing"].engine.stats()
    verifies, drafts, verified, guessed, steps, computing, idle = (
        getattr(after, field) - getattr(before, field)
        for field in (
            "verifies", "drafts", "verified_tokens", "draft_tokens", "steps", "step_seconds", "gap_seconds",
        )
    )  # fmt: skip
    speeds = {kind: round(rows * args.tokens / median(found), 1) for kind, found in seconds.items()}
    lines.emit(
        {
            "bench": "drafts",
            "model": args.model,
            "algorithm": args.algorithm,
            "draft": args.draft,
            "device": args.device,
            "text": name,
            "rows": rows,
            "most": most,
            "tokens": args.tokens,
            "repeat": args.repeat,
            "accept": share,
            "second": args.second,
            "tok_s": speeds,
            "ms": {kind: round(1e3 * median(found) / args.tokens, 3) for kind, found in seconds.items()},
            **({} if args.alone else {"ratio": round(speeds["guessing"] / speeds["none"], 2)}),
            "tokens_a_step": round(verified / max(1, verifies), 2),
            "guessed_a_step": round(guessed / max(1, verifies), 2),
            "rows_that_guessed": round(drafts / max(1, verifies), 2),
            "verifies": verifies,  # rows of steps that might guess
            "steps": steps,
            "step_ms": round(1e3 * computing / max(1, steps), 3),
            "gap_ms": round(1e3 * idle / max(1, steps), 3),
            "runs": runs,
            "same_text": same,
        }
    )
    return same


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rows", default="1")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--algorithm", default="ngram")
    parser.add_argument("--draft", help="--speculative-model")
    parser.add_argument("--guesses", help="--speculative-num-draft-tokens")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--all", action="store_true", help="--no-speculative-adaptive")
    parser.add_argument("--always", action="store_true", help="n-grams guess in every step")
    parser.add_argument("--second", type=float, help="--speculative-eagle-topk 2")
    parser.add_argument("--values", default="", help="set in the worker: module.CONSTANT = value")
    parser.add_argument("--extra", default="{}", help="other settings, as JSON")
    parser.add_argument("--accept", default="")
    parser.add_argument("--kv", type=int, default=4, help="GiB of each engine's KV cache on a GPU")
    parser.add_argument("--texts", help="some of those, by commas")
    args = parser.parse_args()
    rows = [int(n) for n in args.rows.split(",")]
    shares: list[float | None] = [float(share) for share in args.accept.split(",") if share] or [None]
    settings: dict[str, Any] = {"device": args.device}
    if args.device == "cuda":
        settings |= {"kv_cache_bytes": args.kv << 30, "max_running_requests": max(16, *rows)}
    if args.dummy:
        settings |= {"load_format": "dummy", "context_length": len(IDS) + args.tokens + 2}
    settings |= json.loads(args.extra)
    most = [int(n) for n in (args.guesses or "0").split(",")]
    none = {} if args.alone else {"none": LLM(args.model, **settings)}
    texts = args.texts.split(",") if args.texts else DUMMY if args.dummy else TEXTS
    same = []
    for share in shares:
        if share is not None:
            os.environ["SGLA_BENCH_ACCEPT"], os.environ["SGLA_BENCH_VALUES"] = str(share), args.values
            os.environ["SGLA_BENCH_SECOND"] = str(args.second or 0)
            if args.always:
                os.environ["SGLA_BENCH_ALWAYS"] = "1"
            procs.runner_of = lambda config: "forced:runner"
        guessing = LLM(
            args.model,
            speculative_algorithm=args.algorithm,
            speculative_model=args.draft,
            speculative_num_draft_tokens=most[0] or None,
            speculative_adaptive=not args.all,
            speculative_eagle_topk=1 if args.second is None else 2,
            **settings,
        )
        for n in most:
            if n:
                guess_at_most(guessing, n if args.second is None else 2 * n)
            llms = none | {"guessing": guessing}
            for count in rows:
                same += [measure(name, count, share, n, llms, args) for name in texts if name != "chats"]
            if "chats" in texts:
                same.append(measure_chats(llms, args))
    return int(args.device == "cpu" and not all(same))


if __name__ == "__main__":
    sys.exit(main())
