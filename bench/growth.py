"""How the cost of the main process grows: one JSON line a case, in microseconds of CPU time.

    python bench/growth.py [--parts rows,tree,waiting,context] [--most 1000000]

``rows``: plan and retire of a step of 1 to 4,096 decode rows, for each step and for each token. ``tree``: a
prefix is looked up, inserted, and pages are evicted, in a radix tree of 10,000 to ``--most`` nodes.
``waiting``: a step of 256 rows is planned, of which one has ended, while 0 to 10,000 requests wait, for each
policy.
``context``: a prompt of 1,000 to a million tokens is taken, and read in steps of 8,192: for each step.
Medians; no model.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from array import array
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import lines
from scheduler import measure, result_of

from sgla.cache.pages import PagePool
from sgla.cache.radix import RadixCache
from sgla.messages import LONGEST, CacheGroup, RowSampling, Submit
from sgla.sched.core import Core
from sgla.sched.limits import Limits

PAGE = 16
POLICIES = "fcfs", "lpm", "auto", "dfs-weight", "lof", "random", "priority"
Line = dict[str, Any]


def timed(work: Callable[[], Any], repeat: int = 1) -> float:
    """Median of microseconds."""
    found = []
    for _ in range(repeat):
        begun = time.thread_time()
        work()
        found.append(time.thread_time() - begun)
    return round(median(found) * 1e6, 1)


def resident_mb() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def rows(args: argparse.Namespace) -> Iterator[Line]:
    for count in (1, 64, 256, 1024, 4096):
        found = measure(count, 60, 128, 0, shared=False, ranks=1)
        step = found["plan_us"] + found["retire_us"]
        yield {"rows": count, **found, "step_us": round(step, 1), "token_us": round(step / count, 3)}


def tree(args: argparse.Namespace) -> Iterator[Line]:
    """Each node is a page behind one of a thousand prefixes of 16 pages."""
    pool = PagePool(args.most + 50_000)
    draw, cache = random.Random(0), RadixCache(PAGE, pool)
    prefixes = [[draw.randrange(50_000) for _ in range(16 * PAGE)] for _ in range(1000)]

    def prompt() -> bytes:
        tail = [draw.randrange(50_000) for _ in range(PAGE)]
        return array("i", draw.choice(prefixes) + tail).tobytes()

    def insert() -> None:
        data = prompt()
        found = cache.match("", data, len(data) // 4)
        own = pool.alloc(17 - len(found.pages))
        cache.insert(cache.root, "", data, [*found.pages, *own])

    nodes = 0
    for most in (10_000, 100_000, 1_000_000):
        if most > args.most:
            return
        while nodes < most:
            insert()
            nodes += 1
        yield {
            "nodes": nodes,
            "insert_us": timed(insert, 500),
            "match_us": timed(lambda: cache.match("", prompt(), 17 * PAGE), 500),
            "evict_us": timed(lambda: cache.evict(1), 200),
            "rss_mb": resident_mb(),
        }


def submit(rid: str, tokens: list[int], max_new: int) -> Submit:
    return Submit(
        rid=rid,
        parent=rid,
        index=0,
        tokens=tokens,
        max_new=max_new,
        stop_ids=frozenset(),
        sampling=RowSampling(),
    )


def limits_of(slots: int, tokens: int, policy: str = "fcfs", context: int = LONGEST) -> Limits:
    return Limits(
        slots=slots, groups=[CacheGroup(tokens // PAGE + 2)], page_size=PAGE, context_len=context,
        step_tokens=8192, depth=2, itl_target=0.03, policy=policy,
    )  # fmt: skip


def steps(core: Core, count: int) -> float:
    """Median microseconds of planning one."""
    found = []
    for _ in range(count):
        begun = time.thread_time()
        plan = core.plan(1.0)
        found.append(time.thread_time() - begun)
        if plan is not None:
            core.retire(result_of(plan), 1.0)
    return round(median(found) * 1e6, 1)


def waiting(args: argparse.Namespace) -> Iterator[Line]:
    for policy in POLICIES:
        for count in (0, 1000, 10_000):
            core = Core(limits_of(256, 1 << 20, policy))
            for i in range(256):
                core.offer(submit(f"r{i}", [i, *range(40)], 40 + i), 0.0)
            steps(core, 30)
            begun = time.thread_time()
            for i in range(count):
                core.offer(submit(f"w{i}", [i, *range(40)], 40), 1.0)
            offered = time.thread_time() - begun
            yield {
                "policy": policy,
                "waiting": count,
                "plan_us": steps(core, 100),
                "offer_us": round(offered / max(1, count) * 1e6, 1),
            }


def context(args: argparse.Namespace) -> Iterator[Line]:
    for tokens in (1000, 32_000, 128_000, 1_000_000):
        core = Core(limits_of(4, tokens + 4096))
        prompt = [i * 7919 % 50_000 for i in range(tokens)]
        offered = timed(lambda core=core, prompt=prompt: core.offer(submit("long", prompt, 64), 0.0))  # type: ignore[misc]
        count = -(-tokens // 8192)
        each = steps(core, count)
        yield {
            "tokens": tokens, "offer_us": offered, "prefill_step_us": each,
            "decode_step_us": steps(core, 30), "rss_mb": resident_mb(),
        }  # fmt: skip


PARTS = {"rows": rows, "tree": tree, "waiting": waiting, "context": context}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--most", type=int, default=1_000_000, help="nodes of the tree")
    args = parser.parse_args()
    for part in args.parts.split(","):
        for line in PARTS[part](args):
            print(lines.line({"bench": "growth", "part": part, **line}), flush=True)


if __name__ == "__main__":
    main()
