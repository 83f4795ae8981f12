"""From a StepPlan to the tensors of the forward step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from sgla.layers.batch import ForwardBatch
from sgla.messages import PROMPT_LOGPROBS, SAMPLE, StepPlan
from sgla.worker.state import Int32s, SlotTables, column


class PromptSpan(NamedTuple):
    """Prompt tokens whose logprobs a row owes: the hidden states ``first:end`` of the step predict the tokens of
    ``slot`` from position ``start`` on."""

    row: int
    slot: int
    first: int
    end: int
    start: int


class StepBatch(NamedTuple):
    """``forward`` and what the sampler needs of its S sampled rows; arrays int32[S]."""

    forward: ForwardBatch
    rows: Int32s
    slots: Int32s
    positions: Int32s  # of the tokens to sample
    prompt_spans: list[PromptSpan]


def build(plan: StepPlan, tables: SlotTables) -> StepBatch:
    """The batch of ``plan``, whose new rows and pages ``tables`` has taken in."""
    slots, starts, q_lens = column(plan.slots), column(plan.starts), column(plan.q_lens)
    flags = np.frombuffer(plan.flags, np.uint8)
    ends = starts + q_lens
    q_start = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(q_lens, out=q_start[1:])
    if len(slots) == q_start[-1]:  # decode only
        token_slots, positions = slots, starts
    else:
        token_slots = np.repeat(slots, q_lens)
        positions = np.arange(q_start[-1], dtype=np.int32) - np.repeat(q_start[:-1] - starts, q_lens)
    pages = tables.page_table[token_slots, positions // tables.page_size]
    sampled = np.flatnonzero(flags & SAMPLE).astype(np.int32)
    forward = ForwardBatch(
        rows=len(slots),
        tokens=len(positions),
        ids=torch.from_numpy(tables.tokens[token_slots, positions]),
        positions=_tensor(positions),
        slots=_tensor(slots),
        q_start=torch.from_numpy(q_start),
        kv_len=torch.from_numpy(ends),
        out_loc=torch.from_numpy(pages * tables.page_size + positions % tables.page_size),
        page_table=torch.from_numpy(tables.page_table),
        page_size=tables.page_size,
        sample_rows=torch.from_numpy(q_start[1:][sampled] - 1),
    )
    spans = [_span(r, slots, starts, q_lens, q_start, tables) for r in np.flatnonzero(flags & PROMPT_LOGPROBS).tolist()]
    return StepBatch(forward, sampled, slots[sampled], ends[sampled], spans)


def _tensor(values: Int32s) -> torch.Tensor:
    """Columns of a message are read-only, which torch does not know: copy those."""
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _span(row: int, slots: Int32s, starts: Int32s, q_lens: Int32s, q_start: Int32s, tables: SlotTables) -> PromptSpan:
    slot, start, first = int(slots[row]), int(starts[row]), int(q_start[row])
    count = min(int(q_lens[row]), int(tables.prompt_len[slot]) - 1 - start)
    return PromptSpan(row, slot, first, first + count, start + 1)
