"""What the worker of an encoder does with a plan:
every row is a whole prompt, and nothing outlives its step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.kernels.program import Limits
from sgla.layers.batch import ForwardBatch
from sgla.messages import CacheGroup, Facts, Pooling, Progress, StepPlan, StepResult
from sgla.model.encoder import EncoderSpec
from sgla.model.heads import apply, pool
from sgla.model.load_pooled import load_encoder
from sgla.model.sizes import weight_bytes
from sgla.sampling import faults
from sgla.worker.forward import compiled
from sgla.worker.memory import check_weights
from sgla.worker.place import Cpu
from sgla.worker.runner import Runner
from sgla.worker.state import column

STEP_TOKENS = 512  # where the configuration leaves it open: enough rows to fill a CPU's cores
VECTOR_BYTES = 1 << 20  # of the vectors of one step, so that several fit in the ring of results


class EncoderRunner(Runner):
    """Of one rank."""

    place: Cpu

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
        if size > 1:
            raise ConfigError("an encoder is not split over ranks; use --tp 1", param="tp")
        self._pooling = pooling
        super().__init__(config, source, rank, size, rendezvous, report)

    def _load(self, config: Config, source: ModelSource) -> None:
        dtype = "float32" if config.dtype == "auto" else config.dtype
        spec = EncoderSpec.from_config(source.config)
        context = choose_context(spec, self._pooling, config.context_length)
        weights = weight_bytes(spec, dtype, config.quantization, 1)
        check_weights(weights, self.place.free())
        self.model = load_encoder(
            source, self._pooling, dtype, config.quantization, self._report, config.random_seed or 0
        )
        rows = max(1, VECTOR_BYTES // (4 * self._pooling.size))
        self.facts = Facts(
            groups=[CacheGroup(1)],
            page_size=config.page_size,
            slots=min(config.max_running_requests or rows, rows),
            context_len=context,
            vocab_size=spec.vocab,
            step_tokens=config.step_tokens or STEP_TOKENS,
            dtype=dtype,
            device=self.place.device.name,
            ledger={"weights": weights},
            pooling=self._pooling,
        )
        limits = Limits(max(self.facts.step_tokens, context), 1)
        forward = self.model.body.forward
        self._forward, note = compiled(forward, limits, self.place.threads, config.native_kernels)
        self.facts.notes += [note] if note else []

    def _warm_up(self) -> None:
        self._vectors([np.zeros(length, np.int32) for length in (1, 8)], [0, 0])

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        assert len(plan.new) * 4 == len(plan.slots), "a row that is not a whole new prompt"
        vectors = self._vectors([column(new.tokens) for new in plan.new], [new.segment for new in plan.new])
        self.profiler.step()
        return vector_result(plan.step, vectors, np.arange(len(plan.new)))

    def _vectors(self, prompts: list[Any], segments: list[int]) -> Tensor:
        """float32 ``[rows, size]``.
        Prompts of equal length lie together in the batch, so that they are pooled together."""
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        batch, types = make_batch(
            [prompts[row] for row in order], [segments[row] for row in order], self.model.body.spec.offset - 1
        )
        self.model.body.place(batch.positions.long(), types)
        hidden = self._forward(batch)
        pooled, start = [], 0
        for length, group in groupby(batch.kv_len.tolist()):
            end = start + length * len(list(group))
            pooled.append(pool(hidden[start:end].view(-1, length, hidden.shape[1]), self._pooling.kind))
            start = end
        return apply(self.model.head, torch.cat(pooled))[torch.tensor(order).argsort()]


def vector_result(step: int, vectors: Tensor, rows: Any) -> StepResult:
    """``vectors`` float32 ``[n, size]`` of the ``rows`` int[n] of a step;
    those with a NaN or an infinity fail."""
    broken = rows[~torch.isfinite(vectors).all(1).numpy()]
    return StepResult(
        step=step,
        tokens=b"",
        vectors=[vector.tobytes() for vector in vectors.numpy()],
        failed=[faults.no_vector(row) for row in broken.tolist()],
    )


def make_batch(prompts: list[Any], segments: list[int], pad: int = -1) -> tuple[ForwardBatch, Tensor]:
    """Of int32 arrays, without pages; and the type of each token, int64 ``[T]``. ``segments``: where the
    second text of each prompt begins, 0 if there is none. ``pad``: the token that takes no position and has
    -1 (RoBERTa's; -1: none)."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    starts = np.zeros(len(prompts) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    counted = [np.asarray(prompt) != pad for prompt in prompts]
    positions = np.concatenate([np.where(own, np.cumsum(own) - 1, -1) for own in counted]).astype(np.int32)
    types = np.concatenate([np.arange(n) >= (at or n) for n, at in zip(lengths, segments)])
    none = torch.zeros(1, dtype=torch.int32)
    batch = ForwardBatch(
        rows=len(prompts),
        tokens=len(positions),
        ids=torch.from_numpy(np.concatenate(prompts)),
        positions=torch.from_numpy(positions),
        slots=none,
        q_start=torch.from_numpy(starts),
        kv_len=torch.from_numpy(lengths),
        out_loc=none,
        page_table=none[None],
        page_size=1,
        sample_rows=none[:0],
    )
    return batch, torch.from_numpy(types.astype(np.int64))


def choose_context(spec: EncoderSpec, pooling: Pooling, wanted: int | None) -> int:
    """The longest input: what is asked for, else what the model's files recommend. Raises ConfigError."""
    if wanted is not None and wanted > spec.context_len:
        raise ConfigError(
            f"context length {wanted} is beyond the model's {spec.context_len}", param="context_length"
        )
    return wanted or min(pooling.max_length or spec.context_len, spec.context_len)
