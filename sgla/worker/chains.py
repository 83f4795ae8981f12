"""What guesses on a GPU before each step of its target, without a host decision in between, so that steps
stay planned and launched ahead: how many tokens each row guesses, and a graph for each number of rows and
guesses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from functools import partial

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from sgla.kernels.ops import Layer
from sgla.messages import LEAVED, VERIFIED, StepPlan
from sgla.worker.device_state import upload
from sgla.worker.flights import Flight, over
from sgla.worker.gpu_steps import GpuSteps
from sgla.worker.graphs import Capture, DecodeGraphs, seconds_of
from sgla.worker.pace import Curve, Pace
from sgla.worker.state import Int32s, column
from sgla.worker.verify import DeviceDrafts

ROWS = (1, 2, 4, 8, 12, 16, 24, 32)  # that guess in a step: each verifies two tokens at least
COUNTS = (*range(1, 9), 12, 16, 24, 32, 48)  # guesses of a row: one that may make another number is padded
RARE = 4  # steps that plan guesses, which are few where none were right (``Facts.padded_drafts``)


class Chains(ABC):
    """``target``: the steps of the model that it guesses for; ``most``: guesses of a row. Rows read and write
    the slots, places and limits that ``state`` has. ``shift``: by how much what it reads of a token stands
    before the token; ``reads_prompts``: in ``behind``; ``captures``: there are graphs."""

    shift, reads_prompts = 0, False

    def __init__(
        self, target: GpuSteps, state: DeviceDrafts, most: int, adaptive: bool, captures: bool
    ) -> None:
        self._target, self._state, self.most, self._captures = target, state, most, captures
        self._padding = state.padding
        self._pace = Pace(self._padding + 1, adaptive, RARE)
        self._flights: deque[tuple[Flight, int]] = deque()
        self._admitted = np.zeros(self._padding + 1, np.int64)  # the steps in which requests took slots
        self.pairs = [pair for size, before in zip(ROWS, (0, *ROWS)) for pair in self._counts(size, before)]
        self._columns = torch.zeros(3, ROWS[-1], dtype=torch.int32, device="cuda")
        self._columns[0] = self._padding
        self._sent: NDArray[np.int32] = np.zeros((0, 0), np.int32)  # what the columns hold
        # Of each slot: before this token nothing can be read again.
        self._floors = torch.zeros(self._padding + 1, dtype=torch.int32, device="cuda")
        room = max(self._room(), *(size * self._width(count) for size, count in self.pairs))
        self._slots, self._starts = torch.zeros(2, room, dtype=torch.int32, device="cuda")
        self._ends, self._out, self._beside = torch.zeros(3, ROWS[-1], dtype=torch.int32, device="cuda")
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def _room(self) -> int:
        """Tokens that it reads at a time, beside those of chains."""
        return 0

    def _width(self, count: int) -> int:
        """Tokens of a row that a chain of so many guesses begins with."""
        return 1

    def _counts(self, size: int, before: int) -> list[tuple[int, int]]:
        """Of chains with more than ``before`` rows, ``size`` at most: with how many guesses there are any."""
        most = min(self.most, VERIFIED // (before + 1) - 1)
        return [(size, count) for count in COUNTS if count < most] + [(size, most)] * (most > 0)

    def _pair(self, slots: Int32s, most: Int32s) -> tuple[int, int]:
        """Which chain guesses for these rows."""
        size, count = next(size for size in ROWS if size >= len(slots)), int(most.max())
        return next(pair for pair in self.pairs if pair[0] == size and pair[1] >= count)

    @abstractmethod
    def take(self, kv: list[Layer]) -> None:
        """The pages of its layers."""

    def rehearse(self) -> None:
        """Every step there is, to ask for its kernels."""
        if self._captures:
            self._rehearse()

    def _rehearse(self) -> None:
        for pair in self.pairs:
            self._chain(*pair)

    @property
    @abstractmethod
    def graph_bytes(self) -> int:
        """What its graphs are going to take."""

    @abstractmethod
    def follow(self, plan: StepPlan, deep: int) -> None:
        """Before the target's step: guess for the rows that may, and read what the target is to read. Guesses
        of a row behind the first ``deep`` are leaves (``verify.py: Layout``)."""

    def behind(  # noqa: B027  (some do nothing)
        self, slots: Int32s, starts: Int32s, q_lens: Int32s, first: Int32s
    ) -> None:
        """Behind a step of the target: read its prompt rows, whose tokens begin at ``first`` among those of
        the step."""

    @abstractmethod
    def _chain(self, size: int, count: int) -> None:
        """Guess up to ``count`` tokens for each of ``size`` rows in ``_columns``, and second ones beside the
        first of them as far as these say."""

    def limit_drafts(self, plan: StepPlan, leaves: bool = False) -> tuple[StepPlan, int]:
        """The same with as many guesses as pay, and how many of a row follow each other at most: those behind
        are leaves, if there may be ``leaves``. New requests take their slots."""
        self._learn(plan.step)
        for new in plan.new:
            self._admitted[new.slot] = plan.step
            self._pace.admit(new.slot)
        if plan.new:
            self._admit(plan)
        most = column(plan.drafts) if plan.drafts else np.zeros(0, np.int32)
        rows = np.flatnonzero(most > 0)
        if not len(rows):
            return plan, VERIFIED
        alone = np.where(most < 0, column(plan.q_lens), 1)
        slots = column(plan.slots)[rows]
        asked = slots, min(int(most.max()), self.most), int(alone.sum())
        if leaves and len(rows) <= LEAVED:
            deep, more = self._pace.tree(*asked, int(most.max()))
        else:
            deep, more = self._pace.most(*asked), 0
        best = np.full(len(most), deep)
        if more:
            ruled = np.array([self._target.sampler.ruled(slot) for slot in slots.tolist()])
            best[rows[~ruled]] += more
        plan = replace(plan, drafts=np.minimum(most, best).astype(np.int32).tobytes())
        return plan, deep if more else VERIFIED

    @abstractmethod
    def _admit(self, plan: StepPlan) -> None:
        """The plan has new rows."""

    def _raise_floors(self, plan: StepPlan) -> None:
        """Nothing is known of what new rows find in the prefix tree."""
        slots = column(plan.slots)
        rows = np.isin(slots, [new.slot for new in plan.new])
        places, starts = upload(np.stack([slots[rows], column(plan.starts)[rows]]))
        self._floors.index_copy_(0, places.long(), starts)

    def remember(self, flight: Flight, tokens: int) -> None:
        """A step whose rows may guess, or one of so many ``tokens`` of decode rows alone; else 0."""
        self._flights.append((flight, tokens))

    def _learn(self, step: int) -> None:
        """How much was right in the steps that are over for sure when ``step`` is launched: so all ranks have
        learned the same by then. What they took, a rank alone learns."""
        while self._flights and over(self._flights[0][0], step, self._target.shard.pipe):
            flight, tokens = self._flights.popleft()
            flight.end.synchronize()
            rows, guesses = tokens, 0
            if flight.verify is not None:
                slots, guessed, right, tried, second = flight.verify.brought()
                still = self._admitted[slots] <= flight.step
                self._pace.learn(slots[still], guessed[still], right[still])
                self._pace.learn_second(slots[still & tried], second[still & tried])
                rows, guesses = len(slots), flight.verify.most
            if tokens and not flight.waited and self._target.shard.count == 1:
                seconds = flight.begin.elapsed_time(flight.end) / 1e3
                self._pace.took(rows, guesses, tokens, seconds)

    def _guess(self, slots: Int32s, most: Int32s, pair: tuple[int, int], leaves: Int32s) -> None:
        host = np.zeros((3, ROWS[-1]), np.int32)
        host[0] = self._padding
        host[:, : len(slots)] = slots, most, leaves
        if not np.array_equal(host, self._sent):
            self._columns.copy_(upload(host))
            self._sent = host
        if pair in self._graphs:
            self._graphs[pair].replay()
        else:
            self._chain(*pair)

    def capture(self, capture: Capture) -> None:
        """Once the pages are there, and all slots free."""
        if not self._captures:
            return
        for pair in reversed(self.pairs):
            self._graphs[pair] = capture(partial(self._chain, *pair))

    def time(self, target: DecodeGraphs) -> None:
        """Learn what steps and guesses take, from graphs that have been captured."""
        sizes = [size for size in ROWS if (size, 1) in self._graphs]
        if not sizes:
            return
        first = [seconds_of(self._graphs[size, 1]) for size in sizes]
        most = max(count for size, count in self.pairs if size == 1)
        more = (seconds_of(self._graphs[1, most]) - first[0]) / max(most - 1, 1)
        rows, steps = target.times(VERIFIED)
        agreed = torch.tensor([more, *first, *steps], dtype=torch.float64, device="cuda")
        self._target.shard.broadcast(agreed)
        more, *seconds = agreed.tolist()
        first, steps = seconds[: len(first)], seconds[len(first) :]
        self._pace.know(Curve(rows, steps), Curve(sizes, [more] * len(sizes)), Curve(sizes, first))
