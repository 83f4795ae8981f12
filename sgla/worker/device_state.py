"""What the worker knows of each slot, on the GPU; a step changes it by one upload and two small kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgla import attention
from sgla.attention import DeviceBatch
from sgla.kernels.batch import out_loc_of
from sgla.kernels.rehearsal import under_way
from sgla.kernels.triton import step
from sgla.messages import NewRow, StepPlan
from sgla.sampling.device import DeviceSampler
from sgla.sampling.device_rules import send
from sgla.worker.state import Int32s, SlotTables, column


class DeviceTables:
    """``tokens`` int32[slots + 1, context_len + 1] and ``page_table`` int32[groups, slots + 1, max_pages] on
    the GPU, without the first dimension if there is one cache group of pages; ``windows``: of each. The last
    slot belongs to padding rows. ``host`` mirrors the page table for those who plan on the host, and has the
    units of a group of ``states``. ``place`` int32[slots + 1]: those of ``adapters``, if there are any.
    ``deltas`` int32[slots + 1]: by how much positions that keys and queries are turned by are more than the
    numbers of tokens, where pictures make a difference (``turned``).
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
    ) -> None:
        self.page_size, self.admissions, self.windows, self.states = page_size, 0, windows, states
        self.host = SlotTables(slots + 1, context_len, page_size, len(windows), states)
        self.tokens = torch.zeros(self.host.tokens.shape, dtype=torch.int32, device="cuda")
        every = torch.zeros(self.host.page_table.shape, dtype=torch.int32, device="cuda")
        self.tables = list(every)
        self.place = torch.zeros(slots + 1, dtype=torch.int32, device="cuda") if adapters else None
        self.deltas = torch.zeros(slots + 1, dtype=torch.int32, device="cuda") if turned else None
        self._deltas = np.zeros(slots + 1, np.int32)
        self.page_table = every if len(windows) > 1 else every[0]

    def places(self, tokens: int) -> Tensor:
        """Room for ``ForwardBatch.out_loc``."""
        shape = (len(self.tables), tokens) if len(self.tables) > 1 else (tokens,)
        return torch.zeros(shape, dtype=torch.int32, device="cuda")

    def apply(self, plan: StepPlan, sampler: DeviceSampler) -> None:
        """Take in the new rows, then the appended pages; on the device in stream order."""
        if plan.new:
            self._admit(plan.new, sampler)
            self._admit_places(plan.new)
            self.admissions += len(plan.new)
        if plan.tokens:
            rows = len(plan.tokens) // 4
            self.put(np.stack([column(plan.slots)[:rows], column(plan.starts)[:rows], column(plan.tokens)]))
        if plan.page_slots:
            slots, counts = column(plan.page_slots), column(plan.page_counts)
            first = np.cumsum(counts) - counts
            owners = np.repeat(slots, counts)
            places = np.arange(len(owners)) - np.repeat(first - self.host.page_count[slots], counts)
            for table, pages in zip(self.tables, plan.page_ids):
                step.append_pages(upload(np.stack([owners, places, column(pages)])), table)
        self.host.apply(plan)

    def _admit(self, rows: list[NewRow], sampler: DeviceSampler) -> None:
        head = np.zeros((len(rows), step.ADMIT_COLUMNS), np.int32)
        floats, wide = head.view(np.float32), np.zeros(1, np.int64)
        parts: list[Int32s] = []
        at = head.size
        for i, new in enumerate(rows):
            sampler.admit(new)
            tokens, pages, s = column(new.tokens), column(new.pages[0]), new.sampling
            head[i, :5] = new.slot, at, len(tokens), at + len(tokens), len(pages)
            floats[i, 5:8] = s.temperature, s.top_p, s.min_p
            head[i, 8] = s.top_k
            wide[0] = s.seed
            head[i, 9:] = wide.view(np.int32)
            parts += [tokens, pages]
            at += len(tokens) + len(pages)
        data = upload(np.concatenate([head.ravel(), *parts]))
        longest = int(max(head[:, 2].max(), head[:, 4].max()))
        step.admit(
            data[: head.size].view(head.shape), data, longest, self.tokens, self.tables[0],
            sampler.temperatures, sampler.top_ps, sampler.min_ps, sampler.top_ks, sampler.seeds,
        )  # fmt: skip
        for group, table in enumerate(self.tables[1:], 1):
            held = [column(new.pages[group]) for new in rows]
            owners = np.repeat([new.slot for new in rows], [len(pages) for pages in held])
            places = np.concatenate([np.arange(len(pages)) for pages in held])
            if len(owners):
                step.append_pages(upload(np.stack([owners, places, np.concatenate(held)])), table)

    def _admit_places(self, rows: list[NewRow]) -> None:
        """Where the adapters of new rows are, as far as that changes."""
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

    def put(self, tokens: Int32s) -> None:
        """Change the token table: int32[3, n] of slots, positions and tokens."""
        slots, positions, values = upload(tokens)
        self.tokens[slots.long(), positions.long()] = values

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
    ) -> None:
        """See ``kernels/triton/step.py``, for all cache groups; ``cum``: see ``DeviceBatch``. ``shift``: the
        ids are those of so many tokens further on."""
        left, tile = dict(cum), attention.TILE
        first = next(window for window in cum if window not in self.windows[1:])
        for group, table in enumerate(self.tables):
            window = self.windows[group] if group else first
            step.prepare_decode(
                slots, starts, self.tokens[:, shift:], table, self.page_size, ids, positions, kv_len,
                out_loc_of(out_loc, group), left.pop(window), tile, window, None if group else skip,
                self.deltas,
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
                slots, starts, q_start, longest, self.tokens[:, shift:], table, self.page_size, ids,
                positions, out_loc_of(out_loc, group), self.deltas,
            )  # fmt: skip


def upload(host: Int32s) -> Tensor:
    """A host array on the GPU, without waiting."""
    return send(np.ascontiguousarray(host, np.int32), torch.device("cuda"))


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
