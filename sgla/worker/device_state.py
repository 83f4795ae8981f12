"""What the worker knows of each slot, on the GPU; a step changes it by one upload and two small kernels."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgla import attention
from sgla.attention import DeviceBatch
from sgla.dist.pipe import Pipe
from sgla.kernels.batch import out_loc_of
from sgla.kernels.rehearsal import under_way
from sgla.kernels.triton import step
from sgla.kernels.triton.fetch import fetch
from sgla.kernels.triton.tokens import RING, TokenTable, put_tokens
from sgla.messages import NewRow, StepPlan
from sgla.sampling.device import DeviceSampler
from sgla.sampling.device_rules import send
from sgla.worker.state import Int32s, SlotTables, column, told_tokens

SLIP, SLIPS = 32_768, 64  # numbers that a slip has room for: those of a long prompt; and how many there are
STAGES = 8  # pinned buffers at least: see ``stages``


def stages(pipe: Pipe | None) -> int:
    """Pinned buffers that steps fill in turn: more than steps in flight, of which a pipeline has one in each
    of its stages and one more."""
    return STAGES if pipe is None else max(STAGES, pipe.stages + 2)


class DeviceTables:
    """``page_table`` int32[groups, slots + 1, max_pages] on the GPU, without the first dimension if there is
    one cache group of pages; ``windows``: of each. ``tokens``: the ids of what has pages. The last slot
    belongs to padding rows. ``host`` mirrors the page table for those who plan on the host, and has the units
    of a group of ``states``, and of tokens those that the host knows without a result: of each slot the first
    ``known`` int32[slots + 1]. ``place`` int32[slots + 1]: those of ``adapters``, if there are any.
    ``deltas`` int32[slots + 1]: by how much positions that keys and queries are turned by are more than the
    numbers of tokens, where pictures make a difference (``turned``). ``part``: this rank, and how many there
    are that share out the tokens of a page.
    ``admissions`` counts the rows that have taken slots."""

    def __init__(
        self,
        slots: int,
        context_len: int,
        page_size: int,
        windows: Sequence[int] = (0,),
        states: bool = False,
        adapters: bool = False,
        turned: bool = False,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.part = part
        self.page_size, self.admissions, self.windows, self.states = page_size, 0, windows, states
        self.host = SlotTables(slots + 1, context_len, page_size, len(windows), states)
        every = torch.zeros(self.host.page_table.shape, dtype=torch.int32, device="cuda")
        self.tables = list(every)
        self.tokens = TokenTable(
            self.tables[0], torch.zeros(slots + 1, dtype=torch.int32, device="cuda"), page_size
        )
        self.known = np.zeros(slots + 1, np.int32)
        self.place = torch.zeros(slots + 1, dtype=torch.int32, device="cuda") if adapters else None
        self.deltas = torch.zeros(slots + 1, dtype=torch.int32, device="cuda") if turned else None
        self._deltas = np.zeros(slots + 1, np.int32)
        self.page_table = every if len(windows) > 1 else every[0]

    def places(self, tokens: int) -> Tensor:
        """Room for ``ForwardBatch.out_loc``."""
        shape = (len(self.tables), tokens) if len(self.tables) > 1 else (tokens,)
        return torch.zeros(shape, dtype=torch.int32, device="cuda")

    def apply(self, plan: StepPlan, sampler: DeviceSampler) -> None:
        """Take in the new rows, then the appended pages and pending tokens; on the device in stream order."""
        if plan.new:
            self._admit_places(plan.new)
            self.host.admit(plan.new)
            self._admit(plan.new, sampler)
            self.admissions += len(plan.new)
        if plan.page_slots:
            self._append(plan)
            self.host.append(plan)
        if plan.tokens:
            self.put(told_tokens(plan))

    def _admit(self, rows: list[NewRow], sampler: DeviceSampler) -> None:
        own = np.zeros((len(rows), step.ADMIT_COLUMNS - step.COLUMNS.value), np.int32)
        floats, wide = own.view(np.float32), np.zeros(1, np.int64)
        for i, new in enumerate(rows):
            sampler.admit(new)
            s = new.sampling
            floats[i, :3] = s.temperature, s.top_p, s.min_p
            own[i, 3] = s.top_k
            wide[0] = s.seed
            own[i, 4:] = wide.view(np.int32)
            self.known[new.slot] = len(new.tokens) // 4
        slots, none = np.array([new.slot for new in rows], np.int32), np.zeros(len(rows), np.int32)
        held = [[column(new.pages[group]) for new in rows] for group in range(len(self.tables))]
        counts = np.array([len(pages) for pages in held[0]], np.int32)
        head, data, longest = self._coming(slots, none, counts, np.concatenate(held[0]), own)
        step.admit(
            head, data, longest, self.tokens,
            sampler.temperatures, sampler.top_ps, sampler.min_ps, sampler.top_ks, sampler.seeds,
        )  # fmt: skip
        self._append_others(slots, none, counts, [np.concatenate(pages) for pages in held[1:]])

    def _append(self, plan: StepPlan) -> None:
        """Pages come, and with them the tokens that the host knows."""
        slots, counts = column(plan.page_slots), column(plan.page_counts)
        before, (first, *others) = self.host.page_count[slots], map(column, plan.page_ids)
        step.append(*self._coming(slots, before, counts, first), self.tokens)
        self._append_others(slots, before, counts, others)

    def _append_others(self, slots: Int32s, before: Int32s, counts: Int32s, pages: list[Int32s]) -> None:
        """Those of the cache groups behind the first."""
        owners = np.repeat(slots, counts)
        if not pages or not len(owners):
            return
        places = np.arange(len(owners)) - np.repeat(counts.cumsum() - counts - before, counts)
        for table, own in zip(self.tables[1:], pages):
            step.append_pages(upload(np.stack([owners, places, own])), table)

    def _coming(
        self, slots: Int32s, before: Int32s, counts: Int32s, pages: Int32s, own: Int32s | None = None
    ) -> tuple[Tensor, Tensor, int]:
        """What ``step.append`` wants of ``slots`` that have so many pages ``before``, and get ``counts`` of
        ``pages``; ``own``: more columns."""
        size, known, first = step.COLUMNS.value, self.known[slots], before * self.page_size
        head = np.zeros((len(slots), size if own is None else size + own.shape[1]), np.int32)
        head[:, 0], head[:, 1], head[:, 2], head[:, 3], head[:, 6] = (
            slots, before, counts, counts.cumsum(), known,
        )  # fmt: skip
        if own is not None:
            head[:, size:] = own
        parts, longest = [head.ravel(), pages], int(counts.max())
        if (known > first).any():
            # Those behind the last page as well, as far as the ring holds them.
            end = first + counts * self.page_size + RING.value
            come = np.maximum(np.minimum(known, end) - first, 0)
            head[:, 4], head[:, 5] = come, len(pages) + come.cumsum()
            longest = max(longest, int(come.max()))
            for row in come.nonzero()[0].tolist():
                parts.append(self.host.tokens[slots[row], first[row] : first[row] + come[row]])
        data = upload(np.concatenate(parts))
        return data[: head.size].view(head.shape), data[head.size :], longest

    def _admit_places(self, rows: list[NewRow]) -> None:
        """Where the adapters of new rows are, as far as that changes: before ``host`` knows them."""
        changed = [(new.slot, new.place) for new in rows if self.host.place[new.slot] != new.place]
        if self.place is not None and changed:
            slots, places = upload(np.array(changed, np.int32).T)
            self.place[slots.long()] = places

    def turn(self, deltas: Sequence[tuple[int, int]]) -> None:
        """Slots that have another request, and their deltas."""
        changed = [(slot, delta) for slot, delta in deltas if self._deltas[slot] != delta]
        if self.deltas is not None and changed:
            for slot, delta in changed:
                self._deltas[slot] = delta
            slots, values = upload(np.array(changed, np.int32).T)
            self.deltas[slots.long()] = values

    def turned(self, slots: Int32s, positions: Int32s) -> Int32s:
        """What keys and queries of tokens at these ``positions`` are turned by, as steps have it."""
        return np.maximum(positions + self._deltas[slots], 0)

    def put(self, given: Int32s) -> None:
        """Change the token table: int32[3, n] of slots, positions and tokens. Of those that have no page yet
        the host knows all before, and brings them with their pages."""
        slots, positions, values = given
        self.host.tokens[slots, positions] = values
        held = self.host.page_count[slots] * self.page_size
        late = positions >= held
        np.maximum.at(self.known, slots[late], positions[late] + 1)
        now = positions < held + RING.value
        if now.any():
            columns = upload(given[:, now])
            put_tokens(columns[0], columns[1], columns[2], self.tokens)

    @contextmanager
    def alone(self, slot: int, ids: Int32s) -> Iterator[None]:
        """``slot`` has these tokens, and all pages behind the dummy for them."""
        count = -(-len(ids) // self.page_size)
        self.tokens.resize(count + 1)
        self.page_table[..., slot, :count] = torch.arange(1, count + 1, device="cuda")
        self.tokens.held[slot], self.host.page_count[slot] = count * self.page_size, count
        slots, positions = np.full_like(ids, slot), np.arange(len(ids), dtype=np.int32)
        self.put(np.stack([slots, positions, ids]))
        yield
        self.page_table[..., slot, :] = 0
        self.tokens.held[slot] = self.host.page_count[slot] = 0
        self.tokens.resize(1)

    def batch(self, slots: Tensor, ids: Tensor, **more: Any) -> DeviceBatch:
        """Rows in ``slots`` with the tokens ``ids``; ``more``: the other fields of a batch."""
        return DeviceBatch(
            rows=len(slots),
            tokens=len(ids),
            slots=slots,
            ids=ids,
            page_table=self.page_table,
            page_size=self.page_size,
            turned=self.deltas is not None,
            **more,
        )

    def prepare_decode(
        self,
        slots: Tensor,
        starts: Tensor,
        ids: Tensor,
        positions: Tensor,
        kv_len: Tensor,
        out_loc: Tensor,
        cum: dict[int, Tensor],
        skip: Tensor | None = None,
        shift: int = 0,
        ends: Tensor | None = None,
    ) -> None:
        """See ``kernels/triton/step.py``, for all cache groups; ``cum`` and ``ends``: see ``DeviceBatch``.
        ``shift``: the ids are those of so many tokens further on."""
        left, tile = dict(cum), attention.TILE
        first = next(window for window in cum if window not in self.windows[1:])
        for group, table in enumerate(self.tables):
            window = self.windows[group] if group else first
            step.prepare_decode(
                slots, starts, self.tokens, table, ids, positions, kv_len, out_loc_of(out_loc, group),
                left.pop(window), tile, window, None if group else skip, self.deltas, shift, self.part, ends,
            )  # fmt: skip
        for window, tiles in left.items():
            step.count_tiles(kv_len, tiles, tile, window)

    def prepare_extend(
        self,
        slots: Tensor,
        starts: Tensor,
        q_start: Tensor,
        longest: int,
        ids: Tensor,
        positions: Tensor,
        out_loc: Tensor,
        shift: int = 0,
    ) -> None:
        """See ``kernels/triton/step.py``, for all cache groups; ``shift``: as in ``prepare_decode``."""
        for group, table in enumerate(self.tables):
            step.prepare_extend(
                slots, starts, q_start, longest, self.tokens, table, ids, positions,
                out_loc_of(out_loc, group), self.deltas, shift, self.part,
            )  # fmt: skip


class Slips:
    """Pinned memory that numbers are fetched from (``kernels/triton/fetch.py``), with what has passed
    when they have been."""

    def __init__(self) -> None:
        self._slips: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._lock = Lock()

    def upload(self, host: Int32s) -> Tensor | None:
        """None: they are too many, all slips are under way, or this is a rehearsal."""
        if not 0 < host.size <= SLIP:
            return None
        there = torch.empty(host.shape, dtype=torch.int32, device="cuda")
        if under_way():
            fetch(there, there)  # is asked for
            return None
        with self._lock:
            if (free := self._free()) is None:
                return None
            slip, fetched = free
            slip.numpy()[: host.size] = host.ravel()
            fetch(slip[: host.size], there)
            fetched.record()
            self._slips.append(free)
        return there

    def _free(self) -> tuple[Tensor, torch.cuda.Event] | None:
        for _ in range(len(self._slips)):
            slip = self._slips.popleft()
            if slip[1].query():
                return slip
            self._slips.append(slip)
        if len(self._slips) == SLIPS:
            return None
        return torch.empty(SLIP, dtype=torch.int32, pin_memory=True), torch.cuda.Event()


_slips = Slips()


def upload(host: Int32s) -> Tensor:
    """A host array on the GPU, without waiting."""
    there = _slips.upload(host)
    return send(np.ascontiguousarray(host, np.int32), torch.device("cuda")) if there is None else there


def upload_columns(columns: list[Int32s]) -> list[Tensor]:
    """Several arrays in one copy; each begins at a multiple of 16 bytes, as kernels are compiled for."""
    places, end = [], 0
    for values in columns:
        places.append(slice(end, end + len(values)))
        end += -(-len(values) // 4) * 4
    host = np.zeros(end, np.int32)
    for place, values in zip(places, columns):
        host[place] = values
    flat = upload(host)
    return [flat[place] for place in places]


def aligned(columns: int, rows: int) -> Tensor:
    """Room for int32[columns, rows] on the GPU, where each column begins so. Zeros in a rehearsal, when no
    kernel writes what torch's operations may read."""
    make = torch.zeros if under_way() else torch.empty
    return make(columns, -(-rows // 4) * 4, dtype=torch.int32, device="cuda")[:, :rows]
