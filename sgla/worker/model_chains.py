"""A model that guesses on a GPU: its own steps before each step of its target (``chains.py``). The rules are
those of ``draft_model.py``.

A row's chain of k guesses is one graph. Its first step reads the last tokens of the row again, as decode rows
of one slot, since the host does not know how many of the guesses before were right; each further one reads
the guess of the one before. What only the target has read since, the model reads before that: few tokens as
decode rows, prompts as prompts."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from sgla.attention import DeviceBatch
from sgla.kernels.cuda.batch_gemm import ROWS as TILES
from sgla.kernels.ops import Layer
from sgla.kernels.triton import drafts
from sgla.kernels.triton.sampling import Exact
from sgla.messages import LEAVED, StepPlan
from sgla.worker.batch import eager_order
from sgla.worker.chains import Chains
from sgla.worker.device_state import upload
from sgla.worker.gpu_memory import GRAPH_LAYER
from sgla.worker.gpu_steps import GpuSteps
from sgla.worker.graphs import Capture
from sgla.worker.state import Int32s, column
from sgla.worker.verify import DeviceDrafts
from sgla.worker.warm_up import SIZES as PROMPTS
from sgla.worker.warm_up import layers_of_all_kinds

READS = (8, 32, 64)  # tokens that graphs read
AGAIN = 2  # tokens that a chain begins with: the pending one, and the last guess, which nobody has read


class ModelChains(Chains):
    """``steps``: of the model that guesses, with the tables of its ``target``'s."""

    def __init__(
        self, steps: GpuSteps, target: GpuSteps, state: DeviceDrafts, most: int, adaptive: bool
    ) -> None:
        super().__init__(target, state, most, adaptive, steps.attention.captures)
        self.steps, tables = steps, steps.tables
        self._unread = np.zeros(self._padding + 1, np.int32)  # tokens of slots before their pending one
        room = len(self._slots)
        self._look = torch.zeros(2, READS[-1], dtype=torch.int32, device="cuda")
        self._look[0] = self._padding
        self._ids, self._positions, self._kv_len, self._live = torch.zeros(
            4, room, dtype=torch.int32, device="cuda"
        )
        self._out_loc = tables.places(room)
        windows = {0, *tables.windows[1:], *steps.windows}
        self._cum = {w: torch.zeros(room + 1, dtype=torch.int32, device="cuda") for w in windows}
        self._q_start = torch.arange(room + 1, dtype=torch.int32, device="cuda")
        widths = {self._width(count) for _, count in self.pairs}
        self._last = {width: self._q_start[width - 1 : -1 : width].clone() for width in widths}
        self._readers: dict[int, torch.cuda.CUDAGraph] = {}

    def _room(self) -> int:
        return READS[-1]

    def _width(self, count: int) -> int:
        return AGAIN

    def take(self, kv: list[Layer]) -> None:
        self.steps.kv = kv

    def _admit(self, plan: StepPlan) -> None:
        """What new rows find in the prefix tree was read by both models."""
        self._unread[[new.slot for new in plan.new]] = 0

    def follow(self, plan: StepPlan, deep: int) -> None:
        slots, starts, q_lens = column(plan.slots), column(plan.starts), column(plan.q_lens)
        most = column(plan.drafts) if plan.drafts else np.full_like(slots, -1)
        prompts, guessing = (most < 0) & (q_lens > 1), most > 0
        if prompts.any():
            self._read_on(slots[prompts], starts[prompts], q_lens[prompts])
        others = ~(prompts | guessing)
        self._unread[slots[others]] += 1
        if guessing.any():
            rows = slots[guessing], np.minimum(most[guessing], deep)
            pair = self._pair(*rows)
            self._catch_up(slots[guessing], starts[guessing], self._width(pair[1]))
            self._guess(*rows, pair, np.maximum(most[guessing] - deep, 0))

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

    def _guess(self, slots: Int32s, most: Int32s, pair: tuple[int, int], leaves: Int32s) -> None:
        self._unread[slots] = self._left(most)
        super()._guess(slots, most, pair, leaves)

    def _left(self, most: Int32s) -> Int32s:
        """How many of the tokens before the pending one are unread, at most, after so many guesses."""
        return np.minimum(most, AGAIN - 1)

    def _rehearse(self) -> None:
        """A few of the layers stand for all."""
        kept = self.steps.kv
        self.take(kept[: layers_of_all_kinds(self.steps.model.spec)])
        most, one = self.steps.step_tokens, np.array([self._padding], np.int32)
        sizes = {*self._sizes(most), *(n for n in (*PROMPTS, *TILES) if n < most), most}
        for size in sorted(sizes):
            length = min(size, self.steps.context_len - 1)
            for start in (0, length // 2):
                self._extend(one, np.array([start], np.int32), np.array([length - start], np.int32))
        for size in READS:
            self._reader(size)
        super()._rehearse()
        self.take(kept)

    def _sizes(self, most: int) -> list[int]:
        """Numbers of tokens of prompts with which it takes every kernel that it takes with more."""
        return self.steps.forward.sizes(most)

    @property
    def graph_bytes(self) -> int:
        if not self._captures:
            return 0
        steps = len(READS) + sum(count for _, count in self.pairs)
        return steps * self.steps.model.spec.layers * GRAPH_LAYER

    def capture(self, capture: Capture) -> None:
        if self._captures:
            for size in reversed(READS):
                self._readers[size] = capture(partial(self._reader, size))
        super().capture(capture)

    def _reader(self, size: int) -> None:
        """Read the tokens that ``_look`` names."""
        rows, back = self._look[:, :size]
        slots, starts, live = self._slots[:size], self._starts[:size], self._live[:size]
        drafts.look_back(
            rows, back, self._state.computed, self._floors, self.shift, slots, starts, live, self._padding
        )
        self._read_few(self._batch(slots, starts, live=live))

    def _read_few(self, batch: DeviceBatch) -> None:
        self.steps.forward.hidden(batch, self._q_start[:1])

    def _chain(self, size: int, count: int) -> None:
        for ahead in range(count):
            self._step(size, ahead, 1 if ahead else self._width(count))

    def _step(self, size: int, ahead: int, width: int) -> None:
        state, sampler = self._state, self._target.sampler
        rows, most, leaves = self._columns[:, :size]
        slots, starts, live = (each[: size * width] for each in (self._slots, self._starts, self._live))
        ends = self._ends[:size]
        beside = self._beside[:size] if state.leaves and size <= LEAVED else None
        drafts.go_on(
            rows, most, state.computed, state.limits, self._floors, ahead, self.shift, slots, starts, ends,
            self._padding, None if beside is None else (leaves, beside), live,
        )  # fmt: skip
        batch, out = self._batch(slots, starts, live=live), self.steps.logits[:size]
        logits = self._further(batch, out) if ahead else self._first(batch, self._last[width][:size], out)
        own, begin = self._of_target(logits)
        sampler.guess(own, rows, ends, self._out[:size], begin, self._exact(size), beside)

    def _first(self, batch: DeviceBatch, last: Tensor, out: Tensor) -> Tensor:
        """Logits of the tokens ``last`` int32[S] of a chain's first step, if possible in ``out``."""
        return self.steps.forward.step(batch, last, out).logits

    def _further(self, batch: DeviceBatch, out: Tensor) -> Tensor:
        """Of a step behind it, whose rows are of different slots: so they may store k and v themselves."""
        return self.steps.forward.step(batch, None, out, decode=self.steps.attention.decode.fused).logits

    def _of_target(self, logits: Tensor) -> tuple[Tensor, int]:
        """Those of tokens of the target, and the first of these tokens."""
        own = self.steps.model.lm_head.own
        return logits[:, : self._target.model.spec.vocab - own.start].contiguous(), own.start

    def _exact(self, count: int) -> Exact | None:
        """What the logits of so many rows were rounded of, if they were."""
        return None

    def _batch(
        self, slots: Tensor, starts: Tensor, shift: int | None = None, live: Tensor | None = None
    ) -> DeviceBatch:
        """Decode rows. ``live``: see ``ForwardBatch``."""
        shift = self.shift if shift is None else shift
        n, tables = len(slots), self.steps.tables
        cum = {w: c[: n + 1] for w, c in self._cum.items()}
        ids, positions, kv_len = self._ids[:n], self._positions[:n], self._kv_len[:n]
        out_loc, q_start = self._out_loc[..., :n], self._q_start[: n + 1]
        tables.prepare_decode(slots, starts, ids, positions, kv_len, out_loc, cum, shift=shift)
        self._within(ids)
        return tables.batch(
            slots, ids, positions=positions, q_start=q_start, kv_len=kv_len, out_loc=out_loc,
            sample_rows=q_start[:n], decode_rows=n, cum=cum, live=live,
        )  # fmt: skip

    def _within(self, ids: Tensor) -> None:
        """Tokens that it does not know are the last one that it does."""
        own = self.steps.model.spec.vocab
        if own < self._target.model.spec.vocab:
            ids.clamp_(max=own - 1)
