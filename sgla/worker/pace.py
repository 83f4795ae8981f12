"""How many tokens a model guesses in a step, and for which rows: as many as bring most tokens a second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgla import clock
from sgla.dist import Shard
from sgla.messages import VERIFIED, StepPlan
from sgla.worker.drafts import begin
from sgla.worker.state import Int32s, SlotTables, column

FIRST = 0.7  # share of right guesses that a request begins with
SECOND = 0.4  # of wrong guesses, of how many the second is right, to begin with
LOSING = FIRST / 2  # a row with less may be left out beside others, where that brings more
WEIGHT = 0.1  # of the latest guess, and of the latest step
FORGOTTEN = 0.005  # with each step, of what other steps have taken
SUREST = 0.98
LARGEST = 2 * VERIFIED  # tokens
TIMED = 4  # steps before which all that may be guessed is
RARE = 32  # in every so many steps one token is guessed where none would pay, to see whether that is still so


class Line:
    """Seconds as a straight line over numbers of tokens, the latest ones weighing most."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of weights, x, y, x * x, x * y

    def add(self, x: int, y: float) -> None:
        self._sums = (1 - WEIGHT) * self._sums + (1, x, y, x * x, x * y)

    def at(self, x: NDArray[Any]) -> NDArray[Any]:
        """No x takes less time than a smaller one; where all x were alike, all take the same."""
        n, sx, sy, sxx, sxy = self._sums.tolist()
        if not n:
            return np.zeros(x.shape)
        spread = n * sxx - sx * sx
        slope = max(0.0, (n * sxy - sx * sy) / spread) if spread > 1e-6 * n * sxx else 0.0
        return max((sy - slope * sx) / n, 0.0) + slope * x


class Curve:
    """Seconds as they were measured for the numbers ``xs``, which rise, and between these as what is between
    them. What comes later counts for more: a mixture's tokens want other experts than those that it was
    measured with, and long texts take longer. What has not come for long is forgotten."""

    def __init__(self, xs: Sequence[int], seconds: Sequence[float]) -> None:
        self._xs, self._seconds = np.array(xs), np.array(seconds)
        self._ratios = np.ones(len(xs))  # to what was measured

    def add(self, x: int, y: float) -> None:
        """``x`` ran as the next of ``xs``."""
        i = min(int(np.searchsorted(self._xs, x)), len(self._xs) - 1)
        kept = self._ratios[i]
        self._ratios += FORGOTTEN * (1 - self._ratios)
        self._ratios[i] = kept + WEIGHT * (y / max(self._seconds[i], 1e-9) - kept)

    def at(self, x: NDArray[Any]) -> NDArray[Any]:
        return np.interp(x, self._xs, self._seconds * self._ratios)


class Best(NamedTuple):
    """So many guesses bring most tokens a second, and so many tokens."""

    guesses: int
    a_second: float


