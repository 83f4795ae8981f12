"""A model that guesses on a GPU: its own steps before each step of its target, without a host decision in
between, so that steps stay planned and launched ahead. The rules are those of ``draft_model.py``.

A row's chain of k guesses is one graph. Its first step reads the last tokens of the row again, as decode rows
of one slot, since the host does not know how many of the guesses before were right; each further one reads
the guess of the one before. What only the target has read since, the model reads before that: few tokens as
decode rows, prompts as prompts."""

from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from sgla.attention import DeviceBatch
from sgla.kernels.cuda.batch_gemm import ROWS as TILES
from sgla.kernels.ops import Layer
from sgla.kernels.triton import drafts
from sgla.messages import VERIFIED, StepPlan
from sgla.worker.batch import eager_order
from sgla.worker.device_state import upload
from sgla.worker.flights import Flight
from sgla.worker.gpu_memory import GRAPH_LAYER
from sgla.worker.gpu_steps import GpuSteps
from sgla.worker.graphs import Capture, DecodeGraphs, seconds_of
from sgla.worker.pace import Curve, Pace
from sgla.worker.state import Int32s, column
from sgla.worker.verify import DeviceDrafts
from sgla.worker.warm_up import SIZES as PROMPTS
from sgla.worker.warm_up import layers_of_all_kinds

ROWS = (1, 2, 4, 8, 12, 16, 24, 32)  # that guess in a step: each verifies two tokens at least
COUNTS = (*range(1, 9), 12, 16, 24, 32, 48)  # guesses of a row: one that may make another number is padded
READS = (8, 32, 64)  # tokens that graphs read
RARE = 4  # steps that plan guesses, which are few where none were right (``Facts.padded_drafts``)
LATE = 4  # steps behind which all that were launched before are over: more than may be in flight
AGAIN = 2  # tokens that a chain begins with: the pending one, and the last guess, which nobody has read


