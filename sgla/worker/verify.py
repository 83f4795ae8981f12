"""Rows that guess on a GPU. Each token that such a row verifies is a decode row of its slot, so that all
kernels for decode rows serve. Where it begins, what it guesses and how much of that is right is decided on
the device, which is steps ahead of the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from sgla.kernels.gpu.states import DeviceStates
from sgla.kernels.ops import Layer
from sgla.kernels.triton import drafts
from sgla.kernels.triton.drafts import Others
from sgla.kernels.triton.tokens import put_tokens
from sgla.messages import SAMPLE, VERIFIED, Failed, NewRow, StepPlan, StepResult
from sgla.sampling.constraints import Constraints, Forced
from sgla.sampling.runs import ragged
from sgla.sampling.sampler import Samples
from sgla.worker.device_state import DeviceTables, upload
from sgla.worker.ngrams import FIRST, LONGEST, SHORTEST
from sgla.worker.others import BITS, PRIME, ROOM, RUN
from sgla.worker.rewind import Pages, Units
from sgla.worker.state import Int32s, column
from sgla.worker.target_hidden import TargetHidden

NOBODY = np.zeros(0, np.int32)
LAYOUTS = 4  # kept: those of steps with guesses, and of the steps between them that have none
RANKS = 16  # whose decode rows are kept as long


class Brought(NamedTuple):
    """Of each row that samples: its slot, how many guesses it had that follow each other, and how many of
    these were right, the first ones; whether there was a second guess beside the first wrong one (``tried``),
    and whether that was right."""

    slots: Int32s
    guessed: Int32s
    right: Int32s
    tried: NDArray[np.bool_]
    second: NDArray[np.bool_]


class DeviceDrafts:
    """What ``NGrams`` and ``SlotTables`` know of each slot on a CPU, int32[slots + 1] each on the GPU.
    ``searches``: guesses are looked for in what has come, where no model that keeps something is beside
    (``alone``) and none reads ``hidden`` states; else a model has put them into the token table.
    ``units``: of layers that keep states, if there are any; ``others``: what is known beside a row's own
    text, which ``DeviceOutputs`` fills. ``leaves``: guesses may have second ones beside them; ``pages``: of
    layers, if so."""

    units: Units | None = None
    pages: Pages | None = None

    def __init__(
        self, tables: DeviceTables, alone: bool, hidden: TargetHidden | None = None, leaves: bool = False
    ) -> None:
        self.hidden, self.leaves, self._tables = hidden, leaves, tables
        self.tokens, self.padding = tables.tokens, tables.tokens.slots - 1
        self.searches = alone and hidden is None
        self.host = tables.host
        shape = 3, tables.tokens.slots
        self.computed, self.limits, self.trusts = torch.zeros(shape, dtype=torch.int32, device="cuda")
        slots = tables.tokens.slots
        self.others = Others(
            torch.zeros((1 << BITS) + ROOM + VERIFIED, dtype=torch.int32, device="cuda"),
            torch.zeros(slots, dtype=torch.int32, device="cuda"),
            torch.zeros(slots, VERIFIED + 2, dtype=torch.int32, device="cuda"),
            (RUN, BITS, PRIME),
        )
        self._layouts: dict[tuple[bytes, ...], Layout] = {}  # the latest ones, by what they were made of
        self._behind = np.zeros(slots, bool)  # slots whose ``computed`` is of an earlier step

    def take(self, kv: Sequence[Layer], own: int, spare: int) -> None:
        """What layers keep, of which the first ``own`` are the model's. ``spare``: see ``Units``; 0: no layer
        keeps states, or plans say where those behind guesses are kept."""
        if spare:
            self.units = Units(kv, spare)
        if self.leaves:
            self.pages = Pages(kv[:own], self._tables.tables[0], self._tables.page_size)

    def admit(self, rows: list[NewRow]) -> None:
        """Requests take slots."""
        slots, limits, apart = upload(np.array([[new.slot, new.limit, new.apart] for new in rows]).T)
        self.limits.index_copy_(0, slots.long(), limits)
        self.trusts.index_fill_(0, slots.long(), FIRST)
        if self.searches:
            self.others.apart.index_copy_(0, slots.long(), apart)
            self.others.forced.index_fill_(0, slots.long(), 0)

    def skip(self, plan: StepPlan) -> None:
        """A step in which no row guesses: the host knows how far its rows will get."""
        self._behind[column(plan.slots)] = True

    def tell(self, forced: list[Forced]) -> None:
        """What grammars force."""
        if not forced:
            return
        rows = np.zeros((len(forced), VERIFIED + 3), np.int32)
        for row, (slot, position, tokens) in zip(rows, forced):
            row[:3], row[3 : 3 + len(tokens)] = (slot, position, len(tokens)), tokens
        told = upload(rows)
        self.others.forced.index_copy_(0, told[:, 0].long(), told[:, 1:])

    def layout(self, plan: StepPlan, deep: int) -> Layout:
        units = b""
        if self.units is not None:
            assert self.host.unit is not None
            units = self.host.unit[column(plan.slots)].tobytes()
        made_of = plan.slots, plan.q_lens, plan.flags, plan.drafts, units, bytes([deep])
        layout = self._layouts.pop(made_of, None) or Layout(self, plan, deep)
        if len(self._layouts) == LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[made_of] = layout
        return layout

    def place(
        self, columns: Tensor, rows: tuple[Tensor, Tensor, Tensor, Tensor], deep: int = VERIFIED
    ) -> None:
        """Fill in decode rows, and look for guesses if that is how these are made: see
        ``kernels/triton/drafts.py: guess`` and ``place``."""
        known = self.computed, self.limits
        if self.searches:
            drafts.guess(
                columns, self.tokens, *known, self.trusts, *rows, self.padding, (LONGEST, SHORTEST), VERIFIED,
                self.others,
            )  # fmt: skip
        else:
            drafts.place(columns, *known, *rows, self.padding, VERIFIED, deep)

    def begin(self, slots: Int32s, starts: Int32s) -> None:
        """Rows of ``slots`` guess. Those that did not in their step before begin at ``starts``."""
        behind = self._behind[slots]
        if behind.any():
            late, computed = upload(np.stack([slots[behind], starts[behind]]))
            self.computed.index_copy_(0, late.long(), computed)
        self._behind[slots] = False


class Decoding:
    """``rows``: that of each decode row, of which there is one for each token that a row verifies, of steps
    that say the same of their rows, but for where these begin."""

    def __init__(self, slots: Int32s, q_lens: Int32s, flags: NDArray[np.uint8], most: Int32s) -> None:
        spans = np.maximum(most, 0) + 1
        self.rows = np.repeat(np.arange(len(slots)), spans)
        self._offsets = np.arange(len(self.rows)) - np.repeat(np.cumsum(spans) - spans, spans)
        self._fields: dict[str, bytes] = {
            "slots": slots[self.rows].tobytes(),
            "q_lens": np.where(most < 0, q_lens, 1)[self.rows].astype(np.int32).tobytes(),
            "flags": flags[self.rows].tobytes(),
        }

    def spread(self, plan: StepPlan) -> StepPlan:
        """With a row for each decode row, at the latest place where that can be."""
        starts = (column(plan.starts)[self.rows] + self._offsets).astype(np.int32)
        return replace(plan, starts=starts.tobytes(), drafts=b"", **self._fields)


def decoding(plan: StepPlan) -> Decoding:
    return _decoding(plan.slots, plan.q_lens, plan.flags, plan.drafts)


def spread(plan: StepPlan) -> StepPlan:
    """See ``Decoding``; of a plan in which no row may guess it is that."""
    return decoding(plan).spread(plan) if plan.drafts else plan


@lru_cache(LAYOUTS * RANKS)
def _decoding(slots: bytes, q_lens: bytes, flags: bytes, drafts: bytes) -> Decoding:
    most = column(drafts) if drafts else np.full(len(slots) // 4, -1, np.int32)
    return Decoding(column(slots), column(q_lens), np.frombuffer(flags, np.uint8), most)


class Layout:
    """Where the decode rows of steps stand that say the same of their rows, but for where these begin: so it
    serves one step after another. ``deep``: guesses of a row that follow each other, at most; those behind
    are leaves, second guesses of the first places, if there are any (``leaves``). ``most``: guesses of a row
    that follow each other; ``rows``: the step's row of each decode row;
    ``first`` and ``runs``: of each row that samples the first decode row, and how many it has; ``leading``:
    decode rows up to the last that may be a guess."""

    def __init__(self, state: DeviceDrafts, plan: StepPlan, deep: int) -> None:
        slots, flags = column(plan.slots), np.frombuffer(plan.flags, np.uint8)
        most = column(plan.drafts) if plan.drafts else np.full(len(slots), -1, np.int32)
        self.deep, self.leaves = deep, bool(most.max() > deep)
        self.most = min(max(int(most.max()), 0), deep)
        spans = np.maximum(most, 0) + 1
        self._decoding = decoding(plan)
        self.rows = self._decoding.rows
        sampled = np.flatnonzero(flags & SAMPLE)
        self.runs = spans[sampled]
        self.first = (np.cumsum(self.runs) - self.runs).astype(np.int32)
        self.guessing = np.flatnonzero(most >= 0)
        self.slots, self.guessing_slots = slots[sampled], slots[self.guessing]
        self.leading = int(spans[: self.guessing[-1] + 1].sum()) if len(self.guessing) else 0
        if len(sampled):
            columns = [self.slots, most[sampled], self.first]
            if state.units is not None:
                assert state.host.unit is not None
                spare = np.maximum(most[sampled], 0)
                columns += [state.host.unit[self.slots], state.units.first + np.cumsum(spare) - spare]
            self.columns = upload(np.stack(columns))

    def spread(self, plan: StepPlan) -> StepPlan:
        """See ``Decoding``; of a plan in whose place this layout is."""
        return self._decoding.spread(plan) if self.leading else plan


class Verify:
    """A step whose rows may guess. ``plan``: the same with a decode row for each token that a row verifies,
    at the latest place where that can be. ``guided``: the host is told of the guesses, since grammars want
    to know them. ``deep``: see ``Layout``."""

    _told: Tensor | None = None
    _ids: Tensor
    _starts: Tensor
    _where: Tensor
    _ends: Tensor

    def __init__(
        self, state: DeviceDrafts, plan: StepPlan, guided: bool = False, deep: int = VERIFIED
    ) -> None:
        self._state, layout = state, state.layout(plan, deep)
        self.most, self._leading, self._layout = layout.most, layout.leading, layout
        kinds = 3 if layout.leaves else 2
        self._counts = torch.ones(kinds, len(layout.runs), dtype=torch.int32, pin_memory=True)
        state.begin(layout.guessing_slots, column(plan.starts)[layout.guessing])
        if self._leading and guided:
            self._told = torch.zeros(2, self._leading, dtype=torch.int32, pin_memory=True)
            self._heard = torch.cuda.Event()
        self.plan = layout.spread(plan)

    @property
    def guesses(self) -> bool:
        """Some of its rows may guess."""
        return self._leading > 0

    def guess(self, ids: Tensor, slots: Tensor, starts: Tensor, where: Tensor, ends: Tensor) -> None:
        """The columns of ``plan`` are on the GPU: slots and positions of its tokens, whose ids will be in
        ``ids``, and of its samples. Those of rows that guess are the first, and corrected."""
        self._ids, self._starts, self._where, self._ends = ids, starts, where, ends
        if self._leading:
            self._state.place(self._layout.columns, (slots, starts, where, ends), self._layout.deep)
        if self._told is not None:
            drafts.tell(slots, starts, ends, self._state.tokens, self._told)
            self._heard.record()

    def hear(self, positions: Int32s) -> tuple[Int32s, Int32s]:
        """``positions`` int32[S] of the step's samples, corrected, 0 where there is none, and the tokens that
        its rows read, as far as they guess. The step before is over."""
        if self._told is None:
            return positions, positions[:0]
        self._heard.synchronize()
        read, ends = self._told.numpy()
        return np.concatenate([ends, positions[len(ends) :]]), read

    def came(self) -> NDArray[np.bool_]:
        """bool[S]: which samples of ``plan`` count. The step is over."""
        counts = self._counts.numpy()[0]
        behind = np.arange(self._layout.runs.sum()) - np.repeat(self._layout.first, self._layout.runs)
        came = behind < np.repeat(counts, self._layout.runs)
        leaves, standing_for = self._taken()
        came[leaves], came[standing_for] = True, False
        return came

    def _taken(self) -> tuple[Int32s, Int32s]:
        """Decode rows of leaves that count, and those of the wrong guesses in whose places they come."""
        if not self._layout.leaves:
            return NOBODY, NOBODY
        counts, _, leaf = self._counts.numpy()
        first, rows = self._layout.first, np.flatnonzero(leaf)
        return first[rows] + leaf[rows], first[rows] + counts[rows] - 1

    def link(self, states: DeviceStates) -> None:
        """The rows of a slot go on from each other's states. Behind ``guess``."""
        if self._leading:
            assert states.runs is not None
            units = states.reads, states.writes, states.runs
            drafts.link(self._layout.columns, self._ends, *units, VERIFIED)

    def restore(self) -> None:
        """Put the guesses, which rules read, back into the token table, where a graph put what it drew."""
        if self._leading:
            n = self._leading
            places = torch.where(self._ends[:n] > 0, self._starts[:n], -1)
            put_tokens(self._where[:n], places, self._ids[:n], self._state.tokens)

    def accept(self, out: Tensor) -> None:
        """All rows have drawn, into ``out``."""
        state, columns = self._state, (self._ids, out, self._ends)
        if not len(self._layout.runs):
            return
        if self._layout.leaves:
            self._take_leaves(out)
            return
        units, sources = state.units, None
        if units is not None:
            sources = torch.empty(len(self._layout.runs), dtype=torch.int32, device=out.device)
        tables = state.computed, state.trusts, self._counts
        drafts.accept(self._layout.columns, *columns, *tables, VERIFIED, sources)
        if self._leading and units is not None and sources is not None:
            drafts.go_back(self._layout.columns, sources, units.memory, units.places)

    def _take_leaves(self, out: Tensor) -> None:
        """``accept`` in a step that has some."""
        state, layout = self._state, self._layout
        assert state.pages is not None
        moves = torch.empty(2, len(layout.runs), dtype=torch.int32, device=out.device)
        drafts.take_leaf(
            layout.columns, self._ids, out, self._ends, state.tokens, state.computed, self._counts, moves,
            layout.deep, VERIFIED,
        )  # fmt: skip
        pages = state.pages
        drafts.move(layout.columns, moves, pages.table, pages.size, pages.memory, pages.places)
        if state.hidden is not None:
            drafts.move_hidden(layout.columns, moves, state.hidden.ring)

    def brought(self) -> Brought:
        """What the rows that sample have brought. The step is over."""
        counts, guessed = self._counts.numpy()[:2]
        leaves = self._counts.numpy()[2] > 0 if self._layout.leaves else np.zeros(len(counts), bool)
        right = np.maximum(counts - 1, 0) - leaves
        tried = (right < guessed) & (right < self._layout.runs - 1 - self._layout.deep)
        return Brought(self._layout.slots, guessed, right, tried, leaves)

    def know(self, constraints: Constraints) -> None:
        """What grammars force behind its rows, for the guesses of the next step."""
        if self._state.searches:
            self._state.tell(constraints.forced())

    def came_of(self, tokens: list[int]) -> list[tuple[int, list[int]]]:
        """Slots of the rows that sample, and what each brings of the ``tokens`` of ``plan``. The step is
        over."""
        counts = self._counts.numpy()[0].tolist()
        for leaf, place in zip(*self._taken()):
            tokens[place] = tokens[leaf]
        parts = zip(self._layout.slots.tolist(), self._layout.first.tolist(), counts)
        return [(slot, [t for t in tokens[at : at + count] if t >= 0]) for slot, at, count in parts]

    def fold(self, result: StepResult, samples: Samples) -> None:
        """Make the result of ``plan``, with one sample of each of its rows, that of the step. It is over."""
        counts, guessed = self._counts.numpy()[:2]
        first, runs, rows = self._layout.first, self._layout.runs, self._layout.rows
        if guessed.any():
            result.guessed = guessed.tobytes()
        leaves, places = self._taken()
        if len(leaves):
            tokens = samples.tokens.copy()
            tokens[places] = tokens[leaves]
            samples = samples._replace(tokens=tokens)
        if not (samples.forced or samples.known or result.logprobs or result.failed):
            result.tokens, result.counts = ragged(samples, first, counts)
            return
        of = np.repeat(np.arange(len(runs)), runs)
        samples = samples._replace(
            forced={int(of[i]): run for i, run in samples.forced.items()},
            known={int(of[i]) for i in samples.known},
        )
        result.tokens, result.counts = ragged(samples, first, counts)
        if self._leading:
            # Rows with several samples are the first: their samples have the numbers of their rows.
            wrong = set(np.flatnonzero(~self.came()).tolist())
            result.logprobs = [block for block in result.logprobs if block.prompt or block.row not in wrong]
            for block in result.logprobs:
                block.row = int(rows[block.row])
            failed = (failed for failed in result.failed if failed.row not in wrong)
            result.failed = [Failed(int(rows[each.row]), each.why, each.fault) for each in failed]
