"""What the latest steps of a server took, by what was in them, from its step log.

python bench/step_times.py steps.sgla   # one JSON line: of a log that ``GET /step_log`` brought
"""

from __future__ import annotations

import math
import sys
import urllib.request
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import lines

from sgla.bench.report import percentile
from sgla.observe import steplog

ADMIN, STEPS = "of-a-bench", 4000  # the key with which the step log is asked for, and its steps
FLAGS = ["--admin-api-key", ADMIN, "--step-log", str(STEPS)]  # of a server that is to tell

LIKE = 16  # steps that another one is compared with, and by how much of the tokens behind its rows theirs may
NEAR = 1 / 16  # be more or fewer


class Step(NamedTuple):
    """``seconds`` on the device, ``gap`` for which that had nothing to do before, and ``between`` its tokens
    and those of the step before, as the scheduler has heard of them. ``behind``: tokens of its rows."""

    kind: str
    seconds: float
    gap: float
    between: float
    rows: int
    behind: int


def step_times(url: str) -> dict[str, dict[str, Any]]:
    """By kind: medians, 90th and 99th percentiles of what ``Step`` has, in ms."""
    return by_kind(steps_of(url))


def by_kind(steps: list[Step]) -> dict[str, dict[str, Any]]:
    found = dict[str, list[Step]]()
    for step in steps:
        found.setdefault(step.kind, []).append(step)
    return {kind: told(times) for kind, times in sorted(found.items())} | {"all": told(steps)}


def steps_of(url: str) -> list[Step]:
    asked = urllib.request.Request(url + "/step_log", headers={"Authorization": f"Bearer {ADMIN}"})
    with urllib.request.urlopen(asked) as answer:
        return steps_in(answer.read())


def steps_in(data: bytes) -> list[Step]:
    """``new``: requests that begin, and so many tokens of them; ``in``, ``out``: beside copies to the device,
    and from it, which begin with the step, or have begun and have not been told of."""
    log = steplog.read(data)
    plans, before, found = dict[int, Any](), math.inf, list[Step]()
    moving = dict[int, str]()
    for call in (call for chapter in log.chapters for call in chapter.calls):
        if isinstance(call, steplog.Plan) and call.plan is not None:
            moving |= {
                c.transfer: "in" if c.target == "device" else "out" for c in call.plan.copies if c.sources
            }
            plans[call.plan.step] = call.plan, " ".join(sorted(set(moving.values())))
        elif isinstance(call, steplog.Moved):
            moving.pop(call.told.transfer, None)
        elif isinstance(call, steplog.Retire) and call.result.step in plans:
            plan, beside = plans.pop(call.result.step)
            if not plan.slots:
                continue
            q_lens, rows = array("i", plan.q_lens), len(plan.flags)
            read = sum(q_lens) - rows + len(plan.new)
            kind = f"{len(plan.new)} new of {read}" if plan.new else "prompts" if read else "decode"
            between = max(0.0, call.now - before)
            before = call.now
            kind, behind = f"{kind} {beside}".strip(), sum(array("i", plan.starts))
            found.append(Step(kind, call.result.seconds, call.result.gap, between, rows, behind))
    return found


def told(steps: list[Step]) -> dict[str, Any]:
    fields: dict[str, Any] = {"count": len(steps)}
    for name, field in (("ms", "seconds"), ("gap_ms", "gap"), ("between_ms", "between")):
        values = [getattr(step, field) for step in steps]
        fields[name] = [round(1e3 * percentile(values, q), 3) for q in (0.5, 0.9, 0.99)]
    return fields | {"rows": [percentile([step.rows for step in steps], q) for q in (0.5, 0.9, 0.99)]}


def against_alone(steps: list[Step]) -> dict[str, Any]:
    """Of decode steps beside copies, by kind: how many there are, and how much longer they take, at the
    median and at p90, than the median of steps of as many rows that are beside nothing, those with most
    nearly as many tokens behind them."""
    alone, found = dict[int, list[Step]](), dict[str, list[float]]()
    for step in steps:
        if step.kind == "decode":
            alone.setdefault(step.rows, []).append(step)
    for step in steps:
        if step.kind[:7] != "decode ":
            continue
        nearest = sorted((abs(each.behind - step.behind), each.seconds) for each in alone.get(step.rows, []))
        like = [seconds for apart, seconds in nearest[:LIKE] if apart <= NEAR * step.behind]
        if like:
            found.setdefault(step.kind, []).append(step.seconds / percentile(like, 0.5))
    return {
        kind: {"count": len(x), "ratio": [round(percentile(x, q), 4) for q in (0.5, 0.9)]}
        for kind, x in found.items()
    }


def main() -> None:
    steps = steps_in(Path(sys.argv[1]).read_bytes())
    told_of = {kind: fields for kind, fields in by_kind(steps).items() if "new" not in kind}
    lines.emit({"bench": "steps", "beside": against_alone(steps)} | told_of)


if __name__ == "__main__":
    main()
