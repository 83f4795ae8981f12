"""Decoders that answer with vectors:
chunked prefill and prefix cache as for text, then pooling instead of sampling."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.kernels.program import Limits
from sgla.layers.batch import ForwardBatch
from sgla.messages import Pooling, Progress, StepPlan, StepResult
from sgla.model.base import CausalLM
from sgla.model.heads import Accumulator, apply
from sgla.model.load_pooled import load_decoder
from sgla.worker.batch import Columns, build
from sgla.worker.cpu import CpuRunner
from sgla.worker.encoder import VECTOR_BYTES, vector_result
from sgla.worker.forward import Forward, compiled
from sgla.worker.kv import zero_pages
from sgla.worker.state import column


class PooledRunner(CpuRunner):
    """``CpuRunner`` for requests with ``pool`` alone."""

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        pooling: Pooling,
        rank: int,
        size: int,
        rendezvous: str,
        report: Callable[[Progress], None],
    ) -> None:
        self._pooling = pooling
        super().__init__(config, source, rank, size, rendezvous, report)

    def _load(self, config: Config, source: ModelSource) -> None:
        super()._load(config, source)
        rows = max(1, VECTOR_BYTES // (4 * self._pooling.size))
        self.facts.slots = min(self.facts.slots, rows)
        self.facts.pooling, self.facts.grammars, self.facts.scores = self._pooling, False, False
        hidden = self.model.spec.hidden
        last = self._pooling.kind == "last"
        self._sums = None if last else Accumulator(self._pooling.kind, self.facts.slots, hidden)

    def _load_model(self, config: Config, source: ModelSource, dtype: str, context_len: int) -> CausalLM:
        seed = config.random_seed or 0
        model, self._head = load_decoder(
            source, self._pooling, dtype, config.quantization, self.shard, context_len, self._report, seed
        )
        return model

    def _make_forward(self, limits: Limits, native: bool) -> tuple[Forward, str]:
        """-> hidden states, of ``sample_rows`` where only the last ones matter."""

        def forward(batch: ForwardBatch) -> Tensor:
            last = self._pooling.kind == "last"
            return self.model.forward(batch, self.kv, batch.sample_rows if last else None)

        return compiled(forward, limits, self.place.threads, native)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        self.tables.apply(plan)
        if plan.zeroed:
            zero_pages(self.kv, [torch.from_numpy(column(p).astype(np.int64)) for p in plan.zeroed])
        slots, starts, q_lens = column(plan.slots), column(plan.starts), column(plan.q_lens)
        ends = np.cumsum(q_lens, dtype=np.int32)
        done = np.flatnonzero(starts + q_lens == self.tables.prompt_len[slots])
        hidden = self._forward(build(Columns(slots, starts, q_lens, ends[done] - 1), self.tables))
        if self._sums is not None:
            for slot, start, length, end in zip(slots, starts, q_lens, ends):
                self._sums.add(slot, start, hidden[end - length : end])
            pooled = [self._sums.take(slots[row], int(self.tables.prompt_len[slots[row]])) for row in done]
            hidden = torch.stack(pooled) if pooled else hidden[:0]
        self.profiler.step()
        return vector_result(plan.step, apply(self._head, hidden), done)
