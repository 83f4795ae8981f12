"""Drafts without a model: what came behind the same few tokens the last time.

Source: A. Saxena, "Prompt Lookup Decoding", 2023; ``ngram`` of vLLM and SGLang.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from sgla.dist import Shard
from sgla.messages import NewRow, StepPlan
from sgla.sampling.sampler import Sampler
from sgla.worker.batch import Columns, Wanted
from sgla.worker.drafts import Drafter, begin
from sgla.worker.others import Outputs
from sgla.worker.pace import Pace
from sgla.worker.state import Int32s, SlotTables, column

LONGEST, SHORTEST = 4, 2  # tokens that have come before
FIRST = 2  # drafts of a row that has not guessed yet
MODELS = 4  # guesses that a model is asked for, where it is weighed against n-grams


class Found(NamedTuple):
    """What may come behind the known tokens of a row: what its grammar ``forces``, and ``guesses``."""

    row: int
    slot: int
    known: int
    forces: list[int]
    guesses: Int32s


class NGrams:
    """Guesses the next tokens of a slot from those in its table. A row's guesses grow by one each time all
    are right, and shrink to what was right else; ``pace`` says how many pay. A wrong one takes time, and
    never changes what comes out."""

    def __init__(
        self, tables: SlotTables, sampler: Sampler, pace: Pace, others: Outputs | None = None
    ) -> None:
        self._tables, self._sampler, self._pace, self._others = tables, sampler, pace, others
        self._trust = np.full(len(tables.limit), FIRST)

    def admit(self, new: NewRow) -> None:
        self._trust[new.slot] = FIRST
        self._pace.admit(new.slot)
        if self._others is not None:
            self._others.admit(new.slot, new.apart)

    def guess(self, plan: StepPlan) -> tuple[Int32s, Int32s] | None:
        if not plan.drafts:
            return None
        starts, q_lens, counts = begin(plan, self._tables)
        found = self.find(column(plan.slots), starts, counts)
        slots = np.array([one.slot for one in found], np.int32)
        longest = max((len(one.guesses) for one in found), default=0)
        most = self._pace.most(slots, longest, int(q_lens.sum()))
        for one in found:
            q_lens[one.row] += self.put(one, most)
        return starts, q_lens

    def find(self, slots: Int32s, starts: Int32s, counts: Int32s) -> list[Found]:
        """Of the rows that may guess so many tokens, those for which there is something."""
        made = []
        for row in np.flatnonzero(counts).tolist():
            slot, known = int(slots[row]), int(starts[row]) + 1
            tokens, most = self._tables.tokens[slot], int(counts[row])
            forces = self._sampler.forced(slot, known)[:most]
            end = known + len(forces)
            tokens[known:end] = forces
            guesses = self._look(slot, tokens[:end], min(most - len(forces), int(self._trust[slot])))
            if forces or len(guesses):
                made.append(Found(row, slot, known, forces, guesses))
        return made

    def _look(self, slot: int, tokens: Int32s, most: int) -> Int32s:
        """A long run of the slot's own text goes before one of another's, and that before a short one."""
        guesses = self.propose(tokens, most, LONGEST)
        if not len(guesses) and self._others is not None and most > 0:
            guesses = self._others.behind(slot, tokens, most)
        return guesses if len(guesses) else self.propose(tokens, most)

    def put(self, found: Found, most: int) -> int:
        """Put what was found behind the known tokens, with ``most`` of the guesses, as far as the grammar
        allows that. Returns how many these are."""
        made = [*found.forces, *found.guesses[:most].tolist()]
        self._tables.tokens[found.slot, found.known : found.known + len(made)] = made
        return self._sampler.legal(found.slot, found.known, made)

    @staticmethod
    def propose(tokens: Int32s, most: int, shortest: int = SHORTEST) -> Int32s:
        """At most ``most`` tokens that may follow ``tokens``: those behind a run of ``shortest`` or more."""
        if most <= 0:
            return tokens[:0]
        for size in range(min(LONGEST, len(tokens) - 1), shortest - 1, -1):
            # Behind a token like the last one.
            ends = np.flatnonzero(tokens[size - 1 : -1] == tokens[-1]) + size
            for back in range(2, size + 1):
                ends = ends[tokens[ends - back] == tokens[-back]]
            if len(ends):
                behind = tokens[ends[-1] :]
                return behind[np.arange(most) % len(behind)]  # and so on, if that goes on
        return tokens[:0]

    def took(self, tokens: int, seconds: float) -> None:
        self._pace.step(tokens, seconds)

    def learn(self, slots: Int32s, guessed: Int32s, right: Int32s) -> None:
        self._pace.learn(slots, guessed, right)
        wrong, all_right = right < guessed, (right == guessed) & (guessed > 0)
        self._trust[slots[wrong]] = np.maximum(right[wrong], 1)
        self._trust[slots[all_right]] += 1

    def follow(self, columns: Columns, wanted: Wanted, counts: Int32s) -> None:
        if self._others is None:
            return
        first = wanted.first
        for slot, at, count in zip(wanted.slots[first], wanted.positions[first], counts):
            self._others.add(slot, self._tables.tokens[slot, at : at + count].tolist())


class Both:
    """A row's guesses are n-grams where these bring more than those of the ``model``, which all ranks
    compute."""

    def __init__(
        self, ngrams: NGrams, model: Drafter, paces: tuple[Pace, Pace], tables: SlotTables, shard: Shard
    ) -> None:
        self._ngrams, self._model, self._paces, self._tables = ngrams, model, paces, tables
        self._shard = shard
        self._looked = np.zeros(len(tables.limit), bool)  # slots whose latest guesses are n-grams

    def admit(self, new: NewRow) -> None:
        self._ngrams.admit(new)
        self._model.admit(new)

    def guess(self, plan: StepPlan) -> tuple[Int32s, Int32s] | None:
        if not plan.drafts:
            return self._model.guess(plan)
        slots = column(plan.slots)
        starts, _, counts = begin(plan, self._tables)
        made = self._ngrams.find(slots, starts, counts) if self._shard.draws else []
        found = [(one, most) for one in made if (most := self._pays(one)) >= 0]
        self._looked[slots] = False
        rows = [one.row for one, _ in found]
        self._looked[slots[rows]] = True
        drafts = column(plan.drafts).copy()
        drafts[rows] = 0
        self._shard.agree(drafts)
        guessed = self._model.guess(replace(plan, drafts=drafts.tobytes()))
        assert guessed is not None
        starts, q_lens = guessed
        for one, most in found:
            q_lens[one.row] += self._ngrams.put(one, most)
        return starts, q_lens

    def _pays(self, found: Found) -> int:
        """How many of the guesses the row is to take; -1: it takes the model's."""
        ngrams, model = self._paces
        if found.forces:
            return len(found.guesses)
        own, other = ngrams.best(found.slot, len(found.guesses)), model.best(found.slot, MODELS)
        return own.guesses if own.guesses and own.a_second > other.a_second else -1

    def took(self, tokens: int, seconds: float) -> None:
        self._ngrams.took(tokens, seconds)
        self._model.took(tokens, seconds)

    def learn(self, slots: Int32s, guessed: Int32s, right: Int32s) -> None:
        looked = self._looked[slots]
        self._ngrams.learn(slots[looked], guessed[looked], right[looked])
        self._model.learn(slots[~looked], guessed[~looked], right[~looked])

    def follow(self, columns: Columns, wanted: Wanted, counts: Int32s) -> None:
        self._ngrams.follow(columns, wanted, counts)
        self._model.follow(columns, wanted, counts)
