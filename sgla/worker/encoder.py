"""The runner of an encoder, on CPUs and GPUs:
every row is a whole prompt, and nothing outlives its step."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgla.config import Config
from sgla.device import check_encoder
from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.program import ProgramLimits
from sgla.loading.pooled import load_encoder
from sgla.messages import CacheGroup, Facts, Pooling, StepPlan, StepResult
from sgla.model.encoder import EncoderSpec
from sgla.model.heads import apply, pool
from sgla.model.read import read_spec
from sgla.model.sizes import weight_bytes
from sgla.worker.facts import answer_facts, most_rows
from sgla.worker.memory import check_weights
from sgla.worker.place import drop_garbage
from sgla.worker.pooler import add_vectors
from sgla.worker.runner import Command, Runner
from sgla.worker.state import column

ROWS, STEP_TOKENS = 1 << 16, 512  # where the configuration leaves them open: enough to fill a CPU's cores


class EncoderRunner(Runner):
    """Of one rank."""

    _awake = True  # the weights are there

    def _load(self, config: Config, source: ModelSource) -> None:
        assert self.pooling is not None
        gpu = self.place.device.kind == "cuda"
        dtype = config.dtype if config.dtype != "auto" else "bfloat16" if gpu else "float32"
        if gpu:
            check_encoder(self.place.device, config, dtype)
        spec = read_spec(source.config)
        assert isinstance(spec, EncoderSpec)
        context = choose_context(spec, self.pooling, config.context_length)
        weights = weight_bytes(spec, dtype, config.quantization, 1)
        check_weights(weights, self.place.free(), "--device cpu" if gpu else "--quantization int8 or int4")
        self.config, self.source = config, source
        self.facts = Facts(
            groups=[CacheGroup(1)],
            page_size=config.page_size,
            slots=most_rows(config, spec, self.pooling, ROWS),
            context_len=context,
            vocab_size=spec.vocab,
            step_tokens=config.step_tokens or STEP_TOKENS,
            dtype=dtype,
            device=self.place.device.name,
            ledger={"weights": weights},
            notes=self.place.notes,
            **answer_facts(config, spec, self.pooling),
        )
        note = self._make()
        self.facts.notes += [note] if note else []

    def _make(self) -> str:
        """The model with its weights, and a note on how it is computed."""
        assert self.pooling is not None
        config, facts = self.config, self.facts
        with self.place.torch:
            self.model = load_encoder(
                self.source,
                self.pooling,
                facts.dtype,
                config.quantization,
                self._report,
                config.random_seed or 0,
            )
        limits = ProgramLimits(max(facts.step_tokens, facts.context_len), 1)
        self._forward, note = self.place.compiled(self.model.body.forward, limits, config.native_kernels)
        return note

    def _commands(self) -> dict[str, Command]:
        """``may_change``, ``sleep`` and ``wake`` as those of ``ChangingRunner``, but that weights always come
        from the files again. There is no KV cache."""
        return super()._commands() | {
            "may_change": lambda args: None if "weights" in args else self._stay(args),
            "sleep": lambda args: self._sleep(args["weights"]),
            "wake": lambda args: self._wake(args["weights"]),
        }

    def _sleep(self, weights: str) -> None:
        stay = weights == "" or (weights == "host" and self.place.torch.type == "cpu")  # they are there
        if self._awake and not stay:
            self._awake = False
            self._forget()
            drop_garbage()

    def _forget(self) -> None:
        del self.model, self._forward

    def _wake(self, weights: bool) -> None:
        if weights and not self._awake:
            self._make()
            self._awake = True

    def _warm_up(self) -> None:
        self._vectors([np.zeros(length, np.int32) for length in (1, 8)], [0, 0])

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        assert len(plan.new) * 4 == len(plan.slots), "a row that is not a whole new prompt"
        vectors = self._vectors([column(new.tokens) for new in plan.new], [new.segment for new in plan.new])
        self.profiler.step()
        result = StepResult(step=plan.step, tokens=b"")
        add_vectors(result, enumerate(vectors.numpy()))
        return result

    def _vectors(self, prompts: list[Any], segments: list[int]) -> Tensor:
        """float32 ``[rows, size]`` on the host.
        Prompts of equal length lie together in the batch, so that they are pooled together."""
        assert self.pooling is not None
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        batch, types = make_batch(
            [prompts[row] for row in order], [segments[row] for row in order], self.model.body.spec.offset - 1
        )
        where = self.place.torch
        self.model.body.place(batch.positions.long().to(where), types.to(where))
        batch.ids = batch.ids.to(where)
        hidden = self._forward(batch).float()
        pooled, start = [], 0
        for length, group in groupby(batch.kv_len.tolist()):
            end = start + length * len(list(group))
            pooled.append(pool(hidden[start:end].view(-1, length, hidden.shape[1]), self.pooling.kind))
            start = end
        return apply(self.model.head, torch.cat(pooled)).cpu()[torch.tensor(order).argsort()]


def make_batch(prompts: list[Any], segments: list[int], pad: int = -1) -> tuple[ForwardBatch, Tensor]:
    """Of int32 arrays, without pages, on the host; and the type of each token, int64 ``[T]``. ``segments``:
    where the second text of each prompt begins, 0 if there is none. ``pad``: the token that takes no position
    and has -1 (RoBERTa's; -1: none)."""
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
            f"a context of {wanted} tokens is beyond the model's {spec.context_len}; lower --context-length",
            param="context_length",
        )
    return wanted or min(pooling.max_length or spec.context_len, spec.context_len)
