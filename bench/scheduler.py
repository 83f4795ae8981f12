"""Cost of the scheduler itself: time of ``plan`` + ``retire`` for a full batch of decode rows, without a
model.

    python bench/scheduler.py [--rows 256] [--steps 400] [--window 512 [--shared]] [--ranks 16]

Prints one JSON object: lowest quartiles, medians and 99th percentiles of CPU time in microseconds, of plans
the mean, and the median of ``offer`` beside full batches. Beside other work the quartiles tell most.
``--ranks``: with attention by data, where each has so many rows.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections import deque

import lines

from sgla import __version__
from sgla.messages import CacheGroup, RowSampling, StepPlan, StepResult, Submit
from sgla.observe.machine import detect
from sgla.sched.core import Core
from sgla.sched.limits import Limits
from sgla.sched.parts import PartedCore

STEP_TOKENS = 8192


def make_core(rows: int, steps: int, prompt: int, window: int, shared: bool, ranks: int) -> Core | PartedCore:
    groups = [CacheGroup(pages=rows * (prompt + steps + 64) // 16 + 2)]
    if window:
        groups.append(CacheGroup(pages=rows * (window // 16 + 4) + 2, window=window))
    if shared:  # as much, where five pages of the first are as large as one of the other
        slabs = -(-groups[0].pages // 5) + groups[1].pages
        groups = [CacheGroup(pages=1 + slabs * 5, slab=5), CacheGroup(1 + slabs, window, slab=1)]
    limits = Limits(
        slots=rows,
        groups=groups,
        page_size=16,
        context_len=1 << 16,
        step_tokens=STEP_TOKENS,
        depth=2,
        itl_target=0.05,
    )
    core = Core(limits) if ranks == 1 else PartedCore(limits, ranks)
    common = list(range(64))
    for i in range(rows * ranks):
        tokens = common + [(i * 7919 + j * 31) % 50000 for j in range(prompt - 64)]
        core.offer(request(f"request-{i}", tokens, steps + 32), 0.0)
    return core


def request(rid: str, tokens: list[int], most: int) -> Submit:
    return Submit(
        rid=rid,
        parent=rid,
        index=0,
        tokens=tokens,
        max_new=most,
        stop_ids=frozenset((2, 0)),
        sampling=RowSampling(),
    )


def result_of(plan: StepPlan | None) -> StepResult:
    if plan is None:
        return StepResult(step=0, tokens=b"")
    if plan.parts:
        return StepResult(step=0, tokens=b"", parts=[result_of(part) for part in plan.parts])
    samples = sum(flags & 1 for flags in plan.flags)
    return StepResult(step=plan.step, tokens=array("i", range(100, 100 + samples)).tobytes(), seconds=0.006)


def is_full(plan: StepPlan, rows: int) -> bool:
    """Whether all rows decode, none of which is new."""
    parts = plan.parts or [plan]
    return all(part is not None and len(part.slots) == 4 * rows and not part.new for part in parts)


def measure(rows: int, steps: int, prompt: int, window: int, shared: bool, ranks: int) -> dict[str, float]:
    # The first must go on until the prompts of all have been read.
    core = make_core(rows, steps + 2 * rows * prompt // STEP_TOKENS, prompt, window, shared, ranks)
    flights: deque[StepPlan] = deque()
    offers: list[float] = []
    plans: list[float] = []
    retires: list[float] = []
    now = 0.0
    while len(plans) < steps:
        now += 1.0  # more than any step takes, so that none is too early
        begin = time.thread_time()
        plan = core.plan(now)
        planned = time.thread_time()
        if plan is not None:
            flights.append(plan)
        steady = plan is not None and is_full(plan, rows)
        if steady:
            plans.append(planned - begin)
        if len(flights) < 2:
            continue
        result = result_of(flights.popleft())
        begin = time.thread_time()
        core.retire(result, now)
        if steady:
            retires.append(time.thread_time() - begin)
            later = request(f"later-{len(offers)}", [*range(64), *[len(offers)] * (prompt - 64)], steps)
            begin = time.thread_time()
            core.offer(later, now)
            offers.append(time.thread_time() - begin)
            core.cancel(later.rid, "abort")
    return {
        "plan_mean_us": round(sum(plans) / len(plans) * 1e6, 1),
        "plan_q1_us": percentile(plans, 0.25),
        "plan_us": percentile(plans, 0.5),
        "plan_p99_us": percentile(plans, 0.99),
        "retire_q1_us": percentile(retires, 0.25),
        "retire_us": percentile(retires, 0.5),
        "retire_p99_us": percentile(retires, 0.99),
        "offer_us": percentile(offers, 0.5),
    }


def percentile(values: list[float], q: float) -> float:
    return round(sorted(values)[int(q * (len(values) - 1))] * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--window", type=int, default=0, help="tokens of a second cache group, 0: none")
    parser.add_argument("--shared", action="store_true", help="both groups share one memory")
    parser.add_argument("--ranks", type=int, default=1, help="with requests of their own")
    args = parser.parse_args()
    window = (f"-window-{args.window}" + "-shared" * args.shared) if args.window else ""
    window += f"-ranks-{args.ranks}" if args.ranks > 1 else ""
    line = {
        "engine": "sgla",
        "version": __version__,
        "machine": detect().label(),
        "model": "none",
        "w": f"scheduler-{args.rows}{window}",
        **measure(
            args.rows, args.steps, args.prompt, args.window, args.shared and args.window > 0, args.ranks
        ),
    }
    print(lines.line(line))


if __name__ == "__main__":
    main()
