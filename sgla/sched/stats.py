"""Numbers for metrics. Counters only grow; the rest are of now."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from sgla.sched.request import Request

FINISHED_KEPT = 4096


class Finished(msgspec.Struct, kw_only=True):
    """One ended request. Times are seconds on the caller's clock; ``None``: it never came so far."""

    rid: str
    reason: str  # stop | length | abort | error
    arrival: float
    scheduled: float | None
    first_token: float | None
    finished: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    yields: bool = False


class WindowStats(msgspec.Struct, kw_only=True):
    """Pages of a cache group with a window."""

    window: int  # tokens
    total: int  # without the dummy
    free: int
    evictable: int  # in the tree, and held by no request


class TierStats(msgspec.Struct, kw_only=True):
    """Pages of the first cache group in a tier beside the device."""

    name: str
    total: int
    cached: int = 0
    loaded: int = 0  # counter: copied to the device
    saved: int = 0  # counter: copied there
    failed: int = 0  # counter: copies, of any number of pages, that failed
    asking: int = 0  # prompts that it is to compute
    asked: int = 0  # counter: prompts that it was to compute
    unanswered: int = 0  # counter: of these, those of which not all has come


class Stats(msgspec.Struct, kw_only=True):
    running: int = 0
    held: int = 0  # for what their ``holds`` name
    waiting: int = 0  # for room
    retracted: int = 0  # of those, preempted ones
    draining: int = 0
    in_flight: int = 0  # steps
    pages_total: int = 0  # without the dummy
    pages_free: int = 0
    pages_cached: int = 0  # in the tree
    pages_evictable: int = 0  # of those, not in use
    pages_private: int = 0
    windows: list[WindowStats] = []  # the above are of the first cache group, these of the others
    tiers: list[TierStats] = []
    adapter_places: int = 0  # on the device
    adapters_placed: int = 0  # adapters that have one
    adapter_loads: int = 0  # counter: copies to a place
    cached_tokens: int = 0  # in the tree
    query_tokens: int = 0  # counter: tokens looked up in the tree, once a request
    hit_tokens: int = 0  # counter: of those, found
    hits: dict[str, int] = {}  # counters: by the place where they were found, the device or a tier
    misses: dict[str, int] = {}  # counters: of prompts of requests that ran, not found, by the reason
    preemptions: int = 0  # counter
    rejected: int = 0  # counter: refused by offer, or before it for want of room
    finished: dict[str, int] = {}  # counter by reason
    prompt_tokens: int = 0  # counter: prompts of admitted requests
    prefilled_tokens: int = 0  # counter: planned by rows that computed what was known
    output_tokens: int = 0  # counter: committed
    forced_tokens: int = 0  # counter: of those, forced by a grammar and not sampled
    verifies: int = 0  # counter: decode rows that might guess and brought tokens
    verified_tokens: int = 0  # counter: of generated ones, those that they brought
    drafts: int = 0  # counter: of these rows, those that guessed
    draft_tokens: int = 0  # counter: guessed
    right_at: list[int] = []  # counters: right guesses by their position in a row, from 0
    invalid_logits: int = 0  # counter: requests ended because the model's logits or vectors were no numbers
    steps: int = 0  # counter
    step_seconds: float = 0.0  # counter: the worker was busy
    gap_seconds: float = 0.0  # counter: the worker waited for a plan
    last_rows: int = 0  # of the last plan
    last_decodes: int = 0
    last_tokens: int = 0
    last_predicted: float = 0.0  # seconds it should take; 0 without an inter-token target

    @property
    def queued(self) -> int:
        """Open, and not running."""
        return self.waiting + self.held


class Ledger:
    """Counts, and the times of the requests that ended."""

    def __init__(self) -> None:
        self.counts = Stats()
        self._finished: deque[Finished] = deque(maxlen=FINISHED_KEPT)

    def verified(self, rows: Iterable[tuple[int, int]]) -> None:
        """Tokens that rows have guessed and brought."""
        counts = self.counts
        for guessed, brought in rows:
            counts.verifies += 1
            counts.verified_tokens += brought
            counts.drafts += guessed > 0
            counts.draft_tokens += guessed
            right = min(guessed, brought - 1)
            counts.right_at += [0] * (right - len(counts.right_at))
            for at in range(right):
                counts.right_at[at] += 1

    def missed(self, request: Request, page_size: int) -> None:
        """Why the request, which has run, has not found all of its prompt: ``unread`` it had to compute all;
        ``tail`` no page ends there, or it is the last token; ``parts`` the tree has the tokens and not their
        window or state; ``evicted`` the tree has had it; ``salt``, ``adapter`` or ``weights`` it has, of a
        request with another one; ``new`` it has not, as far as it remembers."""
        misses, asked, cached = self.counts.misses, request.prompt_len, request.cached
        if request.reach < 0:
            misses["unread"] = misses.get("unread", 0) + asked
            return
        whole = (asked - 1) // page_size * page_size
        left = max(whole - cached, 0)
        parts = min(left, max(request.reach - cached, 0))
        evicted = min(left - parts, max(request.past - max(request.reach, cached), 0))
        left -= parts + evicted
        apart = min(left, max(request.elsewhere - max(request.past, request.reach, cached), 0))
        reasons = {"tail": asked - whole, "parts": parts, "evicted": evicted, "new": left - apart}
        if apart:
            reasons[request.apart] = apart
        for why, tokens in reasons.items():
            misses[why] = misses.get(why, 0) + tokens

    def ended(self, request: Request, reason: str, now: float) -> None:
        """The request has ended."""
        self.counts.finished[reason] = self.counts.finished.get(reason, 0) + 1
        self._finished.append(
            Finished(
                rid=request.rid,
                reason=reason,
                arrival=request.arrival,
                scheduled=request.scheduled,
                first_token=request.first_token,
                finished=now,
                prompt_tokens=request.prompt_len,
                output_tokens=request.outputs,
                cached_tokens=request.cached,
                preemptions=request.preemptions,
                yields=request.yields,
            )
        )

    def drain(self) -> list[Finished]:
        """The ends since the last call, the latest ``FINISHED_KEPT`` at most."""
        finished = list(self._finished)
        self._finished.clear()
        return finished
