"""Drives Core with FakeModel, synchronously: every plan is verified, every step is followed by ``check``."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from random import Random
from typing import Any

from msgspec.structs import replace

from sgla.cache.tier import chain
from sgla.executor.fake import FakeModel, mix
from sgla.executor.fake_tiers import WRONG
from sgla.messages import (
    CacheGroup,
    Delta,
    Facts,
    Failed,
    Ready,
    RowSampling,
    StepCost,
    StepPlan,
    Submit,
    Tier,
    keys_in,
)
from sgla.sched.core import Core
from sgla.sched.limits import Limits, plan_bytes_of

VOCAB = 50


def make_limits(*, pages: int = 33, windows: Sequence[CacheGroup] = (), **changes: Any) -> Limits:
    """``pages``: of the first cache group; ``windows``: the others."""
    values: dict[str, Any] = {
        "slots": 4,
        "groups": [CacheGroup(pages), *windows],
        "page_size": 4,
        "context_len": 96,
        "step_tokens": 16,
        "depth": 2,
    }
    return Limits(**(values | changes))


def make_submit(rid: str, tokens: list[int], max_new: int = 8, **changes: Any) -> Submit:
    sampling = changes.pop("sampling", RowSampling())
    return Submit(
        rid=rid,
        parent=changes.pop("parent", rid),
        index=0,
        tokens=tokens,
        max_new=max_new,
        stop_ids=changes.pop("stop_ids", frozenset()),
        sampling=sampling,
        sampling_bytes=plan_bytes_of(sampling),
        **changes,
    )


class Simulation:
    """``cut``: requests ended by a cancel or a deadline. ``forced``, ``acceptance`` and ``second``: see
    FakeModel. A step lasts 1 on the simulated clock, or ``cost``."""

    def __init__(
        self,
        limits: Limits,
        cost: Callable[[int, int], float] | None = None,
        check: bool = True,
        forced: int = 0,
        acceptance: float = 0.7,
        second: float = 0.0,
        before: Simulation | None = None,
    ) -> None:
        """``before``: a server that has had the tiers that last."""
        facts = Facts(
            groups=limits.groups,
            page_size=limits.page_size,
            slots=limits.slots,
            context_len=limits.context_len,
            vocab_size=VOCAB,
            step_tokens=limits.step_tokens,
            drafts=limits.drafts,
            leaves=limits.leaves,
            adapters=limits.adapters,
            dtype="none",
            device="fake",
            hidden=limits.hidden,
            tiers=limits.tiers,
        )
        self.limits = limits
        self.core = Core(limits, before.model.tiers.found() if before else [])
        chances = {"forced": forced, "acceptance": acceptance, "second": second}
        self.model = FakeModel(facts, seed=1, verify=check, cost=cost, **chances)
        for tier in limits.tiers if before else ():
            if tier.lasting or tier.shared:
                self.model.tiers.there[tier.name] = before.model.tiers.there[tier.name]
        self.check = check
        self.paused = False  # steps move copies alone
        self.now = 1.0
        self.flights: deque[StepPlan] = deque()
        self.submits: dict[str, Submit] = {}
        self.deltas: dict[str, list[Delta]] = {}
        self.cut: set[str] = set()
        self.held: set[str] = set()
        self.copies: list[int] = []  # transfers under way
        self.plans: list[StepPlan] = []
        self.seconds: list[float] = []

    def offer(self, submit: Submit) -> None:
        self.core.offer(submit, self.now)
        self.submits[submit.rid] = submit
        self.deltas[submit.rid] = []
        if submit.holds:
            self.held.add(submit.rid)

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert self.finish(delta.rid) is None, f"{delta.rid} got a Delta after its finish"
            self.deltas[delta.rid].append(delta)

    def cancel(self, rid: str, reason: str = "client") -> None:
        final = self.core.cancel(rid, reason)
        if final is not None:
            assert final.finish == ("stop" if reason == "stop" else "abort")
            self.cut.add(rid)
            self.take([final])

    def ready(self, rid: str) -> None:
        """All that the request is held for is there."""
        self.held.discard(rid)
        for reason in self.submits[rid].holds:
            self.core.ready(Ready(rid=rid, reason=reason))

    def end_a_hold(self, random: Random) -> None:
        if self.held:
            self.ready(random.choice(sorted(self.held)))

    def end_a_copy(self, random: Random, failures: float = 0.0) -> None:
        if self.copies:
            transfer = self.copies.pop(random.randrange(len(self.copies)))
            self._prefill(transfer, random)
            self.core.moved(self.model.move(transfer, ok=random.random() >= failures))
            if self.check:
                self.core.check()

    def _prefill(self, transfer: int, random: Random) -> None:
        """What a prefill server brings of a prompt, if one is asked: all, or what it had before it died."""
        copy, _ = self.model.tiers._copying.get(transfer, (None, None))
        if copy is None or not copy.tokens:
            return
        size, width = self.limits.page_size, 4 * self.limits.page_size
        tokens, state, hashes = array("I", copy.tokens), 0, list[int]()
        for token in tokens:
            state = mix(state, token)
            hashes.append(state)
        names = chain([], copy.namespace, copy.tokens, width, -(-len(tokens) // size))
        brings = random.choice((1.0, 1.0, 0.7))
        for g, keys in enumerate(copy.keys):
            there = self.model.tiers.there[copy.source][g]
            for key in keys_in(keys):
                assert key in names, "the text is not that of the keys"
                end = (names.index(key) + 1) * size
                whole = self.limits.groups[g].every
                page = hashes[end - size : end]
                content = (end, hashes[end - 1]) if whole else page + [WRONG] * (size - len(page))
                if random.random() < brings:
                    there[key] = key, content

    def evict(self) -> None:
        """The device loses all that nobody holds, and the host keeps its copies."""
        self.core._memory.cache.flush()

    def submit_plans(self) -> None:
        while (plan := self.core.plan(self.now, self.paused)) is not None:
            assert not (self.paused and plan.slots)
            self.flights.append(plan)
            self.plans.append(plan)
            if self.check:
                self.core.check()
        assert len(self.flights) <= max(self.limits.depth, self.limits.brief_depth)

    def step(self, broken: float | None = None) -> bool:
        """Plan as far as possible, then let the oldest step finish. False if there is none. ``broken``: which
        of its rows, of 0 to 1, the model has no numbers for."""
        expired = self.core.expire(self.now)
        self.cut.update(delta.rid for delta in expired)
        self.take(expired)
        self.submit_plans()
        if not self.flights:
            self.now += 1.0
            copying = bool(self.copies)
            self.end_a_copy(Random(0))
            return copying
        plan = self.flights.popleft()
        result = self.model.execute(plan)
        self.copies += [copy.transfer for copy in plan.copies]
        if broken is not None and plan.flags:
            row = int(broken * len(plan.flags))
            result.failed = [Failed(row, "broken", fault=True)]
            self.cut.add(self.core._queues.flights[0].rows[row].rid)
        self.seconds.append(result.seconds)
        over = self.now + (result.seconds or 1.0)
        if self.now < self.core.next_plan < over:
            self.now = self.core.next_plan
            self.submit_plans()
        self.now = over
        self.take(self.core.retire(result, self.now))
        if self.check:
            self.core.check()
        return True

    def run(self, limit: int = 5000) -> None:
        """Until idle; fails if that takes more than ``limit`` steps."""
        for _ in range(limit):
            if self.core.idle:
                return
            assert self.step() or self.core.idle, "requests are open and nothing runs"
        raise AssertionError(f"not idle after {limit} steps")

    def tokens(self, rid: str) -> list[int]:
        return [token for delta in self.deltas[rid] for token in delta.tokens]

    def finish(self, rid: str) -> str | None:
        deltas = self.deltas[rid]
        return deltas[-1].finish if deltas else None

    def alone(self, rid: str) -> tuple[list[int], str]:
        """What the request must produce, and how it must end, whatever else happens."""
        submit = self.submits[rid]
        if submit.sampling.pool is not None:
            return [], "stop"
        room = min(self.limits.context_len, self.limits.pool_tokens + 1) - len(submit.tokens)
        max_new = min(submit.max_new, room)
        tokens = self.model.continuation(
            submit.tokens, submit.sampling, submit.stop_ids, max_new, submit.adapter
        )
        stopped = tokens and tokens[-1] in submit.stop_ids and len(tokens) > submit.sampling.min_tokens
        return tokens, "stop" if stopped else "length"

    def verify(self) -> None:
        """Every request ended, with the text it has alone (a prefix of it if it was cut short); all is given
        back."""
        for rid, submit in self.submits.items():
            tokens, finish = self.alone(rid)
            got = self.tokens(rid)
            assert self.finish(rid) is not None, f"{rid} never ended"
            if rid in self.cut:
                assert got == tokens[: len(got)], rid
            else:
                assert (got, self.finish(rid)) == (tokens, finish), rid
                vector = None if submit.sampling.pool is None else self.model.vector(submit.tokens)
                assert self.deltas[rid][-1].vector == vector, rid
            if submit.sampling.grammar:
                parities = [token % 2 for token in (submit.tokens[-1], *got)]
                assert all(one != other for one, other in pairwise(parities)), f"{rid} left its grammar"
        self.verify_states()
        self.verify_shared()
        self.verify_guesses()
        self.assert_released()

    def verify_guesses(self) -> None:
        """What the metrics count is what the rows have brought."""
        stats = self.core.stats()
        assert stats.verified_tokens == stats.verifies + sum(stats.right_at)
        assert sum(stats.right_at) <= stats.draft_tokens <= self.limits.drafts * stats.drafts
        assert stats.drafts <= stats.verifies
        assert stats.right_at == sorted(stats.right_at, reverse=True)

    def verify_states(self) -> None:
        """Each request that wanted hidden states has those of its own tokens, each once, with the token that
        followed."""
        for rid, submit in self.submits.items():
            found, tokens = b"", list(submit.tokens)
            for delta in self.deltas[rid]:
                found += b"".join(delta.hidden or [])
                tokens += delta.tokens
                if submit.sampling.hidden and delta.tokens:
                    assert found == self.model.states(tokens[:-1]), rid
            assert submit.sampling.hidden or not found

    def verify_shared(self) -> None:
        """Nobody has read more from the cache than another prompt or text begins with, whose media are the
        same."""
        if self.core.stats().preemptions:
            return  # who comes back reads what was its own
        keys = {rid: self._key(rid) for rid in self.submits}
        for rid, key in keys.items():
            cached = sum(delta.cached_tokens for delta in self.deltas[rid])
            common = (shared(key, other) for name, other in keys.items() if name != rid)
            assert cached <= max([0, *common]), rid

    def _key(self, rid: str) -> list[Any]:
        submit = self.submits[rid]
        media = dict(submit.media)
        tokens = enumerate(submit.tokens + self.alone(rid)[0])
        return [submit.namespace, *((token, media.get(position, b"")) for position, token in tokens)]

    def assert_released(self) -> None:
        stats = self.core.stats()
        left = stats.held, stats.running, stats.waiting, stats.draining, stats.pages_private
        assert not any(left), left
        assert stats.pages_evictable == stats.pages_cached
        self.core.check()


def shared(key: list[Any], other: list[Any]) -> int:
    """How many tokens both begin with, in the same namespace."""
    return max(0, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(key, other))) - 1)


def random_limits(random: Random, **changes: Any) -> Limits:
    page_size = random.choice((1, 2, 3, 4, 8))
    tokens = random.choice((16, 24, 32, 60))
    groups = [CacheGroup(1 + tokens // page_size)]
    for _ in range(random.choice((0, 0, 1, 2))):
        window = random.choice((1, 2, 5, 9, 16))
        least = (window + page_size - 2) // page_size + 1
        groups.append(CacheGroup(1 + least + random.choice((0, 1, 4, 60 // page_size)), window))
    shares = len(groups) > 1 and random.random() < 0.5
    if shares:
        sizes = [random.choice((1, 1, 2, 3, 5)) for _ in groups]
        slabs = len(groups) + random.choice((0, 1, 3, tokens // page_size))
        groups = [CacheGroup(1 + slabs * n, group.window, slab=n) for group, n in zip(groups, sizes)]
    if random.random() < 0.5:
        groups.append(
            CacheGroup(random.choice((2, 3, 5, 12, 40)), every=page_size * random.choice((1, 2, 5)))
        )
    values: dict[str, Any] = {
        "slots": random.randint(1, 6),
        "page_size": page_size,
        "groups": groups,
        "context_len": random.choice((20, 40, 40)),
        "step_tokens": random.choice((1, 3, 8, 20, 64)),
        "costs": random_costs(random),
        "tiers": [] if shares else random_tiers(random, len(groups)),
        "depth": random.randint(1, 3),
        "drafts": random.choice((0, 0, 1, 3, 8)),
        "adapters": random.choice((1, 2, 4)),
        "padded_drafts": random.random() < 0.5,
        "searched_drafts": random.random() < 0.3,
        "guided_drafts": random.random() < 0.7,
        "itl_target": random.choice((None, None, 2.0)),
        "policy": random.choice(("fcfs", "lpm", "auto", "dfs-weight", "lof", "random", "priority")),
        "eviction": random.choice(("lru", "lfu", "fifo", "mru", "cost")),
        "prefix_cache": random.random() < 0.8,
        "patience": random.choice((5.0, 1000.0)),
        "reserve": random.choice((0.0, 0.0, 0.5)),
    }
    limits = Limits(**(values | changes))
    return replace(limits, brief_depth=random.choice((0, 0, 3)))


def brief(tokens: int, work: int) -> float:
    """Seconds of a step, where those of a row or two are brief."""
    return 0.5 if tokens > 2 else 0.0005


def random_tiers(random: Random, groups: int) -> list[Tier]:
    tiers = [Tier("host", [random.choice((1, 3, 10, 60)) for _ in range(groups)])]
    tiers.append(Tier("disk", [random.choice((2, 20, 90)) for _ in range(groups)], lasting=True))
    return random.choice(([], tiers[:1], tiers[1:], tiers))


def random_costs(random: Random) -> list[StepCost]:
    tile, tokens, prompts = random.choice((1, 1, 4, 16)), random.choice((2, 8, 30)), random.choice((0, 1, 3))
    every = StepCost(tokens=64, tile=tile)
    return [StepCost(tokens=tokens, prompts=prompts, tile=tile), every] if prompts else [every]


def random_submits(random: Random, count: int, longest: int = 24, end: float = 60.0) -> list[Submit]:
    """Requests that share prefixes, in order of arrival."""
    stems = []
    for _ in range(random.randint(1, 3)):
        words = random.choice((1, 2, VOCAB))  # repetitive prompts look alike at different depths
        stems.append([random.randrange(words) for _ in range(random.randint(1, longest))])
    submits = []
    arrival = 1.0
    for i in range(count):
        stem = random.choice(stems)
        tokens = stem[: random.choice((len(stem), len(stem), random.randint(1, len(stem))))]
        tokens += [random.randrange(3) for _ in range(random.choice((0, 1, 4)))]
        arrival += random.choice((0.0, 0.0, 0.0, 1.0, 4.0))
        stop_ids = frozenset(random.sample(range(VOCAB), random.choice((0, 4))))
        sampling = RowSampling(
            min_tokens=random.choice((0, 0, 3)),
            stop_ids=random.choice((sorted(stop_ids), [])),
            logprobs=random.choice((-1, -1, 0, 2)),
            grammar=random.choice(("", "", "in turn")),
            prompt_logprobs=random.choice((-1, -1, -1, 0, 1)),
            logprob_start=random.choice((0, 0, 3, 12)),
        )
        submits.append(
            make_submit(
                f"r{i}",
                tokens,
                random.choice((0, 1, 3, 10, 20)),
                stop_ids=stop_ids,
                sampling=sampling,
                client=random.choice(("", "", "other", f"new{i}")),
                priority=random.choice((0, 0, 1, 5)),
                yields=random.random() < 0.25,
                namespace=random.choice(("", "", "salt")),
                deadline=arrival + random.uniform(1, end) if random.random() < 0.1 else None,
                arrival=arrival,
                cache_ttl=random.choice((0.0, 0.0, 0.0, 2.0, 50.0)),
                holds=frozenset(random.choice(((), (), (), ("grammar",), ("grammar", "adapter")))),
            )
        )
    return submits


def of_any_kind(random: Random, submit: Submit) -> Submit:
    """The request, at times for a vector or with hidden states, and with something else among its tokens."""
    sampling, max_new = submit.sampling, submit.max_new
    match random.choice(("text", "text", "text", "vector", "states")):
        case "vector":
            sampling, max_new = RowSampling(pool=random.choice(([], [1, 2]))), 0
        case "states":
            sampling = replace(sampling, hidden=True)
    media = [(random.randrange(len(submit.tokens)), random.choice((b"cat", b"dog")))]
    adapter = random.choice((0, 0, 1, 2, 3, 4))
    return replace(
        submit,
        adapter=adapter,
        namespace=f"{submit.namespace}/{adapter}",
        sampling=sampling,
        sampling_bytes=plan_bytes_of(sampling),
        max_new=max_new,
        media=media if random.random() < 0.3 else [],
    )
