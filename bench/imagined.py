"""Talks larger than the KV cache (``sessions.py turns``) without a GPU: the scheduler as it is, and times
that are modelled, those of Qwen3-8B on an H200. One JSON line.

    python bench/imagined.py [--talks 12] [--at 4] [--pool 58250] [--tier 42]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lines

from sgla.messages import CacheGroup, Copy, Moved, RowSampling, StepPlan, StepResult, Submit, Tier
from sgla.sched.core import Core
from sgla.sched.limits import Limits
from sgla.worker.crossing import MARGIN

TOKEN = 147_456  # bytes of KV
PAGE, BANDS = 16, 6
SEND = 3e-4  # seconds of a message between the scheduler and a worker
TURN = 1.5e-3  # and of a client between two requests
LOOK = 5e-4  # and between looks at copies, whose rates follow what the GPU does
LONG = 12_500  # tokens of a prompt that is prepared behind others of its client; shorter ones two at a time


@dataclass(eq=False)
class Talk:
    tokens: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Turn:
    """``start``, ``first``, ``last``: when its client asked, and had its first and its last token."""

    talk: Talk
    round: int
    start: float
    first: float = 0.0
    last: float = 0.0
    tokens: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Crossing:
    """A copy: what a ``Copy`` says of it, the time from which on it may begin, and how far it is."""

    transfer: int
    slack: float
    units: set[int]
    behind: float
    total: int
    done: float = 0.0
    begun: float = 0.0
    told: bool = False


class World:
    """A server with its clients. ``args``: of the command."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.now = args, 1.0
        tiers = [Tier("host", [int(args.tier * 1e9 / TOKEN / PAGE)])] if args.tier else []
        groups = [CacheGroup(pages=args.pool // PAGE + 1)]
        self.core = Core(
            Limits(
                slots=256, groups=groups, page_size=PAGE, context_len=32_768, step_tokens=8192,
                itl_target=args.target, tiers=tiers,
            )
        )  # fmt: skip
        self.draw = random.Random(args.seed)
        self.talks = [Talk() for _ in range(args.talks)]
        self.turns: dict[str, Turn] = {}
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = itertools.count()
        self._free = 0.0  # when the GPU is
        self._steps: deque[tuple[float, float, bool]] = deque()  # begin, end, whether they read prompts
        self._lanes: dict[str, deque[Crossing]] = {"device": deque(), "host": deque()}
        self._looked: float | None = None  # when copies were looked at
        self._early: list[Crossing] = []  # that have been told of
        self._results: list[StepResult] = []  # that have not been told, by their steps
        self._step = 1  # whose result is next
        self._queue: deque[Talk] = deque()  # talks that have had no turn in this round
        self._round, self._left, self._asking = -1, 0, 0
        self._threads = {False: [0.0, 0.0], True: [0.0]}  # when threads that prepare prompts are free
        self.mixed: list[tuple[float, int]] = []  # seconds and prompt tokens of steps

    def run(self) -> None:
        self._begin_round()
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] <= self.now:
                _, _, act, given = heapq.heappop(self._events)
                act(given)
            while (plan := self.core.plan(self.now)) is not None:
                self._launch(plan)
            if self.now < self.core.next_plan < math.inf:
                self._at(self.core.next_plan, lambda _: None, None)
            self.core.drain_finished()

    def _at(self, when: float, act: Callable[..., None], given: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), act, given))

    def _begin_round(self) -> None:
        self._round += 1
        if self._round < self.args.rounds:
            self.draw.shuffle(self.talks)
            self._queue.extend(self.talks)
            self._left = len(self.talks)
            self._ask()

    def _ask(self) -> None:
        while self._queue and self._asking < self.args.at:
            self._asking += 1
            talk, start = self._queue.popleft(), self.now + TURN
            talk.tokens += [self.draw.randrange(50_000) for _ in range(self.args.question)]
            threads = self._threads[len(talk.tokens) > LONG]
            i = threads.index(min(threads))
            threads[i] = max(threads[i], start) + self.args.prepare * len(talk.tokens)
            self._at(threads[i], self._arrive, Turn(talk, self._round, start))

    def _arrive(self, turn: Turn) -> None:
        rid = str(len(self.turns))
        self.turns[rid] = turn
        self.core.offer(
            Submit(
                rid=rid, parent=rid, index=0, tokens=[*turn.talk.tokens], max_new=self.args.answer,
                stop_ids=frozenset(), sampling=RowSampling(),
            ),
            self.now,
        )  # fmt: skip

    def _launch(self, plan: StepPlan) -> None:
        before = self._free
        for copy in plan.copies:
            self._copy(copy, before)
        if not plan.slots:
            self._at(self.now + SEND, self._told, StepResult(step=plan.step, tokens=b""))
            return
        starts, counts = array("i", plan.starts), array("i", plan.q_lens)
        begin, seconds = max(self.now + SEND, before), self._seconds(starts, counts)
        touched = {page for new in plan.new for page in array("i", new.pages[0])}
        end = begin + seconds
        for crossing in self._early:
            if crossing.units & touched:  # the rest crosses as beside prompts, band by band
                at = begin
                for band in range(1, BANDS + 1):
                    left = max(0.0, crossing.total * band / BANDS - crossing.done)
                    at = max(at, self.now + left / (self.args.link[1] * 1e9)) + seconds / BANDS
                end = max(end, at)
        self._free = end
        prompt = sum(n for n in counts if n > 1)
        if prompt:
            self.mixed.append((end - begin, prompt))
        self._steps.append((begin, end, prompt > 0))
        tokens = array("i", [7] * sum(flags & 1 for flags in plan.flags)).tobytes()
        result = StepResult(step=plan.step, tokens=tokens, seconds=end - begin)
        self._at(end + SEND, self._told, result)

    def _seconds(self, starts: array[int], counts: array[int]) -> float:
        """Of a step alone."""
        args = self.args
        prompts = [(start, n) for start, n in zip(starts, counts) if n > 1]
        pairs = sum(n * start + n * (n + 1) // 2 for start, n in prompts)
        seconds: float = args.step + args.token * sum(n for _, n in prompts) + args.pair * pairs
        seconds += args.behind * sum(start for start, n in zip(starts, counts) if n == 1)
        eager = any(start >= 8192 for start, _ in prompts) or sum(counts) > 1024
        return max(seconds, args.launch) if eager else seconds

    def _copy(self, copy: Copy, behind: float) -> None:
        units = set(array("i", (copy.targets if copy.target == "device" else copy.sources)[0]))
        total = max(1, len(units) * PAGE * TOKEN)
        begin = max(behind, self.now + SEND)
        self._lanes[copy.target].append(Crossing(copy.transfer, copy.slack, units, begin, total))
        if self._looked is None:
            self._looked = self.now
            self._at(self.now + LOOK, self._look, None)

    def _look(self, _: None) -> None:
        """What has crossed since the last time."""
        assert self._looked is not None
        for lane, rate in zip(self._lanes.values(), self._rates(self._looked)):
            self._cross(lane, 1e9 * rate, self.now - self._looked)
        self._looked = self.now if any(self._lanes.values()) else None
        if self._looked is not None:
            self._at(self.now + LOOK, self._look, None)

    def _rates(self, when: float) -> tuple[float, float]:
        """Of what comes, and of what leaves."""
        while self._steps and self._steps[0][1] <= when:
            self._steps.popleft()
        idle, prompts, *decodes = self.args.link
        if not self._steps or self._steps[0][0] > when:
            return idle, idle
        return (prompts, prompts) if self._steps[0][2] else (decodes[0], decodes[1])

    def _cross(self, lane: deque[Crossing], rate: float, seconds: float) -> None:
        while lane and seconds > 0 and lane[0].behind < self.now:
            one = lane[0]
            one.begun = one.begun or self.now - seconds
            took = min(seconds, (one.total - one.done) / rate)
            one.done, seconds = one.done + took * rate, seconds - took
            over, left = one.total - one.done < 1, 0.0
            if not over:
                left = MARGIN * (self.now - one.begun) * (one.total - one.done) / max(1.0, one.done)
            may = one.slack and one.done >= one.total / BANDS and left <= one.slack * (BANDS - 1) / BANDS
            if (over or may) and not one.told:
                one.told = True
                self._early += [] if over else [one]
                self._at(self.now + SEND, self._moved, one.transfer)
            if over:
                self._early = [other for other in self._early if other is not one]
                lane.popleft()

    def _moved(self, transfer: int) -> None:
        self.core.moved(Moved(transfer, ok=True))

    def _told(self, result: StepResult) -> None:
        self._results.append(result)
        self._results.sort(key=lambda each: each.step)
        while self._results and self._results[0].step == self._step:
            self._step += 1
            for delta in self.core.retire(self._results.pop(0), self.now):
                turn = self.turns[delta.rid]
                turn.first, turn.last = turn.first or self.now, self.now
                turn.tokens += delta.tokens
                if delta.finish:
                    self._end(turn)

    def _end(self, turn: Turn) -> None:
        turn.talk.tokens += turn.tokens
        self._asking -= 1
        self._left -= 1
        self._ask() if self._left else self._begin_round()


def numbers(world: World) -> dict[str, Any]:
    turns = list(world.turns.values())
    times = sorted(1e3 * (turn.first - turn.start) for turn in turns)
    rounds = [[turn for turn in turns if turn.round == k] for k in range(world.args.rounds)]
    by_round = [round(sum(1e3 * (t.first - t.start) for t in each) / len(each)) for each in rounds]
    steps = world.mixed
    return {
        "ttft_mean_ms": round(sum(times) / len(times), 1),
        "ttft_ms": round(times[len(times) // 2], 1),
        "rounds_ms": by_round,
        "turns_s": round(len(turns) / (world.now - 1), 3),
        "prompt_step_ms": round(1e3 * sum(seconds for seconds, _ in steps) / len(steps), 1),
        "prompt_step_tokens": round(sum(tokens for _, tokens in steps) / len(steps)),
    }


def parsed(given: Sequence[str] | None = None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The arguments, and those that are not as they are by default."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--talks", type=int, default=12)
    parser.add_argument("--at", type=int, default=4, help="talks at a time")
    parser.add_argument("--pool", type=int, default=58_250, help="tokens of the KV cache")
    parser.add_argument("--tier", type=float, default=42, help="GB of the host's memory; 0: none")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--question", type=int, default=2240, help="tokens")
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--target", type=float, default=0.03, help="seconds between tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=float, default=4.4e-3, help="seconds of a step, and")
    parser.add_argument("--token", type=float, default=24e-6, help="of a prompt's token in it, and")
    parser.add_argument("--pair", type=float, default=0.93e-9, help="of a token and one that it reads")
    parser.add_argument("--launch", type=float, default=0.016, help="of an eager step, at least")
    parser.add_argument("--behind", type=float, default=35e-9, help="of what is behind a decode row")
    parser.add_argument(
        "--link",
        type=float,
        nargs=4,
        default=[50, 20, 12, 10],
        metavar=("IDLE", "PROMPTS", "IN", "OUT"),
        help="GB a second between the host and the GPU: beside nothing, beside steps that read prompts, and "
        "into the GPU and out of it beside decode steps",
    )
    parser.add_argument("--prepare", type=float, default=2e-6, help="seconds a token that prompts wait for")
    args = parser.parse_args(given)
    return args, {name: value for name, value in vars(args).items() if value != parser.get_default(name)}


def main() -> None:
    args, given = parsed()
    world = World(args)
    world.run()
    lines.emit({"bench": "imagined"} | given | numbers(world))


if __name__ == "__main__":
    main()
