"""Steps that read prompts as graph replays: a few prompt rows, with decode rows beside them or not.

Run eagerly, such a step takes the host longer to launch than the GPU to compute.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sgla.attention.base import InGraph, cut
from sgla.kernels.batch import out_loc_of
from sgla.kernels.gpu.ops import Attend
from sgla.kernels.gpu.states import CHUNK, DeviceStates, Stretches, marks_of, stretches
from sgla.kernels.triton.fetch import fetch
from sgla.messages import POOL, PROMPT_LOGPROBS, SAMPLE
from sgla.sampling.device import Pending
from sgla.worker import gpu_halves
from sgla.worker.batch import StateColumns
from sgla.worker.device_state import stages
from sgla.worker.gpu_adapters import AdaptedPrompts
from sgla.worker.gpu_shared_cache import Shares
from sgla.worker.gpu_steps import EAGER, GpuSteps
from sgla.worker.graphs import Capture
from sgla.worker.verify import Verify

ROWS = 16  # prompt rows: at most 14 real ones, one that owns the padding tokens, one that is empty
REAL = ROWS - 2
SEGMENTS = 64  # of prompt rows, cut where they leave states
# Of a step. Those between, such as 448, 704 or 960, take as long as the next one.
TOKENS = (32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 1024)
# Of larger steps, where layers are many small kernels: those of mixtures, and of ranks. The host takes 40 to
# 60 ms to launch those of Qwen3-30B-A3B, whatever the tokens: as long as they take with 8192.
LARGE = (1536, 2048, 3072, 4096)
BESIDE = 2048  # the same, where each rank brings as many to its MLPs: of two they are 4096 together
# Tokens of the longest history of a prompt row: with more, eager steps may be faster, whose attention splits
# histories: if that saves more than their launch costs.
HISTORY = 8192
DECODES = (0, 64, 256)  # decode rows among these tokens, at most; or as many as there may be
# Tokens of steps that split histories, and decode rows among them, at most; how long the longest history is
# at least. In others a few tokens keep as few multiprocessors busy as there are heads.
SPLIT, SPLIT_ROWS, SPLIT_FROM = (128, 256, 384, 512), 64, 2048
# A row of few tokens behind a history is read faster as so many decode rows of its slot, which split it, than
# as a prompt row, which goes through it alone: tokens of such a row, and (query, key) pairs of all.
SHORT, PAIRS = 16, 1 << 16


class Which(NamedTuple):
    """A graph: it reads ``tokens``, of which up to ``decodes`` are decode rows. ``split``: its tiles are a
    plan of ``Splits``; ``adapted``: rows may have adapters."""

    decodes: int
    tokens: int
    split: bool
    adapted: bool


class PromptGraphs:
    """One graph for each ``Which``; none where prompts are not read in graphs.
    The batch is decode rows, prompt rows, padding; results are in the plan's order."""

    def __init__(self, steps: GpuSteps) -> None:
        self._steps = steps
        most = min(steps.step_tokens, steps.context_len) if steps.reads_in_graphs else 0
        most = most if steps.shard.lockstep is None else min(most, BESIDE)
        most = min(most, gpu_halves.WHOLE) if steps.halved else most
        # Not where a context is shared out, which no graph does.
        large = steps.shard.context is None and (steps.model.spec.moe is not None or steps.shard.size > 1)
        self.tokens = [n for n in (TOKENS + LARGE if large else TOKENS) if n <= most]
        self.decodes = [n for n in DECODES if n < steps.rows] + [steps.rows]
        self.pairs = sorted({self._pair(n, size) for n in self.decodes for size in self.tokens})
        self.limit = self.tokens[-1] if self.tokens else 0
        prompts = steps.attention.prompts
        self._tile = prompts.tile if prompts is not None else 1
        splits = prompts.splits if prompts is not None and not steps.apart else None
        self._splits = splits
        split_rows = min(SPLIT_ROWS, steps.rows)
        self.splits = [(split_rows, n) for n in SPLIT if n <= self.limit] if splits is not None else []
        self._tiles = max(self.limit // self._tile + REAL, 0 if splits is None else splits.room)
        self._states = steps.tables.states
        size = sum(self._lengths(steps.rows))
        self._columns = torch.zeros(size, dtype=torch.int32, device="cuda")
        count = stages(steps.shard.pipe)
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(count)]
        self._stage = 0
        self._tokens = torch.zeros(2, self.limit, dtype=torch.int32, device="cuda")
        self._out_loc = steps.tables.places(self.limit)
        self._cum = {w: torch.zeros(steps.rows + 1, dtype=torch.int32, device="cuda") for w in steps.windows}
        self._out = torch.zeros(steps.rows, dtype=torch.int32, device="cuda")
        self._graphs: dict[Which, torch.cuda.CUDAGraph] = {}
        self._adapted: AdaptedPrompts | None = None
        if steps.adapted is not None and self.tokens:
            self._adapted = AdaptedPrompts(steps.adapted, self.limit, self._samples(steps.rows), count)
        self._pipe = steps.shard.pipe
        if self._pipe is not None:
            room = self.limit, steps.model.spec.hidden, steps.model.embed.dtype
            self._arrived, self._leaving = self._pipe.messages(*room)

    def _pair(self, count: int, size: int) -> tuple[int, int]:
        """The sizes of the graph for so many decode rows among ``size`` tokens. Of large ones none is without
        room for decode rows."""
        decodes = self.decodes if size <= TOKENS[-1] else self.decodes[1:]
        return min(next(n for n in decodes if n >= count), size), size

    def _lengths(self, decodes: int) -> tuple[int, ...]:
        """Of the columns: tiles; slots, starts, kv_len; of the samples:
        row of hidden states, slot, position; q_start; and of ``DeviceStates`` what ``_units`` cuts, if layers
        keep states."""
        rows = decodes + ROWS
        kept = 2 * rows + 4 * decodes + ROWS + 1 + 4 * SEGMENTS + 4 * self._chunks(self.limit)
        return (4 * self._tiles, rows, rows, rows, rows, rows, rows, ROWS + 1, kept if self._states else 0)

    def _units(self, kept: Any, n: int) -> tuple[Any, ...]:
        """Of a step with up to ``n`` decode rows: reads, writes, marks, runs; first, segments and chunks of
        ``Stretches``."""
        ends = np.cumsum([n + ROWS, n + ROWS, 3 * n, n, ROWS + 1, 4 * SEGMENTS]).tolist()
        bounds = pairwise([0, *ends, len(kept)])
        reads, writes, marks, runs, first, segments, chunks = (kept[begin:end] for begin, end in bounds)
        marks, segments, chunks = marks.reshape(-1, 3), segments.reshape(-1, 4), chunks.reshape(-1, 4)
        return reads, writes, marks, runs, first, segments, chunks

    def _chunks(self, size: int) -> int:
        """Of a step of ``size`` tokens, at most."""
        return size // CHUNK + SEGMENTS

    def takes(self, starts: Any, q_lens: Any, flags: Any, states: StateColumns | None = None) -> bool:
        prompts = ~_decodes(q_lens, flags)
        few = int(prompts.sum()) <= REAL and int(q_lens.sum()) <= self.limit
        few = few and (states is None or prompts[states.marks[:, 0]].sum() <= SEGMENTS - REAL)
        if not few or (flags & (PROMPT_LOGPROBS | POOL)).any():
            return False
        fits = self._may_split(len(prompts) - int(prompts.sum()), int(q_lens.sum()))
        starts, q_lens = starts[prompts], q_lens[prompts]
        if (starts < HISTORY).all():
            return True
        if fits and self._splits is not None and (-(-q_lens // self._tile)).sum() <= self._splits.tiles:
            return True
        return not self._steps.apart and self._lost(starts, q_lens) < EAGER

    def _lost(self, starts: Any, q_lens: Any) -> float:
        """Microseconds that attention to these rows takes longer than in an eager step."""
        attention = self._steps.attention.prompts
        assert attention is not None
        tiles = cut(np.zeros_like(starts), starts, q_lens, 0, self._tile)
        return attention.lost(tiles) * len(self._steps.kv)

    def _may_split(self, decodes: int, tokens: int) -> bool:
        return bool(self.splits) and decodes <= self.splits[-1][0] and tokens <= self.splits[-1][1]

    def _plan_splits(self, slots: Any, starts: Any, q_lens: Any, decodes: Any) -> Any:
        """``Splits.plan`` of the prompts in a step. None: their histories are read as a whole."""
        rest, count = ~decodes, int(decodes.sum())
        if self._splits is None or not self._may_split(count, int(q_lens.sum())):
            return None
        if not rest.any() or starts[rest].max() < SPLIT_FROM:
            return None
        return self._splits.plan(cut(slots[rest], starts[rest], q_lens[rest], count, self._tile))

    @property
    def _kinds(self) -> list[Which]:
        """The graphs that there are: large to small, so that the small ones fit into the memory of the
        large."""
        whole = sorted(self.pairs, key=lambda pair: (-pair[1], -pair[0]))
        sizes = [(pair, False) for pair in whole] + [(pair, True) for pair in reversed(self.splits)]
        sets = (False, True) if self._adapted is not None else (False,)
        return [Which(*pair, split, adapted) for adapted in sets for pair, split in sizes]

    @property
    def count(self) -> int:
        """Graphs to be captured."""
        return len(self._kinds)

    def _samples(self, decodes: int) -> int:
        """Of a graph with so many decode rows, at most."""
        return min(decodes + ROWS, self._steps.rows)

    def rehearse(self) -> None:
        """Every step there is, to ask for its kernels."""
        for which in self._kinds:
            self._forward(*which)

    def capture(self, capture: Capture) -> None:
        """After the decode graphs."""
        for which in self._kinds:
            self._graphs[which] = capture.unrun(partial(self._forward, *which))

    def _fill(
        self,
        slots: Any,
        starts: Any,
        q_lens: Any,
        decodes: Any,
        sampled: Any,
        sizes: tuple[int, int],
        states: StateColumns | None,
        plan: Any = None,
    ) -> None:
        """Send the step's columns.
        ``decodes`` bool[R]: which rows are decode rows; ``sampled``: rows that sample; ``plan``: of tiles."""
        padded, size = sizes
        lengths = self._lengths(padded)
        pinned = self._pinned[self._stage][: sum(lengths)]
        self._stage = (self._stage + 1) % len(self._pinned)
        host = pinned.numpy()
        host[:] = 0
        tiles, *six, q_start, kept = np.split(host, np.cumsum(lengths)[:-1])
        tiles, (d_slots, d_starts, kv_len, at, where, ends) = tiles.reshape(-1, 4), six
        first, rest = decodes.nonzero()[0], (~decodes).nonzero()[0]
        count, prompts, new = len(first), len(rest), len(sampled)
        stops = starts + q_lens
        d_slots[:] = where[:] = self._steps.slots
        d_starts[count:padded] = -1
        last = np.empty(len(slots), np.int32)  # each row's last hidden state
        if count:
            d_slots[:count], d_starts[:count], kv_len[:count] = slots[first], starts[first], stops[first]
            last[first] = np.arange(count)
        place = slice(padded, padded + prompts)
        d_slots[place], d_starts[place], kv_len[place] = slots[rest], starts[rest], stops[rest]
        q_start[0] = count
        np.add(q_lens[rest].cumsum(), count, out=q_start[1 : prompts + 1])
        last[rest] = q_start[1 : prompts + 1] - 1
        q_start[prompts + 1 :] = size
        at[:new], where[:new], ends[:new] = last[sampled], slots[sampled], stops[sampled]
        if plan is None:
            plan = cut(slots[rest], starts[rest], q_lens[rest], count, self._tile)
        tiles[: len(plan)] = plan
        if states is not None:
            self._fill_units(kept, states.ordered(np.concatenate([first, rest])), q_start, padded, count)
        fetch(pinned, self._columns)

    def _fill_units(self, kept: Any, states: StateColumns, q_start: Any, padded: int, count: int) -> None:
        """Of rows in the order of the batch, of which ``count`` are decode rows, with room for ``padded``."""
        *columns, marks, runs, first, segments, chunks = self._units(kept, padded)
        runs[:] = 1
        for column, values in zip(columns, states):
            column[:count] = values[:count]
            column[padded : padded + len(values) - count] = values[count:]
        marks[:count] = marks_of(states.marks, count)
        prompts = len(states.writes) - count
        made = stretches(q_start[: prompts + 1], states.writes[count:], states.marks, count)
        first[:] = len(made.segments)
        first[: prompts + 1], segments[: len(made.segments)], chunks[: len(made.chunks)] = made

    def _guess(self, verify: Verify, padded: int) -> None:
        """Correct the columns on the GPU."""
        lengths = self._lengths(padded)
        columns = self._columns[: sum(lengths)].split(lengths)
        _, slots, starts, _, _, where, ends, _, kept = columns
        verify.guess(self._tokens[0], slots, starts, where, ends)
        if self._states:
            verify.link(self._device_states(kept, padded, self.limit))

    def _forward(self, n: int, size: int, split: bool = False, adapted: bool = False) -> None:
        """The step in the columns: see ``Which``."""
        rows = self._adapted if adapted else None
        with nullcontext() if rows is None else rows.graph(size, self._samples(n)):
            if self._pipe is None:
                self._compute(n, size, split)
                return
            with self._pipe.holding(self._arrived, self._leaving):
                self._compute(n, size, split)

    def _compute(self, n: int, size: int, split: bool) -> None:
        steps, tables = self._steps, self._steps.tables
        lengths = self._lengths(n)
        columns = self._columns[: sum(lengths)].split(lengths)
        tiles, slots, starts, kv_len, at, where, ends, q_start, kept = columns
        ids, positions = self._tokens[:, :size]
        out_loc = self._out_loc[..., :size]
        sampled = self._samples(n)
        at, where, ends = at[:sampled], where[:sampled], ends[:sampled]
        logits, out = steps.logits[:sampled], self._out[:sampled]
        cum = {w: c[: n + 1] for w, c in self._cum.items()}
        if n:
            tables.prepare_decode(
                slots[:n], starts[:n], ids[:n], positions[:n], kv_len[:n], out_loc[..., :n], cum
            )
        # Behind the decode rows, where the places of those that are missing have just been filled as padding.
        tables.prepare_extend(slots[n:], starts[n:], q_start, size, ids, positions, out_loc)
        batch = tables.batch(
            slots,
            ids,
            positions=positions,
            q_start=q_start,
            kv_len=kv_len,
            out_loc=out_loc,
            sample_rows=at,
            decode_rows=n,
            cum=cum,
            states=self._device_states(kept, n, size) if self._states else None,
            live=self._live(out_loc),
        )
        attend: Attend = InGraph(steps.attention, tiles.view(-1, 4), split)
        if isinstance(steps.ops.attend, Shares):
            attend = steps.ops.attend.over(attend)
        with steps.ops.attending(attend):
            if not steps.shard.samples:
                steps.forward.hidden(batch)
                return
            found = steps.forward.step(batch, at, logits).logits
        if steps.hidden is not None and n:
            steps.hidden.keep(slots[:n], positions[:n])
        if found.data_ptr() != logits.data_ptr():  # a soft cap or an all-gather made another tensor
            logits.copy_(found)
        steps.sampler.draw(logits, where, ends, out)

    def _live(self, out_loc: Tensor) -> Tensor | None:
        """``ForwardBatch.live`` for mixtures: KV of padding goes to the dummy page. Ranks that share out a
        context leave there what others have, too."""
        tables = self._steps.tables
        if self._steps.model.spec.moe is None or not tables.windows or tables.part[1] > 1:
            return None
        return (out_loc_of(out_loc, 0) >= tables.page_size).int()

    def _device_states(self, kept: Tensor, n: int, size: int) -> DeviceStates:
        reads, writes, marks, runs, first, segments, chunks = self._units(kept, n)
        made = Stretches(first, segments, chunks[: self._chunks(size)])
        return DeviceStates(reads, writes, marks, made, None if self._steps.drafts is None else runs)

    def run(
        self,
        slots: Any,
        starts: Any,
        q_lens: Any,
        flags: Any,
        states: StateColumns | None = None,
        verify: Verify | None = None,
        least: int = 0,
    ) -> tuple[Tensor, int, Pending | None]:
        """The tokens of the rows that sample, in their order,
        how many they are, and ``Pending`` as ``DecodeGraphs.run``. ``least``: tokens that the graph has at
        least. A stage before the last has none that sample."""
        decodes, owners = _decodes(q_lens, flags), np.arange(len(slots))
        if states is None and self._steps.drafts is None:
            owners, (slots, starts, q_lens, flags), decodes = spread(
                slots, starts, q_lens, flags, decodes, self._steps.rows
            )
        sampled = np.flatnonzero(flags & SAMPLE)
        count, new, total = int(decodes.sum()), len(sampled), int(q_lens.sum())
        plan = None if least else self._plan_splits(slots, starts, q_lens, decodes)
        if plan is None:
            sizes = self._pair(count, next(size for size in self.tokens if size >= max(total, least)))
        else:
            sizes = next(sizes for sizes in self.splits if sizes[1] >= total)
        adapted = self._steps.adapted is not None and self._steps.adapted.any(slots)
        graph = self._graphs[Which(*sizes, plan is not None, adapted)]
        self._fill(slots, starts, q_lens, decodes, sampled, sizes, states, plan)
        if adapted and self._adapted is not None:
            order = np.concatenate([decodes.nonzero()[0], (~decodes).nonzero()[0]])
            self._adapted.fill(slots[order], q_lens[order], slots[sampled])
        if verify is not None:
            self._guess(verify, sizes[0])
        if self._pipe is not None and not self._pipe.first:
            self._pipe.take(self._arrived[:total])
        graph.replay()
        if self._pipe is not None and not self._pipe.last:
            self._pipe.give(self._leaving[:total])
            return self._out, 0, None
        if self._steps.sampler.plain(slots[sampled]):
            return self._out, new, None
        on_host = (slots[sampled], (starts + q_lens)[sampled])
        lengths = self._lengths(sizes[0])
        where, ends = self._columns[: sum(lengths)].split(lengths)[5:7]
        numbers = np.asarray(owners[sampled], np.int32)
        return (
            self._out,
            new,
            Pending(self._steps.logits[:new], where[:new], ends[:new], self._out, numbers, on_host),
        )


def spread(slots: Any, starts: Any, q_lens: Any, flags: Any, decodes: Any, most: int) -> Any:
    """Short rows as decode rows, of which there may be ``most``. Of each row that there is then: which it
    was; slots, starts, q_lens and flags; and whether it is a decode row."""
    short = ~decodes & (q_lens <= SHORT) & (starts > q_lens)
    fits = int(decodes.sum()) + np.cumsum(q_lens * short) <= most
    short &= fits & (np.cumsum(q_lens * (starts + q_lens) * short) <= PAIRS)
    counts = np.where(short, q_lens, 1)
    owners = np.repeat(np.arange(len(slots)), counts)
    ahead = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
    last = ahead == counts[owners] - 1
    columns = (
        slots[owners],
        (starts[owners] + ahead).astype(starts.dtype),
        np.where(short, 1, q_lens)[owners].astype(q_lens.dtype),
        flags[owners] * last,
    )
    return owners, columns, (decodes | short)[owners]


def _decodes(q_lens: Any, flags: Any) -> Any:
    """Which rows are decode rows. (A prompt may have a chunk of one token that does not sample.)"""
    return (q_lens == 1) & ((flags & SAMPLE) != 0)


def prompts_last(q_lens: Any, flags: Any) -> Any:
    """Rows of a step in the order of a graph's batch."""
    return np.argsort(~_decodes(q_lens, flags), kind="stable")
