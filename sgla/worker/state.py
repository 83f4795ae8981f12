"""What the worker knows of each slot, as tables that a step reads with one numpy operation a column."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sgla.messages import NewRow, StepPlan

Int32s = NDArray[np.int32]
HIDDEN, EXPERTS = 1, 2  # what a row brings of each token: its hidden state, or the experts that it goes to


def column(data: bytes) -> Int32s:
    """An integer column of a message, without a copy (read-only)."""
    return np.frombuffer(data, np.int32)


def told_tokens(plan: StepPlan) -> Int32s:
    """int32[3, n]: slots and positions of ``plan.tokens``, and these."""
    tokens, ends = column(plan.tokens), column(plan.q_lens).cumsum()
    rows = int(np.searchsorted(ends, len(tokens))) + 1
    slots, starts, spans = (column(data)[:rows] for data in (plan.slots, plan.starts, plan.q_lens))
    places = np.arange(len(tokens)) + np.repeat(starts - (ends[:rows] - spans), spans)
    return np.stack([np.repeat(slots, spans), places, tokens]).astype(np.int32)


class SlotTables:
    """``tokens`` int32[slots, context_len + 1], ``page_table`` int32[groups,
    slots, max_pages] (0, the dummy, where unset), for each of ``groups`` that keeps tokens. ``unit``
    int32[slots]: that of each slot, if there is a group of ``states``.

    Memory is touched only where a request has written.
    """

    def __init__(
        self, slots: int, context_len: int, page_size: int, groups: int = 1, states: bool = False
    ) -> None:
        self.page_size = page_size
        self.tokens: Int32s = np.zeros((slots, context_len + 1), np.int32)
        self.page_table: Int32s = np.zeros((groups, slots, -(-(context_len + 1) // page_size)), np.int32)
        self.unit: Int32s | None = np.zeros(slots, np.int32) if states else None
        self.page_count: Int32s = np.zeros(slots, np.int32)
        self.prompt_len: Int32s = np.zeros(slots, np.int32)
        self.prompt_logprobs: Int32s = np.zeros(slots, np.int32)
        self.brings: NDArray[np.int8] = np.zeros(slots, np.int8)  # what rows bring of each token
        self.computed: Int32s = np.zeros(slots, np.int32)  # tokens with KV, of slots that sample
        self.limit: Int32s = np.zeros(slots, np.int32)  # NewRow.limit
        self.place: Int32s = np.zeros(slots, np.int32)  # NewRow.place
        self.labels: dict[int, Int32s] = {}  # of slots that want log-probabilities of tokens, these

    def apply(self, plan: StepPlan) -> None:
        """Take in the new rows, then pending tokens and the appended pages."""
        self.admit(plan.new)
        if plan.tokens:
            slots, places, tokens = told_tokens(plan)
            self.tokens[slots, places] = tokens
        self.append(plan)

    def admit(self, rows: list[NewRow]) -> None:
        for new in rows:
            self._admit(new)

    def append(self, plan: StepPlan) -> None:
        """Take in its pages, but for those of new rows."""
        if not plan.page_slots:
            return
        slots, counts = column(plan.page_slots), column(plan.page_counts)
        first = np.cumsum(counts) - counts
        offsets = np.arange(counts.sum()) - np.repeat(first - self.page_count[slots], counts)
        owners = np.repeat(slots, counts)
        for table, pages in zip(self.page_table, plan.page_ids):
            table[owners, offsets] = column(pages)
        self.page_count[slots] += counts

    def _admit(self, new: NewRow) -> None:
        tokens = column(new.tokens)
        self.tokens[new.slot, : len(tokens)] = tokens
        self.page_count[new.slot] = 0
        if self.unit is not None:
            self.unit[new.slot] = column(new.pages[-1])[0] if new.pages else 0
        for table, column_of in zip(self.page_table, new.pages):
            pages = column(column_of)
            table[new.slot, : len(pages)] = pages
            self.page_count[new.slot] = len(pages)
        self.prompt_len[new.slot] = new.prompt_len
        self.prompt_logprobs[new.slot] = new.sampling.prompt_logprobs
        self.limit[new.slot] = new.limit
        self.place[new.slot] = new.place
        self.brings[new.slot] = HIDDEN * new.sampling.hidden + EXPERTS * new.sampling.experts
        self.labels.pop(new.slot, None)
        if new.sampling.pool is not None:
            self.labels[new.slot] = np.array(new.sampling.pool, np.int32)
