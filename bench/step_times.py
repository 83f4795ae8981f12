"""What the latest steps of a server took, by what was in them, from its step log."""

from __future__ import annotations

import math
import urllib.request
from array import array
from typing import Any

from sgla.bench.report import percentile
from sgla.observe import steplog

ADMIN, STEPS = "of-a-bench", 4000  # the key with which the step log is asked for, and its steps
FLAGS = ["--admin-api-key", ADMIN, "--step-log", str(STEPS)]  # of a server that is to tell

Times = tuple[float, float, float, int]


def step_times(url: str) -> dict[str, dict[str, Any]]:
    """``ms`` on the device, ``gap_ms`` for which the device had nothing to do before, ``between_ms`` from a
    step's tokens to those of the step before, as the scheduler has heard of them; ``rows`` of the step.
    ``new``: requests that begin, and so many tokens of them; ``in``, ``out``: beside copies to the device,
    and from it, which have not been told of."""
    asked = urllib.request.Request(url + "/step_log", headers={"Authorization": f"Bearer {ADMIN}"})
    with urllib.request.urlopen(asked) as answer:
        log = steplog.read(answer.read())
    plans, before, found = dict[int, Any](), math.inf, dict[str, list[Times]]()
    moving = dict[int, str]()
    for call in (call for chapter in log.chapters for call in chapter.calls):
        if isinstance(call, steplog.Plan) and call.plan is not None:
            plans[call.plan.step] = call.plan, " ".join(sorted(set(moving.values())))
            moving |= {
                c.transfer: "in" if c.target == "device" else "out" for c in call.plan.copies if c.sources
            }
        elif isinstance(call, steplog.Moved):
            moving.pop(call.told.transfer, None)
        elif isinstance(call, steplog.Retire) and call.result.step in plans:
            plan, beside = plans.pop(call.result.step)
            if not plan.slots:
                continue
            q_lens, rows = array("i", plan.q_lens), len(plan.flags)
            read = sum(q_lens) - rows + len(plan.new)
            kind = f"{len(plan.new)} new of {read}" if plan.new else "prompts" if read else "decode"
            times = call.result.seconds, call.result.gap, max(0.0, call.now - before), rows
            before = call.now
            found.setdefault(f"{kind} {beside}".strip(), []).append(times)
    return {kind: told(times) for kind, times in sorted(found.items())} | {
        "all": told([each for times in found.values() for each in times])
    }


def told(times: list[Times]) -> dict[str, Any]:
    """Medians, 90th and 99th percentiles."""
    fields: dict[str, Any] = {"count": len(times)}
    for name, values in zip(("ms", "gap_ms", "between_ms"), zip(*times)):
        fields[name] = [round(1e3 * percentile(values, q), 3) for q in (0.5, 0.9, 0.99)]
    return fields | {"rows": [percentile([each[3] for each in times], q) for q in (0.5, 0.9, 0.99)]}
