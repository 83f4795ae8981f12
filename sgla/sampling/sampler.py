"""Chooses the next token of every row that is due, with what it knows of each slot."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgla.grammar.matcher import Constraint, Matchers, MatchFailed
from sgla.kernels.cpu.native import DRAW
from sgla.messages import Failed, LogprobBlock, RowSampling
from sgla.sampling import faults
from sgla.sampling.draw import Distribution, Draw, Floats, draw
from sgla.sampling.logprobs import score
from sgla.sampling.processors import Custom, Factory, ProcessorFailed
from sgla.sampling.rules import Rule, forbids, make_rules

COLD = 1e-5  # temperatures below are greedy


class Samples(NamedTuple):
    tokens: NDArray[np.int32]  # [S]
    logprobs: list[LogprobBlock]
    failed: list[Failed]
    forced: dict[int, NDArray[np.int32]]  # behind the token of the i-th row, by its grammar
    known: set[int]  # rows whose token is not new


class Unusable(Exception):
    """A row's logits give no token. ``failed`` says why."""

    def __init__(self, failed: Failed) -> None:
        self.failed = failed


class SlotSampling(NamedTuple):
    """How the request in a slot is sampled; ``distribution`` None is greedy."""

    distribution: Distribution | None
    seed: int
    rules: list[Rule]
    constraint: Constraint | None
    logprobs: int
    logprob_ids: list[int]
    skip_forced: bool  # tokens that the grammar forces may come without being sampled


