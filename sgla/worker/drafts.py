"""Drafts without a model: what came behind the same few tokens the last time.
And how a row with drafts is sampled.

Source: A. Saxena, "Prompt Lookup Decoding", 2023; ``ngram`` of vLLM and SGLang.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sgla.messages import StepPlan
from sgla.sampling.sampler import Sampler, Samples
from sgla.worker.batch import Columns, Wanted
from sgla.worker.state import Int32s, SlotTables, column

LONGEST, SHORTEST = 4, 2  # tokens that have come before
FIRST = 2  # drafts of a row that has not guessed yet


class Drafter(Protocol):
    """Guesses the next tokens of slots."""

    def admit(self, slot: int) -> None:
        """A request takes the slot."""

    def guess(self, plan: StepPlan) -> tuple[Int32s, Int32s] | None:
        """Before a step: ``starts`` and ``q_lens`` of its rows, if some have drafts, which stand behind the
        known tokens in the token table then."""

    def took(self, tokens: int, seconds: float) -> None:
        """The target's forward pass of so many tokens."""

    def follow(self, columns: Columns, wanted: Wanted, counts: Int32s) -> None:
        """A step has brought so many tokens of each row that is sampled, which are in the token table."""


def begin(plan: StepPlan, tables: SlotTables) -> tuple[Int32s, Int32s, Int32s]:
    """Where the rows of a plan begin, how many tokens they read without guesses, and how many each may
    guess."""
    slots, starts, q_lens = column(plan.slots), column(plan.starts).copy(), column(plan.q_lens).copy()
    most = column(plan.drafts) if plan.drafts else np.full_like(slots, -1)
    rows = np.flatnonzero(most >= 0)
    starts[rows], q_lens[rows] = tables.computed[slots[rows]], 1
    left = tables.limit[slots] - starts - 2  # behind the pending token and the one that follows
    return starts, q_lens, np.where(most >= 0, np.minimum(most, left), 0).clip(0)


class NGrams:
    """Guesses the next tokens of a slot from those in its table. A row's guesses grow by one each time all
    are right, and shrink to what was right else: a wrong one takes time, and never changes what comes out."""

    def __init__(self, tables: SlotTables, sampler: Sampler) -> None:
        self._tables, self._sampler = tables, sampler
        self._trust = np.full(len(tables.limit), FIRST)

    def admit(self, slot: int) -> None:
        self._trust[slot] = FIRST

    def guess(self, plan: StepPlan) -> tuple[Int32s, Int32s] | None:
        if not plan.drafts:
            return None
        tables, slots = self._tables, column(plan.slots)
        starts, q_lens, counts = begin(plan, tables)
        for row in np.flatnonzero(counts).tolist():
            slot, known = int(slots[row]), int(starts[row]) + 1
            q_lens[row] += self._guess(slot, known, int(counts[row]))
        return starts, q_lens

    def _guess(self, slot: int, known: int, most: int) -> int:
        """Put at most ``most`` guesses behind the ``known`` tokens of a slot: what its grammar forces, then
        what came behind the same tokens before, as far as the grammar allows that. Returns how many."""
        tokens = self._tables.tokens[slot]
        forced = self._sampler.forced(slot, known)[:most]
        end = known + len(forced)
        tokens[known:end] = forced
        guessed = self.propose(tokens[:end], min(known + most - end, int(self._trust[slot])))
        tokens[end : end + len(guessed)] = guessed
        return self._sampler.legal(slot, known, tokens[known : end + len(guessed)].tolist())

    @staticmethod
    def propose(tokens: Int32s, most: int) -> Int32s:
        """At most ``most`` tokens that may follow ``tokens``."""
        if most <= 0:
            return tokens[:0]
        for size in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
            # Behind a token like the last one.
            ends = np.flatnonzero(tokens[size - 1 : -1] == tokens[-1]) + size
            for back in range(2, size + 1):
                ends = ends[tokens[ends - back] == tokens[-back]]
            if len(ends):
                behind = tokens[ends[-1] :]
                return behind[np.arange(most) % len(behind)]  # and so on, if that goes on
        return tokens[:0]

    def took(self, tokens: int, seconds: float) -> None:
        """A row's guesses depend on its text alone."""

    def follow(self, columns: Columns, wanted: Wanted, counts: Int32s) -> None:
        if len(wanted.rows) > len(wanted.runs):
            self.learn(wanted.slots[wanted.first], wanted.runs - 1, counts - 1)

    def learn(self, slots: Int32s, guessed: Int32s, right: Int32s) -> None:
        """Of so many guesses in each slot so many were right."""
        wrong, all_right = right < guessed, (right == guessed) & (guessed > 0)
        self._trust[slots[wrong]] = np.maximum(right[wrong], 1)
        self._trust[slots[all_right]] += 1


def verify(
    sampler: Sampler,
    logits: NDArray[np.float32],
    wanted: Wanted,
    drafts: Int32s,
    draws: NDArray[Any] | None,
) -> tuple[Samples, Int32s]:
    """Sample each row of ``wanted.runs`` tokens one after the other, as if they were computed one by one, up
    to the first that is not the one of ``drafts`` int32[S]. Returns also how many each row has; its others
    mean nothing. ``forced`` and ``known`` are about rows.

    A token is drawn by its seed, position and id,
    so it is the same one that comes without drafts, at any temperature.
    """
    first, counts = wanted.first, np.zeros_like(wanted.runs)
    whole = Samples(np.zeros(len(wanted.rows), np.int32), [], [], {}, set())
    going = np.arange(len(first))
    while len(going):
        at = first[going] + counts[going]
        part = sampler.sample(logits, wanted.rows[at], wanted.slots[at], wanted.positions[at], draws, at)
        whole.tokens[at] = part.tokens
        whole.logprobs.extend(part.logprobs)
        whole.failed.extend(part.failed)
        whole.forced.update({int(going[i]): run for i, run in part.forced.items()})
        whole.known.update(int(going[i]) for i in part.known)
        counts[going] += 1
        right = (part.tokens == drafts[at]) & (counts[going] < wanted.runs[going])
        right &= ~np.isin(wanted.rows[at], [failed.row for failed in part.failed])
        going = going[right]
    return whole, counts
