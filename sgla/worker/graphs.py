"""Decode as graph replays: from the plan's columns to sampled tokens without a host decision in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sgla import attention
from sgla.attention import DeviceBatch
from sgla.kernels.triton import step
from sgla.sampling.device import Scored

if TYPE_CHECKING:
    from sgla.worker.cuda import CudaRunner

STAGES = 8  # pinned buffers, more than steps in flight


def sizes_up_to(limit: int) -> list[int]:
    """Batch sizes that get a graph: a batch runs in the next larger one."""
    sizes = [1, 2, 4, 8, 12, 16, *range(24, 256, 8), *range(256, limit, 16)]
    return [size for size in sizes if size < limit] + [limit]


class DecodeGraphs:
    """One graph for each size, all in one memory pool. ``columns`` int32[3, limit] is what they read: slots, positions of
    the input token (-1: padding), positions of the sampled one (0: padding)."""

    def __init__(self, runner: CudaRunner) -> None:
        self.limit = runner.slots
        self.sizes = sizes_up_to(self.limit)
        self._runner = runner
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits = torch.empty(self.limit, runner.model.spec.vocab, device="cuda")
        self.columns = torch.zeros(3, self.limit, dtype=torch.int32, device="cuda")
        self._pinned = [torch.zeros(3, self.limit, dtype=torch.int32, pin_memory=True) for _ in range(STAGES)]
        self._stage = 0
        self._ids, self._positions, self._kv_len, self._out_loc = torch.zeros(
            4, self.limit, dtype=torch.int32, device="cuda"
        )
        self._cum = {w: torch.zeros(self.limit + 1, dtype=torch.int32, device="cuda") for w in runner.windows}
        self.out = torch.zeros(self.limit, dtype=torch.int32, device="cuda")
        self._q_start = torch.arange(self.limit + 1, dtype=torch.int32, device="cuda")

    def capture(self) -> None:
        """Large to small, so that the small ones fit into the memory of the large."""
        self.columns[0].fill_(self._runner.slots)
        self.columns[1].fill_(-1)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for size in reversed(self.sizes):
            with torch.cuda.stream(stream):
                self._forward(size)  # compiles what is not compiled yet, and lets libraries allocate
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self._forward(size)
            self._graphs[size] = graph
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    def _forward(self, size: int) -> None:
        """The step of ``size`` rows described by ``columns``."""
        runner, tables = self._runner, self._runner.tables
        slots, starts, ends = (c[:size] for c in self.columns)
        kv_len, cum = self._kv_len[:size], {w: c[: size + 1] for w, c in self._cum.items()}
        first, *others = runner.windows
        step.prepare_decode(
            slots, starts, tables.tokens, tables.page_table, tables.page_size,
            self._ids[:size], self._positions[:size], kv_len, self._out_loc[:size], cum[first], attention.TILE, first,
        )  # fmt: skip
        for window in others:
            step.count_tiles(kv_len, cum[window], attention.TILE, window)
        batch = DeviceBatch(
            rows=size,
            tokens=size,
            ids=self._ids[:size],
            positions=self._positions[:size],
            slots=slots,
            q_start=self._q_start[: size + 1],
            kv_len=kv_len,
            out_loc=self._out_loc[:size],
            page_table=tables.page_table,
            page_size=tables.page_size,
            sample_rows=self._q_start[:size],
            decode_rows=size,
            cum=cum,
        )
        with runner.ops.fused(size):
            hidden = runner.model.forward(batch, runner.kv)
            with runner.ops.float32_output(self._logits[:size]):
                logits = runner.model.logits(hidden)
        if logits.data_ptr() != self._logits.data_ptr():  # a soft cap or an all-gather made another tensor
            self._logits[:size].copy_(logits)
        runner.sampler.draw(self._logits[:size], slots, ends, self.out[:size])

    def run(self, slots: Any, starts: Any) -> tuple[Tensor, list[Scored]]:
        """Decode one token of each row: int32[rows, at least] on the GPU, and the logprobs that rows want."""
        rows = len(slots)
        size = next(size for size in self.sizes if size >= rows)
        pinned = self._pinned[self._stage]
        self._stage = (self._stage + 1) % STAGES
        host = pinned.numpy()
        host[0, :rows], host[1, :rows] = slots, starts
        host[0, rows:], host[1, rows:], host[2, rows:] = self._runner.slots, -1, 0
        np.add(starts, 1, out=host[2, :rows])
        self.columns.copy_(pinned, non_blocking=True)
        self._graphs[size].replay()
        sampler = self._runner.sampler
        if sampler.plain(slots):
            return self.out, []
        on_host = (slots, host[2, :rows].copy())
        d_slots, _, d_ends = (c[:rows] for c in self.columns)
        numbers = np.arange(rows, dtype=np.int32)
        return self.out, sampler.sample(
            self._logits[:rows], d_slots, d_ends, self.out, numbers, on_host
        )
