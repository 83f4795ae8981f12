"""From a StepPlan to the tensors of the forward step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from sgla.kernels.batch import ForwardBatch, StateRows
from sgla.messages import POOL, PROMPT_LOGPROBS, SAMPLE, StepPlan
from sgla.worker.state import EXPERTS, Int32s, SlotTables, column


class StateColumns(NamedTuple):
    """``kernels.batch.StateRows`` in numpy."""

    reads: Int32s  # [R]
    writes: Int32s  # [R]
    marks: Int32s  # [M, 3]

    def ordered(self, order: Any) -> StateColumns:
        """With the rows in this order."""
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order))
        marks = self.marks.copy()
        marks[:, 0] = place[marks[:, 0]]
        return StateColumns(self.reads[order], self.writes[order], marks)


class Columns(NamedTuple):
    """int32 columns of R rows, as in StepPlan;
    ``logits`` are the T-indices of the tokens whose successor matters."""

    slots: Int32s  # [R]
    starts: Int32s  # [R]
    q_lens: Int32s  # [R]
    logits: Int32s  # [S], rising
    states: StateColumns | None = None


def eager_order(starts: Any, q_lens: Any) -> Any:
    """Rows of an eager step: those of one token, then what has a history (see ``attention.ExtendRows``)."""
    return np.argsort((q_lens > 1) * (1 + (starts == 0)), kind="stable")


class PromptSpan(NamedTuple):
    """Prompt tokens whose logprobs a row owes: the step's tokens ``first:end`` predict those of ``slot`` from
    position ``start`` on."""

    row: int
    slot: int
    first: int
    end: int
    start: int


class PooledRow(NamedTuple):
    """A row whose prompt is complete and which is for a vector: its last token in the step, and its slot."""

    row: int
    token: int
    slot: int


class BroughtSpan(NamedTuple):
    """The tokens ``first:end`` of a step, those of a row that brings their hidden states, or (``experts``)
    the experts that they go to."""

    row: int
    first: int
    end: int
    experts: bool


class Wanted(NamedTuple):
    """What is to become of the logits. Arrays are int32[S] of the S tokens to sample: one of each SAMPLE row,
    or of one with drafts one behind each token. ``runs``: how many of each SAMPLE row."""

    rows: Int32s
    slots: Int32s
    positions: Int32s  # of the tokens to sample
    tokens: Int32s  # the one before it in the step: its logits say the next
    runs: Int32s
    prompt_spans: list[PromptSpan]
    pooled: list[PooledRow]
    brought: list[BroughtSpan]

    @property
    def first(self) -> Int32s:
        """Index of the first token of each SAMPLE row."""
        return np.cumsum(self.runs, dtype=np.int32) - self.runs

    @property
    def plain(self) -> bool:
        """Logits are wanted to sample from them, and nothing else."""
        return not (self.prompt_spans or self.pooled or self.brought)


def read(
    plan: StepPlan, tables: SlotTables, guessed: tuple[Int32s, Int32s] | None = None
) -> tuple[Columns, Wanted]:
    """Decode ``plan``, whose new rows ``tables`` has taken in.
    ``guessed``: starts and lengths of its rows, if some have drafts."""
    slots, starts, q_lens = column(plan.slots), *(guessed or (column(plan.starts), column(plan.q_lens)))
    flags = np.frombuffer(plan.flags, np.uint8)
    ends = np.cumsum(q_lens, dtype=np.int32)
    sampled = np.flatnonzero(flags & SAMPLE).astype(np.int32)
    spans = [
        _span(row, slots, starts, q_lens, ends, tables)
        for row in np.flatnonzero(flags & PROMPT_LOGPROBS).tolist()
    ]
    last, runs, positions = ends[sampled] - 1, np.ones_like(sampled), (starts + q_lens)[sampled]
    if plan.drafts:
        # Spans of 1, 3 and 1 tokens have runs 1, 3, 1: before 0, 2, 1, 0, 0 and last 0, 1, 2, 3, 4.
        runs = np.where(column(plan.drafts)[sampled] >= 0, q_lens[sampled], 1).astype(np.int32)
        sampled = np.repeat(sampled, runs)
        before = np.repeat(np.cumsum(runs), runs) - 1 - np.arange(len(sampled), dtype=np.int32)
        last = (np.repeat(last, runs) - before).astype(np.int32)
        positions = (np.repeat(positions, runs) - before).astype(np.int32)
    pooled = [
        PooledRow(row, int(ends[row]) - 1, int(slots[row]))
        for row in np.flatnonzero(flags & POOL).tolist()
        if starts[row] + q_lens[row] == tables.prompt_len[slots[row]]
    ]
    kinds = tables.brings[slots]
    brought = [
        BroughtSpan(row, int(ends[row] - q_lens[row]), int(ends[row]), kinds[row] == EXPERTS)
        for row in np.flatnonzero(kinds).tolist()
    ]
    wanted = Wanted(sampled, slots[sampled], positions, last, runs, spans, pooled, brought)
    logits = last
    if not wanted.plain:
        tails = np.array([row.token for row in pooled], np.int32)
        bounds = [(s.first, s.end) for s in spans] + [(s.first, s.end) for s in brought]
        inner = (np.arange(first, end, dtype=np.int32) for first, end in bounds)
        logits = np.unique(np.concatenate([last, tails, *inner]))
    return Columns(slots, starts, q_lens, logits, state_columns(plan, slots, starts, tables)), wanted


def state_columns(plan: StepPlan, slots: Int32s, starts: Int32s, tables: SlotTables) -> StateColumns | None:
    """None where no layer keeps a state."""
    if tables.unit is None:
        return None
    writes, row_of = tables.unit[slots], np.zeros(len(tables.unit), np.int32)
    row_of[slots] = np.arange(len(slots))
    reads = np.where(starts > 0, writes, 0).astype(np.int32)
    told, marks = column(plan.state_reads).reshape(-1, 2), column(plan.checkpoints).reshape(-1, 3)
    reads[row_of[told[:, 0]]] = told[:, 1]
    rows = row_of[marks[:, 0]]
    return StateColumns(reads, writes, np.stack([rows, marks[:, 1] - starts[rows], marks[:, 2]], 1))


def _span(
    row: int, slots: Int32s, starts: Int32s, q_lens: Int32s, ends: Int32s, tables: SlotTables
) -> PromptSpan:
    slot, start, first = int(slots[row]), int(starts[row]), int(ends[row] - q_lens[row])
    count = min(int(q_lens[row]), int(tables.prompt_len[slot]) - 1 - start)
    return PromptSpan(row, slot, first, first + count, start + 1)


def cut(columns: Columns, most: int) -> list[Columns]:
    """Split the step, in token order, so that no part has more than ``most`` logits.

    Parts must run in order: a row may read pages that an earlier row of the same step has written.
    """
    if len(columns.logits) <= most:
        return [columns]
    bounds = [0, *(columns.logits[most::most]).tolist(), int(columns.q_lens.sum())]
    return [between(columns, first, end) for first, end in pairwise(bounds)]


def between(columns: Columns, first: int, end: int) -> Columns:
    """The tokens ``first:end`` of the step."""
    ends = np.cumsum(columns.q_lens)
    begins = ends - columns.q_lens
    rows = (ends > first) & (begins < end)
    begins, stops = np.maximum(begins, first), np.minimum(ends, end)
    starts = columns.starts + (begins - (ends - columns.q_lens)).astype(np.int32)
    logits = columns.logits[(columns.logits >= first) & (columns.logits < end)] - first
    q_lens = (stops - begins).astype(np.int32)
    states = columns.states
    if states is not None:
        states = _states_of(states, rows, starts - columns.starts, q_lens)
    return Columns(columns.slots[rows], starts[rows], q_lens[rows], logits.astype(np.int32), states)


def _states_of(states: StateColumns, rows: Any, passed: Int32s, q_lens: Int32s) -> StateColumns:
    """Those of a part of the step that has ``q_lens`` tokens of ``rows`` behind the first ``passed``."""
    reads = np.where(passed > 0, states.writes, states.reads)
    row, length, unit = states.marks.T
    length = length - passed[row]
    inside = rows[row] & (length > 0) & (length <= q_lens[row])
    marks = np.stack([np.cumsum(rows)[row] - 1, length, unit], 1)[inside]
    return StateColumns(reads[rows], states.writes[rows], marks.astype(np.int32))


def build(columns: Columns, tables: SlotTables) -> ForwardBatch:
    """The tensors; their ids and pages are those that stand in ``tables`` now."""
    slots, starts, q_lens = columns.slots, columns.starts, columns.q_lens
    q_start = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(q_lens, out=q_start[1:])
    if len(slots) == q_start[-1]:  # decode only
        token_slots, positions = slots, starts
    else:
        token_slots = np.repeat(slots, q_lens)
        positions = np.arange(q_start[-1], dtype=np.int32) - np.repeat(q_start[:-1] - starts, q_lens)
    pages = np.ascontiguousarray(tables.page_table[:, token_slots, positions // tables.page_size])
    return ForwardBatch(
        rows=len(slots),
        tokens=len(positions),
        ids=torch.from_numpy(tables.tokens[token_slots, positions]),
        positions=_tensor(positions),
        slots=_tensor(slots),
        q_start=torch.from_numpy(q_start),
        kv_len=torch.from_numpy(starts + q_lens),
        out_loc=torch.from_numpy(pages * tables.page_size + positions % tables.page_size),
        page_table=torch.from_numpy(tables.page_table),
        page_size=tables.page_size,
        sample_rows=_tensor(columns.logits),
        states=None if columns.states is None else StateRows(*map(_tensor, columns.states)),
    )


def _tensor(values: Int32s) -> torch.Tensor:
    """Columns of a message are read-only, which torch does not know: copy those."""
    return torch.from_numpy(values if values.flags.writeable else values.copy())
