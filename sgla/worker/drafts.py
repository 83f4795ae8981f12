"""What guesses the next tokens of rows, and how a row with drafts is sampled."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from sgla.dist import Shard
from sgla.messages import SAMPLE, NewRow, StepPlan
from sgla.sampling.draw import Floats
from sgla.sampling.sampler import Sampler, Samples
from sgla.worker.batch import Columns, Wanted
from sgla.worker.state import Int32s, SlotTables, column


class Drafter(Protocol):
    """Guesses the next tokens of slots."""

    def admit(self, new: NewRow) -> None:
        """A request takes a slot."""

    def guess(self, plan: StepPlan) -> tuple[Int32s, Int32s] | None:
        """Before a step: ``starts`` and ``q_lens`` of its rows, if some have drafts, which stand behind the
        known tokens in the token table then."""

    def took(self, tokens: int, seconds: float) -> None:
        """The target's forward pass of so many tokens."""

    def learn(self, slots: Int32s, guessed: Int32s, right: Int32s) -> None:
        """Of so many guesses in each slot so many were right, the first ones; -1: the request had ended."""

    def follow(self, columns: Columns, wanted: Wanted, counts: Int32s) -> None:
        """A step has brought so many tokens of each row that is sampled, which are in the token table."""


class Agreed:
    """All ranks guess what ``own`` does on the one that draws, where grammars and clocks are."""

    def __init__(self, own: Drafter, tables: SlotTables, shard: Shard) -> None:
        self._own, self._tables, self._shard = own, tables, shard
        self.admit, self.took, self.learn, self.follow = own.admit, own.took, own.learn, own.follow

    def guess(self, plan: StepPlan) -> tuple[Int32s, Int32s] | None:
        made = self._own.guess(plan)
        if made is None:
            return None
        starts, q_lens = made
        self._shard.agree(q_lens)
        rows = np.flatnonzero((column(plan.drafts) >= 0) & (q_lens > 1))
        counts = q_lens[rows] - 1
        if len(rows):
            behind = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
            places = np.repeat(column(plan.slots)[rows], counts), np.repeat(starts[rows] + 1, counts) + behind
            tokens = self._tables.tokens[places]
            self._shard.agree(tokens)
            self._tables.tokens[places] = tokens
        return starts, q_lens


def agreed(own: Drafter, tables: SlotTables, shard: Shard) -> Drafter:
    """``own`` for one of the ranks."""
    return own if shard.count == 1 else Agreed(own, tables, shard)


class Guessing:
    """What a model that guesses asks of the ``sampler``. All ranks have the guesses of the one that draws."""

    def __init__(self, sampler: Sampler, tables: SlotTables, shard: Shard) -> None:
        self._sampler, self._tables, self._shard = sampler, tables, shard
        self.draws, self.forget_guesses = sampler.draws, sampler.forget_guesses

    def guess(self, logits: Floats, slots: Int32s, positions: Int32s, draws: NDArray[Any]) -> None:
        self._sampler.guess(logits, slots, positions, draws)
        tokens = self._tables.tokens[slots, positions]
        self._shard.agree(tokens)
        self._tables.tokens[slots, positions] = tokens


def begin(plan: StepPlan, tables: SlotTables) -> tuple[Int32s, Int32s, Int32s]:
    """Where the rows of a plan begin, how many tokens they read without guesses, and how many each may
    guess."""
    slots, starts, q_lens = column(plan.slots), column(plan.starts).copy(), column(plan.q_lens).copy()
    most = column(plan.drafts) if plan.drafts else np.full_like(slots, -1)
    rows = np.flatnonzero(most >= 0)
    starts[rows], q_lens[rows] = tables.computed[slots[rows]], 1
    left = tables.limit[slots] - starts - 2  # behind the pending token and the one that follows
    return starts, q_lens, np.where(most >= 0, np.minimum(most, left), 0).clip(0)


def propose(drafter: Drafter, plan: StepPlan, tables: SlotTables) -> list[bytes]:
    """``StepResult.proposed`` of a step that is computed. Rows that have all their tokens guess none."""
    rows = np.arange(len(plan.flags))
    if plan.drafts:
        ended = tables.computed[column(plan.slots)] + 1 >= tables.limit[column(plan.slots)]
        rows = np.flatnonzero((column(plan.drafts) < 0) | ~ended)
    made = drafter.guess(rows_of(plan, rows)) if len(rows) else None
    if made is None:
        return []
    found = [b""] * len(plan.flags)
    for row, start, count in zip(rows.tolist(), *made):
        if column(plan.drafts)[row] >= 0:
            slot = column(plan.slots)[row]
            found[row] = tables.tokens[slot, start + 1 : start + count].tobytes()
    return [tokens for tokens, flags in zip(found, plan.flags) if flags & SAMPLE]


def rows_of(plan: StepPlan, rows: NDArray[np.int_]) -> StepPlan:
    """With some of its ``rows`` alone."""
    names = "slots", "starts", "q_lens", "drafts"
    columns = {name: column(data)[rows].tobytes() for name in names if (data := getattr(plan, name))}
    return replace(plan, flags=np.frombuffer(plan.flags, np.uint8)[rows].tobytes(), **columns)


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
