"""The runner of a model that generates, with everything on the host: tables, forward pass, sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sgla.config import Config
from sgla.grammar.matcher import Matchers
from sgla.hub.source import ModelSource
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.program import ProgramLimits
from sgla.loading.load import load_model
from sgla.loading.pooled import load_decoder
from sgla.messages import (
    SAMPLE,
    Facts,
    Moved,
    NewRow,
    RowSampling,
    StepPlan,
    StepResult,
)
from sgla.model.base import CausalLM
from sgla.model.read import read_decoder
from sgla.model.sizes import weight_bytes
from sgla.model.state import Demand, Pool, kv_groups, state_of
from sgla.sampling import Sampler, Samples, faults
from sgla.sampling.draw import draw
from sgla.sampling.logprobs import Scores, score
from sgla.sampling.logprobs import join as join_scores
from sgla.sampling.native import find_draw
from sgla.sampling.processors import declared
from sgla.sampling.processors import load as load_processors
from sgla.sampling.runs import ragged
from sgla.worker.batch import Columns, Wanted, build, cut, read
from sgla.worker.drafts import NGrams, verify
from sgla.worker.facts import answer_facts, most_rows
from sgla.worker.forward import Forward, Kept, compiled, make_forward
from sgla.worker.kv import HostPages, allocate_kv, zero_pages
from sgla.worker.memory import cache_groups, check_weights, size_kv
from sgla.worker.place import Cpu
from sgla.worker.pooler import Pooler, add_vectors, label_logprobs
from sgla.worker.runner import Runner
from sgla.worker.state import Int32s, SlotTables, column

SLOTS, STEP_TOKENS = 32, 512  # where the configuration leaves them open
LOGIT_ROWS = 64  # rows of logits that exist at a time, at least


class CpuRunner(Runner):
    """Computes a step when it is told to. Also of devices that have torch bodies alone."""

    place: Cpu
    host_pages = 0  # kept for a prefix tree that outgrows the pool: here both are the same memory

    def _load(self, config: Config, source: ModelSource) -> None:
        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        processors = load_processors(config.logits_processors)
        spec, step_tokens = read_decoder(source.config), config.step_tokens or STEP_TOKENS
        slots = most_rows(config, spec.hidden, self.pooling, SLOTS)
        weights = weight_bytes(spec, dtype, config.quantization, self.shard.size)
        check_weights(weights, self.place.free())
        state = state_of(spec, self.shard.size, self.shard.rank)
        groups = kv_groups(state, config.context_length or spec.context_len, dtype)
        pool = Pool(groups, config.page_size, Demand(slots, step_tokens, config.prefix_cache))
        size = size_kv(
            pool,
            budget=config.kv_cache_bytes,
            available=self.place.free() - weights,
            wanted_context=config.context_length,
            model_context=spec.context_len,
        )
        self.model = self._load_model(config, source, dtype, size.context_len)
        self.kv = allocate_kv(state, groups, size.pages, config.page_size, dtype)
        self._host = HostPages(self.kv, self.host_pages) if self.host_pages and len(groups) == 1 else None
        self._moved: list[Moved] = []
        self._most_logits = max(slots, LOGIT_ROWS)
        limits = ProgramLimits(step_tokens, self._most_logits)
        self._kept = Kept() if config.enable_return_hidden_states else None
        self._forward, kernels = self._make_forward(limits, config.native_kernels)
        states = groups[-1].unit_bytes > 0
        paged = len(groups) - states
        self.tables = SlotTables(slots, size.context_len, config.page_size, paged, states)
        self._drafter = NGrams(self.tables)
        self.matchers = Matchers() if self.shard.rank == 0 else None
        pick = find_draw() if config.native_kernels else draw
        skip_forced = self.shard.size == 1  # other ranks are told one token a row
        self.sampler = Sampler(self.tables.tokens, spec.vocab, self.matchers, pick, skip_forced, processors)
        self.facts = Facts(
            groups=cache_groups(pool, size.pages),
            page_size=config.page_size,
            slots=slots,
            context_len=size.context_len,
            vocab_size=spec.vocab,
            step_tokens=step_tokens,
            dtype=dtype,
            device=self.place.device.name,
            ledger={"weights": weights, "kv": size.bytes},
            notes=[note for note in (kernels, size.note) if note],
            host_pages=self.host_pages if self._host else 0,
            **answer_facts(config, spec, self.pooling, declared(processors)),
        )

    def _load_model(self, config: Config, source: ModelSource, dtype: str, context_len: int) -> CausalLM:
        quantization, seed, report = config.quantization, config.random_seed or 0, self._report
        self._pooler: Pooler | None = None
        if self.pooling is None:
            return load_model(source, dtype, quantization, self.shard, context_len, report, seed)
        model, head = load_decoder(
            source, self.pooling, dtype, quantization, self.shard, context_len, report, seed
        )
        slots = most_rows(config, model.spec.hidden, self.pooling, SLOTS)
        self._pooler = Pooler(self.pooling, head, slots, model.spec.hidden)
        return model

    def _make_forward(self, limits: ProgramLimits, native: bool) -> tuple[Forward, str]:
        if self._pooler is None:
            return make_forward(self.model, self.kv, limits, self.place.threads, native, self._kept)
        whole = self._pooler.whole

        def hidden(batch: ForwardBatch) -> torch.Tensor:
            return self.model.forward(batch, self.kv, None if whole else batch.sample_rows)

        return compiled(hidden, limits, self.place.threads, native)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """All ranks return the same tokens; logprobs come from rank 0."""
        self._apply(plan)
        if not plan.slots:
            return StepResult(step=plan.step, tokens=b"")
        for new in plan.new:
            self.sampler.admit(new.slot, new.prompt_len, new.sampling)
            self._drafter.admit(new.slot)
        columns, wanted = read(plan, self.tables, self._drafter.guess(plan) if plan.drafts else None)
        if self._pooler is not None:
            return self._pool(plan.step, columns, wanted)
        parts = cut(columns, self._most_logits)
        extras = StepResult(step=plan.step, tokens=b"")
        if len(parts) == 1 and wanted.plain:
            batch = build(columns, self.tables)
            if self.shard.rank == 0:
                batch.draws = self.sampler.draws(wanted.slots, wanted.positions)
            samples, counts = self._sample(self._forward(batch), wanted, batch.draws)
        else:
            samples, counts = self._score_and_sample(parts, wanted, extras)
        self.profiler.step()
        tokens, brought = ragged(samples, wanted.first, counts)
        return StepResult(
            step=plan.step,
            tokens=tokens,
            counts=brought,
            logprobs=samples.logprobs,
            failed=extras.failed + samples.failed,
            vectors=extras.vectors,
            hidden=extras.hidden,
            guessed=(wanted.runs - 1).tobytes() if wanted.runs.sum() > len(wanted.runs) else b"",
        )

    def _pool(self, step: int, columns: Columns, wanted: Wanted) -> StepResult:
        """A step of a model that answers with vectors."""
        assert self._pooler is not None
        rows = [row.row for row in wanted.pooled]
        first = np.cumsum(columns.q_lens) - columns.q_lens
        lengths = self.tables.prompt_len[columns.slots[rows]]
        hidden = self._forward(build(columns, self.tables))
        result = StepResult(step=step, tokens=b"")
        add_vectors(result, zip(rows, self._pooler(columns, first, rows, lengths, hidden).numpy()))
        self.profiler.step()
        return result

    def _apply(self, plan: StepPlan) -> None:
        """Bring tables and pages to where the plan's rows begin."""
        self.tables.apply(plan)
        if plan.zeroed:
            zero_pages(self.kv, [places(p) for p in plan.zeroed])
        for copy in plan.copies:
            assert self._host is not None, "copies for a runner without host pages"
            self._host.copy(copy.source, copy.target, places(copy.sources), places(copy.targets))
            self._moved.append(Moved(copy.transfer, ok=True))

    @property
    def copying(self) -> bool:
        return bool(self._moved)

    def moved(self) -> list[Moved]:
        moved, self._moved = self._moved, []
        return moved

    def _sample(
        self, logits: torch.Tensor, wanted: Wanted, draws: NDArray[Any] | None = None
    ) -> tuple[Samples, Int32s]:
        """The next token of each sampled row, in the token table of every rank; of a row with drafts as many
        as come. Returns also how many each row has."""
        tables, counts = self.tables, np.ones_like(wanted.runs)
        samples = Samples(np.empty(len(wanted.rows), np.int32), [], [], {}, set())
        if not len(samples.tokens):
            return samples, counts
        if len(wanted.rows) > len(wanted.runs):  # there is one rank
            drafts = tables.tokens[wanted.slots, wanted.positions]
            samples, counts = verify(self.sampler, logits.numpy(), wanted, drafts, draws)
            self._drafter.learn(wanted.slots[wanted.first], wanted.runs - 1, counts - 1)
        else:
            if self.shard.rank == 0:
                columns = wanted.rows, wanted.slots, wanted.positions
                samples = self.sampler.sample(logits.numpy(), *columns, draws)
            self.shard.broadcast(torch.from_numpy(samples.tokens))
            tables.tokens[wanted.slots, wanted.positions] = samples.tokens
        slots, limits = wanted.slots[wanted.first], tables.limit[wanted.slots[wanted.first]]
        ended = (limits > 0) & (wanted.positions[wanted.first] >= limits)  # the host did not know yet
        reached = wanted.positions[wanted.first + counts - 1]
        tables.computed[slots] = np.where(ended, limits - 1, reached)
        return samples, np.where(ended, 0, counts).astype(np.int32)

    def _score_and_sample(
        self, parts: list[Columns], wanted: Wanted, extras: StepResult
    ) -> tuple[Samples, Int32s]:
        """A step with prompt logprobs, or with scores of labels or states, which go to ``extras``; in parts,
        so that few rows of logits exist at a time."""
        scores: list[list[Scores]] = [[] for _ in wanted.prompt_spans]
        states: list[list[bytes]] = [[] for _ in wanted.stated]
        rows: list[torch.Tensor] = []
        at = 0
        for part in parts:
            logits, tokens = self._forward(build(part, self.tables)), part.logits + at
            at += int(part.q_lens.sum())
            if self.shard.rank:
                continue
            rows.append(logits[torch.from_numpy(np.isin(tokens, wanted.tokens))])
            for row in wanted.pooled:
                labels = torch.from_numpy(self.tables.labels[row.slot])
                for index in np.flatnonzero(tokens == row.token):
                    values = label_logprobs(logits[index], labels).numpy()
                    add_vectors(extras, [(row.row, values)], labels=True)
            for span, found in zip(wanted.prompt_spans, scores):
                inside = np.flatnonzero((tokens >= span.first) & (tokens < span.end))
                if len(inside):
                    start = span.start + int(tokens[inside[0]]) - span.first
                    targets = self.tables.tokens[span.slot, start : start + len(inside)]
                    k = int(self.tables.prompt_logprobs[span.slot])
                    part_logits = logits.numpy()[inside[0] : inside[-1] + 1]
                    found.append(score(part_logits, targets, k, self.sampler.logprob_ids(span.slot)))
            for stated, pieces in zip(wanted.stated, states):
                assert self._kept is not None
                own = (tokens >= stated.first) & (tokens < stated.end)
                pieces.append(self._kept.states.numpy()[own].tobytes())
        extras.hidden += map(b"".join, states)
        samples, counts = self._sample(torch.cat(rows) if rows else torch.empty(0), wanted)
        prompts = []
        for span, found in zip(wanted.prompt_spans, scores):
            if not found:
                continue
            whole = join_scores(found)
            if whole.sound:
                asked = len(self.sampler.logprob_ids(span.slot))
                prompts.append(whole.block(span.row, True, span.start, asked))
            else:
                extras.failed.append(faults.no_logprobs(span.row))
        return samples._replace(logprobs=prompts + samples.logprobs), counts

    def _warm_up(self) -> None:
        """One token through everything, on the dummy page; slot 0 forgets it when a request takes it."""
        one, zero = np.ones(1, np.int32).tobytes(), np.zeros(1, np.int32).tobytes()
        new = NewRow(slot=0, tokens=zero, prompt_len=1, pages=[], sampling=RowSampling())
        self.execute(StepPlan(step=0, slots=zero, starts=zero, q_lens=one, flags=bytes([SAMPLE]), new=[new]))


def places(pages: bytes) -> torch.Tensor:
    """int64[n]"""
    return torch.from_numpy(column(pages).astype(np.int64))