class Chains:
    """``steps``: of the model that guesses, with the tables of its ``target``'s; ``most``: guesses of a row.
    Rows read and write the slots, places and limits that ``state`` has. ``shift``: by how much its KV of a
    token stands before the token; ``reads_prompts``: in ``behind``."""

    shift, reads_prompts = 0, False

    def __init__(
        self, steps: GpuSteps, target: GpuSteps, state: DeviceDrafts, most: int, adaptive: bool
    ) -> None:
        self.steps, self._target, self._state, self._most = steps, target, state, most
        self._captures = steps.attention.captures
        tables = steps.tables
        self._padding = state.padding
        self._pace = Pace(self._padding + 1, adaptive, RARE)
        self._unread = np.zeros(self._padding + 1, np.int32)  # tokens of slots before their pending one
        self._flights: deque[tuple[Flight, int]] = deque()
        self._admitted = np.zeros(self._padding + 1, np.int64)  # the steps in which requests took slots
        self.pairs = [pair for size, before in zip(ROWS, (0, *ROWS)) for pair in self._counts(size, before)]
        room = max(READS[-1], *(size * self._width(count) for size, count in self.pairs))
        self._columns = torch.zeros(2, ROWS[-1], dtype=torch.int32, device="cuda")
        self._sent: NDArray[np.int32] = np.zeros((0, 0), np.int32)  # what the columns hold
        # Of each slot: before this token nothing can be read again.
        self._floors = torch.zeros(self._padding + 1, dtype=torch.int32, device="cuda")
        self._look = torch.zeros(2, READS[-1], dtype=torch.int32, device="cuda")
        self._columns[0] = self._look[0] = self._padding
        self._slots, self._starts, self._ids, self._positions, self._kv_len = torch.zeros(
            5, room, dtype=torch.int32, device="cuda"
        )
        self._out_loc = tables.places(room)
        windows = {0, *tables.windows[1:], *steps.windows}
        self._cum = {w: torch.zeros(room + 1, dtype=torch.int32, device="cuda") for w in windows}
        self._q_start = torch.arange(room + 1, dtype=torch.int32, device="cuda")
        widths = {self._width(count) for _, count in self.pairs}
        self._last = {width: self._q_start[width - 1 : -1 : width].clone() for width in widths}
        self._ends, self._out = torch.zeros(2, ROWS[-1], dtype=torch.int32, device="cuda")
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._readers: dict[int, torch.cuda.CUDAGraph] = {}

    def _width(self, count: int) -> int:
        """Tokens of a row that a chain of so many guesses begins with."""
        return AGAIN

    def _counts(self, size: int, before: int) -> list[tuple[int, int]]:
        """Of chains with more than ``before`` rows, ``size`` at most: with how many guesses there are any."""
        most = min(self._most, VERIFIED // (before + 1) - 1)
        return [(size, count) for count in COUNTS if count < most] + [(size, most)] * (most > 0)

    def _pair(self, slots: Int32s, most: Int32s) -> tuple[int, int]:
        """Which chain guesses for these rows."""
        size, count = next(size for size in ROWS if size >= len(slots)), int(most.max())
        return next(pair for pair in self.pairs if pair[0] == size and pair[1] >= count)

    def take(self, kv: list[Layer]) -> None:
        """The pages of its layers."""
        self.steps.kv = kv

    def limit_drafts(self, plan: StepPlan) -> StepPlan:
        """The same with as many guesses as pay. New requests take their slots; what they find in the prefix
        tree was read by both models."""
        self._learn(plan.step)
        for new in plan.new:
            self._unread[new.slot], self._admitted[new.slot] = 0, plan.step
            self._pace.admit(new.slot)
        if plan.new:
            self._admit(plan)
        most = column(plan.drafts) if plan.drafts else np.zeros(0, np.int32)
        rows = np.flatnonzero(most > 0)
        if not len(rows):
            return plan
        alone = np.where(most < 0, column(plan.q_lens), 1)
        slots = column(plan.slots)[rows]
        best = self._pace.most(slots, int(most.max()), int(alone.sum()))
        return replace(plan, drafts=np.minimum(most, best).astype(np.int32).tobytes())

    def _admit(self, plan: StepPlan) -> None:
        """The plan has new rows."""

    def remember(self, flight: Flight, tokens: int) -> None:
        """A step whose rows may guess, or one of so many ``tokens`` of decode rows alone; else 0."""
        self._flights.append((flight, tokens))

    def _learn(self, step: int) -> None:
        """How much was right in the steps that are over for sure when ``step`` is launched: so all ranks have
        learned the same by then. What they took, a rank alone learns."""
        while self._flights and self._flights[0][0].step <= step - LATE:
            flight, tokens = self._flights.popleft()
            flight.end.synchronize()
            rows, guesses = tokens, 0
            if flight.verify is not None:
                slots, guessed, right = flight.verify.brought()
                still = self._admitted[slots] <= flight.step
                self._pace.learn(slots[still], guessed[still], right[still])
                rows, guesses = len(slots), flight.verify.most
            if tokens and not flight.waited and self.steps.shard.size == 1:
                seconds = flight.begin.elapsed_time(flight.end) / 1e3
                self._pace.took(rows, guesses, tokens, seconds)

    def follow(self, plan: StepPlan) -> None:
        """Before the target's step: read the prompts that it reads, and guess for the rows that may."""
        slots, starts, q_lens = column(plan.slots), column(plan.starts), column(plan.q_lens)
        most = column(plan.drafts) if plan.drafts else np.full_like(slots, -1)
        prompts, guessing = (most < 0) & (q_lens > 1), most > 0
        if prompts.any():
            self._read_on(slots[prompts], starts[prompts], q_lens[prompts])
        others = ~(prompts | guessing)
        self._unread[slots[others]] += 1
        if guessing.any():
            rows = slots[guessing], most[guessing]
            pair = self._pair(*rows)
            self._catch_up(slots[guessing], starts[guessing], self._width(pair[1]))
            self._guess(*rows, pair)

    def _read_on(self, slots: Int32s, starts: Int32s, q_lens: Int32s) -> None:
        """Read ``q_lens`` tokens of ``slots`` from ``starts`` on, and those before that are unread."""
        behind = self._unread[slots]
        self._unread[slots] = 0
        starts, q_lens = starts - behind, q_lens + behind
        while len(slots):
            room = np.maximum(self.steps.step_tokens - (q_lens.cumsum() - q_lens), 0)
            parts = np.minimum(q_lens, room).astype(np.int32)
            self._extend(slots, starts, parts)
            starts, q_lens = starts + parts, q_lens - parts
            slots, starts, q_lens = (column[q_lens > 0] for column in (slots, starts, q_lens))

    def _extend(self, slots: Int32s, starts: Int32s, q_lens: Int32s) -> None:
        """Without rows of no tokens."""
        order = eager_order(starts, q_lens)
        order = order[q_lens[order] > 0]
        batch = self.steps.extend_batch(slots[order], starts[order], q_lens[order])
        self._within(batch.ids)
        self.steps.forward.hidden(batch, self._q_start[:1])

    def _catch_up(self, slots: Int32s, starts: Int32s, width: int) -> None:
        """Read what is unread of ``slots``, but for the ``width`` tokens that their chains begin with. Where
        it is much it is known where they are: no row has guessed lately."""
        far = self._unread[slots] > READS[-1]
        if far.any():
            self._read_on(slots[far], starts[far], np.zeros_like(starts[far]))
        unread = self._unread[slots]
        counts = np.maximum(unread - (width - 1), 0)
        if not counts.any():
            return
        rows = np.repeat(slots, counts)
        back = np.repeat(unread, counts) - (
            np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
        )
        for at in range(0, len(rows), READS[-1]):
            self._read(rows[at : at + READS[-1]], back[at : at + READS[-1]])

    def _read(self, slots: Int32s, back: Int32s) -> None:
        size = next(size for size in READS if size >= len(slots))
        host = np.zeros((2, READS[-1]), np.int32)
        host[0] = self._padding
        host[:, : len(slots)] = slots, back
        self._look.copy_(upload(host))
        if size in self._readers:
            self._readers[size].replay()
        else:
            self._reader(size)

    def _guess(self, slots: Int32s, most: Int32s, pair: tuple[int, int]) -> None:
        host = np.zeros((2, ROWS[-1]), np.int32)
        host[0] = self._padding
        host[:, : len(slots)] = slots, most
        if not np.array_equal(host, self._sent):
            self._columns.copy_(upload(host))
            self._sent = host
        self._unread[slots] = self._left(most)
        if pair in self._graphs:
            self._graphs[pair].replay()
        else:
            self._chain(*pair)

    def _left(self, most: Int32s) -> Int32s:
        """How many of the tokens before the pending one are unread, at most, after so many guesses."""
        return np.minimum(most, AGAIN - 1)

    def rehearse(self) -> None:
        """Every step there is, to ask for its kernels; a few of the layers stand for all."""
        if not self._captures:
            return
        kept = self.steps.kv
        self.take(kept[: layers_of_all_kinds(self.steps.model.spec)])
        self._rehearse()
        self.take(kept)

    def _rehearse(self) -> None:
        most, one = self.steps.step_tokens, np.array([self._padding], np.int32)
        sizes = {*self._sizes(most), *(n for n in (*PROMPTS, *TILES) if n < most), most}
        for size in sorted(sizes):
            length = min(size, self.steps.context_len - 1)
            for start in (0, length // 2):
                self._extend(one, np.array([start], np.int32), np.array([length - start], np.int32))
        for size in READS:
            self._reader(size)
        for pair in self.pairs:
            self._chain(*pair)

    def _sizes(self, most: int) -> list[int]:
        """Numbers of tokens of prompts with which it takes every kernel that it takes with more."""
        return self.steps.forward.sizes(most)

    @property
    def graph_bytes(self) -> int:
        """What its graphs are going to take."""
        if not self._captures:
            return 0
        steps = len(READS) + sum(count for _, count in self.pairs)
        return steps * self.steps.model.spec.layers * GRAPH_LAYER

    def capture(self, capture: Capture) -> None:
        """Once the pages are there, and all slots free."""
        if not self._captures:
            return
        for size in reversed(READS):
            self._readers[size] = capture(partial(self._reader, size))
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

    def _reader(self, size: int) -> None:
        """Read the tokens that ``_look`` names."""
        rows, back = self._look[:, :size]
        slots, starts = self._slots[:size], self._starts[:size]
        drafts.look_back(
            rows, back, self._state.computed, self._floors, self.shift, slots, starts, self._padding
        )
        self._read_few(self._batch(slots, starts))

    def _read_few(self, batch: DeviceBatch) -> None:
        self.steps.forward.hidden(batch, self._q_start[:1])

    def _chain(self, size: int, count: int) -> None:
        """Guess up to ``count`` tokens for each of ``size`` rows in ``_columns``."""
        for ahead in range(count):
            self._step(size, ahead, 1 if ahead else self._width(count))

    def _step(self, size: int, ahead: int, width: int) -> None:
        state, sampler = self._state, self._target.sampler
        rows, most = self._columns[:, :size]
        slots, starts, ends = self._slots[: size * width], self._starts[: size * width], self._ends[:size]
        drafts.go_on(
            rows, most, state.computed, state.limits, self._floors, ahead, self.shift, slots, starts, ends,
            self._padding,
        )  # fmt: skip
        batch, out = self._batch(slots, starts), self.steps.logits[:size]
        logits = self._further(batch, out) if ahead else self._first(batch, self._last[width][:size], out)
        own, begin = self._of_target(logits)
        sampler.guess(own, rows, ends, self._out[:size], begin)

    def _first(self, batch: DeviceBatch, last: Tensor, out: Tensor) -> Tensor:
        """Logits of the tokens ``last`` int32[S] of a chain's first step, if possible in ``out``."""
        return self.steps.forward.step(batch, last, out).logits

    def _further(self, batch: DeviceBatch, out: Tensor) -> Tensor:
        """Of a step behind it, whose rows are of different slots: so they may store k and v themselves."""
        return self.steps.forward.step(batch, None, out, decode=self.steps.attention.decode.fused).logits

    def behind(self, slots: Int32s, starts: Int32s, q_lens: Int32s, first: Int32s) -> None:
        """Behind a step of the target: read its prompt rows, whose tokens begin at ``first`` among those of
        the step."""

    def _of_target(self, logits: Tensor) -> tuple[Tensor, int]:
        """Those of tokens of the target, and the first of these tokens."""
        own = self.steps.model.lm_head.own
        return logits[:, : self._target.model.spec.vocab - own.start].contiguous(), own.start

    def _batch(self, slots: Tensor, starts: Tensor) -> DeviceBatch:
        """Decode rows."""
        n, tables = len(slots), self.steps.tables
        cum = {w: c[: n + 1] for w, c in self._cum.items()}
        ids, positions, kv_len = self._ids[:n], self._positions[:n], self._kv_len[:n]
        out_loc, q_start = self._out_loc[..., :n], self._q_start[: n + 1]
        tables.prepare_decode(slots, starts, ids, positions, kv_len, out_loc, cum, shift=self.shift)
        self._within(ids)
        return tables.batch(
            slots, ids, positions=positions, q_start=q_start, kv_len=kv_len, out_loc=out_loc,
            sample_rows=q_start[:n], decode_rows=n, cum=cum,
        )  # fmt: skip

    def _within(self, ids: Tensor) -> None:
        """Tokens that it does not know are the last one that it does."""
        own = self.steps.model.spec.vocab
        if own < self._target.model.spec.vocab:
            ids.clamp_(max=own - 1)