class Sampler:
    """``tokens`` int32[slots, context + 1] is the worker's token table:
    read by the rules, written by ``sample``.

    ``matchers``: None on ranks that do not sample. ``skip_forced``: tokens that a grammar forces are told at
    once, without being sampled.
    """

    def __init__(
        self,
        tokens: NDArray[np.int32],
        vocab_size: int,
        matchers: Matchers | None = None,
        draw: Draw = draw,
        skip_forced: bool = True,
        processors: Mapping[str, Factory] = MappingProxyType({}),
    ) -> None:
        self._processors = processors
        self._matchers = matchers
        self._draw = draw
        self._skip_forced = skip_forced
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._of_slot: list[SlotSampling | None] = [None] * len(tokens)
        self._draws = np.zeros(len(tokens), DRAW)
        self._plain = np.zeros(len(tokens), bool)  # the draw is all that is to be done
        self._ahead: dict[int, Constraint] = {}  # of slots, behind their guesses
        self._known = [0] * len(tokens)  # positions before are not sampled: a grammar has forced their tokens

    def admit(self, slot: int, prompt_len: int, sampling: RowSampling, guesses: bool = False) -> None:
        """A request takes ``slot``; whatever the slot had is forgotten. ``guesses``: tokens that its grammar
        forces are guessed, and not told at once."""
        rules = make_rules(self._tokens[slot], prompt_len, sampling, self._vocab_size, self._processors)
        constraint = None
        if sampling.grammar and self._matchers is not None:
            constraint = self._matchers.constraint(self._tokens[slot], prompt_len, sampling)
        distribution = None
        if sampling.temperature >= COLD:
            distribution = Distribution(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        self._known[slot] = 0
        told = sampling.logprobs >= 0 or sampling.states or guesses
        skip_forced = self._skip_forced and not told and not forbids(sampling)
        self._of_slot[slot] = SlotSampling(
            distribution,
            sampling.seed,
            rules,
            constraint,
            sampling.logprobs,
            sampling.logprob_ids,
            skip_forced,
        )
        self._plain[slot] = not (rules or constraint) and sampling.logprobs < 0
        temperature, top_k, top_p, min_p = distribution or Distribution(0.0)
        self._draws[slot] = (0, 0, sampling.seed, top_k, temperature, top_p, min_p, -1)

    def logprob_ids(self, slot: int) -> list[int]:
        """Tokens whose logprobs the request in ``slot`` asks for."""
        own = self._of_slot[slot]
        return own.logprob_ids if own else []

    def plain(self, slots: NDArray[np.int32]) -> bool:
        """True if a draw from the logits is all that these slots need."""
        return bool(self._plain[slots].all())

    def draws(self, slots: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[Any]:
        """``DRAW`` [at most S]:
        what may be drawn as soon as there are logits, of rows that need nothing else."""
        rows = np.flatnonzero(self._plain[slots])
        draws = self._draws[slots[rows]]
        draws["row"], draws["position"] = rows, positions[rows]
        return draws

    def sample(
        self,
        logits: Floats,
        rows: NDArray[np.int32],
        slots: NDArray[np.int32],
        positions: NDArray[np.int32],
        draws: NDArray[Any] | None = None,
        at: NDArray[Any] | None = None,
    ) -> Samples:
        """Choose the token at ``positions[i]`` of ``slots[i]`` from ``logits[i]`` and put it into the token
        table, followed by those that its grammar then forces. A position that is known already keeps its
        token.

        ``logits`` float32[S, V] is changed in place; ``rows`` are the numbers that logprob blocks carry.
        ``draws``: those of ``self.draws``; tokens that they have already are taken from there. ``at``: which
        of the logits and draws the others are about, if not all.
        """
        blocks: list[LogprobBlock] = []
        failed: list[Failed] = []
        forced: dict[int, NDArray[np.int32]] = {}
        known: set[int] = set()
        chosen = np.full(len(logits), -1, np.int32)
        if draws is not None:
            chosen[draws["row"]] = draws["token"]
        at = np.arange(len(logits)) if at is None else at
        chosen = chosen[at]
        for i in np.flatnonzero(chosen < 0).tolist():
            row, slot, position = int(rows[i]), int(slots[i]), int(positions[i])
            if position < self._known[slot]:
                chosen[i] = self._tokens[slot, position]
                known.add(i)
                continue
            try:
                chosen[i] = self._sample_row(logits[at[i]], row, slot, position, blocks)
                run = self._take_forced(slot, position, int(chosen[i]))
                if len(run):
                    forced[i] = run
            except (MatchFailed, ProcessorFailed) as error:
                chosen[i] = 0
                failed.append(Failed(row, str(error)))
            except Unusable as error:
                chosen[i] = 0
                failed.append(error.failed)
        self._tokens[slots, positions] = chosen
        return Samples(chosen, blocks, failed, forced, known)

    def guess(
        self,
        logits: Floats,
        slots: NDArray[np.int32],
        positions: NDArray[np.int32],
        draws: NDArray[Any],
    ) -> None:
        """Put into the token table what ``positions`` of ``slots`` would have by the ``logits`` float32[S, V]
        of another model: with the same noise, the same rules and the same grammar. Processors of users, which
        want to see each token once, have no say. ``draws``: those of ``self.draws``."""
        tokens = np.full(len(logits), -1, np.int32)
        tokens[draws["row"]] = draws["token"]
        for i in np.flatnonzero(tokens < 0).tolist():
            own, position = self._of_slot[slots[i]], int(positions[i])
            assert own is not None, f"slot {slots[i]} was never admitted"
            for rule in own.rules:
                if not isinstance(rule, Custom):
                    rule.apply(logits[i], position)
            row, ids = self._narrowed_ahead(int(slots[i]), own.constraint, logits[i], position)
            if own.distribution is None:
                token = int(row.argmax())
            else:
                token = max(0, self._draw(row, own.distribution, own.seed, position, ids))
            tokens[i] = token if ids is None else ids[token]
        self._tokens[slots, positions] = tokens

    def _narrowed_ahead(
        self, slot: int, constraint: Constraint | None, logits: Floats, position: int
    ) -> tuple[Floats, NDArray[np.intp] | None]:
        """What its grammar leaves, if all guesses before ``position`` are right."""
        if constraint is None:
            return logits, None
        try:
            ahead = self._ahead.get(slot)
            if ahead is None:
                ahead = self._ahead[slot] = constraint.ahead()
            return ahead.narrow(logits, position)
        except MatchFailed:  # a row that goes so far will say so
            return logits, None

    def forget_guesses(self) -> None:
        """The next ones begin where the rows have got to."""
        self._ahead.clear()

    def forced(self, slot: int, position: int) -> list[int]:
        """The tokens that must come from ``position`` on by the slot's grammar; those before are known."""
        constraint = self._constraint_at(slot, position)
        return [] if constraint is None else constraint.forced()

    def legal(self, slot: int, position: int, guesses: list[int]) -> int:
        """How many of ``guesses`` may stand from ``position`` on by the slot's grammar."""
        constraint = self._constraint_at(slot, position)
        return len(guesses) if constraint is None else constraint.legal(guesses)

    def _constraint_at(self, slot: int, position: int) -> Constraint | None:
        own = self._of_slot[slot]
        if own is None or own.constraint is None:
            return None
        try:
            own.constraint.catch_up(position)
        except MatchFailed:  # the row that samples says so
            return None
        return None if own.constraint.open else own.constraint

    def _sample_row(
        self, logits: Floats, row: int, slot: int, position: int, blocks: list[LogprobBlock]
    ) -> int:
        own = self._of_slot[slot]
        assert own is not None, f"slot {slot} was never admitted"
        changed = own.rules or own.constraint
        raw = logits.copy() if changed and own.logprobs >= 0 else logits
        for rule in own.rules:
            rule.apply(logits, position)
        ids = None
        if own.constraint is not None:
            logits, ids = own.constraint.narrow(logits, position)
        if own.distribution is None:
            token = int(logits.argmax())
            usable = np.isfinite(logits[token])
        else:
            token = self._draw(logits, own.distribution, own.seed, position, ids)
            usable = token >= 0
        if not usable:
            fault = faults.NONE_LEFT if logits.max() == -np.inf else faults.NOT_NUMBERS
            raise Unusable(faults.no_token(row, fault, bool(changed)))
        if ids is not None:
            token = int(ids[token])
        if own.logprobs >= 0:
            scores = score(raw[None], [token], own.logprobs, own.logprob_ids)
            if not scores.sound:
                raise Unusable(faults.no_logprobs(row))
            blocks.append(scores.block(row, False, position, len(own.logprob_ids)))
        return token

    def _take_forced(self, slot: int, position: int, token: int) -> NDArray[np.int32]:
        """Put the tokens that must follow ``token`` at ``position`` into the token table; int32[*]. None
        where logprobs or hidden states are wanted, which are those of samples, or rules may forbid them."""
        own = self._of_slot[slot]
        assert own is not None
        if not own.skip_forced or own.constraint is None:
            return np.empty(0, np.int32)
        places = self._tokens[slot, position + 1 :]
        run = np.array(own.constraint.take_forced(position, token)[: len(places)], np.int32)
        places[: len(run)] = run
        self._known[slot] = position + 1 + len(run)
        return run
