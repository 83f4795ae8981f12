"""What the worker knows of each slot, on the GPU; a step changes it by one upload and two small kernels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sgla.kernels.triton import step
from sgla.messages import NewRow, StepPlan
from sgla.sampling.device import DeviceSampler
from sgla.sampling.device_rules import send
from sgla.worker.state import Int32s, SlotTables, column


class DeviceTables:
    """``tokens`` int32[slots + 1, context_len + 1] and ``page_table`` int32[slots + 1, max_pages] on the GPU.
    The last slot belongs to padding rows. ``host`` mirrors the page table for those who plan on the host.
    ``admissions`` counts the rows that have taken slots."""

    def __init__(self, slots: int, context_len: int, page_size: int) -> None:
        self.page_size, self.admissions = page_size, 0
        self.host = SlotTables(slots + 1, context_len, page_size)
        self.tokens = torch.zeros(self.host.tokens.shape, dtype=torch.int32, device="cuda")
        self.page_table = torch.zeros(self.host.page_table.shape[1:], dtype=torch.int32, device="cuda")

    def apply(self, plan: StepPlan, sampler: DeviceSampler) -> None:
        """Take in the new rows, then the appended pages; on the device in stream order."""
        if plan.new:
            self._admit(plan.new, sampler)
            self.admissions += len(plan.new)
        if plan.page_slots:
            slots, counts, pages = column(plan.page_slots), column(plan.page_counts), column(plan.page_ids[0])
            first = np.cumsum(counts) - counts
            owners = np.repeat(slots, counts)
            places = np.arange(len(pages)) - np.repeat(first - self.host.page_count[slots], counts)
            step.append_pages(upload(np.stack([owners, places, pages])), self.page_table)
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
            data[: head.size].view(head.shape), data, longest, self.tokens, self.page_table,
            sampler.temperatures, sampler.top_ps, sampler.min_ps, sampler.top_ks, sampler.seeds,
        )  # fmt: skip

    def put(self, tokens: Int32s) -> None:
        """Change the token table: int32[3, n] of slots, positions and tokens."""
        slots, positions, values = upload(tokens)
        self.tokens[slots.long(), positions.long()] = values

    def prepare_extend(
        self,
        slots: Tensor,
        starts: Tensor,
        q_start: Tensor,
        longest: int,
        ids: Tensor,
        positions: Tensor,
        out_loc: Tensor,
    ) -> None:
        """See ``kernels/triton/step.py``."""
        step.prepare_extend(
            slots,
            starts,
            q_start,
            longest,
            self.tokens,
            self.page_table,
            self.page_size,
            ids,
            positions,
            out_loc,
        )


def upload(host: Int32s) -> Tensor:
    """A host array on the GPU, without waiting."""
    return send(np.ascontiguousarray(host, np.int32), torch.device("cuda"))


def upload_columns(columns: list[Int32s]) -> list[Tensor]:
    """Several arrays in one copy."""
    return list(upload(np.concatenate(columns)).split([len(c) for c in columns]))
