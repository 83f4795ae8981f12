"""Grammars of rows that a device samples. The device is a step ahead: tokens are taken in when a step's
result is read, and the masks of the next step are made while its forward pass runs."""

from __future__ import annotations

import os
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from sgla.grammar.matcher import Constraint, Matchers, MatchFailed, Words, set_bits
from sgla.messages import NewRow
from sgla.sampling.rules import forbids

Int32s = NDArray[np.int32]
THREADS = 8  # that make masks, at most
NOTHING = np.zeros(0, np.int32)
FORCED_ROWS = 8  # rows of the largest steps after which forced tokens are told at once


class Masks(NamedTuple):
    """``words`` int32[n, ceil(V / 32)], see ``grammar/matcher.py: Words``; ``rows`` int32[n]: the logits they
    belong to; ``ends`` int32[n]: see ``Constraint.ends``, None where no row does."""

    rows: Tensor
    words: Tensor
    ends: Tensor | None = None


class Taken(NamedTuple):
    """``failed``: (i, why) of the i-th of the rows given; ``forced``: what comes behind the i-th; ``known``:
    those whose token is not new."""

    failed: list[tuple[int, str]]
    forced: dict[int, Int32s]
    known: set[int]


class Forced(NamedTuple):
    """``tokens`` that a grammar forces from the ``position`` of a slot on."""

    slot: int
    position: int
    tokens: list[int]


