"""Decoders that answer with vectors:
chunked prefill and prefix cache as for text, then pooling instead of sampling."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.program import ProgramLimits
from sgla.loading.pooled import load_decoder
from sgla.messages import StepPlan, StepResult
from sgla.model.base import CausalLM
from sgla.worker.batch import Columns, build
from sgla.worker.cpu import SLOTS, CpuRunner
from sgla.worker.facts import most_rows
from sgla.worker.forward import Forward, compiled
from sgla.worker.pooler import Pooler, vector_result
from sgla.worker.state import column


class PooledRunner(CpuRunner):
    """``CpuRunner`` for requests with ``pool`` alone."""

    def _load_model(self, config: Config, source: ModelSource, dtype: str, context_len: int) -> CausalLM:
        assert self.pooling is not None
        model, head = load_decoder(
            source,
            self.pooling,
            dtype,
            config.quantization,
            self.shard,
            context_len,
            self._report,
            config.random_seed or 0,
        )
        slots = most_rows(config, model.spec.hidden, self.pooling, SLOTS)
        self._pooler = Pooler(self.pooling, head, slots, model.spec.hidden)
        return model

    def _make_forward(self, limits: ProgramLimits, native: bool) -> tuple[Forward, str]:
        """-> hidden states, of ``sample_rows`` where only the last ones matter."""
        whole = self._pooler.whole

        def forward(batch: ForwardBatch) -> Tensor:
            return self.model.forward(batch, self.kv, None if whole else batch.sample_rows)

        return compiled(forward, limits, self.place.threads, native)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        self._apply(plan)
        slots, starts, q_lens = column(plan.slots), column(plan.starts), column(plan.q_lens)
        ends = np.cumsum(q_lens, dtype=np.int32)
        lengths = self.tables.prompt_len[slots]
        done = np.flatnonzero(starts + q_lens == lengths)
        hidden = self._forward(build(Columns(slots, starts, q_lens, ends[done] - 1), self.tables))
        if self._pooler.whole:
            self._pooler.add(slots, starts, ends - q_lens, ends, hidden)
            hidden = self._pooler.take(slots[done], lengths[done])
        self.profiler.step()
        return vector_result(plan.step, self._pooler.vectors(hidden), done)