class Pace:
    """Learns of each slot how many of its guesses are right, and how long steps and guesses take.
    ``adaptive`` False: all that may be guessed is. ``rare``: see ``RARE``. ``shard``: all ranks take what the
    one that draws decides."""

    def __init__(self, slots: int, adaptive: bool, rare: int = RARE, shard: Shard | None = None) -> None:
        self._right, self._shard = np.full(slots, FIRST), shard
        self._second = np.full(slots, SECOND)
        self.adaptive, self._rare = adaptive, rare
        self._target: Line | Curve = Line()
        self._guess: Line | Curve = Line()
        self._read: Line | Curve = Line()
        self._steps = self._timed = 0

    def know(self, target: Curve, guess: Curve, read: Curve) -> None:
        """Seconds that have been measured before: of a step of the target over its tokens, of one more guess
        and of the first one over its rows."""
        self._target, self._guess, self._read, self._timed = target, guess, read, TIMED

    def admit(self, slot: int) -> None:
        self._right[slot], self._second[slot] = FIRST, SECOND

    def step(self, tokens: int, seconds: float) -> None:
        """The target's forward pass of so many tokens. That of a part of a prompt tells nothing of others."""
        if tokens <= LARGEST:
            self._target.add(tokens, seconds)
            self._timed += 1

    def took(self, rows: int, guesses: int, tokens: int, seconds: float) -> None:
        """A step with so many ``guesses`` of each of ``rows``, and its target's ``tokens`` in all."""
        own = float(self._guess.at(np.array([rows]))[0]) * max(guesses - 1, 0)
        own += float(self._read.at(np.array([rows]))[0]) * (guesses > 0)
        self._target.add(tokens, max(seconds - own, 0.0))

    @contextmanager
    def guessing(self, rows: int) -> Iterator[None]:
        """One more guess of so many rows is made."""
        begun = clock.now()
        yield
        self._guess.add(rows, clock.now() - begun)

    @contextmanager
    def reading(self, tokens: int) -> Iterator[None]:
        """What guesses reads so many tokens, which nobody does where no row guesses."""
        begun = clock.now()
        yield
        if tokens <= LARGEST:
            self._read.add(tokens, clock.now() - begun)

    def begin(self, plan: StepPlan, tables: SlotTables) -> tuple[Int32s, Int32s, Int32s]:
        """Where the rows of a plan begin, how many tokens they read without guesses, and how many each is to
        guess."""
        starts, q_lens, counts = begin(plan, tables)
        rows = np.flatnonzero(counts)
        if len(rows):
            slots = column(plan.slots)[rows]
            counts[rows] = np.minimum(counts[rows], self.each(slots, int(counts.max()), int(q_lens.sum())))
        if self._shard is not None:
            self._shard.agree(counts)
        return starts, q_lens, counts

    def learn(self, slots: Int32s, guessed: Int32s, right: Int32s) -> None:
        """Of so many guesses in each slot so many were right, the first ones."""
        tried = np.minimum(right + 1, guessed)
        kept = (1 - WEIGHT) ** tried
        wrong_last = right < guessed
        share = np.where(wrong_last, (1 - WEIGHT) * (1 - (1 - WEIGHT) ** right), 1 - kept)
        self._right[slots] = self._right[slots] * kept + np.where(tried > 0, share, 0.0)

    def learn_second(self, slots: Int32s, right: NDArray[np.bool_]) -> None:
        """A guess in each slot was wrong, and the one beside it right or not."""
        self._second[slots] += WEIGHT * (right - self._second[slots])

    def tree(self, slots: Int32s, most: int, tokens: int, room: int) -> tuple[int, int]:
        """``most``, and how many second guesses there are to be, beside the first of these: ``room`` is for
        both together. One counts where the first wrong guess is that which it stands beside."""
        self._steps += 1
        counts, beside = np.arange(most + 1)[:, None], np.arange(min(most, room - 1) + 1)
        there = (beside <= counts) & (counts + beside <= room)
        if not self._chooses(most):
            deep = min(most, -(-room // 2))
            return deep, min(deep, room - deep)
        shares, second = self._shares(slots)[:, None, None], self._second[slots][:, None, None]
        brought = ((1 - shares ** (counts + 1)) / (1 - shares) + second * (1 - shares**beside)).sum(0)
        found = brought / self._seconds(tokens, len(slots), counts, beside)
        deep, more = divmod(int(np.where(there, found, -1.0).argmax()), found.shape[1])
        return max(deep, self._tries), more

    def most(self, slots: Int32s, most: int, tokens: int) -> int:
        """How many tokens rows of ``slots`` guess, ``most`` at most,
        in a step of so many ``tokens`` without guesses."""
        self._steps += 1
        if not self._chooses(most):
            return most
        found = self._a_second(self._shares(slots), most, tokens)[-1]
        return max(int(found.argmax()), self._tries)

    def each(self, slots: Int32s, most: int, tokens: int) -> Int32s:
        """The same for each row: those of whose guesses least are right may be left out."""
        self._steps += 1
        if not self._chooses(most):
            return np.full(len(slots), most, np.int32)
        shares = self._shares(slots)
        order = np.argsort(-shares, kind="stable")
        found = self._a_second(shares[order], most, tokens)
        least = max(int((shares >= LOSING).sum()), 1)
        rows, guesses = np.unravel_index(found[least - 1 :].argmax(), found[least - 1 :].shape)
        counts = np.full(len(slots), self._tries, np.int32)
        counts[order[: least + rows]] = max(int(guesses), self._tries)
        return counts

    def _chooses(self, most: int) -> bool:
        return self.adaptive and self._timed >= TIMED and most > 0

    @property
    def _tries(self) -> int:
        """Guesses of a row for which none would pay."""
        return int(self._steps % self._rare == 0)

    def best(self, slot: int, most: int) -> Best:
        """What a row alone would guess, ``most`` at most."""
        found = self._a_second(self._shares(np.array([slot])), most, 1)[-1]
        guesses = int(found.argmax())
        return Best(guesses, float(found[guesses]))

    def _shares(self, slots: NDArray[Any]) -> NDArray[np.float64]:
        return np.minimum(self._right[slots], SUREST)

    def _a_second(self, shares: NDArray[np.float64], most: int, tokens: int) -> NDArray[np.float64]:
        """Tokens a second where the first one, two, to all rows guess, 0 to ``most`` tokens each."""
        counts, rows = np.arange(most + 1), np.arange(1, len(shares) + 1)[:, None]
        share = shares[:, None]
        brought = ((1 - share ** (counts + 1)) / (1 - share)).cumsum(0) + (len(shares) - rows)
        return brought / self._seconds(tokens, rows, counts, 0)

    def _seconds(
        self, tokens: int, rows: int | NDArray[Any], counts: NDArray[Any], beside: int | NDArray[Any]
    ) -> NDArray[Any]:
        """Of a step in which so many rows guess ``counts`` tokens each, and ``beside`` second ones."""
        seconds = self._target.at(tokens + rows * (counts + beside))
        seconds = seconds + self._guess.at(np.array(rows)) * np.maximum(counts - 1, 0)
        seconds = seconds + self._read.at(np.array([tokens])) * (counts > 0)
        return np.maximum(seconds, 1e-9)