def mask_threads() -> int:
    return max(1, min(THREADS, len(os.sched_getaffinity(0)) // 2))


class Constraints:
    """``tokens`` int32[slots + 1, context + 1] is the token table on the host; here it holds the tokens of
    rows with a grammar alone, and what these have guessed. ``skip_forced`` as in ``Sampler``; ``rows``:
    samples of a step, at most, if there may be more than slots."""

    def __init__(
        self,
        tokens: Int32s,
        vocab_size: int,
        matchers: Matchers,
        skip_forced: bool,
        pin: bool,
        rows: int = 0,
    ) -> None:
        slots = len(tokens)
        rows = max(rows, slots)
        self._tokens, self._matchers, self._skip_forced = tokens, matchers, skip_forced
        self._new: dict[int, NewRow] = {}  # whose constraint has not been made
        self._constraints: dict[int, Constraint] = {}
        self._has = np.zeros(slots, bool)
        self._sampled = np.zeros(slots, bool)  # wants to be told of no token that is not sampled
        # Positions before are not sampled: a grammar has forced their tokens.
        self._known = np.zeros(slots, np.int32)
        self._furthest: dict[int, tuple[int, Constraint]] = {}  # by slot, of the latest masks
        self._executor = LLExecutor(mask_threads())
        self._rows = torch.zeros(rows, dtype=torch.int32, pin_memory=pin)
        self._ends = torch.zeros(rows, dtype=torch.int32, pin_memory=pin)
        self._words = torch.zeros(rows, -(-vocab_size // 32), dtype=torch.int32, pin_memory=pin)

    def admit(self, new: NewRow) -> None:
        """A request takes a slot; whatever the slot had is forgotten. ``tokens`` has what is known of it."""
        slot = new.slot
        self._constraints.pop(slot, None)
        self._new.pop(slot, None)
        self._has[slot] = bool(new.sampling.grammar)
        asked = new.sampling
        self._sampled[slot] = asked.logprobs >= 0 or asked.states or forbids(asked) or new.limit > 0
        self._known[slot] = 0
        if new.sampling.grammar:
            self._new[slot] = new

    def any(self, slots: Int32s) -> bool:
        return bool(self._has[slots].any())

    def masks(
        self, slots: Int32s, positions: Int32s, device: torch.device, read: Int32s = NOTHING
    ) -> tuple[Masks | None, list[tuple[int, str]]]:
        """Of the rows that sample ``positions`` of ``slots``, whose earlier tokens have all been taken; and
        the rows that cannot go on. Of the first rows ``read`` has the tokens that they read: one behind
        another of the same slot reads a guess. Where the position is 0 there is no row. The step before the
        last one must be done: its masks are overwritten."""
        words: Words = self._words.numpy().view(np.uint32)
        rows: list[int] = []
        wanted: list[tuple[int, LLMatcher, int]] = []
        begun: list[Constraint | None] = []
        failed: list[tuple[int, str]] = []
        behind: dict[int, Constraint] = {}  # by slot, of the rows so far
        self._furthest = {}
        for i in np.flatnonzero(self._has[slots] & (positions > 0)).tolist():
            slot, position, place = int(slots[i]), int(positions[i]), len(rows)
            guessed, constraint = 0 < i < len(read) and slots[i - 1] == slot, None
            if position < self._known[slot] and not guessed:
                words[place] = 0
                set_bits(words[place], self._tokens[slot, position : position + 1].astype(np.intp))
            elif not guessed or slot in behind:
                try:
                    constraint = self._constraint(slot)
                    if guessed:
                        self._tokens[slot, position - 1], constraint = read[i], behind.pop(slot).ahead()
                    constraint.catch_up(position)
                except MatchFailed as error:
                    if not guessed:  # else it is the guess that cannot stand there
                        failed.append((i, str(error)))
                    continue
                behind[slot], self._furthest[slot] = constraint, (position, constraint)
                if constraint.open:
                    continue
                if constraint.matcher is not None:
                    wanted.append((constraint.template, constraint.matcher, place))
            else:
                continue
            rows.append(i)
            begun.append(constraint)
        if wanted:
            # Neighbours go to the same thread: those of one template share a lock.
            wanted.sort(key=itemgetter(0))
            pairs = [(matcher, place) for _, matcher, place in wanted]
            self._executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, words.strides[0], len(words))
        ends = self._ends.numpy()
        for place, constraint in enumerate(begun):
            ends[place] = 0
            try:
                if constraint is not None:
                    constraint.complete(words[place])
                    ends[place] = constraint.ends(words[place])
            except MatchFailed as error:
                failed.append((rows[place], str(error)))
        if not rows:
            return None, failed
        count = len(rows)
        self._rows.numpy()[:count] = rows
        parts = [self._rows, self._words, *([self._ends] if ends[:count].any() else [])]
        return Masks(*(x[:count].to(device, non_blocking=True) for x in parts)), failed

    def forced(self) -> list[Forced]:
        """Of the rows that ``masks`` was asked for the last time, behind what they read; nothing where other
        ranks would have to be told."""
        if not self._skip_forced:
            return []
        furthest = ((slot, *found) for slot, found in self._furthest.items())
        runs = (Forced(slot, position, made.forced()) for slot, position, made in furthest)
        return [run for run in runs if run.tokens]

    def take(self, slots: Int32s, positions: Int32s, tokens: Int32s) -> Taken:
        """``tokens`` have been sampled for ``positions`` of ``slots``; negative ones are none. What is forced
        behind them is in the host's token table, and the next samples planned of these rows will be that."""
        failed: list[tuple[int, str]] = []
        runs: dict[int, list[int]] = {}
        few = self._skip_forced and len(slots) <= FORCED_ROWS
        known = set(np.flatnonzero(self._has[slots] & (positions < self._known[slots])).tolist())
        due = self._has[slots] & (positions >= self._known[slots]) & (tokens >= 0)
        for i in np.flatnonzero(due).tolist():
            slot, position = int(slots[i]), int(positions[i])
            self._tokens[slot, position] = tokens[i]
            try:
                constraint = self._constraint(slot)
                constraint.catch_up(position + 1)
            except MatchFailed as error:
                failed.append((i, str(error)))
                continue
            if few and not self._sampled[slot]:
                runs[i] = constraint.forced()
        # A step that reads several tokens of a row takes longer for all rows than one that reads one of each.
        if sum(len(run) - 1 for run in runs.values() if run) < len(slots):
            return Taken(failed, {}, known)
        return Taken(failed, self._take_forced(slots, positions, runs, failed), known)

    def _take_forced(
        self, slots: Int32s, positions: Int32s, runs: dict[int, list[int]], failed: list[tuple[int, str]]
    ) -> dict[int, Int32s]:
        forced: dict[int, Int32s] = {}
        for i, run in runs.items():
            slot, first = int(slots[i]), int(positions[i]) + 1
            places = self._tokens[slot, first : first + len(run)]
            places[:] = run[: len(places)]
            try:
                self._constraint(slot).catch_up(first + len(places))
            except MatchFailed as error:
                failed.append((i, str(error)))
                continue
            self._known[slot] = first + len(places)
            if len(places):
                forced[i] = places.copy()
        return forced

    def _constraint(self, slot: int) -> Constraint:
        """Made when it is first asked for, while the row's prompt is computed: compiling can take long."""
        new = self._new.pop(slot, None)
        if new is not None:
            tokens = self._tokens[slot]
            self._constraints[slot] = self._matchers.constraint(tokens, new.prompt_len, new.sampling)
        return self._constraints[slot]
