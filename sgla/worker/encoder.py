"""What the worker of an encoder does with a plan: every row is a whole prompt, and nothing outlives its step."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgla import clock
from sgla.config import Config
from sgla.errors import ConfigError, UnsupportedField
from sgla.hub.source import ModelSource
from sgla.messages import Control, Facts, Pooling, Progress, StepPlan, StepResult
from sgla.model.bert import EncoderBatch, Span
from sgla.model.encoder import EncoderSpec
from sgla.model.heads import apply, pool
from sgla.model.load_pooled import load_encoder
from sgla.worker.memory import BYTES, available_bytes, check_weights, resident_bytes
from sgla.worker.profile import Profiler
from sgla.worker.state import column

STEP_TOKENS = 512  # where the configuration leaves it open: enough rows to fill a CPU's cores
VECTOR_BYTES = 1 << 20  # of the vectors of one step, so that several fit in the ring of results


class EncoderRunner:
    """See ``worker/runner.py``; one rank."""

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        pooling: Pooling,
        rank: int,
        size: int,
        report: Callable[[Progress], None],
    ) -> None:
        if size > 1:
            raise ConfigError("an encoder is not split over ranks; use --tp 1", param="tp")
        if config.quantization is not None:
            raise ConfigError(
                "the weights of an encoder are not quantized; leave --quantization out", param="quantization"
            )
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        begun = clock.now()
        self._pooling = pooling
        self._load(config, source, report)
        loaded = clock.now()
        report(Progress(phase="warmup"))
        with torch.inference_mode():
            self._vectors([np.zeros(length, np.int32) for length in (1, 8)], [0, 0])
        self.facts.timings = {"weights": loaded - begun, "warmup": clock.now() - loaded}
        self._profiler = Profiler(rank)

    def _load(self, config: Config, source: ModelSource, report: Callable[[Progress], None]) -> None:
        dtype = "float32" if config.dtype == "auto" else config.dtype
        spec = EncoderSpec.from_config(source.config)
        context = choose_context(spec, self._pooling, config.context_length)
        weights = int(spec.values * BYTES[dtype])
        check_weights(weights, available_bytes())
        self.model = load_encoder(source, self._pooling, dtype, report, config.random_seed or 0)
        rows = max(1, VECTOR_BYTES // (4 * self._pooling.size))
        self.facts = Facts(
            pages=1,
            page_size=config.page_size,
            slots=min(config.max_running_requests or rows, rows),
            context_len=context,
            vocab_size=spec.vocab,
            step_tokens=max(config.step_tokens or STEP_TOKENS, context),
            dtype=dtype,
            device="cpu",
            ledger={"weights": weights},
            pooling=self._pooling,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        assert len(plan.new) * 4 == len(plan.slots), "a row that is not a whole new prompt"
        vectors = self._vectors([column(new.tokens) for new in plan.new], [new.segment for new in plan.new])
        return StepResult(
            step=plan.step, tokens=b"", vectors=[vector.tobytes() for vector in vectors.numpy()]
        )

    def _vectors(self, prompts: list[Any], segments: list[int]) -> Tensor:
        """float32 ``[rows, size]``."""
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        batch = make_batch([prompts[row] for row in order], [segments[row] for row in order])
        hidden = self.model.body.forward(batch)
        pooled = torch.cat([pool(span.of(hidden), self._pooling.kind) for span in batch.spans])
        vectors = apply(self.model.head, pooled)
        return vectors[torch.tensor(order).argsort()]

    def control(self, command: Control) -> dict[str, Any]:
        """Verbs: ``memory``; ``profile_start`` with ``folder``; ``profile_stop``. Raises UnsupportedField, InvalidField."""
        match command.verb:
            case "memory":
                return {"ledger": self.facts.ledger | resident_bytes()}
            case "profile_start":
                return self._profiler.start(str(command.args.get("folder", "profile")))
            case "profile_stop":
                return self._profiler.stop()
        raise UnsupportedField(f"an encoder has no control command {command.verb!r}", param="verb")


def make_batch(prompts: list[Any], segments: list[int]) -> EncoderBatch:
    """Of int32 arrays by rising length; ``segments``: where the second text of each begins, 0 if there is none."""
    lengths = [len(prompt) for prompt in prompts]
    spans, start = [], 0
    for length, group in groupby(lengths):
        rows = len(list(group))
        spans.append(Span(start, rows, length))
        start += rows * length
    positions = np.concatenate([np.arange(length) for length in lengths])
    types = np.concatenate([np.arange(n) >= (at or n) for n, at in zip(lengths, segments)])
    return EncoderBatch(
        torch.from_numpy(np.concatenate(prompts).astype(np.int64)),
        torch.from_numpy(positions),
        torch.from_numpy(types.astype(np.int64)),
        spans,
    )


def choose_context(spec: EncoderSpec, pooling: Pooling, wanted: int | None) -> int:
    """The longest input: what is asked for, else what the model's files recommend. Raises ConfigError."""
    if wanted is not None and wanted > spec.context_len:
        raise ConfigError(
            f"context length {wanted} is beyond the model's {spec.context_len}", param="context_length"
        )
    return wanted or min(pooling.max_length or spec.context_len, spec.context_len)
