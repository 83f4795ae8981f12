"""Two engines by turns in one call: a script runs itself for one side, then for the other, several times.

``--beside ARGUMENTS`` names the other side: it has the arguments of the call, with these behind them. The
sides begin in turn. A line a workload: medians of both, and of each number the ratio between the sides, where
more than 1 says that the first one is better: median, least and greatest of the turns.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import lines

MORE = "out_tok_s", "in_tok_s", "turns_s", "goodput", "hit_rate"  # numbers of which more is better
LESS = (
    "s", "ms_per_tok", "ms_per_step", "prefill_s", "ttft_ms", "ttft_p99_ms", "cached_ttft_ms", "itl_ms",
    "itl_p99_ms", "peak_rss_mb",
)  # fmt: skip
NAMES = "w", "bs", "tokens", "rate", "lengths", "concurrency"  # which say what a line measures

Line = dict[str, Any]
Measured = dict[tuple[str, ...], Line]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--beside",
        metavar="ARGUMENTS",
        help="run two sides by turns: this call, and this call with these arguments behind it",
    )
    parser.add_argument("--turns", type=int, default=3, help="with --beside: runs of each side")


def measure(args: argparse.Namespace, command: Callable[[list[str]], list[str]]) -> None:
    """Print the lines of both sides. ``command``: what runs a side that has these arguments."""
    mine = without(sys.argv[1:])
    sides = command(mine), command([*mine, *shlex.split(args.beside)])
    for line in by_turns(*sides, args.turns):
        lines.emit(line)


def without(arguments: Sequence[str]) -> list[str]:
    """Arguments of a call, without those of ``add_arguments``."""
    left, value = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if value:
            value = False
        elif name in ("--beside", "--turns"):
            value = not equals
        else:
            left.append(argument)
    return left


def run(command: list[str]) -> list[Line]:
    """The lines that a command prints, which go on to stderr. Raises SystemExit."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    sys.stderr.write(done.stdout)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with code {done.returncode}")
    texts = (text.removeprefix("JSON ") for text in done.stdout.splitlines())
    return [json.loads(text) for text in texts if text.startswith("{")]


def by_turns(
    first: list[str], other: list[str], turns: int, run: Callable[[list[str]], list[Line]] = run
) -> Iterator[Line]:
    """A line for each workload that all runs have."""
    ours: list[Measured] = []
    theirs: list[Measured] = []
    for turn in range(turns):
        order = [(first, ours), (other, theirs)]
        for command, found in order if turn % 2 == 0 else order[::-1]:
            found.append(medians(run(command)))
    for name in ours[0]:
        if all(name in side for side in (*ours, *theirs)):
            yield compared([side[name] for side in ours], [side[name] for side in theirs])


def medians(found: Sequence[Line]) -> Measured:
    """By what the lines measure; of several runs the medians of what is compared."""
    alike: dict[tuple[str, ...], list[Line]] = defaultdict(list)
    for line in found:
        if "error" not in line:
            alike[tuple(str(line.get(name)) for name in NAMES)].append(line)
    return {name: same[0] | numbers(same) for name, same in alike.items()}


def numbers(same: Sequence[Line]) -> Line:
    """Medians of what can be compared: what all lines have."""
    known = [name for name in (*MORE, *LESS) if all(line.get(name) for line in same)]
    return {name: round(median(line[name] for line in same), 4) for name in known}


def compared(ours: Sequence[Line], theirs: Sequence[Line]) -> Line:
    head = {name: ours[0][name] for name in (*NAMES, "model", "machine") if name in ours[0]}
    mine, others = numbers(ours), numbers(theirs)
    ratios = {}
    for name in (name for name in mine if name in others):
        pairs = [(a[name], b[name]) if name in MORE else (b[name], a[name]) for a, b in zip(ours, theirs)]
        found = [better / worse for better, worse in pairs]
        ratios[name] = [round(x, 3) for x in (median(found), min(found), max(found))]
    engines = [side[0].get("engine") for side in (ours, theirs)]
    return head | {"engines": engines, "turns": len(ours), "ratio": ratios, "ours": mine, "theirs": others}
